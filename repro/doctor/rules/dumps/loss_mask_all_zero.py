"""Loss masks of a rollout that train on nothing."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Rollout
from repro.doctor.facts.train_columns import floats
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(rollout: Rollout) -> Iterator[Found]:
    dump = rollout.dump
    responses = [sample for sample in dump.samples if sample["response_length"] > 0]
    if dump.evaluation or not responses:
        return
    removed = 0
    for sample in responses:
        if sample["remove_sample"]:
            removed += 1
            continue
        mask = floats(sample["loss_mask"])
        if mask is None or mask.any() or not len(mask):
            return
    rest = f", {removed} of them by remove_sample" if removed else ""
    yield Found(
        f"all {len(responses)} samples are masked whole{rest}: no token of the rollout is trained on",
        Where(str(rollout.path), item="remove_sample" if removed else "loss_mask", value="1" if removed else "0"),
        severity="warning" if removed else None,  # a filter may mean it
    )


RULE = Rule(
    id="loss-mask-all-zero",
    title="A rollout of which no token is trained on",
    inputs=(Rollout,),
    severity="error",
    certainty="certain",
    why="the loss is 0 or 0/0 and no gradient comes of it: the rollout is sampled for nothing",
    cure="look at what sets loss_mask and remove_sample (generate function, filters): response tokens of the "
    "model are 1",
    sources=("slime guide: Troubleshooting (build_loss_mask)",),
    check=_check,
)
