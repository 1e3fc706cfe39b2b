"""Muon: its distributed optimizer on two ranks (gloo), three updates of a network with layers that a step leaves out.

torchrun --standalone --nproc-per-node 2 muon_ranks.py
"""

import torch
import torch.distributed as dist
from kit import norm_of, report, seed, upstream

upstream()
from muon import Muon  # noqa: E402 - Muon's, of the commit

seed()
dist.init_process_group("gloo")
rank = dist.get_rank()


class Experts(torch.nn.Module):
    """Four square layers; the second and the third are left out, as experts are that no token was sent to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Through the first and the last."""
        return self.layers[3](torch.tanh(self.layers[0](inputs)))


model = torch.nn.parallel.DistributedDataParallel(Experts(), find_unused_parameters=True)
parameters = list(model.parameters())
optimizer = Muon(parameters, lr=0.02)
torch.manual_seed(rank)
for step in range(3):
    inputs = torch.randn(16, 8)
    loss = (model(inputs) - inputs.roll(1, -1)).square().mean()
    loss.backward()
    norm = norm_of(parameters)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if rank == 0:
        report(step, loss=loss.item(), grad_norm=norm)
dist.destroy_process_group()
