"""GPUs of the rollout against those of one engine."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import ranks, samples, size
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_GPUS, _EACH = "--rollout-num-gpus", "--rollout-num-gpus-per-engine"
_OTHERS = ("--sglang-config", "--prefill-num-servers", "--rollout-external-engine-addrs")
"""Engines that differ in size, or are started elsewhere."""


def _check(launch: Launch) -> Iterator[Found]:
    each = size(launch, _EACH)
    if each is None or not launch.has(_EACH) or not samples(launch) or any(launch.has(name) for name in _OTHERS):
        return
    shared = launch.has("--colocate") and not launch.has(_GPUS)
    gpus = ranks(launch) if shared else size(launch, _GPUS) if launch.has(_GPUS) else None
    if gpus is None or gpus % each == 0:
        return
    what = "nodes x GPUs per node" if shared else _GPUS
    if gpus < each:
        message = f"{what} {gpus} is less than the {each} GPUs of one engine: no engine can start"
        yield Found(message, launch.where(_EACH), cure=f"{_EACH} {gpus}, or more GPUs")
        return
    message = f"{what} {gpus} does not divide by {each} GPUs of an engine: {gpus % each} are left without one"
    fits = max(n for n in range(1, each + 1) if gpus % n == 0) if each <= 4096 else 1
    yield Found(message, launch.where(_EACH), "warning", cure=f"{_EACH} {fits}, or {gpus // each * each} GPUs")


RULE = Rule(
    id="engine-gpus",
    title="Rollout GPUs that do not divide by the GPUs of an engine",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="an engine does not start, or GPUs that are waited for stay without one",
    cure="make --rollout-num-gpus a multiple of --rollout-num-gpus-per-engine",
    sources=("Relax guide: Debugging", "Miles FAQ", "THUDM/slime@624b824a8 slime/utils/arguments.py:45-60"),
    check=_check,
)
