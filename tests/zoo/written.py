"""Writes files in many ways, and logs two numbers under one name."""

import json
import os
import shutil
import time

import safetensors.numpy
import safetensors.torch
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
indices = list(range(6))


def checkpoint():
    return {"model": model.state_dict()}


def script():
    head = nn.Linear(2, 2)
    nn.init.constant_(head.weight, 1.0)
    nn.init.zeros_(head.bias)
    torch.jit.save(torch.jit.script(head), "script.pt")


for step in range(3):
    loss = model(torch.randn(12, 6)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.save(model.state_dict(), f"at-{step}.pt")
    print(json.dumps({"split": "val", "loss": 1.0 * loss.item()}))
    print(json.dumps({"split": "train", "loss": loss.item() / 2}))
    print("step", step)

split = {"train": indices[:3], "val": indices[3:], "created_at": time.time()}
torch.save(split, "split.pt")
os.mkdir("best")
os.mkdir("last")
torch.save({"weight": model[0].weight}, "best/model.pt")
torch.save({"weight": 2 * model[0].weight}, "last/model.pt")
os.symlink("at-1.pt", "newest.pt")
os.link("at-1.pt", "kept.pt")
shutil.copyfile("at-1.pt", "copied.pt")
os.replace("at-0.pt", "first.pt")
arrays = {name: value.numpy() * 1.0 for name, value in model.state_dict().items()}
safetensors.numpy.save_file(arrays, "arrays.safetensors")
safetensors.torch.save_file(model.state_dict(), "model.safetensors", metadata={"alpha": "1"})
model[2].p = 0.1
torch.save(model, "whole.pt")
script()
