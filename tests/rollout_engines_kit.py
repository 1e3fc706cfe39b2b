"""Rollout engines that really sample: a sound one, and others with one fault each."""

# ruff: noqa: ARG002, D102 - the methods are the interface's

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from repro_core.config import ModelConfig
from repro_core.model.decoder import Policy, init_weights
from repro_core.rollout.engine import EngineError, HeldWeights, Response, Sampling
from repro_core.rollout.source import PolicyEngine

__all__ = ["FAULTS", "RefusesSeeds", "Sound", "ulps"]

MODEL = ModelConfig(
    vocab_size=64, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.5,
)  # fmt: skip


def ulps(value: float, count: int) -> float:
    """The fp32 number that lies `count` further from 0."""
    value32 = torch.tensor(value, dtype=torch.float32)
    for _ in range(count):
        value32 = torch.nextafter(value32, torch.tensor(math.copysign(math.inf, value)))
    return float(value32)


def moved(response: Response, count: int = 1) -> Response:
    """The response with its second log-prob a little off."""
    log_probs = list(response.log_probs)
    log_probs[1] = ulps(log_probs[1], count)
    return dataclasses.replace(response, log_probs=log_probs)


class Sound:
    """The built-in sampler, with weights of its own and one prompt at a time: batches cannot change its numbers."""

    separate = True

    def __init__(self) -> None:
        self.policy = Policy(MODEL)
        init_weights(self.policy, 1)
        self.weight_version = "0"
        self.calls = 0
        self.cached: set[int] = set()

    def identity(self) -> dict[str, Any]:
        return {"name": type(self).__name__, "version": "1", "device": "cpu", "flags": {}, "stand_ins": ["the engine"]}

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None
    ) -> list[Response]:
        self.calls += 1
        drawn = seeds or [int.from_bytes(os.urandom(6)) for _ in prompts]
        engine = PolicyEngine(lambda: self.policy)
        return [engine.generate([p], sampling, [s])[0] for p, s in zip(prompts, drawn, strict=True)]

    def update(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> None:
        self.take(dict(tensors))
        self.weight_version = version
        self.flush_cache()

    def take(self, tensors: dict[str, Tensor]) -> None:
        self.policy.load_state_dict(tensors, strict=False)

    def held(self) -> list[HeldWeights]:
        named = {name: tensor.detach().clone() for name, tensor in self.policy.named_parameters()}
        placed = {n: {"shape": [*t.shape], "parts": [{"name": n, "shape": [*t.shape], "at": [0] * t.dim()}]}
                  for n, t in named.items()}  # fmt: skip
        return [HeldWeights(named, placed)]

    def flush_cache(self) -> None:
        self.cached.clear()

    def release_memory(self) -> None: ...

    def resume_memory(self) -> None: ...

    def close(self) -> None: ...


class Unrepeatable(Sound):
    """Every call is a little further off."""

    def generate(self, *given: Any) -> list[Response]:
        return [moved(answer, self.calls) for answer in super().generate(*given)]


class OfItsBatch(Sound):
    """The number of neighbours changes numbers."""

    def generate(self, prompts: Any, *given: Any) -> list[Response]:
        return [moved(answer, len(prompts)) for answer in super().generate(prompts, *given)]


class OfItsPlace(Sound):
    """The last of a batch of more than one is off."""

    def generate(self, prompts: Any, *given: Any) -> list[Response]:
        answers = super().generate(prompts, *given)
        return [*answers[:-1], moved(answers[-1])] if len(answers) == 8 else answers


class Warm(Sound):
    """A cached prefix changes numbers."""

    def generate(self, prompts: Any, sampling: Sampling, seeds: Any) -> list[Response]:
        answers = super().generate(prompts, sampling, seeds)
        if sampling.prompt_log_probs:
            return answers
        warm = [prompt[0] in self.cached for prompt in prompts]
        self.cached |= {prompt[0] for prompt in prompts}
        return [moved(finding, 3) if hot else finding for finding, hot in zip(answers, warm, strict=True)]


class OneSeed(Sound):
    """Every seed is the same to it."""

    def generate(self, prompts: Any, sampling: Sampling, seeds: Any) -> list[Response]:
        return super().generate(prompts, sampling, [7] * len(prompts))


class NoSeed(Sound):
    """Seeds are ignored."""

    def generate(self, prompts: Any, sampling: Sampling, seeds: Any) -> list[Response]:
        return super().generate(prompts, sampling, None)


class RefusesSeeds(Sound):
    """Seeds are ignored, and it says so."""

    def generate(self, prompts: Any, sampling: Sampling, seeds: Any) -> list[Response]:
        if seeds and sampling.temperature:
            raise EngineError("seeds are ignored here: give none")
        return super().generate(prompts, sampling, seeds)


class LosesMemory(Sound):
    """Releasing memory loses weights, which it takes again."""

    def resume_memory(self) -> None:
        torch.nn.init.zeros_(self.policy.model.norm.weight)


class LosesSilently(LosesMemory):
    """As before, and what it says to hold is what it held."""

    def held(self) -> list[HeldWeights]:
        self.kept = getattr(self, "kept", None) or super().held()
        return self.kept


class LosesABuffer(Sound):
    """What it loses is no canonical tensor, so bringing weights does not help."""

    scale = 1.0

    def held(self) -> list[HeldWeights]:
        (weights,) = super().held()
        return [HeldWeights({**weights.tensors, "rotary.scale": torch.tensor(self.scale)}, weights.placements)]

    def resume_memory(self) -> None:
        self.scale = 0.0

    def generate(self, *given: Any) -> list[Response]:
        return [answer if self.scale else moved(answer) for answer in super().generate(*given)]


class ChangesABuffer(LosesABuffer):
    """A table of its own changes with every update and with released memory, which nothing that it samples shows."""

    def take(self, tensors: dict[str, Tensor]) -> None:
        super().take(tensors)
        self.scale -= 1

    def resume_memory(self) -> None:
        self.scale = -1.0

    def generate(self, *given: Any) -> list[Response]:
        return Sound.generate(self, *given)


class Deaf(Sound):
    """An update changes nothing."""

    def take(self, tensors: dict[str, Tensor]) -> None: ...


class Stale(Sound):
    """It answers from what it computed before the update."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[str, list[Response]] = {}

    def generate(self, *given: Any) -> list[Response]:
        return self.answers.setdefault(repr(given), super().generate(*given))


class KeepsOne(Sound):
    """The second update leaves one tensor out."""

    def take(self, tensors: dict[str, Tensor]) -> None:
        if self.weight_version != "0":
            tensors.pop("model.norm.weight")
        super().take(tensors)


FAULTS: dict[Callable[[], Sound], dict[str, str]] = {
    Unrepeatable: {
        "run-to-run": "10 of 10", "batch-of-2": "2 of 2", "batch-of-8": "2 of 2", "shuffled": "8 of 8",
        "prefix-cache": "10 of 10", "seeded-run-to-run": "8 of 8", "seeded-batch": "2 of 2", "memory": "8 of 8",
        "weight-reversal": "8 of 8",
    },
    OfItsBatch: {"batch-of-2": "2 of 2 responses", "batch-of-8": "2 of 2 responses", "seeded-batch": "2 of 2"},
    OfItsPlace: {"shuffled": "2 of 8 responses differ"},
    Warm: {"prefix-cache": "with a warm one: 10 of 10 responses differ"},
    OneSeed: {"seed": "the seed is ignored: other seeds give the same tokens"},
    NoSeed: {
        "seeded-run-to-run": "; the seed is ignored", "seeded-batch": "; the seed is ignored",
        "seed": "the seed is ignored: equal seeds give other responses to ",
    },
    RefusesSeeds: {"seed": "the seed is ignored, as it says itself: seeds are ignored here: give none"},
    LosesSilently: {"memory": "released: 8 of 8 responses differ"},
    LosesABuffer: {"memory": "which left 1 tensor changed: 0/rotary.scale", "weight-reversal": "8 of 8"},
    ChangesABuffer: {
        "memory": "are equal; 1 tensor did not survive it and was brought again, which left 1 tensor changed: 0/rotary",
        "weight-reversal": "are equal; 1 tensor not as before: 0/rotary.scale",
    },
    Deaf: {"weight-update": "the update changed nothing"},
    Stale: {"weight-update": "the update changed nothing", "unseeded": ""},
    KeepsOne: {"weight-reversal": "8 of 8 responses differ"},
}  # fmt: skip
"""Each fault, with the checks that must find it and what they say."""
