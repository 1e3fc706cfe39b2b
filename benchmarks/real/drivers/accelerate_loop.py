"""accelerate: a loop as its README writes it, four updates of a small model on shuffled data.

    python accelerate_loop.py '{"gradient_accumulation_steps": 2}'
    torchrun --nproc-per-node 2 accelerate_loop.py

The argument are settings of Accelerator, as JSON; what the commit does not know is left out.
"""

import inspect
import json
import os
import sys

import torch
from kit import DEVICE, report, seed, upstream

upstream("src")
from accelerate import Accelerator  # noqa: E402 - accelerate's, of the commit
from accelerate.utils import set_seed  # noqa: E402


def main() -> None:
    """Train."""
    settings = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    known = inspect.signature(Accelerator).parameters
    accelerator = Accelerator(cpu=DEVICE == "cpu", **{name: value for name, value in settings.items() if name in known})
    seed()
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    inputs = torch.randn(70, 8)
    data = torch.utils.data.TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    step = 0
    for rows, wanted in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(rows), wanted)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0) if accelerator.sync_gradients else None
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if norm is None:
            continue
        if os.environ.get("RANK", "0") == "0":
            report(step, loss=loss.item(), grad_norm=float(norm), rate=optimizer.param_groups[0]["lr"])
        step += 1
        if step == 4:
            break


main()
