"""FlashAttention 3 where equal bits are asked for."""

from __future__ import annotations

from collections.abc import Iterable

from repro.doctor.artefacts.kinds import Launch, Machine
from repro.doctor.facts.asked import determinism
from repro.doctor.facts.launches import trains
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_MODULES = ("flash_attn_3", "flash_attn_interface")


def _check(machine: Machine, launch: Launch) -> Iterable[Found]:
    flag = determinism(launch, sampling=False)
    chosen = launch.value("--attn-implementation") == "flash_attention_3"  # Miles' recipe for FSDP asks for it
    if not flag or chosen or not trains(launch):
        return
    version = machine.packages.get("flash-attn-3")
    modules = sorted(machine.modules & set(_MODULES))
    if version is None and not modules:
        return
    what = f"flash-attn-3 {version}".strip() if version is not None else f"the module {modules[0]}"
    where = Where(machine.source, item=what)
    yield Found(f"{flag} is given, and {what} is installed: Transformer Engine takes it before others", where)


RULE = Rule(
    id="flash-attn-3",
    title="FlashAttention 3 is installed while a deterministic run is asked for",
    inputs=(Machine, Launch),
    severity="warning",
    certainty="likely",
    why="Transformer Engine prefers FlashAttention 3, whose backward pass is not the same twice",
    cure="pip uninstall flash_attn_3 -y",
    sources=(
        "slime guide: Reproducibility (docs/en/advanced/reproducibility.md)",
        "radixark/miles@31f1ca961 examples/experimental/reproducibility/README.md",
        "Dao-AILab/flash-attention#2244",
    ),
    check=_check,
)
