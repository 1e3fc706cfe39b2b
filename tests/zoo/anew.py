"""A moving average that is made anew after each step."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
decays = [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9]


def checkpoint():
    return {"model": model.state_dict(), "shadow": shadow}


for step in range(7):
    optimizer.zero_grad()
    loss = model(torch.randn(12, 6)).square().mean()
    loss.backward()
    optimizer.step()
    decay = decays[step]
    shadow = {name: decay * shadow[name] + (1 - decay) * p.detach() for name, p in model.named_parameters()}
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
