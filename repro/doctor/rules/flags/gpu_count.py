"""GPUs that a launch asks for against those that there are."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Machine
from repro.doctor.facts.launches import absent, known_text, ranks, samples, seen, severed, size
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_ROLLOUT = "--rollout-num-gpus"
_SIZES = ("--actor-num-nodes", "--actor-num-gpus-per-node", "--rollout-batch-size")
_ELSEWHERE = ("--rollout-external-engine-addrs", "--rollout-external", "--resource", "--sglang-config")
"""Flags that place GPUs in another way."""


def _check(launch: Launch, machine: Machine | None) -> Iterator[Found]:
    if any(launch.has(name) for name in _ELSEWHERE) or launch.system == "relax" or not launch.entry or severed(launch):
        return
    if not any(launch.has(name) for name in _SIZES):
        return
    if samples(launch) and not launch.has("--colocate") and not launch.has(_ROLLOUT):
        severity, certainty = absent(launch, "error")
        message = f"neither --colocate nor {_ROLLOUT} is given: sampling has no GPUs"
        cure = f"give --colocate to sample on the GPUs of training, or {_ROLLOUT} N for GPUs of its own"
        yield Found(message, Where(str(launch.path), item="--colocate"), severity, certainty, cure)
        return
    need = _needed(launch)
    if need is None:
        return
    for have, what, where in _had(launch, machine):
        if have < need[0]:
            message = f"the launch asks for {need[1]} GPUs, and {what} {have}"
            if what.startswith("ray"):
                yield Found(message, where, cure=_cure(launch, have))
            else:
                yield Found(message, where, "warning", "likely", _cure(launch, have))
            return


def _needed(launch: Launch) -> tuple[int, str] | None:
    """GPUs of the placement group, and how they come about."""
    train = ranks(launch)
    rollout = size(launch, _ROLLOUT) if launch.has(_ROLLOUT) and launch.value(_ROLLOUT) != "0" else 0
    if train is None or rollout is None:
        return None
    if launch.has("--debug-rollout-only"):
        return (rollout, f"{_ROLLOUT} {rollout} =") if rollout else (train, "nodes x GPUs per node =")
    shown = f"{size(launch, '--actor-num-nodes')} nodes x {size(launch, '--actor-num-gpus-per-node', 8)}"
    if not samples(launch):
        return train, f"{shown} = {train}"
    if launch.has("--colocate"):
        return max(train, rollout), f"{shown} (colocated) = {max(train, rollout)}"
    return train + rollout, f"{shown} + {rollout} for sampling = {train + rollout}"


def _had(launch: Launch, machine: Machine | None) -> Iterator[tuple[int, str, Where]]:
    """GPUs that are said to be there, for launches on one node."""
    if size(launch, "--actor-num-nodes") != 1 or any(map(_more_nodes, launch.text.splitlines())):
        return
    counts = [
        int(count)
        for words in launch.commands
        if words[:2] == ("ray", "start") and (count := _after(words, "--num-gpus")).isdecimal() and len(count) < 6
    ]
    if counts and launch.submitted:
        line = next((n for n, text in enumerate(launch.text.splitlines(), 1) if "ray start" in text), None)
        yield max(counts), "ray start gives", Where(str(launch.path), line, "--num-gpus", str(max(counts)))
        return
    visible = known_text(seen(launch, "CUDA_VISIBLE_DEVICES"))
    if visible is not None:
        number = len([one for one in visible.split(",") if one.strip()])
        where = launch.env["CUDA_VISIBLE_DEVICES"].where
        yield number, "CUDA_VISIBLE_DEVICES names", where
    if machine is not None and machine.gpus:
        yield machine.gpus, "this machine has", Where(machine.source, item="GPUs", value=str(machine.gpus))


def _more_nodes(line: str) -> bool:
    """Whether a line of the script starts something on other machines."""
    joins = "ray start" in line and "--address" in line
    return joins or re.match(r"[^#]*\b(srun|ssh|pdsh|mpirun)\b", line) is not None


def _after(words: tuple[str, ...], name: str) -> str:
    for number, word in enumerate(words):
        if word == name and number + 1 < len(words):
            return words[number + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return ""


def _cure(launch: Launch, have: int) -> str:
    train, rollout = ranks(launch) or 0, size(launch, _ROLLOUT) or 0
    if samples(launch) and not launch.has("--colocate") and not launch.asynchronous and max(train, rollout) <= have:
        return "was --colocate forgotten? With it, training and sampling share these GPUs"
    return f"ask for {have} GPUs in all, or start Ray with more"


RULE = Rule(
    id="gpu-count",
    title="GPUs that the launch asks for and does not have",
    inputs=(Launch,),
    uses=(Machine,),
    severity="error",
    certainty="certain",
    why="Ray waits for ever for GPUs that never come: the job hangs at its submission",
    cure="colocated: nodes x GPUs per node; apart: that plus --rollout-num-gpus",
    sources=(
        "Miles FAQ",
        "Relax guide: Debugging",
        "THUDM/slime@624b824a8 slime/ray/placement_group.py:_get_placement_group_layout",
    ),
    check=_check,
)
