"""An optimizer of torch's kind whose state is nested, string-keyed, and of Python's numbers."""

import torch
from torch import nn


class Tracking(torch.optim.Optimizer):
    """Gradient descent that keeps count of what it did."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.state["all"] = {"largest": torch.zeros(()), "calls": 0}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"history": {"mean": {"grad": torch.zeros_like(p)}}, "size": 0.0, "count": 0}
                state["history"]["mean"]["grad"].lerp_(p.grad, 0.1)
                state["size"] = 0.5 * state["size"] + p.grad.norm().item()
                state["count"] += 1
                self.state["all"]["largest"].clamp_(min=p.grad.abs().max() / 1)
                p.sub_(p.grad, alpha=group["lr"])
        self.state["all"]["calls"] += 1


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = Tracking(model.parameters(), lr=0.1)


def checkpoint():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(12, 6)).square().mean()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
