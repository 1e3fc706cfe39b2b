"""Dropout in the trainer: Megatron's default is 0.1."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.determinism import asked_of_trainer
from repro.doctor.facts.launches import absent, fsdp, trains
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


def _check(launch: Launch) -> Iterator[Found]:
    # with a bridge the checkpoint's own configuration decides
    bridged = launch.value("--megatron-to-hf-mode") == "bridge"
    if fsdp(launch) or not trains(launch):
        return
    for name in ("--attention-dropout", "--hidden-dropout"):
        value = launch.number(name, 0.1)
        if value is None or value == 0 or (bridged and not launch.has(name)):
            continue
        asking = ", in a run that asks for determinism" if asked_of_trainer(launch) else ""
        if launch.has(name):
            yield Found(f"{name} {launch.value(name)}{asking}", launch.where(name))
        else:
            message = f"{name} is not given: Megatron's default is 0.1{asking}"
            yield Found(message, launch.where(name), *absent(launch, "warning"))


RULE = Rule(
    id="megatron-dropout",
    title="--attention-dropout or --hidden-dropout is not 0",
    inputs=(Launch,),
    severity="warning",
    certainty="certain",
    why="the policy that is trained is not the one that sampled; layouts with other random streams give other results",
    cure="--attention-dropout 0.0 --hidden-dropout 0.0, as all launch scripts of the trainers do",
    sources=(
        "THUDM/slime@624b824a8 scripts/run-qwen2.5-0.5B-reproducibility.sh (MISC_ARGS)",
        "THUDM/slime@624b824a8 slime/backends/megatron_utils/model.py:748",
    ),
    check=_check,
)
