"""Loss masks of a rollout that train on the prompt."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Rollout
from repro.doctor.facts.train_columns import floats
from repro.doctor.rule import Found, Rule, Where
from repro_golden.dumps.rollout.arrays import length

__all__ = ["RULE"]


def _check(rollout: Rollout) -> Iterator[Found]:
    dump = rollout.dump
    found = []
    for place, sample in enumerate(dump.samples):
        total, response = length(sample["tokens"]) or 0, sample["response_length"]
        if dump.evaluation or sample["remove_sample"] or not total or not sample["prompt"]:
            continue
        mask = floats(sample["loss_mask"])
        over = mask is not None and len(mask) == total > response
        if over and mask is not None and mask[: total - response].any():
            found.append(
                (place, f"its mask has {total} entries for {response} response tokens and trains on the prompt")
            )
        elif response == total and (mask is None or mask.all()):
            found.append((place, f"all {total} tokens are its response, though it has a prompt"))
    if found:
        place, how = found[0]
        count = f"{len(found)} of {len(dump.samples)} samples train on their prompt: sample {place}: {how}"
        yield Found(count, Where(str(rollout.path), item=f"loss_mask of sample {place}"))


RULE = Rule(
    id="loss-mask-whole-prompt",
    title="Loss masks that cover the prompt",
    inputs=(Rollout,),
    severity="warning",
    certainty="likely",
    why="the policy gradient pushes the prompt's tokens up and down, which no policy chose",
    cure="loss_mask has one entry for each of the last response_length tokens; response_length counts what was "
    "generated",
    sources=(
        "slime guide: Troubleshooting (build_loss_mask)",
        "THUDM/slime@624b824a8 slime/utils/types.py:418 (Sample)",
    ),
    check=_check,
)
