"""A run that saves its weights and its history at the end."""

import pathlib

import torch
from safetensors.torch import save_file
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
history = []


def checkpoint():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(12, 6)).square().mean()
    loss.backward()
    optimizer.step()
    history.append({"step": step, "loss": loss.item()})
    print(f"step {step}: {{'loss': {loss.item()!r}}}")

folder = pathlib.Path("out")
folder.mkdir()
torch.save(checkpoint(), folder / "last.pt")
torch.save(history, folder / "history.pt")
save_file(model.state_dict(), folder / "model.safetensors")
model[0].weight.detach().numpy().tofile(folder / "first.bin")
