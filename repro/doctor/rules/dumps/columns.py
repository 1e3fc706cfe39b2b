"""Columns of dumps: loss masks, log-probs, advantages, what is not finite."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from repro.doctor.artefacts.kinds import Rollout, Series, Tokenizer, TrainStep
from repro.doctor.facts.samples.rounding import narrow_dtype
from repro.doctor.facts.samples.tool_spans import Span, spans_of, texts_of_tokens, tokens_inside
from repro.doctor.facts.samples.train_columns import Floats, columns, floats, masks, sample_name
from repro.doctor.facts.sources import SLIME
from repro_golden.base.checks import Certainty, Found, Severity, Where, rule
from repro_golden.dumps.rollout.arrays import length


@rule(
    title="A rollout of which no token is trained on",
    severity="error",
    certainty="certain",
    why="the loss is 0 or 0/0 and no gradient comes of it: the rollout is sampled for nothing",
    fix="look at what sets loss_mask and remove_sample (generate function, filters): response tokens of the model are"
    " 1",
    sources=("slime guide: Troubleshooting (build_loss_mask)",),
)
def _loss_mask_all_zero(rollout: Rollout) -> Iterator[Found]:
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
    suffix = f", {removed} of them by remove_sample" if removed else ""
    yield Found(
        f"all {len(responses)} samples are masked whole{suffix}: no token of the rollout is trained on",
        Where(str(rollout.path), item="remove_sample" if removed else "loss_mask", value="1" if removed else "0"),
        severity="warning" if removed else None,  # a filter may mean it
    )


@rule(
    title="Loss masks that cover the prompt",
    severity="warning",
    certainty="likely",
    why="the policy gradient pushes the prompt's tokens up and down, which no policy chose",
    fix="loss_mask has one entry for each of the last response_length tokens; response_length counts what was "
    "generated",
    sources=("slime guide: Troubleshooting (build_loss_mask)", f"{SLIME} slime/utils/types.py:418 (Sample)"),
)
def _loss_mask_whole_prompt(rollout: Rollout) -> Iterator[Found]:
    dump = rollout.dump
    violations = []
    for place, sample in enumerate(dump.samples):
        total, response = length(sample["tokens"]) or 0, sample["response_length"]
        if dump.evaluation or sample["remove_sample"] or not total or not sample["prompt"]:
            continue
        mask = floats(sample["loss_mask"])
        over = mask is not None and len(mask) == total > response
        if over and mask is not None and mask[: total - response].any():
            violations.append(
                (place, f"its mask has {total} entries for {response} response tokens and trains on the prompt")
            )
        elif response == total and (mask is None or mask.all()):
            violations.append((place, f"all {total} tokens are its response, though it has a prompt"))
    if violations:
        place, how = violations[0]
        count = f"{len(violations)} of {len(dump.samples)} samples train on their prompt: sample {place}: {how}"
        yield Found(count, Where(str(rollout.path), item=f"loss_mask of sample {place}"))


_RUN = 8
"""Tokens in a row with a log-prob of exactly 0 that no model samples."""
_SHARE = 0.2
"""Of a tool's tokens, what may be trained on by a mask that is off by a token or two at the ends."""


class _Seen(NamedTuple):
    sample: int
    text: str
    marker: str
    severity: Severity
    certainty: Certainty


def _sample(place: int, sample: Mapping[str, Any], tokenizer: Tokenizer | None) -> _Seen | None:
    response, text = sample["response_length"], sample["response"]
    if sample["remove_sample"] or response <= 0:
        return None
    mask = floats(sample["loss_mask"])
    if sample["loss_mask"] is None:
        mask = np.ones(response)
    if mask is None or len(mask) != response or not mask.any():
        return None
    log_probs = floats(sample["rollout_log_probs"])
    if log_probs is not None and len(log_probs) != response:
        log_probs = None
    texts = texts_of_tokens(sample, tokenizer)
    if texts is not None:
        return _aligned(place, sample, texts, mask, log_probs)
    spans = spans_of(text, sample["metadata"]) if isinstance(text, str) else []
    return _by_text(place, spans, text, mask, log_probs) if spans else None


def _aligned(
    place: int, sample: Mapping[str, Any], texts: Sequence[str], mask: Floats, log_probs: Floats | None
) -> _Seen | None:
    """With the text of each token: which tokens of each tool's answer are trained on."""
    spans = spans_of("".join(texts), sample["metadata"])
    for span, inside in zip(spans, tokens_inside(texts, spans), strict=True):
        trained = inside & (mask != 0)
        count, size = int(trained.sum()), int(inside.sum())
        if count < 2 or count <= _SHARE * size:
            continue
        first = int(trained.argmax())
        share = f"{count} of {size} tokens of a tool's answer ({span.marker})"
        what = f"{share} are trained on, from response token {first} on"
        return _judged(place, what, span, log_probs, None if log_probs is None else log_probs[trained])
    return None


def _by_text(place: int, spans: Sequence[Span], text: str, mask: Floats, log_probs: Floats | None) -> _Seen | None:
    """With the text alone: a mask without a 0 leaves no tool's answer out, nor one with fewer gaps than answers."""
    span = max(spans, key=lambda s: s.end - s.start)
    share = sum(s.end - s.start for s in spans) / max(len(text), 1)
    if mask.all():
        what = f"{len(spans)} answers of tools ({span.marker}) are in its response, and its mask has no 0"
        zeros = None
        if log_probs is not None:
            run = _longest_zero(log_probs)
            zeros = np.zeros(run) if run >= _RUN else np.full(1, -1.0)
        return _judged(place, what, span, log_probs, zeros)
    gaps = int((np.diff(np.concatenate([[1.0], mask])) < 0).sum())
    masked = float((mask == 0).mean())
    if gaps < len(spans) and masked < share / 2:
        what = (
            f"{len(spans)} answers of tools ({span.marker}), {share:.0%} of the text, are in its response, and its "
            f"mask leaves out {gaps} stretches, {masked:.0%} of the tokens"
        )
        return _Seen(place, what, span.marker, "warning", "possible")
    return None


def _judged(place: int, what: str, span: Span, log_probs: Floats | None, inside: Floats | None) -> _Seen:
    """How sure it is: by the log-probs of what a tool is taken to have said."""
    called = span.marker.startswith("a tool message")
    if log_probs is None or inside is None:
        return _Seen(place, what, span.marker, "warning", "certain" if called else "likely")
    if not inside.any():
        return _Seen(
            place, f"{what}; their log-probs are exactly 0: no model sampled them", span.marker, "error", "certain"
        )
    if called:
        return _Seen(place, what, span.marker, "warning", "likely")
    # a model that was never given a tool may write a whole tool call with its answer
    return _Seen(
        place, f"{what}; their log-probs look sampled: the model may have made it up", span.marker, "note", "possible"
    )


def _longest_zero(values: Floats) -> int:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (values == 0).astype(np.int8), [0]])))
    return int((edges[1::2] - edges[::2]).max(initial=0))


@rule(
    title="Answers of tools that the loss mask trains on",
    severity="warning",
    certainty="likely",
    why="the model learns to write the tools' answers itself, verbatim, instead of calling them",
    fix="give response tokens of tools a 0 in loss_mask: append_response_tokens(..., trainable=False) does, or build "
    "the mask in the generate function turn by turn",
    sources=(
        "slime guide: Troubleshooting (tool responses included in loss)",
        f"{SLIME} slime/utils/types.py:253 (append_response_tokens)",
    ),
)
def _tool_response_in_loss(rollout: Rollout, tokenizer: Tokenizer | None) -> Iterator[Found]:
    if rollout.dump.evaluation:
        return
    hits = [hit for place, sample in enumerate(rollout.dump.samples) if (hit := _sample(place, sample, tokenizer))]
    if not hits:
        return
    order: tuple[Severity, ...] = ("error", "warning", "note")
    worst = min(hits, key=lambda hit: order.index(hit.severity))
    count = f"; {len(hits)} of {len(rollout.dump.samples)} samples are like it" if len(hits) > 1 else ""
    yield Found(
        f"sample {worst.sample}: {worst.text}{count}",
        Where(str(rollout.path), item=f"loss_mask of sample {worst.sample}", value=worst.marker),
        severity=worst.severity,
        certainty=worst.certainty,
    )


def _groups(step: TrainStep) -> dict[bytes, list[int]]:
    """Samples that were sampled from the same prompt, by its tokens."""
    tokens, lengths = next(columns(step, "tokens"), None), next(columns(step, "response_lengths"), None)
    groups: dict[bytes, list[int]] = defaultdict(list)
    if tokens is None or lengths is None:
        return groups
    for place, (ids, response) in enumerate(zip(tokens.values, lengths.values, strict=True)):
        if ids is not None and response is not None and len(response) == 1 and 0 <= response[0] <= len(ids):
            groups[ids[: len(ids) - int(response[0])].tobytes()].append(place)
    return groups


def _differ(rewards: Sequence[object] | None, group: Sequence[int], count: int) -> bool:
    """Whether the samples of a group earned several rewards, where the dump says which is whose."""
    if rewards is None or len(rewards) != count:
        return False
    earned: Floats = np.array([value for i in group if isinstance(value := rewards[i], float | int)], dtype=np.float64)
    return len(earned) == len(group) and len(np.unique(earned)) > 1


@rule(
    title="Groups whose advantages are all equal",
    severity="warning",
    certainty="certain",
    why="advantages relative to a group that are all equal are 0: the rollout gives no gradient but that of KL and "
    "entropy",
    fix="look at the rewards (--rm-type, --label-key, --reward-key), and at --n-samples-per-prompt, which must be "
    "above 1; prompts that are too easy or too hard are filtered by --dynamic-sampling-filter-path",
    sources=("Miles guide: Debugging (rewards from the right key)",),
)
def _advantages_constant(step: TrainStep) -> Iterator[Found]:
    advantages = next(columns(step, "advantages"), None)
    if advantages is None:
        return
    loss_masks = masks(step)
    levels: dict[int, set[float]] = {}
    for place, values in enumerate(advantages.values):
        mask = loss_masks[place]
        if values is None or (mask is not None and len(mask) != len(values)):
            continue
        trained = values if mask is None else values[mask]
        if len(trained):
            levels[place] = set((trained + 0.0).tolist())  # -0.0 becomes 0.0
    groups = [[i for i in group if i in levels] for group in _groups(step).values()]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return
    dead = [group for group in groups if len(set().union(*(levels[i] for i in group))) == 1]
    rewards = step.joined.whole.get("raw_reward")
    lost = [group for group in dead if _differ(rewards, group, len(step.joined.indices))]
    where = Where(str(step.path), item="advantages")
    if len(dead) == len(groups):
        level = next(iter(levels[dead[0][0]]))
        yield Found(
            f"rollout {step.rollout_id}: in each of its {len(groups)} groups all advantages are equal ({level:g} in "
            "the first)",
            Where(where.path, item=where.item, value=f"{level:g}"),
        )
    elif lost:
        yield Found(
            f"rollout {step.rollout_id}: in {len(lost)} of {len(groups)} groups the rewards differ and all "
            "advantages are equal",
            where,
        )
    elif 2 * len(dead) >= len(groups):
        yield Found(
            f"rollout {step.rollout_id}: in {len(dead)} of {len(groups)} groups all advantages are equal: their "
            "samples earned one reward each and teach nothing",
            where,
            severity="note",
            fix="--dynamic-sampling-filter-path samples other prompts in their place",
        )


_ENOUGH = 64
"""Different values, of which some would need the bits that are all zero."""


@rule(
    title="Rollout log-probs that were rounded to bf16 or fp16",
    severity="warning",
    certainty="likely",
    why="the rounding is a hundred times the mismatch of train and rollout that is to be measured, and enters every "
    "importance ratio of --use-tis",
    fix="keep log-probs in fp32 from the engine's softmax to the dump: no cast of the logits' log_softmax, none in "
    "the generate function",
    sources=("THUDM/slime#245 (rollout_log_probs cast to bf16, fixed in 9a291fca7)",),
)
def _dump_log_probs_rounded(rollout: Rollout) -> Iterator[Found]:
    log_probs = [floats(sample.get("rollout_log_probs")) for sample in rollout.dump.samples]
    known = [array for array in log_probs if array is not None]
    if not known:
        return
    values = np.unique(np.concatenate(known))
    values = values[np.isfinite(values) & (values != 0)]
    if len(values) >= _ENOUGH and (dtype := narrow_dtype(values)):
        yield Found(
            f"all {len(values)} different rollout_log_probs are values of {dtype}",
            Where(str(rollout.path), item="rollout_log_probs", value=repr(values[0].item())),
        )


_TRAINED = (
    "log_probs", "rollout_log_probs", "ref_log_probs", "old_log_probs", "advantages", "returns", "values", "rewards",
    "teacher_log_probs",
)  # fmt: skip
"""Columns that enter the loss."""


class _NotFinite(NamedTuple):
    """A column with values that are not finite.

    Attributes:
        column: Its name.
        values: How many of them are not finite.
        samples: Of how many samples.
        place: The first of these samples.
        token: The first such value in it, as a token of its response.
        value: That value.
        masked: Whether that token is masked.
    """

    column: str
    values: int
    samples: int
    place: int
    token: int
    value: float
    masked: bool


def _not_finite(step: TrainStep) -> list[_NotFinite]:
    """Columns with values that are not finite, each with the first of them."""
    loss_masks = masks(step)
    by_column: dict[str, _NotFinite] = {}
    for column in columns(step):
        present = [(place, values) for place, values in enumerate(column.values) if values is not None]
        wrong = [(place, values, odd) for place, values in present if (odd := ~np.isfinite(values)).any()]
        if not wrong or column.name in by_column:
            continue
        place, values, odd = wrong[0]
        token = int(odd.argmax())
        mask = loss_masks[place]
        masked = mask is not None and len(mask) == len(values) and not mask[token]
        count = sum(int(bad.sum()) for _, _, bad in wrong)
        by_column[column.name] = _NotFinite(column.name, count, len(wrong), place, token, float(values[token]), masked)
    return list(by_column.values())


def _where_of(step: TrainStep, bad: _NotFinite) -> Where:
    """Where the first value of a column that is not finite stands."""
    return Where(
        str(step.path), item=f"{bad.column} of {sample_name(step, bad.place)}", value=f"{bad.value} at {bad.token}"
    )


def _text_of(step: TrainStep, bad: _NotFinite) -> str:
    """What is said of a column that is not finite."""
    masked = ", a masked token" if bad.masked else ""
    return (
        f"{bad.column} of rollout {step.rollout_id} holds {bad.values} values that are not finite, in {bad.samples} "
        f"samples: {bad.value} at token {bad.token} of {sample_name(step, bad.place)}{masked}"
    )


_SOURCE = "radixark/miles@31f1ca961 miles/backends/training_utils/loss_hub/losses.py:198-357 (nan_to_num)"


@rule(
    title="NaN or infinity in the columns of a train dump",
    severity="error",
    certainty="certain",
    why="a NaN in one token reaches every parameter with the next update, even from a masked token (NaN x 0 is NaN)",
    fix="look at that sample: -inf of a forbidden token, a log-prob of an empty softmax, a reward that is none, a "
    "group whose standard deviation is 0",
    sources=("Miles guide: Debugging (gradient NaN/Inf)", _SOURCE),
)
def _dump_not_finite(step: TrainStep) -> Iterator[Found]:
    for bad in _not_finite(step):
        yield Found(_text_of(step, bad), _where_of(step, bad), severity=None if bad.column in _TRAINED else "warning")


_METRICS = {
    "log_probs": ("log_probs", "ppo_kl", "pg_loss", "loss"),
    "rollout_log_probs": ("rollout_log_probs", "train_rollout_logprob_abs_diff", "loss"),
    "ref_log_probs": ("ref_log_probs", "kl_loss", "loss"),
    "advantages": ("advantages", "pg_loss", "loss"),
    "returns": ("returns", "value_loss", "loss"),
    "kl": ("kl", "kl_loss", "loss"),
}
"""The metrics in which a column's NaN should show."""


def _of(numbers: Mapping[int, Mapping[str, float]], key: int, name: str) -> float | None:
    value = numbers.get(key, {}).get(name)
    return value if isinstance(value, float | int) and not isinstance(value, bool) else None


@rule(
    title="NaN in raw columns that the metrics do not show",
    severity="error",
    certainty="certain",
    why="Miles replaces NaN by 0 in its metrics: curves look well while every parameter is already wrong",
    fix="do not trust the metrics of this step: go back to the checkpoint before it, and look at the sample that is "
    "named",
    sources=(_SOURCE,),
)
def _dump_nan_hidden(step: TrainStep, series: Series) -> Iterator[Found]:
    if series.path.is_dir() and series.path not in (step.folder, step.folder / "train_data"):
        return  # numbers of another run's folder
    updates = step.joined.updates or 1
    numbers = range(step.rollout_id * updates, (step.rollout_id + 1) * updates)
    for bad in _not_finite(step):
        names = _METRICS.get(bad.column)
        if names is None:
            continue
        reported = [
            ("rollout", step.rollout_id, n, v)
            for n in names
            if (v := _of(series.rollouts, step.rollout_id, n)) is not None
        ]
        reported += [("step", k, n, v) for k in numbers for n in names if (v := _of(series.steps, k, n)) is not None]
        if not reported or not all(math.isfinite(value) for *_, value in reported):
            continue  # it shows, or there is nothing to see it in
        kind, number, name, value = reported[0]
        where = series.where(kind, number, name, value)
        yield Found(
            f"{_text_of(step, bad)}; and {name} of {kind} {number} is {value:.6g} ({where.path}), as if all were well",
            _where_of(step, bad),
        )
