"""Metrics of a run as curves, and what a launch says of the run, for the rules that look at both."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import median
from typing import Literal, NamedTuple

from repro.doctor.artefacts.kinds import Launch, Metrics, Series
from repro_golden.base.checks import Where

__all__ = [
    "INSTRUCT", "Fall", "Point", "Rise", "curve", "falls", "first_kl", "is_moe", "kl_where", "number",
    "replays_routing", "rises", "setting", "switched_on", "updates_of",
]  # fmt: skip

Kind = Literal["step", "rollout"]

INSTRUCT = re.compile(r"instruct|chat|(?:^|[-_/])it(?:[-_/]|$)|think", re.IGNORECASE)
"""How models are called that were tuned on conversations."""

_HIGH = 3
"""So many numbers make a level: its median is what a curve had."""
_LOW = 0.1
"""Share of a curve's height that counts as its floor."""

_FIRST, _TIMES_FIRST = 2, 100.0
"""Of a level of so few numbers, so many times it are too much."""
_BEFORE, _TIMES = 5, 10.0
"""Of a level of more, fewer are."""
_WINDOW = 20
_STAYS = 3


class Point(NamedTuple):
    """One number of a curve: of which step or rollout, and the value."""

    number: int
    value: float


class Fall(NamedTuple):
    """A curve that fell to its floor: the level that it had, since when it stayed low, and the level that it has."""

    level: float
    since: int
    now: float


class Rise(NamedTuple):
    """A curve that left its level for far above: the level, the point where it left, and the largest from there on."""

    level: float
    at: Point
    top: float


def curve(series: Metrics, kind: Kind, metric: str) -> list[Point]:
    """A metric's numbers in the order of steps or rollouts, those that are not finite among them."""
    table = series.steps if kind == "step" else series.rollouts
    return [Point(number, float(table[number][metric])) for number in sorted(table) if metric in table[number]]


def falls(points: Sequence[Point], *, least: float = 0.05) -> Fall | None:
    """Whether a curve rose or stood above its floor, and then fell back to it for good.

    Args:
        points: Six of them at least; those that are not finite are left out.
        least: Smallest height that counts.

    Returns:
        None where it did not fall.
    """
    finite = [point for point in points if math.isfinite(point.value)]
    if len(finite) < 2 * _HIGH:
        return None
    values = [point.value for point in finite]
    levels = [median(values[k : k + _HIGH]) for k in range(len(values) - _HIGH + 1)]
    floor = min(0.0, min(values))
    top = max(levels[:-_HIGH] or levels[:1])
    now = median(values[-_HIGH:])
    edge = floor + _LOW * (top - floor)
    if top - floor < least or max(values[-_HIGH:]) > edge:
        return None
    since = next(k for k in range(len(values)) if max(values[k:]) <= edge)
    return Fall(top, finite[since].number, now)


def rises(points: Sequence[Point], *, least: float, least_first: float) -> Rise | None:
    """Whether a curve rises far above its level, and stays there for three numbers.

    Its level is the smallest running median of what came before, so that a rise does not become the level. Ten times a
    level of five numbers are too much, and a hundred times one of two to four.

    Args:
        points: What is not finite is left out.
        least: Numbers up to this are not too large.
        least_first: The same where the level is of two to four numbers.

    Returns:
        None where it does not.
    """
    finite = [point for point in points if math.isfinite(point.value)]
    values = [point.value for point in finite]
    medians = [median(values[max(0, k - _WINDOW) : k]) if k >= _FIRST else math.inf for k in range(len(values))]
    for k in range(_FIRST, len(values) - _STAYS + 1):
        settled = min((value for value in medians[max(_BEFORE, k - _WINDOW) : k + 1] if value > 0), default=math.inf)
        # the first numbers are a level only until there are more
        early = medians[_FIRST : min(k, _BEFORE - 1) + 1] if k <= _WINDOW else []
        first = min((value for value in early if value > 0), default=math.inf)
        now = min(values[k : k + _STAYS])
        for level, times, bound in ((settled, _TIMES, least), (first, _TIMES_FIRST, least_first)):
            if now > max(times * level, bound):
                return Rise(level, finite[k], max(values[k:]))
    return None


def first_kl(series: Series) -> tuple[Kind, str, float] | None:
    """The distance of the policy from the reference before anything was learned: rollout 0, or update 0's ``kl_loss``.

    Returns:
        Of which kind, under which name, and the largest of what there is; None where nothing says it.
    """
    rollout, step = series.rollouts.get(0, {}), series.steps.get(0, {})
    gaps: list[tuple[Kind, str, float]] = []
    if "log_probs" in rollout and "ref_log_probs" in rollout:
        gaps.append(("rollout", "log_probs - ref_log_probs", abs(rollout["log_probs"] - rollout["ref_log_probs"])))
    if "ref_logprob_abs_diff" in rollout:
        gaps.append(("rollout", "ref_logprob_abs_diff", abs(rollout["ref_logprob_abs_diff"])))
    if "kl_loss" in step:
        gaps.append(("step", "kl_loss", abs(step["kl_loss"])))
    return max((gap for gap in gaps if math.isfinite(gap[2])), key=lambda gap: gap[2], default=None)


def kl_where(series: Series, kl: tuple[Kind, str, float]) -> Where:
    """The evidence for `first_kl`."""
    return series.where(kl[0], 0, kl[1], kl[2])


def setting(launch: Launch | None, series: Metrics | None, flag: str) -> str | None:
    """What a flag is set to: by the launch, else as the run's log prints it. A switch that is given is ``True``.

    Returns:
        None where neither says it.
    """
    if launch is not None and launch.has(flag):
        return launch.value(flag) if launch.flags[flag].values else "True"
    logged = None if series is None else series.flags.get(flag.removeprefix("--").replace("-", "_"))
    return None if logged in (None, "None", "") else logged


def switched_on(value: str | None) -> bool:
    """Whether a switch's value, as `setting` gives it, means that it is on."""
    return value is not None and value not in ("False", "0", "None")


def number(value: str | None) -> float | None:
    """A setting as a finite number; None for anything else."""
    try:
        parsed = float(value) if value is not None else None
    except ValueError:
        return None
    return parsed if parsed is not None and math.isfinite(parsed) else None


def replays_routing(launch: Launch | None, series: Series | None = None) -> bool:
    """Whether the rollout's routing is replayed in training (R3)."""
    return switched_on(setting(launch, series, "--use-rollout-routing-replay"))


def is_moe(launch: Launch | None, series: Series | None = None) -> bool:
    """Whether the model has experts, as far as the launch or the log say."""
    if switched_on(setting(launch, series, "--num-experts")):
        return True
    return launch is not None and any(flag.startswith("--moe-") for flag in launch.flags)


def updates_of(launch: Launch | None, series: Series) -> int | None:
    """Optimizer updates of a rollout: as set, else as the batch sizes or the numbers of steps and rollouts show."""
    if updates := number(setting(launch, series, "--num-steps-per-rollout")):
        return int(updates)
    sizes = [
        number(setting(launch, series, flag))
        for flag in ("--rollout-batch-size", "--n-samples-per-prompt", "--global-batch-size")
    ]
    batch, per_prompt, whole = sizes
    if batch and whole and batch * (per_prompt or 1) >= whole:
        return int(batch * (per_prompt or 1) // whole)
    steps, rollouts = sorted(series.steps), sorted(series.rollouts)
    if len(rollouts) >= 2 and steps[:1] == [0] and rollouts[0] == 0 and len(steps) % len(rollouts) == 0:
        return len(steps) // len(rollouts) or None
    return None
