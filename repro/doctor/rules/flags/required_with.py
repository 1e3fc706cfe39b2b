"""Flags that need another one beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import absent, fsdp, nonzero, open_ended, tempered, trains
from repro.doctor.rule import Found, Rule
from repro_golden.dumps.values import System

__all__ = ["RULE"]


class _Need(NamedTuple):
    flag: str
    any_of: tuple[str, ...]
    systems: tuple[System, ...] = ("slime", "miles", "relax")
    value: str = ""
    """Only with this value; ``>0`` and ``>1`` for numbers above."""
    megatron: bool = False
    """Only where Megatron checks its arguments."""
    model: bool = False
    """What is needed comes with the model's flags: not missed where some of the flags are not known."""


_NEEDS = (
    _Need("--save-interval", ("--save",)),
    _Need("--save-trigger-sentinel", ("--save",), ("miles",)),
    _Need("--eval-interval", ("--eval-prompt-data", "--eval-config", "--eval-size", "--custom-dataset-class-path")),
    _Need("--enable-mtp-training", ("--mtp-num-layers",), model=True),
    _Need("--use-opd", ("--opd-type",), ("slime", "miles")),
    _Need("--opd-teacher-load", ("--use-opd",), ("slime", "miles")),
    _Need("--opd-teacher-urls", ("--use-opd",), ("miles",)),
    _Need("--opd-type", ("--opd-teacher-load",), ("slime", "miles"), "megatron"),
    _Need("--lora-rank", ("--target-modules",), ("miles",), ">0"),
    _Need("--sglang-dp-size", ("--sglang-enable-dp-attention",), value=">1"),
    _Need("--sglang-data-parallel-size", ("--sglang-enable-dp-attention",), value=">1"),
    _Need("--recompute-logprobs-via-prefill", ("--true-on-policy-mode",), ("miles",)),
    _Need("--mini-ft-controller-enable", ("--control-server-port",), ("miles",)),
    _Need("--expert-model-parallel-size", ("--num-experts",), value=">1", megatron=True, model=True),
    _Need("--tp-comm-overlap", ("--sequence-parallel",), megatron=True),
)


def _applies(need: _Need, launch: Launch) -> bool:
    if not launch.has(need.flag) or (launch.system is not None and launch.system not in need.systems):
        return False
    if need.megatron and (fsdp(launch) or not trains(launch) or launch.value("--megatron-to-hf-mode") == "bridge"):
        return False
    if need.model and open_ended(launch):
        return False
    if need.flag.startswith("--sglang-") and (
        launch.has("--debug-train-only") or launch.has("--load-debug-rollout-data")
    ):
        return False
    if need.value.startswith(">"):
        number = launch.number(need.flag)
        return number is not None and number > int(need.value[1:])
    return not need.value or launch.value(need.flag) == need.value


@tempered("error")
def _check(launch: Launch) -> Iterator[Found]:
    for need in _NEEDS:
        if not _applies(need, launch) or any(launch.has(name) for name in need.any_of):
            continue
        given = " ".join((need.flag, *launch.flags[need.flag].values[:1]))
        message = f"{given} needs {' or '.join(need.any_of)}, which is not given: the trainer stops at its arguments"
        yield Found(message, launch.where(need.flag), *absent(launch, "error"), cure=f"add {need.any_of[0]}")
    if not launch.has("--num-rollout") and not launch.has("--num-epoch") and launch.has("--rollout-batch-size"):
        message = "neither --num-rollout nor --num-epoch is given: the trainer stops at its arguments"
        yield Found(message, launch.where("--num-rollout"), *absent(launch, "error"), cure="add --num-rollout N")
    over, batch = launch.number("--over-sampling-batch-size"), launch.number("--rollout-batch-size")
    if over is not None and batch is not None and nonzero(launch, "--over-sampling-batch-size") and over < batch:
        message = f"--over-sampling-batch-size {over:.0f} is below --rollout-batch-size {batch:.0f}: the trainer stops"
        yield Found(message, launch.where("--over-sampling-batch-size"), cure=f"--over-sampling-batch-size {batch:.0f}")


RULE = Rule(
    id="required-with",
    title="A flag that needs another one, which is not given",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="the launch is refused when its arguments are checked, after it has waited for its GPUs",
    cure="add the flag that is named, or remove the one that needs it",
    sources=(
        "THUDM/slime@624b824a8 slime/utils/arguments.py:1786,1814,1840,1843,1988,2003,2008",
        "THUDM/slime@624b824a8 slime/backends/sglang_utils/arguments.py:183",
        "radixark/miles@31f1ca961 miles/utils/arguments.py:2882,2986,3029,3060,3075,3450,3465,3470",
        "redai-infra/Relax@05149ae1a relax/utils/arguments.py",
        "NVIDIA/Megatron-LM@000c4ac24 megatron/training/arguments.py (validate_args)",
    ),
    check=_check,
)
