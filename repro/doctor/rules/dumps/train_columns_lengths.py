"""Per-token columns of a training step whose lengths do not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import TrainStep
from repro.doctor.facts.train_columns import response_lengths, sample_name
from repro.doctor.rule import Found, Rule, Where
from repro_golden.dumps.train.files import length_of

__all__ = ["RULE"]


def _check(step: TrainStep) -> Iterator[Found]:
    responses = response_lengths(step)
    for name, replicas in step.joined.columns.items():
        for values in replicas.values():
            sizes = [length_of(value) for value in values]
            if len(sizes) != len(responses) or name in ("tokens", "loss_masks"):
                continue
            pairs = [
                (i, size - want)
                for i, (size, want) in enumerate(zip(sizes, responses, strict=True))
                if size is not None
            ]
            if len(pairs) < 2 or len(set(responses)) < 2:
                continue
            usual, count = Counter(over for _, over in pairs).most_common(1)[0]
            odd = [(i, over) for i, over in pairs if over != usual]
            # per token is what nearly all samples have in the length of their response, or in one more
            if usual not in (0, 1) or not odd or 4 * len(odd) > count:
                continue
            i, over = odd[0]
            rest = f"{usual} more than tokens" if usual else "as many as tokens"
            yield Found(
                f"{name} of rollout {step.rollout_id} has {responses[i] + over} entries for the {responses[i]} "
                "tokens of "
                f"{sample_name(step, i)}; {count} other samples have {rest}",
                Where(str(step.path), item=f"{name} of {sample_name(step, i)}", value=str(responses[i] + over)),
            )
            break


RULE = Rule(
    id="train-columns-lengths",
    title="Per-token columns of a train dump that do not have their response's length",
    inputs=(TrainStep,),
    severity="warning",
    certainty="likely",
    why="values shift against the tokens they belong to, or the loss fails on the first such sample",
    cure="append to every per-token column together; look at what cuts responses (length filters, context parallel)",
    sources=("THUDM/slime@624b824a8 slime/utils/types.py:418 (Sample)",),
    check=_check,
)
