"""Embeddings with sparse gradients."""

import torch
from torch import nn

torch.manual_seed(0)
table = nn.EmbeddingBag(20, 4, mode="sum", sparse=True)
optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.01)
words = torch.randint(20, (3, 5, 4))


def checkpoint():
    return {"table": table.state_dict(), "optimizer": optimizer.state_dict()}


for step in range(3):
    optimizer.zero_grad()
    loss = table(words[step]).square().mean()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
