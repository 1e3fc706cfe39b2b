"""A checkpoint with more than tensors in it: texts, large integers, containers of many kinds, a quantized table."""

import collections

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(6, 3)
codes = torch.arange(4, dtype=torch.int8)
model.register_buffer("table", torch._make_per_tensor_quantized_tensor(codes, 0.1, 0))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recent = collections.deque([1.0, 2.0], maxlen=2)
nested = torch.zeros(3)
for _ in range(12):
    nested = {"inner": nested}
weights = torch._make_per_tensor_quantized_tensor(codes, 0.5, 0)


def digits(value):
    return {"codes": value.int_repr(), "scale": value.q_scale(), "zero": value.q_zero_point()}


def checkpoint():
    return {
        "model": {name: digits(t) if t.is_quantized else t for name, t in model.state_dict().items()},
        "weights": digits(weights),
        "facts": {"act": "relu", "seed": 2**63 + 1, "out": "runs/one"},
        "state": [list(recent), nested],
    }


for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(12, 6)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.state[model.weight] |= {"recent": collections.deque(recent), "nested": nested}
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
    torch.save({"weights": weights}, "weights.bin")
    torch.save({"facts": checkpoint()["facts"]}, "last.bin")
