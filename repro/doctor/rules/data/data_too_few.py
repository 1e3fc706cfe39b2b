"""Fewer prompts than one rollout takes."""

from __future__ import annotations

from collections.abc import Iterable

from repro.doctor.artefacts.kinds import Launch, PromptData
from repro.doctor.facts.prompt_survey import keys_of, survey
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(data: PromptData, launch: Launch) -> Iterable[Found]:
    keys = keys_of(launch, data)
    batch = launch.number("--rollout-batch-size")
    if not keys.sure or keys.evaluation or not batch or batch <= 0:
        return
    seen = survey(data, keys.prompt, keys.label)
    if not seen.rows or not seen.whole or seen.rows >= batch:
        return
    short = seen.rows * 2 < batch
    what = "a rollout comes out short of it" if short else "a rollout holds some prompts twice"
    where = Where(str(data.path), item="rows", value=str(seen.rows))
    yield Found(f"{seen.rows} prompts, and --rollout-batch-size is {batch:.0f}: {what}", where)


RULE = Rule(
    id="data-too-few",
    title="The data has fewer prompts than one rollout takes",
    inputs=(PromptData, Launch),
    severity="warning",
    certainty="certain",
    why="the data source goes round once at most: groups repeat within a rollout, or the batch is smaller than the "
    "steps expect",
    cure="lower --rollout-batch-size, or give more prompts",
    sources=("THUDM/slime@624b824a8 slime/rollout/data_source.py (get_samples)",),
    check=_check,
)
