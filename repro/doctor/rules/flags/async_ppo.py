"""PPO on samples of an older policy, with ratios against the newest."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import absent, critic, tempered
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_CORRECTIONS = ("--use-rollout-logprobs", "--use-tis", "--keep-old-actor")


@tempered("error")
def _check(launch: Launch) -> Iterator[Found]:
    if not launch.asynchronous or not critic(launch) or any(launch.has(name) for name in _CORRECTIONS):
        return
    refused = launch.system == "miles"
    message = "train_async.py with --advantage-estimator ppo and no correction for the older policy"
    message += ": Miles stops" if refused else ""
    severity, certainty = absent(launch, "error" if refused else "warning")
    yield Found(message, launch.where("--advantage-estimator"), severity, certainty)


RULE = Rule(
    id="async-ppo",
    title="Asynchronous PPO without a correction for stale samples",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="samples come from weights before the update, and clipping is anchored to a policy that never wrote them",
    cure="one of --use-rollout-logprobs, --use-tis, --keep-old-actor",
    sources=("radixark/miles@31f1ca961 miles/utils/arguments.py:3591; train_async.py:24",),
    check=_check,
)
