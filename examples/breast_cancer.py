"""Three hospitals, one data frame: a binary diagnosis from one logit, with the AUC."""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

import pdsl

frame = load_breast_cancer(as_frame=True).frame
frame["target"] = frame["target"].map({0: "malignant", 1: "benign"}).astype("category")
frame["hospital"] = [f"hospital-{'abc'[n % 3]}" for n in range(len(frame))]  # the owner of each record

torch.manual_seed(0)  # initial weights
result = pdsl.train(
    nn.Linear(30, 1),
    frame,
    target="target",
    owner="hospital",
    graph="full",
    task="binary",
    rounds=40,
    privacy={"target_epsilon": 4.0},
)
print(result)
print(f"AUC {result.metrics['auc']:.3f}, recall of malignant tumours {result.metrics['recall']['malignant']:.3f}")
