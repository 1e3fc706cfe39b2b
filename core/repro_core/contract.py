"""The interface between the trainer and whoever watches it: what crosses it, and what a trainer offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CONTRACT", "Observe", "Rollout", "Subject"]

CONTRACT = 1
"""The interface's version. It changes when the meaning of `build` or `Subject` does."""

Observe = Callable[..., None]
"""``observe(phase, name, value, placement=None)``.

Called for every signal of a step, in the order of the phases input, forward, loss, grad, update. `value` is a tensor,
a Python float for a metric, or a mapping of names to tensors: they are the signals ``name + key``, read in one pass.
`placement` says which parts of canonical tensors a local one holds, as plain data (docs/reference/formats.md), for a
mapping one by key; None means the whole.
"""


@dataclass(frozen=True)
class Rollout:
    """The samples that one training iteration consumes, as plain data (it crosses the interface both ways).

    Attributes:
        meta: JSON types only: ``rollout_id``, ``prompts``, ``labels``, ``statuses`` and ``sampling``.
        tensors: ``tokens`` int64 [total tokens]; ``total_lengths`` and ``response_lengths`` int64 [samples];
            ``loss_mask`` int64 and ``rollout_log_probs`` float32 [response tokens]; ``rewards`` float32 [samples];
            ``group_index`` int64 [samples]. Samples lie one after the other; groups are contiguous. Of a model with
            experts also ``routed_experts``, uint8 or int16 [total tokens, layers, top k], 0 for a sample's last token.
    """

    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class Subject(Protocol):
    """A trainer under test."""

    @property
    def position(self) -> tuple[int, int]:
        """The next step and the next rollout."""

    def sample(self, rollout_id: int) -> Rollout:
        """Generate the rollout of one iteration with the current policy."""

    def train(self, rollout: Rollout, observe: Observe) -> Iterator[int]:
        """Train on one rollout, yielding the step's number after each optimizer update."""

    def state(self) -> Mapping[str, Tensor]:
        """All that decides the future: weights, optimizer, random generators, data position."""

    def save(self, directory: str) -> None:
        """Write `state` so that `load` resumes bit for bit."""

    def load(self, directory: str) -> None:
        """Resume from what `save` wrote."""
