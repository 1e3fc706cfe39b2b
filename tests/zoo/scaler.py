"""Mixed precision with a gradient scaler."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)


def checkpoint():
    return {"model": model.state_dict(), "scaler": scaler.state_dict()}


for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(12, 6)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
