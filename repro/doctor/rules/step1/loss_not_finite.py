"""Losses, and what they are made of, that are NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

from repro.doctor.artefacts.kinds import Launch, Series
from repro.doctor.facts.curves import setting, switched_on
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_ALSO = ("ppo_kl", "log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "returns", "rewards", "raw_reward",
         "entropy", "values", "kl", "train_rollout_logprob_abs_diff")  # fmt: skip


def _check(series: Series, launch: Launch | None) -> Iterator[Found]:
    fp16 = switched_on(setting(launch, series, "--fp16"))
    cure = f"train in bf16 instead of fp16 (drop --fp16); then {RULE.cure}" if fp16 else ""
    kinds: tuple[tuple[Literal["step", "rollout"], Mapping[int, Mapping[str, float]]], ...] = (
        ("rollout", series.rollouts), ("step", series.steps),
    )  # fmt: skip
    for kind, table in kinds:
        first: dict[str, tuple[int, float]] = {}
        count: dict[str, int] = {}
        for number in sorted(table):
            for metric, value in table[number].items():
                if (metric.endswith("loss") or metric in _ALSO) and not math.isfinite(value):
                    first.setdefault(metric, (number, value))
                    count[metric] = count.get(metric, 0) + 1
        for metric, (number, value) in first.items():
            yield Found(
                f"{metric} is {value} at {kind} {number}, and not finite at {count[metric]} of {len(table)} {kind}s",
                series.where(kind, number, metric, value),
                cure=cure,
            )


RULE = Rule(
    id="loss-not-finite",
    title="Losses, log-probs, advantages or rewards that are NaN or infinite",
    inputs=(Series,),
    uses=(Launch,),
    severity="error",
    certainty="certain",
    why="from there on the weights are NaN, or every update is skipped",
    cure="look for empty prompts and responses, rewards that are NaN, and log-probs of -inf in the dump of that "
    "rollout; lower --lr (1e-6), keep --clip-grad 1.0, train in bf16",
    sources=("slime guide: Troubleshooting", "Miles guide: Debugging"),
    check=_check,
)  # fmt: skip
