"""Text as token ids through a Transformer encoder."""

import docstrings  # in this folder: docstrings of four libraries as token ids
import torch
from torch import Tensor, nn

import pdsl


class Classifier(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(docstrings.VOCABULARY, width)
        self.position = nn.Parameter(0.1 * torch.randn(docstrings.LENGTH, width))
        self.encoder = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=64, batch_first=True)
        self.head = nn.Linear(width, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(ids) + self.position).mean(1))


torch.manual_seed(0)
x, y, libraries = docstrings.load()
result = pdsl.train(
    Classifier(), (x, y), classes=libraries, graph={"kind": "full", "agents": 4}, rounds=25,
    batch={"rate": 0.5}, partition={"kind": "iid"},
)  # fmt: skip
print(result)
