"""A module whose parameters are stepped by hand: there is no optimizer."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
rate = 0.1


def checkpoint():
    return model.state_dict()


for step in range(3):
    loss = model(torch.randn(12, 6)).square().mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= rate * p.grad
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
