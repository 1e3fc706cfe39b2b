"""An in-process trainer that trains on as many ranks as there are: a bandit whose weight is split by rows.

Its configuration can let one rank die, hang or differ: ``{"rank": …, "step": …, "how": …}`` under ``fault``; with
``"how": "forget"`` it no longer shows the ``signals``, pairs of phase and name, from that step on.
"""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CONTRACT = 1
FEATURES = 3
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` with every sum in one order: BLAS takes other kernels, and so other bits, for fewer rows."""
    terms = [a[:, k : k + 1] * b[k : k + 1] for k in range(a.shape[1])]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


@dataclass(frozen=True)
class Rollout:
    """Samples of one iteration."""

    meta: dict[str, Any]
    tensors: dict[str, torch.Tensor]


class Guarded:
    """`arms` actions over `RANKS` ranks; each step is one update on eight samples."""

    def __init__(self, arms: int, seed: int, fault: dict[str, Any]) -> None:
        torch.manual_seed(seed)
        whole = torch.randn(arms, FEATURES) / 4
        self.arms, self.rows = arms, arms // RANKS
        self.weight = whole[RANK * self.rows : (RANK + 1) * self.rows].clone()
        self.bias = torch.zeros(arms)
        self.rate, self.step, self.fault = 0.5, 0, fault

    @property
    def position(self) -> tuple[int, int]:
        """The next step and the next rollout."""
        return self.step, self.step

    def inputs(self) -> torch.Tensor:
        """Float32 [samples, FEATURES]."""
        return torch.linspace(-1, 1, 8 * FEATURES).reshape(8, FEATURES)

    def logits(self) -> torch.Tensor:
        """Float32 [samples, arms], gathered."""
        out = product(self.inputs(), self.weight.T)
        parts = [torch.empty_like(out) for _ in range(RANKS)]
        if RANKS > 1:
            dist.all_gather(parts, out.contiguous())
        return torch.cat(parts if RANKS > 1 else [out], dim=1) + self.bias

    def sample(self, rollout_id: int) -> Rollout:
        """Eight draws; arm 0 pays."""
        generator = torch.Generator().manual_seed(rollout_id)
        log_p = torch.log_softmax(self.logits(), dim=-1)
        actions = torch.multinomial(log_p.exp(), 1, generator=generator)[:, 0]
        ones = torch.ones(8, dtype=torch.int64)
        tensors = {
            "tokens": actions,
            "total_lengths": ones,
            "response_lengths": ones.clone(),
            "loss_mask": ones.clone(),
            "rollout_log_probs": log_p[torch.arange(8), actions],
            "rewards": (actions == 0).float(),
            "group_index": torch.zeros(8, dtype=torch.int64),
        }
        return Rollout({"rollout_id": rollout_id}, tensors)

    def split(self, name: str) -> dict[str, Any]:
        """Where this rank's rows lie in the weight called `name`."""
        part = {"name": name, "shape": [self.arms, FEATURES], "at": [RANK * self.rows, 0]}
        return {"shape": [self.rows, FEATURES], "parts": [part]}

    def train(self, rollout: Rollout, observe: Callable[..., None]) -> Iterator[int]:
        """One update by REINFORCE."""
        self.fail()
        observe = self.shown(observe)
        actions = rollout.tensors["tokens"]
        for name, column in rollout.tensors.items():
            observe("input", name, column)
        observe("input", "start/rows", self.weight, self.split("start/weight"))
        log_p = torch.log_softmax(self.logits(), dim=-1)
        advantages = rollout.tensors["rewards"] - rollout.tensors["rewards"].mean()
        log_probs = log_p[torch.arange(8), actions]
        observe("forward", "log_probs", log_probs)
        observe("forward", "advantages", advantages)
        loss = -(log_probs * advantages).mean().item()
        observe("loss", "loss", loss)
        d_logits = (log_p.exp() - torch.nn.functional.one_hot(actions, self.arms)) * advantages[:, None] / 8
        d_weight = product(d_logits[:, RANK * self.rows : (RANK + 1) * self.rows].T, self.inputs())
        mine = d_logits.chunk(RANKS)[RANK].sum(0)  # of this rank's samples
        if RANKS > 1:
            dist.all_reduce(mine)
        observe("grad", "", {"bias": mine})
        observe("grad", "rows", d_weight, self.split("weight"))
        self.bias -= self.rate * mine
        self.weight -= self.rate * d_weight
        observe("update", "bias", self.bias)
        observe("update", "rows", self.weight, self.split("weight"))
        if RANK == 0:
            print(f"step {self.step}: {{'train/loss': {loss!r}}}")
        self.step += 1
        yield self.step - 1

    def fail(self) -> None:
        """Do what the configuration says of this step of this rank."""
        if (self.fault.get("rank"), self.fault.get("step")) != (RANK, self.step):
            return
        print(f"rank {RANK} is about to {self.fault['how']}", flush=True)
        if self.fault["how"] == "raise":
            raise ValueError("no such arm")
        if self.fault["how"] == "exit":
            os._exit(9)
        if self.fault["how"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault["how"] == "hang":
            time.sleep(999)
        if self.fault["how"] == "differ":
            self.bias[0] += 1

    def shown(self, observe: Callable[..., None]) -> Callable[..., None]:
        """The observer, without what this rank forgets."""
        fault = self.fault
        if fault.get("how") != "forget" or fault["rank"] != RANK or fault["step"] > self.step:
            return observe
        return lambda phase, name, *rest: [phase, name] in fault["signals"] or observe(phase, name, *rest)

    def state(self) -> dict[str, torch.Tensor]:
        """All that decides the future of this rank."""
        return {"weight": self.weight, "bias": self.bias, "step": torch.tensor(self.step)}

    def save(self, directory: str) -> None:
        """Write this rank's state."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        torch.save(self.state(), Path(directory) / f"rank-{RANK}.pt")

    def load(self, directory: str) -> None:
        """Resume."""
        state = torch.load(Path(directory) / f"rank-{RANK}.pt", weights_only=True)
        self.weight, self.bias, self.step = state["weight"], state["bias"], int(state["step"])


def build(case: dict[str, Any]) -> Guarded:
    """The interface."""
    if RANKS > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
        atexit.register(dist.destroy_process_group)  # else gloo's threads may abort the exit
    config = case["config"]
    return Guarded(config["arms"], config["seed"], config.get("fault", {}))
