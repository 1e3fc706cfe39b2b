"""The rollout engine that is the trainer's own policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from repro_core.model.decoder import Policy
from repro_core.model.layout_free import box
from repro_core.rollout.engine import EngineError, HeldWeights, Response, Sampling
from repro_core.rollout.sampler import sample

__all__ = ["PolicyEngine"]


class PolicyEngine:
    """Samples with `repro_core.rollout.sampler`. It has no weights of its own, so none can fail to arrive.

    Args:
        policy: gives the policy with the present weights; called once for each batch.
    """

    separate = False

    def __init__(self, policy: Callable[[], Policy]) -> None:
        self._policy = policy
        self.weight_version = ""

    def identity(self) -> dict[str, Any]:
        """See `engine.RolloutEngine.identity`."""
        return {"name": "policy", "version": torch.__version__, "device": "cpu", "flags": {}, "stand_ins": []}

    def seeds(self, seeds: Sequence[int]) -> list[int]:
        """See `engine.RolloutEngine.seeds`: they are used as they are."""
        return list(seeds)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None
    ) -> list[Response]:
        """See `engine.RolloutEngine.generate`.

        Raises:
            EngineError: no seeds: it draws from nothing else.
            ValueError: the arguments do not fit together, or the logits are no distribution.
        """
        if seeds is None:
            raise EngineError("the policy samples from seeds alone: give one for each prompt")
        return sample(
            self._policy(),
            prompts,
            max_response_len=sampling.max_response_len,
            temperature=sampling.temperature,
            seeds=seeds,
            eos_id=None if sampling.ignore_eos else sampling.eos_id,
            prompt_log_probs=sampling.prompt_log_probs,
        )

    def update(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> None:  # noqa: ARG002 - the interface's
        """Nothing to bring: refused."""
        raise EngineError("the policy's weights are the trainer's own: there is nothing to bring")

    def update_from_disk(self, directory: str, version: str) -> None:  # noqa: ARG002 - the interface's
        """Nothing to bring: refused."""
        raise EngineError("the policy's weights are the trainer's own: there is nothing to bring")

    def held(self) -> list[HeldWeights]:
        """What the policy holds, under the canonical names."""
        named = {name: tensor.detach().cpu() for name, tensor in self._policy().named_parameters()}
        placed = {name: box(name, t.shape, [0] * t.dim(), t.shape).data() for name, t in named.items()}
        return [HeldWeights(named, placed)]

    def flush_cache(self) -> None:
        """It keeps no prefixes."""

    def release_memory(self) -> None:
        """Its memory is the trainer's: refused."""
        raise EngineError("the policy's memory is the trainer's own: there is nothing to release")

    def resume_memory(self) -> None:
        """Its memory is the trainer's: refused."""
        raise EngineError("the policy's memory is the trainer's own: there is nothing to resume")

    def close(self) -> None:
        """Nothing was started."""
