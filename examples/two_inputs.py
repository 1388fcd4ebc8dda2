"""A model with two inputs, numbers and a category, that returns a mapping."""

import torch
from sklearn.datasets import load_iris
from torch import Tensor, nn

import pdsl


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.site = nn.Embedding(3, 2)
        self.head = nn.Linear(4 + 2, 3)

    def forward(self, measurements: Tensor, site: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(torch.cat([measurements, self.site(site)], dim=1))}


iris = load_iris()
inputs = {
    "measurements": (torch.tensor(iris.data).float() - 3.5) / 2,  # scaled by constants, which cost no privacy
    "site": torch.arange(150) % 3,  # integers stay integers
}
torch.manual_seed(0)  # initial weights
result = pdsl.train(
    Classifier(),
    (inputs, torch.tensor(iris.target)),
    classes=list(iris.target_names),
    graph={"kind": "full", "agents": 3},
    partition={"kind": "iid"},
    rounds=40,
    batch={"rate": 1.0},
)
print(result)
