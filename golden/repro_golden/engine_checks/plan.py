"""What is sampled to check a rollout engine, and as much of such an engine as the checks need."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from repro_golden.engine_checks.difference import Answer

if TYPE_CHECKING:
    from torch import Tensor

    from repro_golden.recording.weight_pieces import Held

__all__ = ["Engine", "Plan", "Sampling"]


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled: the fields are those of `repro_core.rollout.engine.Sampling`."""

    max_response_len: int
    temperature: float
    eos_id: int = 0
    ignore_eos: bool = True
    prompt_log_probs: bool = True
    routed_experts: bool = False


class Engine(Protocol):
    """As much of `repro_core.rollout.engine.RolloutEngine` as the checks need; it says what its methods raise."""

    weight_version: str
    separate: bool

    def identity(self) -> dict[str, Any]: ...  # noqa: D102 - see the class
    def generate(  # noqa: D102
        self, prompts: Sequence[Sequence[int]], sampling: Any, seeds: Sequence[int] | None
    ) -> Sequence[Answer]: ...
    def update(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> None: ...  # noqa: D102
    def held(self) -> Sequence[Held]: ...  # noqa: D102
    def flush_cache(self) -> None: ...  # noqa: D102
    def release_memory(self) -> None: ...  # noqa: D102
    def resume_memory(self) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class Plan:
    """What is sampled.

    Attributes:
        prompts: How many, at least as many as the largest batch.
        alone: How many of these, from the first on, are also sampled alone.
        shortest: Tokens of the shortest prompt.
        longest: Tokens of the longest.
        response: Tokens sampled to each; the end of sequence ends none.
        temperature: Where seeds matter; elsewhere it is 0.
        seed: What prompts, order and seeds are drawn from.
        vocabulary: How many ids there are; None for as many as the engine's embedding has. The first and the last are
            in no prompt: SGLang shows the last as the first.
        scale: Standard deviation of the noise by which weights are changed.
    """

    prompts: int = 32
    alone: int = 8
    shortest: int = 3
    longest: int = 40
    response: int = 16
    temperature: float = 1.0
    seed: int = 1
    vocabulary: int | None = None
    scale: float = 0.02

    def drawn(self, vocabulary: int) -> list[list[int]]:
        """The prompts, no two of which begin alike where the vocabulary allows it: none is another's cached prefix."""
        rng = random.Random(f"repro rollout checks {self.seed}")

        def below(count: int) -> int:
            return int(rng.random() * count)  # the one draw that all versions of Python make alike

        ids = list(range(1, vocabulary - 1))
        found = []
        for number in range(self.prompts):
            k = number % len(ids)
            other = k + below(len(ids) - k)
            ids[k], ids[other] = ids[other], ids[k]
            length = self.shortest + below(self.longest - self.shortest + 1)
            found.append([ids[k], *(1 + below(vocabulary - 2) for _ in range(length - 1))])
        return found

    def seeds(self, *, other: bool = False) -> list[int]:
        """One for each prompt; others that share none with them."""
        first = (self.seed + (1 if other else 0)) * 1_000_003
        return [first + k for k in range(self.prompts)]
