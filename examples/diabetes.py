"""Regression under a total ε of 8: progression of diabetes from ten measurements."""

import torch
from sklearn.datasets import load_diabetes
from torch import nn

import pdsl

frame = load_diabetes(as_frame=True).frame  # the column "target" is a number, so this is regression
torch.manual_seed(0)  # initial weights
result = pdsl.train(
    nn.Linear(10, 1),
    frame,
    target="target",
    graph={"kind": "full", "agents": 3},
    partition={"kind": "iid"},
    test_fraction=0.4,
    rounds=60,
    privacy={"target_epsilon": 8.0},
)
metrics = result.metrics
print(result)
print(f"RMSE {metrics['rmse']:.1f}, R² {metrics['r2']:.2f} (predicting the mean has an R² of 0)")
