"""Gradients of four micro-batches are added up."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
parts = [0, 1, 2, 3]


def checkpoint():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


for step in range(3):
    batches = torch.randn(4, 12, 6)
    losses = {}
    for part in parts:
        loss = model(batches[part]).square().mean()
        loss.backward()
        losses[part] = loss.item()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: {{'loss': {losses[0]!r}}}")
