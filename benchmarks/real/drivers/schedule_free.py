"""Schedule-Free: one of its optimizers on a small network, three updates.

    python schedule_free.py AdamWScheduleFree '{"lr": 0.01}'

The second argument are the optimizer's settings, as JSON.
"""

import json
import sys

import torch
from kit import norm_of, report, seed, upstream

upstream()
import schedulefree  # noqa: E402 - Schedule-Free's, of the commit

seed()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
settings = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
optimizer = getattr(schedulefree, sys.argv[1])(model.parameters(), **settings)
if hasattr(optimizer, "train"):
    optimizer.train()
for step in range(3):
    inputs = torch.randn(16, 8)
    loss = (model(inputs).squeeze(-1) - inputs.sum(-1)).square().mean()
    loss.backward()
    norm = norm_of(model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    report(step, loss=loss.item(), grad_norm=norm)
