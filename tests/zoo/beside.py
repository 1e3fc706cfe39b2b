"""A model with an optimizer, and a head beside it that is stepped by hand."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
head = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rate = 0.1


def checkpoint():
    return {"model": model.state_dict(), "head": head.state_dict()}


for step in range(3):
    optimizer.zero_grad()
    head.zero_grad()
    hidden = model(torch.randn(12, 6))
    loss = hidden.square().mean()
    guess = (head(hidden.detach()).squeeze(1) - 1).square().mean()
    (loss + guess).backward()
    optimizer.step()
    with torch.no_grad():
        for p in head.parameters():
            p -= rate * p.grad
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
