"""Log-probs of the first rollout a little too far from 0 for an instruct model: the chat template."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Series, Tokenizer
from repro.doctor.facts.curves import setting
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_ELEVATED = 0.7
"""Nats. The guides say about 0.8, the loss of instruction tuning on text that others wrote; of its own text, sampled at
temperature 1 from prompts that it knows, an instruct model has 0.2 to 0.6."""
_LARGE = 1.5
"""From there on it is `log-probs-large`."""
_INSTRUCT = re.compile(r"instruct|chat|(?:^|[-_/])it(?:[-_/]|$)|think", re.IGNORECASE)


def _check(series: Series, launch: Launch | None, tokenizer: Tokenizer | None) -> Iterator[Found]:
    own = series.rollouts.get(0, {}).get("log_probs")
    if own is None or not math.isfinite(own) or not _ELEVATED <= -own < _LARGE:
        return
    model = setting(launch, series, "--hf-checkpoint") or ""
    applied = launch is not None and launch.has("--apply-chat-template")
    instruct = bool(_INSTRUCT.search(model)) or applied or (tokenizer is not None and "instruct" in str(tokenizer.path))
    yield Found(
        f"the mean log-prob of rollout 0 is {own:.3g} per token, "
        + ("and an instruct model is above -0.7" if instruct else "which an instruct model does not have"),
        series.where("rollout", 0, "log_probs", own),
        "warning" if instruct else "note",
        "likely" if instruct else "possible",
    )


RULE = Rule(
    id="chat-template-log-probs",
    title="Log-probs of the first rollout near -0.8 per token (-0.7 to -1.5) on average",
    inputs=(Series,),
    uses=(Launch, Tokenizer),
    severity="warning",
    certainty="likely",
    why="prompts in another form than the model was tuned on make its answers less sure, so training first teaches the "
    "form",
    cure="give `repro doctor` a rollout dump and the tokenizer's folder: it says whether the template was applied "
    "once, twice or not at all; then set or drop --apply-chat-template, or fix the data. A base model, or a cold "
    "start on other data, is right to be so",
    sources=("Miles guide: Debugging", "slime guide: Debugging", "Relax guide: Debugging"),
    check=_check,
)  # fmt: skip
