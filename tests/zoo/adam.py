"""AdamW with two groups, and a schedule."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
weights = [p for p in model.parameters() if p.ndim > 1]
biases = [p for p in model.parameters() if p.ndim == 1]
groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
last = 2


def checkpoint():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}


for step in range(3):
    optimizer.zero_grad()
    outputs = model(torch.randn(12, 6))
    loss = outputs.square().mean()
    loss.backward()
    optimizer.step()
    if step <= last:
        schedule.step()
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
