"""OpenRLHF: one of its losses over a model of two layers, three updates on random tokens.

    python openrlhf_loss.py policy '{"policy_loss_type": "gspo"}'
    torchrun --nproc-per-node 2 openrlhf_loss.py sft      # a sequence cut over two ranks, as ring attention cuts it

The second argument is what the loss is made with, as JSON. openrlhf/models/__init__.py imports flash_attn, peft and
deepspeed, of which the losses use nothing: its files loss.py and utils.py are imported as those of a package without
an __init__.py, from the same folder of the checkout.
"""

import importlib.machinery
import importlib.util
import inspect
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from kit import norm_of, report, seed

VOCABULARY, WIDTH, LENGTH, ROWS = 32, 16, 12, 4


def models(name: str) -> object:
    """A module of openrlhf/models."""
    spec = importlib.machinery.ModuleSpec("openrlhf_models", None, is_package=True)
    spec.submodule_search_locations = [str(Path.cwd() / "openrlhf" / "models")]
    sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    return importlib.import_module(f"{spec.name}.{name}")


def model() -> torch.nn.Module:
    """Logits of the next token."""
    return torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(),
        torch.nn.Linear(WIDTH, VOCABULARY),
    )  # fmt: skip


def policy(settings: dict[str, object]) -> None:
    """PolicyLoss: completions of lengths that differ, advantages, and the log-probabilities before the first step."""
    criterion = models("loss").PolicyLoss(**settings)
    log_probs_from_logits = models("utils").log_probs_from_logits
    actor = model()
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-2)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1))
    advantages = torch.randn(ROWS, 1).expand(ROWS, LENGTH).contiguous()
    mask = (torch.arange(LENGTH) < torch.tensor([[3], [12], [7], [5]])).float()
    old = None
    for step in range(3):
        log_probs = log_probs_from_logits(actor(tokens[:, :-1]), tokens[:, 1:])
        old = log_probs.detach() if old is None else old
        returned = criterion(log_probs, old, advantages, action_mask=mask)
        loss = returned[0] if isinstance(returned, tuple) else returned
        loss.backward()
        norm = norm_of(actor.parameters())
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss=loss.item(), grad_norm=norm)


def sft(settings: dict[str, object]) -> None:
    """GPTLMLoss: each rank has its part of the logits where the loss knows of a ring, else all; long prompts."""
    dist.init_process_group("gloo")
    kind = models("loss").GPTLMLoss
    rings = "ring_attn_group" in inspect.signature(kind).parameters
    criterion = kind(**settings, **({"ring_attn_group": dist.group.WORLD} if rings else {}))
    actor = model()
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-2)
    part = LENGTH // dist.get_world_size()
    start = dist.get_rank() * part
    for step in range(3):
        tokens = torch.randint(VOCABULARY, (1, LENGTH))
        labels = tokens.clone()
        labels[:, : 4 + 3 * step] = -100
        mine = tokens[:, start : start + part] if rings else tokens
        loss = criterion(actor(mine), labels)
        loss.backward()
        for parameter in actor.parameters():
            dist.all_reduce(parameter.grad)
        norm = norm_of(actor.parameters())
        optimizer.step()
        optimizer.zero_grad()
        if not dist.get_rank():
            report(step, loss=loss.item(), grad_norm=norm)
    dist.destroy_process_group()


def main() -> None:
    """Train."""
    seed()
    {"policy": policy, "sft": sft}[sys.argv[1]](json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})


main()
