"""Megatron-core's optimizers as step calls, and its own gradient clipping.

Megatron's step does more than the torch optimizer in it: it brings gradients to the main parameters before, and these
to the model's after. It leaves the optimizer out where a gradient is not finite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from repro_golden.attach.steps import Steps

__all__ = ["hook"]

_OPTIMIZERS = ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")
"""The classes of `megatron.core.optimizer.optimizer` that define ``step``; it returns (success, norm, zeros)."""


def hook(when: Callable[[str, Callable[[Any], None]], object], steps: Steps, session: Any) -> None:
    """Hook Megatron's modules once the program has imported them."""

    def optimizers(module: Any) -> None:
        for name in _OPTIMIZERS:
            owner = getattr(module, name, None)
            if owner is not None and "step" in vars(owner):
                owner.step = steps.outer(owner.step, _inner, lambda out, _: out[0] is False)

    def clipping(module: Any) -> None:
        clip = module.clip_grad_by_total_norm_fp32

        @functools.wraps(clip)
        def call(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            session.metric("grad_norm", total_norm, early=True)
            return clip(parameters, max_norm, total_norm, *args, **kwargs)

        module.clip_grad_by_total_norm_fp32 = call

    # before its other modules take the function from it
    when("megatron.core.optimizer.clip_grads", clipping)
    when("megatron.core.optimizer.optimizer", optimizers)


def _inner(optimizer: Any, *_: Any, **__: Any) -> Any:
    """The torch optimizer in one of Megatron's; of a chain, the first's. None in a stub."""
    for chained in getattr(optimizer, "chained_optimizers", ()):
        if (found := _inner(chained)) is not None:
            return found
    return None if hasattr(optimizer, "chained_optimizers") else getattr(optimizer, "optimizer", None)
