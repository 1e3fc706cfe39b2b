"""The moving average of a model, as tensors in a plain object."""

import torch
from torch import nn


class Shadow:
    """A copy of each parameter, by name."""

    def __init__(self, module, decay):
        self.decay = decay
        self.tensors = {name: p.detach().clone() for name, p in module.named_parameters()}

    @torch.no_grad()
    def update(self, module):
        for name, p in module.named_parameters():
            self.tensors[name].mul_(self.decay).add_(p, alpha=1 - self.decay)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
shadow = Shadow(model, 0.9)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def checkpoint():
    return {"model": model.state_dict(), "shadow": shadow.tensors}


for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(12, 6)).square().mean()
    loss.backward()
    optimizer.step()
    shadow.update(model)
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
