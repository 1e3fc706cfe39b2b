"""Training steps that no token is trained in."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import TrainStep
from repro.doctor.facts.train_columns import masks, response_lengths
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(step: TrainStep) -> Iterator[Found]:
    known = [mask for mask in masks(step) if mask is not None and len(mask)]
    if (
        known
        and len(known) == sum(bool(length) for length in response_lengths(step))
        and not any(mask.any() for mask in known)
    ):
        yield Found(
            f"rollout {step.rollout_id}: the masks of all {len(known)} samples are 0 throughout",
            Where(str(step.path), item="loss_masks", value="0"),
        )


RULE = Rule(
    id="train-mask-all-zero",
    title="A training step whose masks are all 0",
    inputs=(TrainStep,),
    severity="error",
    certainty="certain",
    why="the loss is 0 or 0/0: nothing is learned of the rollout, or everything becomes NaN",
    cure="look at what sets loss_mask and remove_sample (generate function, filters, "
    "--mask-offpolicy-in-partial-rollout)",
    sources=("slime guide: Troubleshooting (build_loss_mask)",),
    check=_check,
)
