"""A frozen convolutional backbone with a trained head: only the head is sent, clipped and noised."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import pdsl

digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
y = torch.tensor(digits.target)

# Train the backbone on public images: here the first 300 digits.
torch.manual_seed(0)
backbone = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
    nn.MaxPool2d(2), nn.Flatten(), nn.LayerNorm(128),
)  # fmt: skip
public = nn.Sequential(backbone, nn.Linear(128, 10))
optimiser = torch.optim.Adam(public.parameters(), lr=3e-3)
for _ in range(60):
    optimiser.zero_grad()
    nn.functional.cross_entropy(public(x[:300]), y[:300]).backward()
    optimiser.step()

backbone.requires_grad_(False)  # nothing else to declare
model = nn.Sequential(backbone, nn.Linear(128, 10))
result = pdsl.train(model, (x[300:], y[300:]), graph="ring", rounds=30, privacy={"target_epsilon": 2.0})
print(result)
print(f"{result.experiment.network.num_parameters:,} of {sum(p.numel() for p in model.parameters()):,} parameters sent")
