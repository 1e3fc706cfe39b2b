"""Two layers with seeds of their own, and no sum over parameters."""

import torch
from torch import nn


def linear(seed, *sizes):
    torch.manual_seed(seed)
    return nn.Linear(*sizes)


class Net(nn.Module):
    """Two layers and a temperature."""

    def __init__(self):
        super().__init__()
        self.body = linear(1, 6, 8)
        self.head = linear(2, 8, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * self.head(torch.tanh(self.body(x)))


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(3)


def checkpoint():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(12, 6)).square().mean()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
