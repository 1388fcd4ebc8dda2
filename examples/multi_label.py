"""Several labels per record: which properties does a digit have? With the recall of each label."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import pdsl

images, digit = load_digits(return_X_y=True)
digit = torch.tensor(digit)
labels = torch.stack([digit % 2 == 0, digit >= 5, torch.isin(digit, torch.tensor([0, 6, 8, 9]))], dim=1).long()

torch.manual_seed(0)  # initial weights
result = pdsl.train(
    nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 3)),
    (torch.tensor(images).float() / 16, labels),
    classes=["even", "at least 5", "has a loop"],
    graph={"kind": "full", "agents": 4},
    rounds=60,
)
print(result)
for label, recall in result.metrics["recall"].items():
    print(f"recall of '{label}': {recall:.3f}")
