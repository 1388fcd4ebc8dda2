"""Text as token ids through an embedding and a GRU."""

import docstrings  # in this folder: docstrings of four libraries as token ids
import torch
from torch import Tensor, nn

import pdsl


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(docstrings.VOCABULARY, 16)
        self.gru = nn.GRU(16, 24, batch_first=True)
        self.head = nn.Linear(24, 4)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.gru(self.embedding(ids))
        return self.head(states.mean(1))


x, y, libraries = docstrings.load()
torch.manual_seed(0)  # initial weights
result = pdsl.train(
    Classifier(), (x, y), classes=libraries, graph={"kind": "full", "agents": 4}, rounds=25,
    batch={"rate": 0.5}, partition={"kind": "iid"},
)  # fmt: skip
print(result)
