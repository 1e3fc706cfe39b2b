"""A forked process trains a second model, and sends its weights back."""

import multiprocessing

import torch
from torch import nn


def train(rate, answer):
    torch.manual_seed(1)
    second = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(second.parameters(), lr=rate)
    for _ in range(3):
        optimizer.zero_grad()
        second(torch.randn(12, 6)).square().mean().backward()
        optimizer.step()
    answer.send({name: value.tolist() for name, value in second.state_dict().items()})


torch.manual_seed(0)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ours, theirs = multiprocessing.Pipe()
process = multiprocessing.get_context("fork").Process(target=train, args=(0.1, theirs))


def checkpoint():
    return {"model": model.state_dict(), "second": second}


second = None
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(12, 6)).square().mean()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {{'loss': {loss.item()!r}}}", flush=True)
process.start()
second = ours.recv()
process.join()
