"""What was trained on against what was sampled: the same tokens under the same index."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from repro.doctor.artefacts.kinds import Rollout, TrainStep
from repro.doctor.facts.train_columns import Floats, columns, floats, of_one_run
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(step: TrainStep, rollout: Rollout) -> Iterator[Found]:
    if not of_one_run(step, rollout):
        return
    sampled: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for sample in rollout.dump.samples:
        if type(sample["index"]) is int:
            sampled[sample["index"]].append(sample)
    trained: dict[int, list[int]] = defaultdict(list)
    for place, index in enumerate(step.joined.indices):
        if type(index) is int:
            trained[index].append(place)
    for name, other in (("tokens", "tokens"), ("response_lengths", "response_length")):
        column = next(columns(step, name), None)
        if column is None:
            continue
        differ = []
        for index, places in trained.items():
            same = sampled.get(index, ())
            if not same or any(sample.get("multimodal_train_inputs") for sample in same):
                continue  # which samples there are is another matter; images may become more tokens
            theirs = [floats(sample.get(other)) for sample in same]
            wrong = [p for p in places if not any(_equal(column.values[p], one) for one in theirs)]
            differ += [(index, column.values[p], theirs[0]) for p in wrong]
        if differ:
            index, ours, others = differ[0]
            yield Found(
                f"rollout {step.rollout_id}: {name} of sample {index} were trained on otherwise than {rollout.path} "
                "has them: "
                f"{_difference(ours, others)} ({len(differ)} of {len(step.joined.indices)} samples)",
                Where(str(step.path), item=f"{name} of sample {index}"),
            )
            return


def _equal(a: Floats | None, b: Floats | None) -> bool:
    return a is None or b is None or (a.shape == b.shape and bool((a == b).all()))


def _difference(ours: Floats | None, theirs: Floats | None) -> str:
    if ours is None or theirs is None:
        return "one side has none"
    if len(ours) != len(theirs):
        return f"{len(ours)} tokens, there {len(theirs)}"
    at = int((ours != theirs).argmax())
    return (
        f"{ours[at]:g}, there {theirs[at]:g}" if len(ours) == 1 else f"token {at} is {ours[at]:g}, there {theirs[at]:g}"
    )


RULE = Rule(
    id="train-rollout-tokens-differ",
    title="Samples that were trained on other tokens than were sampled",
    inputs=(TrainStep, Rollout),
    severity="error",
    certainty="certain",
    why="log-probs and rewards belong to the sampled tokens: the gradient is that of a text that nobody scored",
    cure="look for a second tokenisation of the text, for truncation between rollout and trainer, and for two runs "
    "that wrote "
    "into one folder",
    sources=("Miles guide: Debugging (rollout or training?)", "slime guide: Debugging (the model input is fixed)"),
    check=_check,
)
