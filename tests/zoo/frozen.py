"""A trained body before a frozen head, and a critic that nobody calls."""

import torch
from torch import nn

torch.manual_seed(0)
body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
torch.manual_seed(1)
head = nn.Linear(8, 3).requires_grad_(False)
torch.manual_seed(2)
critic = nn.Linear(8, 1)
optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
torch.manual_seed(3)


def checkpoint():
    return {"body": body.state_dict(), "head": head.state_dict(), "critic": critic.state_dict()}


for step in range(3):
    optimizer.zero_grad()
    loss = head(body(torch.randn(12, 6))).square().mean()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
