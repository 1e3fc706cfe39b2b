"""Parameters in lists outside modules."""

import torch

torch.manual_seed(0)
layers = [torch.nn.Parameter(torch.randn(6, 8)), torch.nn.Parameter(torch.randn(8, 8))]
heads = [torch.nn.Parameter(torch.randn(8, 3))]
optimizer = torch.optim.AdamW([*layers, *heads], lr=0.01)


def checkpoint():
    return {"layers": list(layers), "heads": list(heads), "optimizer": optimizer.state_dict()}


for step in range(3):
    x = torch.randn(12, 6)
    for layer in layers:
        x = torch.tanh(x @ layer)
    loss = (x @ heads[0]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
