"""A model gives way to another in the middle of the run."""

import torch
from torch import nn


def start(seed):
    torch.manual_seed(seed)
    net = nn.Linear(6, 3)
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


model, optimizer = start(0)


def checkpoint():
    return {"model": model.state_dict()}


for step in range(4):
    if step == 2:
        del model, optimizer
        model, optimizer = start(1)
    optimizer.zero_grad()
    loss = model(torch.ones(12, 6) * (step + 1)).square().mean()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
