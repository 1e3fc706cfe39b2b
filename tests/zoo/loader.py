"""Batches made by a worker process."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    """Items that depend on their index alone."""

    scale = 0.1

    def __len__(self):
        return 12

    def __getitem__(self, index):
        seeded = torch.Generator().manual_seed(index)
        return index / 12 + self.scale * torch.randn(6, generator=seeded)


torch.manual_seed(0)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Noisy(), batch_size=4, num_workers=1)


def checkpoint():
    return {"model": model.state_dict()}


for step, batch in enumerate(loader):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
