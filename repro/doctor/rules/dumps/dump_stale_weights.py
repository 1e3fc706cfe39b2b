"""Weights that responses were sampled with: how old they are."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Rollout
from repro.doctor.facts.train_columns import weight_versions
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(rollout: Rollout, launch: Launch | None) -> Iterator[Found]:
    found = weight_versions(rollout.dump)
    if rollout.dump.evaluation or len(found) < 2:
        return
    told = launch.number("--max-staleness") if launch else None
    allowed = max(int(told), 1) if told else 1
    oldest, newest = min(found), max(found)
    if newest - oldest <= allowed:
        return
    overlaps = launch is not None and (launch.asynchronous or launch.has("--partial-rollout"))
    yield Found(
        f"weights of versions {oldest} to {newest} in one rollout: the oldest are {newest - oldest} updates behind, "
        f"{allowed} is what " + ("the launch allows" if told else "sampling one rollout ahead explains"),
        Where(str(rollout.path), item=f"weight_versions of sample {found[oldest]}", value=str(oldest)),
        certainty="likely" if overlaps or launch is None else "certain",
    )


RULE = Rule(
    id="dump-stale-weights",
    title="Samples whose weights are more than one update old",
    inputs=(Rollout,),
    uses=(Launch,),
    severity="warning",
    certainty="certain",
    why="the older the weights, the further off-policy the sample: importance ratios grow and clipping drops tokens",
    cure="--update-weights-interval 1; sample less ahead (a smaller buffer or --over-sampling-batch-size); "
    "correct the "
    "rest with --use-tis, or --mask-offpolicy-in-partial-rollout for partial rollouts",
    sources=(
        "slime guide: Troubleshooting (stale weights in async mode)",
        "THUDM/slime@624b824a8 train_async.py:66",
    ),
    check=_check,
)
