"""An optimizer that is not torch's: a plain class."""

import torch
from torch import nn


class Momentum:
    """Heavy ball."""

    def __init__(self, parameters, rate, momentum):
        self.parameters = list(parameters)
        self.rate, self.momentum = rate, momentum
        self.velocity = [torch.zeros_like(p) for p in self.parameters]

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p, velocity in zip(self.parameters, self.velocity, strict=True):
            velocity.mul_(self.momentum).add_(p.grad)
            p.sub_(velocity, alpha=self.rate)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = Momentum(model.parameters(), rate=0.1, momentum=0.9)


def checkpoint():
    return {"model": model.state_dict(), "velocity": optimizer.velocity}


for step in range(3):
    loss = model(torch.randn(12, 6)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
