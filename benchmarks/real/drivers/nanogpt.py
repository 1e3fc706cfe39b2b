"""nanoGPT: its model and its optimizer, three updates on random tokens."""

import inspect

import torch
from kit import DEVICE, norm_of, report, seed, upstream

upstream()
from model import GPT, GPTConfig  # noqa: E402 - nanoGPT's, of the commit

seed()
known = inspect.signature(GPTConfig).parameters
shape = {"block_size": 16, "vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 32, "dropout": 0.0}
model = GPT(GPTConfig(**{name: value for name, value in shape.items() if name in known})).to(DEVICE)
given = {"weight_decay": 0.1, "learning_rate": 1e-2, "betas": (0.9, 0.95), "device_type": DEVICE}
wanted = inspect.signature(model.configure_optimizers).parameters
optimizer = model.configure_optimizers(**{name: value for name, value in given.items() if name in wanted})
for step in range(3):
    tokens = torch.randint(64, (4, 17)).to(DEVICE)
    _, loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    loss.backward()
    norm = norm_of(model.parameters())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    report(step, loss=loss.item(), grad_norm=norm)
