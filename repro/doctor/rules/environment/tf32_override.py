"""Switches of a launch that make fp32 less than fp32."""

from __future__ import annotations

from collections.abc import Iterable

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.asked import determinism
from repro.doctor.facts.launches import known_text, seen
from repro.doctor.rule import Found, Rule, Where

__all__ = ["CURE", "NAMES", "RULE", "SOURCES", "WHY", "tf32"]

NAMES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
"""Variables that turn TF32 on for all products of fp32 matrices."""

WHY = (
    "log-probs, routers and optimizer parts that are kept in fp32 lose its precision on this side alone, so "
    "trainer and engine drift apart"
)
CURE = "unset it"
SOURCES = ("pytorch: CUDA semantics, TensorFloat-32", "NVIDIA: NVIDIA_TF32_OVERRIDE")


def _check(launch: Launch) -> Iterable[Found]:
    for name in NAMES:
        variable = seen(launch, name)
        if variable and known_text(variable) == "1":
            yield tf32(name, Where(variable.where.path, variable.where.line, name, "1"), determinism(launch))


def tf32(name: str, where: Where, flag: str) -> Found:
    """What both rules say of a variable; a warning under a flag that asks for equal bits."""
    message = f"{name}=1: products of fp32 matrices keep 10 bits of mantissa, not 23"
    return Found(f"{message}, while {flag} is given", where, "warning") if flag else Found(message, where)


RULE = Rule(
    id="tf32-override",
    title="The launch turns fp32 into TF32",
    inputs=(Launch,),
    severity="note",
    certainty="certain",
    why=WHY,
    cure=CURE,
    sources=SOURCES,
    check=_check,
)
