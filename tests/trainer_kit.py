"""What the tests of the trainer and of its checkpoints share: a tiny configuration and ways to compare bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from repro_core import Rollout
from repro_core.config import ModelConfig, TrainConfig
from repro_core.train.trainer import Trainer

torch.set_num_threads(1)

TINY = TrainConfig(
    model=ModelConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2),
    rollout_batch_size=2,
    n_samples_per_prompt=4,
    global_batch_size=4,
    num_steps_per_rollout=2,
    max_tokens_per_micro_batch=24,
    max_response_len=3,
)
WEIGHT = "model.layers.0.mlp.gate_proj.weight"
ONE_STEP = replace(TINY, global_batch_size=8, num_steps_per_rollout=1)
PHASES = ("input", "forward", "loss", "grad", "update")
COLUMNS = ("log_probs", "old_log_probs", "ref_log_probs", "entropy", "kl", "returns", "values", "advantages")


def quiet(config: TrainConfig = TINY) -> Trainer:
    return Trainer(config, log=lambda _: None)


def ignore(*_: Any) -> None:
    """The observer that does nothing."""


def bits(value: Tensor | float) -> bytes:
    if isinstance(value, float):
        return value.hex().encode()
    return str(value.dtype).encode() + value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def state_bits(trainer: Trainer) -> dict[str, bytes]:
    return {name: bits(value) for name, value in trainer.state().items()}


def with_rewards(rollout: Rollout) -> Rollout:
    """The same rollout with rewards that differ within each group, so that there is something to learn."""
    count = len(rollout.tensors["rewards"])
    return Rollout(rollout.meta, {**rollout.tensors, "rewards": torch.arange(count, dtype=torch.float32) % 4})


def run(trainer: Trainer, rollouts: range, observe: Any = ignore) -> None:
    for rollout_id in rollouts:
        for _ in trainer.train(with_rewards(trainer.sample(rollout_id)), observe):
            pass


class Recorder:
    """The bits of every signal in order; may change one signal in place before what follows is computed."""

    def __init__(self, plant: tuple[str, str] | None = None) -> None:
        self.seen: list[tuple[str, str, bytes]] = []
        self.plant = plant
        self.planted = False

    def __call__(self, phase: str, name: str, value: Any) -> None:
        """Plant, then record; each tensor of a mapping by itself."""
        if isinstance(value, dict):
            for key, tensor in value.items():
                self(phase, name + key, tensor)
            return
        if (phase, name) == self.plant and not self.planted:
            flat = value.view(-1)
            # Not one ULP: next to a larger term that would be rounded away, and the tensor still in use.
            flat[0] += 1 if flat.dtype == torch.int64 else 0.25
            self.planted = True
        self.seen.append((phase, name, bits(value)))


# The interface
