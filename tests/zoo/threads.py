"""Two threads that train a model each."""

import threading
import time

import torch
from torch import nn

torch.manual_seed(0)
models = {"left": nn.Linear(6, 3), "right": nn.Linear(6, 3)}
rates = {"left": 0.1, "right": 0.1}
pauses = {"left": [0.0, 0.05, 0.05], "right": [0.15, 0.05, 0.05]}
batches = {name: torch.randn(3, 12, 6) for name in models}


def checkpoint():
    return {name: model.state_dict() for name, model in models.items()}


def train(name):
    model = models[name]
    optimizer = torch.optim.SGD(model.parameters(), lr=rates[name])
    for step in range(3):
        time.sleep(pauses[name][step])
        optimizer.zero_grad()
        loss = model(batches[name][step]).square().mean()
        loss.backward()
        optimizer.step()


threads = [threading.Thread(target=train, args=(name,)) for name in models]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
