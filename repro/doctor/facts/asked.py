"""Whether a launch asks for equal bits, and of whom."""

from __future__ import annotations

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import fsdp, trains

__all__ = ["determinism", "megatron"]

_TRAINING = ("--deterministic-mode", "--true-on-policy-mode", "--debug-deterministic-collective")
_SAMPLING = ("--sglang-enable-deterministic-inference",)


def determinism(launch: Launch | None, *, sampling: bool = True) -> str:
    """The flag by which equal bits are asked for; '' where none is.

    Args:
        launch: The launch, if there is one.
        sampling: Whether determinism of the inference engine alone counts.
    """
    names = _TRAINING + (_SAMPLING if sampling else ())
    return next((name for name in names if launch and launch.has(name)), "")


def megatron(launch: Launch) -> bool:
    """Whether Megatron trains."""
    return trains(launch) and not fsdp(launch)
