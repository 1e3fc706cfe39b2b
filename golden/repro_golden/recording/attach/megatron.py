"""Megatron-core's optimizers as step calls, and its own gradient clipping.

Megatron's step does more than the torch optimizers in it: it brings gradients to the main parameters before, and these
to the model's after. It leaves the optimizers out where a gradient is not finite. So one of its steps is one step of
the whole, whose parts are read as `megatron_mains` finds them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from repro_golden.recording.attach.steps import Steps

__all__ = ["hook"]

_OPTIMIZERS = {
    "megatron.core.optimizer.optimizer": ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer"),
    "megatron.core.optimizer.layer_wise_optimizer": ("LayerWiseDistributedOptimizer",),
}
"""The classes that define ``step``; it returns (success, norm, zeros)."""


def hook(when: Callable[[str, Callable[[Any], None]], object], steps: Steps, session: Any) -> None:
    """Hook Megatron's modules once the program has imported them."""

    def left_out(out: Any, _: bool) -> bool:
        done, norm = out[:2]
        if norm:  # 0.0 says that it was not asked for
            session.metric("grad_norm", norm, early=True)
        return done is False

    def optimizers(module: Any) -> None:
        for name in _OPTIMIZERS[module.__name__]:
            owner = getattr(module, name, None)
            if owner is not None and "step" in vars(owner):
                owner.step = steps.outer(owner.step, lambda optimizer, *_, **__: optimizer, left_out, whole=True)

    def clipping(module: Any) -> None:
        clip = module.clip_grad_by_total_norm_fp32

        @functools.wraps(clip)
        def call(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            session.metric("grad_norm", total_norm, early=True)
            return clip(parameters, max_norm, total_norm, *args, **kwargs)

        module.clip_grad_by_total_norm_fp32 = call

    # before its other modules take the function from it
    when("megatron.core.optimizer.clip_grads", clipping)
    for name in _OPTIMIZERS:
        when(name, optimizers)
