"""NaN and infinity in what a trainer dumped of training, beside metrics that are finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from repro.doctor.artefacts.kinds import Series, TrainStep
from repro.doctor.rule import Found, Rule
from repro.doctor.rules.dumps.dump_not_finite import SOURCE, not_finite, text_of, where_of

__all__ = ["RULE"]

_METRICS = {
    "log_probs": ("log_probs", "ppo_kl", "pg_loss", "loss"),
    "rollout_log_probs": ("rollout_log_probs", "train_rollout_logprob_abs_diff", "loss"),
    "ref_log_probs": ("ref_log_probs", "kl_loss", "loss"),
    "advantages": ("advantages", "pg_loss", "loss"),
    "returns": ("returns", "value_loss", "loss"),
    "kl": ("kl", "kl_loss", "loss"),
}
"""The metrics in which a column's NaN should show."""


def _check(step: TrainStep, series: Series) -> Iterator[Found]:
    if series.path.is_dir() and series.path not in (step.folder, step.folder / "train_data"):
        return  # numbers of another run's folder
    updates = step.joined.updates or 1
    numbers = range(step.rollout_id * updates, (step.rollout_id + 1) * updates)
    for bad in not_finite(step):
        names = _METRICS.get(bad.column)
        if names is None:
            continue
        told = [
            ("rollout", step.rollout_id, n, v)
            for n in names
            if (v := _of(series.rollouts, step.rollout_id, n)) is not None
        ]
        told += [("step", k, n, v) for k in numbers for n in names if (v := _of(series.steps, k, n)) is not None]
        if not told or not all(math.isfinite(value) for *_, value in told):
            continue  # it shows, or there is nothing to see it in
        kind, number, name, value = told[0]
        where = series.where(kind, number, name, value)
        yield Found(
            f"{text_of(step, bad)}; and {name} of {kind} {number} is {value:.6g} ({where.path}), as if all were well",
            where_of(step, bad),
        )


def _of(numbers: Mapping[int, Mapping[str, float]], key: int, name: str) -> float | None:
    value = numbers.get(key, {}).get(name)
    return value if isinstance(value, float | int) and not isinstance(value, bool) else None


RULE = Rule(
    id="dump-nan-hidden",
    title="NaN in raw columns that the metrics do not show",
    inputs=(TrainStep, Series),
    severity="error",
    certainty="certain",
    why="Miles replaces NaN by 0 in its metrics: curves look well while every parameter is already wrong",
    cure="do not trust the metrics of this step: go back to the checkpoint before it, and look at the sample "
    "that is named",
    sources=(SOURCE,),
    check=_check,
)
