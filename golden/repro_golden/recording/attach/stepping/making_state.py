"""Steps that only make an optimizer's state, for a checkpoint to be loaded into: they train nothing, and are none.

Libraries set gradients of zeros and call ``step``. Some do so at the full rate, or with other gradients, so no values
tell all of them: these are known by name. Others are told by what they do.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from repro_golden.recording.attach.alive.readings import gradients_of, learning_rates
from repro_golden.recording.attach.base.guard import harmless
from repro_golden.recording.attach.base.steps import Steps

__all__ = ["MAKE_STATE", "hook", "only_makes_state"]

_DEEPSPEED = {
    "bf16_optimizer": "BF16_Optimizer",
    "fp16.fused_optimizer": "FP16_Optimizer",
    "fp16.unfused_optimizer": "FP16_UnfusedOptimizer",
    "zero.stage3": "DeepSpeedZeroOptimizer_Stage3",
    "zero.stage_1_and_2": "DeepSpeedZeroOptimizer",
}
_MEGATRON = "megatron.core.optimizer"
MAKE_STATE: Mapping[str, tuple[str, ...]] = {
    "torch.distributed.checkpoint.state_dict": ("_init_optim_state",),
    "torch.distributed.optim.named_optimizer": ("_NamedOptimizer.init_state",),
    "torchrec.optim.keyed": ("KeyedOptimizer.init_state",),
    f"{_MEGATRON}.distrib_optimizer": ("DistributedOptimizer._init_optimizer_states_with_dummy_values",),
    f"{_MEGATRON}.cpu_offloading.hybrid_optimizer": ("HybridDeviceOptimizer.dummy_step",),
    **{f"deepspeed.runtime.{at}": (f"{name}.initialize_optimizer_states",) for at, name in _DEEPSPEED.items()},
}
"""By module, the functions whose step calls are no training steps."""


def hook(when: Callable[[str, Callable[[Any], None]], object], steps: Steps) -> None:
    """Watch these functions once the program has imported them."""

    def watch(paths: tuple[str, ...], module: Any) -> None:
        for path in paths:
            owner, _, name = path.rpartition(".")
            with contextlib.suppress(AttributeError):  # another version's
                there = operator.attrgetter(owner)(module) if owner else module
                setattr(there, name, steps.none_in(getattr(there, name)))

    for name, paths in MAKE_STATE.items():
        when(name, functools.partial(watch, paths))


@harmless
def only_makes_state(session: Any, optimizer: Any) -> bool:
    """Whether an optimizer without state steps at rates of 0 by gradients of 0, before any pass since it was made.

    The gradients, which may be on a device, are looked at last: no program waits for it that trains by such passes, and
    no rank is another for a shard whose gradients happen to be 0.
    """
    inside = torch._C._current_graph_task_id() >= 0  # of a backward pass
    if inside or session.passes.since(optimizer) or optimizer.state:
        return False
    rates = learning_rates(optimizer).values()
    if not rates or any(float(rate) for rate in rates):
        return False
    gradients = [grad for (grad,) in gradients_of(optimizer).values()]
    with contextlib.suppress(RuntimeError):  # a kind that cannot be asked
        return bool(gradients) and not any(bool(_local(grad).any()) for grad in gradients)
    return False


def _local(grad: torch.Tensor) -> torch.Tensor:
    """What of it is this rank's."""
    return grad.to_local() if hasattr(grad, "to_local") else grad
