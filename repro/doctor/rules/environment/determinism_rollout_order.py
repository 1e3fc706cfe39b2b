"""Deterministic engines whose samples are chosen by which is ready first."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.determinism import asked_of_engines
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


def _racing(launch: Launch) -> str | None:
    """The flag by which the order in which responses end decides what is trained on."""
    for name in ("--partial-rollout", "--fully-async"):
        if launch.has(name):
            return name
    if "fully_async" in (launch.value("--rollout-function-path") or ""):
        return "--rollout-function-path"
    over, batch = launch.number("--over-sampling-batch-size"), launch.number("--rollout-batch-size")
    return "--over-sampling-batch-size" if over is not None and batch is not None and over > batch else None


def _check(launch: Launch) -> Iterator[Found]:
    asking, racing = asked_of_engines(launch), _racing(launch)
    if asking is not None and racing is not None:
        given = " ".join((racing, *launch.flags[racing].values[:1]))
        message = f"{asking.item} with {given}: the samples that are ready first are trained on, and that is a race"
        yield Found(message, launch.where(racing))


RULE = Rule(
    id="determinism-rollout-order",
    title="Deterministic inference with a rollout that takes what is ready first",
    inputs=(Launch,),
    severity="warning",
    certainty="certain",
    why="each response is the same again, but which of them make a batch is not: the runs differ all the same",
    cure="sample exactly the batch, synchronously; or record the rollouts once and replay them (repro rollout record)",
    sources=("THUDM/slime@624b824a8 slime/rollout/sglang_rollout.py", "Miles guide: Debugging"),
    check=_check,
)
