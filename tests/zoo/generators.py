"""Dropout, and every generator in use."""

import random

import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
random.seed(0)
np.random.seed(0)
own = torch.Generator().manual_seed(1)
model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [torch.randn(12, 6, generator=own) for _ in range(3)]
torch.manual_seed(2)


def checkpoint():
    return {"model": model.state_dict(), "own": own.get_state()}


for step in range(3):
    optimizer.zero_grad()
    scale = random.uniform(0.9, 1.1) * np.random.uniform(0.9, 1.1)
    loss = model(data[step] * scale).square().mean()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
