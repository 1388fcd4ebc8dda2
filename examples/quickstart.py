"""Ten agents on a ring train your own module on your own tensors."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import pdsl

digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32) / 16
y = torch.tensor(digits.target)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))

result = pdsl.train(model, (x, y), graph=pdsl.ring(10), algorithm=pdsl.PDSL(learning_rate=2.0), rounds=40)

print(f"accuracy {result.accuracy:.3f} over agents, {result.accuracy_of_mean:.3f} for the mean model")
print(result.summary["privacy"])
worth = result.message_values.mean(0)  # [edges], mean over rounds
receiver, sender = result.edges[worth.argmax()]
print(f"most welcome: what agent {sender} sends to agent {receiver}")
