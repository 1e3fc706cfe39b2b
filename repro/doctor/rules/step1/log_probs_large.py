"""Log-probs of the first rollout far from 0."""

from __future__ import annotations

import math
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Series
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_LARGE = 1.5
"""Nats. At temperature 1 a token of an instruct model's own text has 0.2 to 0.6, of a base model's up to 1.2."""
_APART = 0.5
_ROUNDING = 1e-6


def _check(series: Series) -> Iterator[Found]:
    rollout = series.rollouts.get(0, {})
    own, engine = rollout.get("log_probs"), rollout.get("rollout_log_probs")
    if own is None or not math.isfinite(own):
        return
    where = series.where("rollout", 0, "log_probs", own)
    if own > _ROUNDING:
        yield Found(f"the mean log-prob of rollout 0 is {own:.3g}, above 0: these are no log-probs", where, "error")
        return
    if -own < _LARGE:
        return
    said = f"the mean log-prob of rollout 0 is {own:.3g} per token, as of {math.exp(min(-own, 50.0)):.3g} equal choices"
    if engine is None or not math.isfinite(engine):
        yield Found(said, where)
    elif engine - own > _APART:
        yield Found(
            f"{said}, and the engine that sampled them says {engine:.3g}: the trainer's weights are others",
            where,
            cure="check the conversion of the checkpoint that --load or --ref-load names (rotary base, layer numbers "
            "at pipeline stages), and that the log says that it was loaded",
        )
    else:
        yield Found(
            f"{said}; the engine that sampled them says the same, so it is the weights, the prompts or the temperature",
            where,
        )


RULE = Rule(
    id="log-probs-large",
    title="Log-probs of the first rollout below -1.5 per token on average",
    inputs=(Series,),
    severity="warning",
    certainty="likely",
    why="text that its own model finds so unlikely comes of weights that were not loaded, of prompts that the model "
    "does not know, or of a high temperature: rewards then reward noise",
    cure="look for the line that says which checkpoint was loaded, check the chat template and --rollout-temperature; "
    "a model that was never trained is right to be so",
    sources=("slime guide: Debugging", "Relax guide: Debugging",
             "THUDM/slime@624b824a8 slime/observability/train_metric_utils.py:231"),
    check=_check,
)  # fmt: skip
