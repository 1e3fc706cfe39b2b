"""Weights that responses were sampled with: whether they ever change."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Rollout
from repro.doctor.facts.train_columns import weight_versions
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(rollout: Rollout, launch: Launch | None) -> Iterator[Found]:
    first = rollout.first
    if first is None or rollout.dump.evaluation:
        return
    before, now = weight_versions(first), weight_versions(rollout.dump)
    interval, ahead = 1, 1  # without a launch it may sample one rollout ahead
    if launch is not None:
        if any(launch.has(flag) for flag in ("--debug-rollout-only", "--debug-skip-weight-update")):
            return
        interval = max(int(launch.number("--update-weights-interval", 1) or 1), 1)
        ahead = int(launch.asynchronous) + int(launch.number("--num-critic-only-steps", 0) or 0)
    apart = rollout.dump.rollout_id - first.rollout_id
    if before.keys() != now.keys() or len(now) != 1 or apart < interval + ahead:
        return
    version = next(iter(now))
    yield Found(
        f"rollouts {first.rollout_id} and {rollout.dump.rollout_id} were sampled with the same weights (version "
        f"{version}), {apart} rollouts apart",
        Where(str(rollout.path), item="weight_versions", value=str(version)),
        certainty="likely" if launch else "possible",
    )


RULE = Rule(
    id="dump-weights-never-updated",
    title="Rollouts of a run that were all sampled with the same weights",
    inputs=(Rollout,),
    uses=(Launch,),
    severity="warning",
    certainty="likely",
    why="the engine goes on sampling with weights that training has long left behind",
    cure="look for the weight update in the log, and at --update-weights-interval; --check-weight-update-equal "
    "compares both sides at the start",
    sources=(
        "slime guide: Troubleshooting (stale weights in async mode)",
        "THUDM/slime@624b824a8 train_async.py:66",
    ),
    check=_check,
)
