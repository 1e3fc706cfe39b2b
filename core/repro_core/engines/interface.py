"""What the RL step asks of a model, whatever computes it: plain torch on one process, or megatron-core on many.

An engine answers in columns: packed fp32 tensors [response tokens], sample after sample as in the rollout, the same on
every process. The RL step makes its loss from whole columns, and hands the loss's gradient with respect to them back.
So no divisor and no order of a sum in the loss depends on micro-batches or on the layout: equal columns give a loss of
equal bits everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from repro_core.config import ModelConfig
from repro_core.contract import Observe
from repro_core.model.decoder import Policy
from repro_core.rl.batching import Update

__all__ = ["Engine", "Engines", "Scores"]

_T = TypeVar("_T")
Scores = dict[str, Tensor]
"""``log_probs`` and ``entropy`` of a policy, ``values`` of a critic; exactly 0 at masked tokens."""


class Engine(Protocol):
    """One model: scored, and unless it is frozen, trained.

    Attributes:
        updates: How many optimizer updates it has made.
    """

    updates: int

    def score(self, tensors: Mapping[str, Tensor], plan: Sequence[Update]) -> Scores:
        """The columns of all updates of a rollout, without gradient, over the micro-batches that they train on.

        Args:
            tensors: of a `repro_core.Rollout`.
            plan: its updates.
        """

    def forward(self, tensors: Mapping[str, Tensor], update: Update) -> Scores:
        """The columns of one update, detached. `backward` comes next."""

    def backward(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Accumulate the weights' gradients, from the loss's with respect to the columns of the last `forward`.

        Args:
            gradients: by the columns' names, fp32 like them; None where the loss does not depend on one.
        """

    def step(self, observe: Observe, prefix: str = "") -> float:
        """Clip the accumulated gradients, update the weights, and show both.

        Observed in phase grad: the fp32 gradients before clipping. In phase update: the fp32 weights, both moments
        under ``exp_avg/`` and ``exp_avg_sq/``, the different counts of steps as ``number/step``, and in bf16 the
        model's own weights under ``model/``.

        Args:
            observe: see `repro_core.Observe`.
            prefix: stands before every name, and before ``model/`` and the moments'.

        Returns:
            The global L2 norm of the gradients before clipping.
        """

    def show(self, observe: Observe, phase: str, prefix: str) -> None:
        """Observe the fp32 weights as they are."""

    def weights(self) -> tuple[Mapping[str, Tensor], Mapping[str, Any] | None]:
        """This process's part of the model's own weights, in its dtype: live tensors, and placements of each by key.

        Without placements they are whole, under their canonical names. A tied ``lm_head.weight`` is the embedding.
        """


class Engines(Protocol):
    """The models of a run, which live on the same processes.

    Attributes:
        model: The policy's sizes.
        lead: Whether this process is the one that speaks for all.
        device: Where columns are, and a rollout's tensors must be.
    """

    model: ModelConfig
    lead: bool
    device: torch.device

    @property
    def policy(self) -> Engine:
        """The model that is trained."""

    @property
    def reference(self) -> Engine:
        """The policy as it was at the start, frozen."""

    @property
    def critic(self) -> Engine | None:
        """Under ppo, the model of the values."""

    def generator(self) -> Policy:
        """A policy in plain torch with the present weights, to sample with. It may be the trained one itself."""

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The trained policy's present weights, whole, one after the other, as canonical names have them.

        Every process must exhaust the iterator: they gather the tensors together. Only the lead's yields any.
        """

    def tell(self, value: _T) -> _T:
        """What the lead calls this with, on every process. All must call it; what the others give is dropped."""

    def state(self) -> Mapping[str, Tensor]:
        """All of the models that decides the future and lies on this process: live tensors by name."""

    def save(self, directory: str, rest: Mapping[str, Tensor]) -> None:
        """Write the models and `rest`, which is the same on every process, so that `load` resumes bit for bit."""

    def load(self, directory: str, rest: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Resume from what `save` wrote; nothing changes unless all of it fits.

        Args:
            directory: where.
            rest: the present one: names, dtypes and shapes that are wanted (see `checkpoint.fit`).

        Returns:
            The saved `rest`.
        """

    def close(self) -> None:
        """Give back what outlives the models, such as process groups."""
