"""A process that was started apart from its surroundings trains a second model, and writes its weights."""

import json
import subprocess
import sys

import torch
from torch import nn

WORKER = """
import json, torch
torch.manual_seed(1)
second = torch.nn.Linear(6, 2)
optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    second(torch.randn(12, 6)).square().mean().backward()
    optimizer.step()
print(json.dumps([p.tolist() for p in second.parameters()]))
"""

torch.manual_seed(0)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
process = subprocess.run([sys.executable, "-I", "-c", WORKER], capture_output=True, text=True, check=True)
second = json.loads(process.stdout)


def checkpoint():
    return {"model": model.state_dict(), "second": second}


for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(12, 6)).square().mean()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
