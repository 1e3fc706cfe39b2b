"""A run that trains or samples, and whose log has no line of a checkpoint that was loaded."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Log
from repro.doctor.artefacts.log_lines import argument
from repro.doctor.rule import Found, Rule, Where

__all__ = ["LOADED", "RULE"]

LOADED = (
    "successfully loaded checkpoint from",
    "Successfully loaded checkpoint from",
    "loaded checkpoint from",
    "Loaded checkpoint from",
    "Load checkpoint from HuggingFace model into Megatron",
    " loading checkpoint from ",
    " loading release checkpoint from ",
    " loading distributed checkpoint from ",
    "[FSDP] Loaded model from",
    "Loading checkpoint shards",
)
"""What Megatron, its bridge, slime, Miles and transformers print of a checkpoint."""

_NOTHING = (None, "None", "")


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    if not (log.series.steps or log.series.rollouts) or any(log.counts.get(phrase) for phrase in LOADED):
        return
    if argument("debug_rollout_only", launch, log) not in (None, "False"):
        return
    given = {name: argument(name, launch, log) for name in ("load", "ref_load", "pretrained_checkpoint")}
    named = {name: value for name, value in given.items() if value not in _NOTHING}
    if not named:  # a run from scratch, or one that says nothing of its checkpoint
        return
    kind, number = next(iter(log.series.lines), ("", 0))
    wanted = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in named.items())
    yield Found(
        f"the log shows training or rollouts, but no line of a checkpoint that was loaded ({wanted})",
        Where(str(log.path), log.series.lines.get((kind, number)), f"{kind} {number}"),
        certainty="likely" if "load" in log.series.flags else None,
    )


RULE = Rule(
    id="checkpoint-never-loaded",
    title="Training without a line of a checkpoint that was loaded",
    inputs=(Log,),
    uses=(Launch,),
    severity="warning",
    certainty="possible",
    why="a model that was never loaded is random: rollouts are gibberish from the first one on",
    cure="name a folder with latest_checkpointed_iteration.txt in --load and --ref-load; the log of rank 0 says "
    "`successfully loaded checkpoint from`",
    sources=(
        "Miles guide: Debugging",
        "slime guide: Debugging",
        "Relax guide: Debugging",
        "NVIDIA/Megatron-LM megatron/training/checkpointing.py",
        "THUDM/slime@624b824a8 slime/backends/megatron_utils/checkpoint.py:128",
        "radixark/miles@31f1ca961 miles/backends/fsdp_utils/checkpoint.py:117",
    ),
    check=_check,
    phrases=LOADED,
)
