"""A moving average that begins in the middle of the run, in a function."""

import torch
from torch import nn

state = {}


def checkpoint():
    return state


def train(decay):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shadow = None
    for step in range(8):
        optimizer.zero_grad()
        loss = model(torch.randn(12, 6)).square().mean()
        loss.backward()
        optimizer.step()
        if step == 4:
            shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        elif step > 4:
            for name, p in model.named_parameters():
                shadow[name].mul_(decay).add_(p.detach(), alpha=1 - decay)
        state.update(model=model.state_dict(), shadow=shadow)
        print(f"step {step}: {{'loss': {loss.item()!r}}}")


train(0.9)
