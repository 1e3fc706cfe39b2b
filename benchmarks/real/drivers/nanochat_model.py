"""nanochat: its model on the meta device, emptied and initialized as its scripts do, and its optimizers; three updates.

python nanochat_model.py
torchrun --standalone --nproc-per-node 2 nanochat_model.py
"""

import inspect
import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its optimizers are compiled, which takes minutes on a CPU
import torch
import torch.distributed as dist
from kit import norm_of, report, seed, upstream

upstream()
from nanochat.gpt import GPT, GPTConfig  # noqa: E402 - nanochat's, of the commit

seed()
rank = int(os.environ.get("RANK", "0"))
if "RANK" in os.environ:
    dist.init_process_group("gloo")
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
torch.manual_seed(1 + rank)
for step in range(3):
    tokens = torch.randint(64, (4, 33))
    loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    loss.backward()
    norm = norm_of(model.parameters())
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    if rank == 0:
        report(step, loss=loss.item(), grad_norm=norm)
if "RANK" in os.environ:
    dist.destroy_process_group()
