"""Dumps that would be written to the same place, or elsewhere than asked."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_ROLLOUT, _TRAIN, _LOAD = "--save-debug-rollout-data", "--save-debug-train-data", "--load-debug-rollout-data"
_ALL = "--dump-details"


def _check(launch: Launch) -> Iterator[Found]:
    folder = launch.flags.get(_ALL)
    if folder is not None:
        for name, below in ((_ROLLOUT, "rollout_data"), (_TRAIN, "train_data")):
            if launch.has(name):
                place = " ".join(folder.values)[:80]
                message = f"{_ALL} puts these dumps into {place}/{below}: {name} is overridden"
                yield Found(message, launch.where(name), "warning", cure=f"drop {name}, or {_ALL}")
        return
    given = {name: " ".join(launch.flags[name].values) for name in (_ROLLOUT, _TRAIN, _LOAD) if launch.has(name)}
    if given.get(_TRAIN) and given[_TRAIN] == given.get(_ROLLOUT):
        message = f"{_TRAIN} and {_ROLLOUT} are the same path {given[_TRAIN][:80]}"
        yield Found(message, launch.where(_TRAIN))
    if given.get(_LOAD) and given[_LOAD] in (given.get(_ROLLOUT), given.get(_TRAIN)):
        name = _ROLLOUT if given[_LOAD] == given.get(_ROLLOUT) else _TRAIN
        message = f"{name} writes over the dumps that {_LOAD} reads: {given[_LOAD][:80]}"
        yield Found(message, launch.where(name), "warning", cure=f"give {name} another folder")


RULE = Rule(
    id="dump-paths-collide",
    title="Dumps of rollouts and of training with one path",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="the trainer refuses equal paths; --dump-details sets both, whatever else is given",
    cure="give --save-debug-train-data a path of its own",
    sources=("Relax guide: Debugging", "THUDM/slime@624b824a8 slime/utils/arguments.py:1890-1895"),
    check=_check,
)
