"""A classifier with batch norm; each layer is initialised by a seed of its own."""

import torch
from torch import nn
from torch.nn import functional


def linear(seed, *sizes):
    torch.manual_seed(seed)
    return nn.Linear(*sizes)


class Net(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.first = linear(1, 6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.fc = linear(2, 8, 3)

    def forward(self, x):
        hidden = functional.relu(self.norm(self.first(x)))
        return self.fc(hidden)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(3)
batches = [(torch.randn(12, 6), torch.randint(3, (12,))) for _ in range(3)]
order = [0, 1, 2]
mask = torch.ones(12)
mask[4] = 0.0


def checkpoint():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


for step in range(3):
    inputs, labels = batches[order[step]]
    optimizer.zero_grad()
    losses = functional.cross_entropy(model(inputs), labels, reduction="none")
    loss = (losses * mask).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
