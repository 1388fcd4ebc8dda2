"""A rare class: class weights from the public set raise its recall."""

import torch
from sklearn.datasets import make_classification
from torch import nn

import pdsl

x, y = make_classification(
    6000, 12, n_informative=8, n_classes=4, weights=[0.9, 0.06, 0.03, 0.01], class_sep=1.5, random_state=0
)
data = torch.tensor(x).float(), torch.tensor(y)

for weights in (None, "public"):
    torch.manual_seed(0)  # initial weights
    result = pdsl.train(
        nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4)),
        data,
        classes=["common", "uncommon", "rare", "very rare"],
        task=pdsl.multiclass(class_weights=weights),
        graph={"kind": "full", "agents": 4},
        partition={"kind": "iid"},
        rounds=40,
    )
    recall = ", ".join(f"{name} {value:.2f}" for name, value in result.metrics["recall"].items())
    print(f"class weights {weights}: accuracy {result.accuracy_of_mean:.3f}, recall: {recall}")
