"""LBFGS, which evaluates a closure and keeps a history."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=4)
inputs = torch.randn(12, 4)


def checkpoint():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def closure():
    optimizer.zero_grad()
    loss = (model(inputs) - 1).square().mean()
    loss.backward()
    return loss


for step in range(4):
    loss = optimizer.step(closure)
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
