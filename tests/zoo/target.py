"""Q-learning with a target network."""

import torch
from torch import nn


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


torch.manual_seed(0)
online, target = network(), network()
target.load_state_dict(online.state_dict())
optimizer = torch.optim.Adam(online.parameters(), lr=0.01)
period, tau = 2, 0.5


def checkpoint():
    return {"online": online.state_dict(), "target": target.state_dict(), "optimizer": optimizer.state_dict()}


for step in range(4):
    states, later = torch.randn(2, 16, 4)
    with torch.no_grad():
        tap = 0.1 + 0.9 * target(later).max(1).values
    loss = (online(states)[:, 0] - tap).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % period == period - 1:
        with torch.no_grad():
            for mine, theirs in zip(target.parameters(), online.parameters(), strict=True):
                mine.lerp_(theirs, tau)
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
