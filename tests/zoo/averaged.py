"""Stochastic weight averaging by torch's own class."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
averaged = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def checkpoint():
    return {"model": model.state_dict(), "averaged": averaged.state_dict()}


for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(12, 6)).square().mean()
    loss.backward()
    optimizer.step()
    averaged.update_parameters(model)
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
