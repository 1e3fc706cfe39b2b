"""A module with buffers of many kinds."""

import torch
from torch import nn


class Table(nn.Module):
    """Buffers that training leaves alone, but for a count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("offset", torch.zeros(3))
        self.register_buffer("empty", torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("codes", torch.tensor([1, 2, 3], dtype=torch.int8))
        self.register_buffer("phases", torch.tensor([1 + 2j, 3 - 1j]))
        self.register_buffer("limits", torch.tensor([-4.0, 4.0]))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x):
        self.count += 1
        return (x + self.offset).clamp(self.limits[0], self.limits[1])


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 3), Table())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def checkpoint():
    return {"model": model.state_dict(), "scratch": model[1].scratch}


for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(12, 6)).square().mean()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
