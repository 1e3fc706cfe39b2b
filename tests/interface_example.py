"""An in-process trainer of somebody else's: policy gradient on a bandit, in one small module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CONTRACT = 1


@dataclass(frozen=True)
class Rollout:
    """Samples of one iteration."""

    meta: dict[str, Any]
    tensors: dict[str, torch.Tensor]


class Guarded:
    """`arms` actions; each step is one update on eight samples."""

    def __init__(self, arms: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.policy = torch.nn.Linear(1, arms)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.5)
        self.step = 0

    @property
    def position(self) -> tuple[int, int]:
        """The next step and the next rollout."""
        return self.step, self.step

    def log_probs(self, actions: torch.Tensor) -> torch.Tensor:
        """Log-probs of the actions, float32 [samples]."""
        return torch.log_softmax(self.policy(torch.ones(len(actions), 1)), dim=-1)[torch.arange(len(actions)), actions]

    def sample(self, rollout_id: int) -> Rollout:
        """Eight draws; arm 0 pays."""
        generator = torch.Generator().manual_seed(rollout_id)
        with torch.no_grad():
            p = torch.softmax(self.policy(torch.ones(1, 1)), dim=-1)[0]
            actions = torch.multinomial(p, 8, replacement=True, generator=generator)
            ones = torch.ones(8, dtype=torch.int64)
            tensors = {
                "tokens": actions,
                "total_lengths": ones,
                "response_lengths": ones.clone(),
                "loss_mask": ones.clone(),
                "rollout_log_probs": self.log_probs(actions),
                "rewards": (actions == 0).float(),
                "group_index": torch.zeros(8, dtype=torch.int64),
            }
        return Rollout({"rollout_id": rollout_id}, tensors)

    def train(self, rollout: Rollout, observe: Callable[..., None]) -> Iterator[int]:
        """One REINFORCE update."""
        for name, column in rollout.tensors.items():
            observe("input", name, column)
        log_probs = self.log_probs(rollout.tensors["tokens"])
        advantages = rollout.tensors["rewards"] - rollout.tensors["rewards"].mean()
        observe("forward", "log_probs", log_probs.detach())
        observe("forward", "advantages", advantages)
        loss = -(log_probs * advantages).mean()
        observe("loss", "loss", loss.item())
        self.optimizer.zero_grad()
        loss.backward()
        for name, parameter in self.policy.named_parameters():
            observe("grad", name, parameter.grad)
        self.optimizer.step()
        for name, parameter in self.policy.named_parameters():
            observe("update", name, parameter.detach())
        print(f"step {self.step}: {{'train/loss': {loss.item()!r}}}")
        self.step += 1
        yield self.step - 1

    def state(self) -> dict[str, torch.Tensor]:
        """All that decides the future."""
        return dict(self.policy.state_dict()) | {"step": torch.tensor(self.step)}

    def save(self, directory: str) -> None:
        """Write the state."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        torch.save(self.state(), Path(directory) / "state.pt")

    def load(self, directory: str) -> None:
        """Resume."""
        state = torch.load(Path(directory) / "state.pt", weights_only=True)
        self.step = int(state.pop("step"))
        self.policy.load_state_dict(state)


def build(case: dict[str, Any]) -> Guarded:
    """The interface."""
    return Guarded(case["config"]["arms"], case["config"]["seed"])
