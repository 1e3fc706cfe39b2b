"""The moving average of a model, as a module of its own."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
ema = copy.deepcopy(model).requires_grad_(False)
decay = 0.9
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def checkpoint():
    return {"model": model.state_dict(), "ema": ema.state_dict()}


@torch.no_grad()
def average():
    for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
        mine.lerp_(theirs, 1 - decay)
    for mine, theirs in zip(ema.buffers(), model.buffers(), strict=True):
        mine.copy_(theirs)


for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(12, 6)).square().mean()
    loss.backward()
    optimizer.step()
    average()
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
