"""nanochat: its model made as its scripts do (on meta, emptied, initialized) and its optimizers; three updates."""

import inspect
import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its optimizers are compiled, which takes minutes on a CPU
import torch
from kit import norm_of, report, seed, upstream

upstream()
from nanochat.gpt import GPT, GPTConfig  # noqa: E402 - nanochat's, of the commit

seed()
known = inspect.signature(GPTConfig).parameters
shape = {
    "sequence_len": 32, "vocab_size": 64, "n_layer": 4, "n_head": 2, "n_kv_head": 2, "n_embd": 64,
    "window_pattern": "L",
}  # fmt: skip
with torch.device("meta"):
    model = GPT(GPTConfig(**{name: value for name, value in shape.items() if name in known}))
model.to_empty(device="cpu")
model.init_weights()
made = model.setup_optimizer() if hasattr(model, "setup_optimizer") else model.setup_optimizers()
optimizers = made if isinstance(made, list) else [made]
torch.manual_seed(1)
for step in range(3):
    tokens = torch.randint(64, (4, 33))
    loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    loss.backward()
    norm = norm_of(model.parameters())
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    report(step, loss=loss.item(), grad_norm=norm)
