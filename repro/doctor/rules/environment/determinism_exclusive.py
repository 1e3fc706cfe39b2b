"""What Megatron's deterministic mode does not allow beside itself."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.determinism import asked_of_trainer
from repro.doctor.facts.launches import fsdp, tempered
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


@tempered("error")
def _check(launch: Launch) -> Iterator[Found]:
    if asked_of_trainer(launch) is None or fsdp(launch):
        return
    if launch.has("--cross-entropy-loss-fusion"):
        message = (
            "--cross-entropy-loss-fusion with --deterministic-mode: Megatron stops, the fusion is not deterministic"
        )
        yield Found(message, launch.where("--cross-entropy-loss-fusion"))
    for name, happens in (
        ("--tp-comm-overlap", "newer versions of Megatron stop, older ones run it and are not deterministic"),
        ("--use-flash-attn", "versions of Megatron before its determinism module stop"),
    ):
        if launch.has(name):
            yield Found(f"{name} with --deterministic-mode: {happens}", launch.where(name), "warning")
    if launch.has("--debug-deterministic-collective") and launch.has("--overlap-grad-reduce"):
        message = "--debug-deterministic-collective with --overlap-grad-reduce: Miles wants synchronous reduction"
        yield Found(message, launch.where("--overlap-grad-reduce"))


RULE = Rule(
    id="determinism-exclusive",
    title="Flags that Megatron's deterministic mode excludes",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="the launch is refused, or runs a kernel whose sums have no fixed order",
    cure="remove the flag that is named",
    sources=(
        "NVIDIA/Megatron-LM@000c4ac24 megatron/training/arguments.py (validate_args)",
        "NVIDIA/Megatron-LM@6ae8fe11d megatron/training/determinism.py (apply_determinism_to_args)",
        "radixark/miles@31f1ca961 miles/backends/megatron_utils/initialize.py:121",
    ),
    check=_check,
)
