"""A rollout dump that is to be loaded and is not there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_LOAD = "--load-debug-rollout-data"
_WIDE = re.compile(r":[^{}]*(?:\d{4}|\{)")
"""A width that would fill the memory, or one that is computed."""


def _check(launch: Launch) -> Iterator[Found]:
    template, first = launch.value(_LOAD), launch.number("--start-rollout-id", 0.0)
    if not template or first is None or "\0" in template or _WIDE.search(template) or abs(first) > 10**9:
        return
    try:
        path = Path(template.format(rollout_id=int(first))).expanduser()
    except (ValueError, LookupError, AttributeError, TypeError, RuntimeError):
        return  # rollout-path-template
    # a relative path is below the trainer's folder, which only an argv given here says
    if not path.is_absolute() and str(launch.path) != "argv":
        return
    try:
        missing = path.parent.is_dir() and not path.exists()
        beside = sorted(one.name for one in path.parent.iterdir() if one.suffix == ".pt")[:3] if missing else []
    except (OSError, ValueError):
        return
    if missing:
        there = f"; there are {', '.join(beside)}" if beside else "; its folder holds no .pt at all"
        message = f"{path} is not there, and rollout {int(first)} is to be trained on it{there}"
        yield Found(message, launch.where(_LOAD))


RULE = Rule(
    id="rollout-path-missing",
    title="The rollout dump to train on is not there",
    inputs=(Launch,),
    severity="warning",
    certainty="likely",
    why="training stops at the first rollout, after the model was loaded",
    cure="correct the path, or record it first: --debug-rollout-only --save-debug-rollout-data DIR/{rollout_id}.pt",
    sources=("slime guide: Debugging", "Miles guide: Debugging", "Relax guide: Debugging"),
    check=_check,
)
