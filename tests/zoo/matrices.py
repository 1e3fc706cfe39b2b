"""The moving average of all but biases, in an object."""

import torch
from torch import nn


class Average:
    """A copy of each matrix, by name."""

    def __init__(self, module):
        self.matrices = {name: p.detach().clone() for name, p in module.named_parameters() if p.ndim > 1}

    @torch.no_grad()
    def update(self, module, decay):
        for name, p in module.named_parameters():
            if name in self.matrices:
                self.matrices[name].lerp_(p, 1 - decay)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
average = Average(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
decays = [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9]


def checkpoint():
    return {"model": model.state_dict(), "average": average.matrices}


for step in range(7):
    optimizer.zero_grad()
    loss = model(torch.randn(12, 6)).square().mean()
    loss.backward()
    optimizer.step()
    average.update(model, decays[step])
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
