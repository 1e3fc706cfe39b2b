"""Transformer Engine is allowed what the launch forbids."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.determinism import NVTE, asked_of_engines, asked_of_trainer
from repro.doctor.facts.launches import fsdp, known_text, seen, tempered, trains
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


@tempered("error")
def _check(launch: Launch) -> Iterator[Found]:
    variable = seen(launch, NVTE)
    value = known_text(variable)
    if variable is None or value is None or fsdp(launch) or not trains(launch):
        return
    if set(value.strip().removeprefix("+")) == {"0"}:
        return
    if asked_of_trainer(launch):
        local = launch.value("--transformer-impl") == "local"
        message = f"{NVTE}={value[:40]} with --deterministic-mode"
        message += "" if local else ": Megatron stops when it builds attention"
        yield Found(message, variable.where, "warning" if local else "error")
    elif asked_of_engines(launch):
        message = f"{NVTE}={value[:40]} leaves the trainer free while the engines are held to determinism"
        yield Found(message, variable.where, "warning")


RULE = Rule(
    id="determinism-nvte",
    title="NVTE_ALLOW_NONDETERMINISTIC_ALGO is not 0 where determinism is asked for",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="Transformer Engine's attention adds gradients atomically unless told not to",
    cure="NVTE_ALLOW_NONDETERMINISTIC_ALGO=0",
    sources=(
        "NVIDIA/Megatron-LM megatron/core/extensions/transformer_engine.py (TEDotProductAttention)",
        "NVIDIA/Megatron-LM@6ae8fe11d megatron/training/determinism.py (apply_determinism_to_args)",
        "THUDM/slime@624b824a8 docs/en/advanced/reproducibility.md",
    ),
    check=_check,
)
