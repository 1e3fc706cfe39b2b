"""A variable of the determinism set that is exported where no actor inherits it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Variable
from repro.doctor.facts.determinism import SET, asked, asked_of_trainer
from repro.doctor.facts.launches import seen, size, tempered, trains
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_NAMES = (*SET, "PYTHONHASHSEED", "CUDA_DEVICE_MAX_CONNECTIONS")
_CLUSTER = re.compile(r"^[^#\n]*\bray\s+start\b", re.M)


def _clusters(launch: Launch) -> list[int]:
    """Lines that start a part of the cluster from this shell."""
    return [launch.text.count("\n", 0, match.start()) + 1 for match in _CLUSTER.finditer(launch.text)]


@tempered("warning")
def _check(launch: Launch) -> Iterator[Found]:
    if not launch.submitted or asked(launch) is None:
        return
    clusters = _clusters(launch)
    for name in _NAMES:
        variable = seen(launch, name)
        if variable is None or variable.origin not in ("export", "prefix"):
            continue
        yield from _late(launch, name, variable, clusters)


def _late(launch: Launch, name: str, variable: Variable, clusters: list[int]) -> Iterator[Found]:
    here = variable.where.path == str(launch.path) and variable.where.line is not None
    line, nodes = variable.where.line or 0, size(launch, "--actor-num-nodes")
    said = f"{name}={variable.value[:40]} is set for the submitting shell alone"
    if not clusters:
        message = f"{said}, and the cluster is started elsewhere: its actors do not see it"
        yield Found(message, variable.where, "warning", "likely")
    elif variable.origin == "prefix" or (here and line > max(clusters)):
        message = f"{said}, after `ray start`: its actors do not see it"
        needed = asked_of_trainer(launch) is not None and trains(launch) and name in SET
        yield Found(message, variable.where, "error" if needed else "warning", "likely")
    elif nodes is not None and nodes > 1:
        message = f"{said}: actors on the other {nodes - 1} of {nodes} nodes do not see it"
        yield Found(message, variable.where, "warning", "likely")


RULE = Rule(
    id="determinism-late",
    title="A variable of the determinism set that does not reach the actors",
    inputs=(Launch,),
    severity="warning",
    certainty="likely",
    why="Ray's actors inherit from `ray start` and from the job's runtime environment, not from the submitting shell",
    cure="name it in env_vars of --runtime-env-json, or export it before `ray start` on each node",
    sources=(
        "THUDM/slime@624b824a8 docs/en/advanced/reproducibility.md",
        "THUDM/slime@624b824a8 slime/ray/actor_group.py:64-109",
        "Ray documentation: Environment Dependencies (env_vars)",
    ),
    check=_check,
)
