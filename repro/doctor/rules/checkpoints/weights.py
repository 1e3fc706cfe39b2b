"""Weights that two checkpoints should or should not share, and INT4."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from repro.doctor.artefacts.kinds import HfCheckpoint, HfConfig, Launch
from repro.doctor.facts.ignored_weights import (
    RECOMMENDED,
    Ignoring,
    Taken,
    bridged,
    decides,
    fix_of,
    ignoring_of,
    is_gate,
    is_linear,
    packed_names,
    taken,
)
from repro.doctor.facts.sources import GUIDES, SLIME_INT4
from repro.doctor.facts.tensor_names import (
    TABLES,
    is_router,
    kind_of,
    layer_count,
    number,
    place,
    ranges,
    text_values,
)
from repro.text import count
from repro_golden.base.checks import Certainty, Found, Where, rule

_ITEM = "quantization_config.ignore"
_LIST = json.dumps(list(RECOMMENDED))
_TABLE = re.compile(r"(?:^|\.)(?:embed_tokens|word_embeddings|wte|lm_head|router)\.weight$")


def _no_linear(weights: list[Taken], checkpoint: HfCheckpoint, launch: Launch | None, path: str) -> Iterator[Found]:
    """One finding for each matrix that is no Linear, and one cure for all."""
    fix = fix_of(weights)
    sure = decides(launch, checkpoint)
    for weight in weights:
        grave = _grave(weight, checkpoint) and (weight.stored or not bridged(launch))
        # whether a gate is quantised differs between engines
        certainty: Certainty = "possible" if is_gate(weight.name) else "likely"
        if grave and (sure or weight.stored):
            certainty = "certain"
        done = "is stored packed" if weight.stored else "would be packed to INT4 in the weight sync"
        what = "a gate" if is_gate(weight.name) else "no Linear"
        where = Where(path, item=_ITEM, value=str(weight))
        yield Found(f"{weight} {done}, and is {what}", where, None if grave else "warning", certainty, fix)


def _grave(weight: Taken, checkpoint: HfCheckpoint) -> bool:
    """Whether no engine has this weight packed: a language model's tables, but for a head that may be."""
    if weight.name not in TABLES and not _TABLE.search(weight.name):
        return False
    tied = checkpoint.config is not None and checkpoint.config.values.get("tie_word_embeddings") is True
    return not (weight.name.endswith("lm_head.weight") and (weight.stored or tied))


@rule(
    title="Matrices that are no Linear and that the INT4 ignore list leaves to be packed",
    severity="error",
    certainty="certain",
    why="the engine does not know the packed names and keeps what it had, without an error",
    fix=f"put every matrix that is no Linear into quantization_config.ignore; for MoE models like GLM: {_LIST}",
    sources=("slime guide: Debugging", SLIME_INT4),
)
def _int4_ignore(checkpoint: HfCheckpoint, launch: Launch | None) -> Iterator[Found]:
    ignoring = ignoring_of(checkpoint.config)
    if ignoring is None or checkpoint.config is None:
        return
    path = str(checkpoint.config.path)
    weights = [weight for weight in taken(ignoring, checkpoint) if not is_router(weight.name, weight.shape or (0, 0))]
    yield from _no_linear([weight for weight in weights if not is_linear(weight.name)], checkpoint, launch, path)
    stored = packed_names(checkpoint.tensors)
    groups: dict[str, list[Taken]] = {}
    for weight in weights if stored else []:
        if is_linear(weight.name):
            groups.setdefault(kind_of(weight.name), []).append(weight)
    for members in groups.values():
        more = f" and {len(members) - 1} of its kind" if len(members) > 1 else ""
        message = f"{members[0]}{more} would be packed to INT4 in the weight sync, and is stored unpacked here"
        yield Found(message, Where(path, item=_ITEM, value=str(members[0])), "warning", "likely", fix_of(members))
    ignored = sorted(name for name in stored if ignoring.ignores(name))
    if ignored:
        message = f"{len(ignored)} weights are stored packed although the list ignores them, first {ignored[0]}"
        yield Found(
            message, Where(path, item=_ITEM, value=ignored[0]), "warning", "likely",
            "the sync will send them unpacked, which the engine does not expect: take the rule out that matches them",
        )  # fmt: skip


_REGEX = re.compile(r"\.\*|\\\.|[\[\](|^$+]")


def _idle(ignoring: Ignoring, rule: str, names: list[str], where: Where) -> Iterator[Found]:
    """A rule that matches nothing, and why, if that can be told."""
    pattern = ignoring.patterns.get(rule)
    if pattern is not None and any(pattern.search(name) for name in names):
        hint = f"write 're:.*{rule[3:]}': patterns are matched from the start of the name"
        yield Found(f"{rule!r} matches only inside of names, and so nothing", where, "warning", "certain", hint)
    elif pattern is None and _REGEX.search(rule):
        message = f"{rule!r} looks like a pattern, and without re: it is compared as text"
        yield Found(message, where, "warning", "likely", f"write 're:{rule}'")
    elif rule not in RECOMMENDED:  # that list is for several models, and each has some of it
        yield Found(
            f"{rule!r} matches no weight of this checkpoint",
            where,
            "note",
            "certain",
            "nothing, if it is of another model's parts",
        )


@rule(
    title="Rules of the INT4 ignore list that are invalid or match nothing",
    severity="warning",
    certainty="certain",
    why="what the rule was meant to keep is packed to INT4; an invalid pattern raises in the first weight sync",
    fix="write patterns as re:PATTERN that match from the start of the name, with .* before what stands inside",
    sources=("slime guide: Debugging",),
)
def _int4_ignore_pattern(checkpoint: HfCheckpoint) -> Iterator[Found]:
    ignoring = ignoring_of(checkpoint.config)
    if ignoring is None or checkpoint.config is None:
        return
    names = [n.removesuffix("_packed") for n in checkpoint.tensors if n.endswith((".weight", ".weight_packed"))]
    for entry in dict.fromkeys(ignoring.rules):
        where = Where(str(checkpoint.config.path), item="quantization_config.ignore", value=entry[:160])
        if entry in ignoring.refused:
            invalid = ignoring.refused[entry].startswith("is no")
            fix = "" if invalid else "write it simpler: this rule was taken to match nothing"
            yield Found(f"{entry[:160]!r} {ignoring.refused[entry]}", where, "error" if invalid else "warning", fix=fix)
        elif names and not any(ignoring.matches(entry, name) for name in names):
            yield from _idle(ignoring, entry, names, where)


@rule(
    title="Router weights that the INT4 ignore list leaves to be packed",
    severity="error",
    certainty="certain",
    why="SGLang knows no packed router and skips it without a word: all gate weights are zeros after the first sync",
    fix='add "re:.*mlp\\\\.gate\\\\..*" to quantization_config.ignore of config.json',
    sources=("slime guide: Debugging", SLIME_INT4),
)
def _int4_router(checkpoint: HfCheckpoint, launch: Launch | None) -> Iterator[Found]:
    ignoring = ignoring_of(checkpoint.config)
    if ignoring is None or checkpoint.config is None:
        return
    # a packed router may not say its shape: its name must do
    routers = [router for router in taken(ignoring, checkpoint) if is_router(router.name, router.shape or (0, 0))]
    fix = fix_of(routers)
    sure = decides(launch, checkpoint)
    for router in routers:
        where = Where(str(checkpoint.config.path), item="quantization_config.ignore", value=str(router))
        if router.stored:
            message = f"the router {router} is stored packed, and the ignore list has no rule for it"
            yield Found(message, where, fix=fix)
        else:
            message = f"the router {router} would be packed to INT4 in the weight sync"
            idle = bridged(launch)
            yield Found(message, where, "warning" if idle else None, None if sure else "likely", fix)


_SMALLEST = 64
"""Elements of a matrix that no two layers share by chance."""


def _matrices(checkpoint: HfCheckpoint) -> list[str]:
    return [
        name
        for name, info in sorted(checkpoint.tensors.items())
        if len(info.shape) >= 2
        and math.prod(info.shape) >= _SMALLEST
        and place(name)
        and checkpoint.scan(name).constant is None
    ]


@rule(
    title="Layers whose weights are another layer's of the other checkpoint",
    severity="error",
    certainty="certain",
    why="with pp_size > 1 the layers of the second stage were written under wrong numbers: the model runs its layers "
    "in another order and generates garbled text",
    fix="look at how the conversion adds the layer offset of a pipeline stage (layers of the stages before it, with "
    "--decoder-first-pipeline-num-layers and uneven stages), then convert again",
    sources=GUIDES,
)
def _layer_offset(reference: HfCheckpoint, other: HfCheckpoint) -> Iterator[Found]:
    if str(reference.path) >= str(other.path):
        return  # the pair comes in both orders
    shifts: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    known: dict[tuple[str, str, str], int] = {}
    for name in _matrices(reference):
        where = place(name)
        assert where is not None
        known.setdefault((where.stack, f"{where.rest}/{where.expert}", reference.scan(name).digest), where.layer)
    for name in _matrices(other):
        where = place(name)
        assert where is not None
        digest = other.scan(name).digest
        if name in reference.tensors and reference.scan(name).digest == digest:
            continue
        source = known.get((where.stack, f"{where.rest}/{where.expert}", digest))
        if source is not None and source != where.layer:
            shifts[where.layer - source][where.layer].append(name)
    for shift, layers in sorted(shifts.items()):
        first = min(layers)
        sources = ranges(layer - shift for layer in layers)
        message = (
            f"layers {ranges(layers)} of {other.path} hold what {reference.path} has in layers {sources}: "
            f"shifted by {abs(shift)} {'up' if shift > 0 else 'down'}"
        )
        yield Found(message, Where(str(other.path / other.tensors[layers[first][0]].file), item=layers[first][0]))


@rule(
    title="Two layers of one checkpoint with the same matrices",
    severity="error",
    certainty="likely",
    why="a pipeline stage was written under the numbers of another: layers run twice, others not at all, and the text"
    " is garbled",
    fix="convert again with the layer offset of each pipeline stage; if the model was grown by repeating layers on "
    "purpose, leave this rule out with --ignore layers-equal",
    sources=("Miles guide: Debugging", "slime guide: Debugging"),
)
def _layers_equal(checkpoint: HfCheckpoint) -> Iterator[Found]:
    held: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    names: dict[tuple[str, int], str] = {}
    totals: dict[tuple[str, int], int] = defaultdict(int)
    for name, info in sorted(checkpoint.tensors.items()):
        where = place(name)
        if where is None or len(info.shape) < 2 or math.prod(info.shape) < _SMALLEST:
            continue
        stats = checkpoint.scan(name)
        if stats.constant is None:
            held[where.stack, f"{where.rest}/{where.expert}", stats.digest].append(where.layer)
            names.setdefault((where.stack, where.layer), name)
            totals[where.stack, where.layer] += 1
    pairs: dict[tuple[str, int, int], int] = defaultdict(int)
    for (stack, _, _), layers in held.items():
        for later in layers[1:]:
            pairs[stack, layers[0], later] += 1
    shifts: dict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
    for (stack, first, later), shared in sorted(pairs.items()):
        shifts[stack, later - first].append((first, later, shared))
    for (stack, shift), matches in sorted(shifts.items()):
        copies = [layer for _, layer, _ in matches]
        whole = all(shared == totals[stack, layer] for _, layer, shared in matches)
        how = "all" if whole else "some"
        sources = ranges(first for first, _, _ in matches)
        message = f"{stack}: layers {ranges(copies)} have {how} matrices of layers {sources} ({shift} before)"
        name = names[stack, copies[0]]
        where_ = Where(str(checkpoint.path / checkpoint.tensors[name].file), item=name)
        yield Found(message, where_, None if whole else "warning")


_MOST = 10
_LARGEST = 1 << 28
"""Elements of a tensor whose difference is computed; of larger ones it is only said that they differ."""


def _unlike(config: HfConfig | None, other: HfConfig | None) -> bool:
    """Whether two configs are of two models: another width, depth or vocabulary."""
    if config is None or other is None:
        return False
    sizes = [
        (layer_count(c.values), *(number(text_values(c.values).get(key)) for key in ("hidden_size", "vocab_size")))
        for c in (config, other)
    ]
    return any(None not in pair and pair[0] != pair[1] for pair in zip(*sizes, strict=True))


def _quantization(checkpoint: HfCheckpoint) -> object:
    """How a checkpoint says that it is quantised; None where it is not."""
    values = text_values(checkpoint.config.values) if checkpoint.config else {}
    return values.get("quantization_config") or None


def _difference(reference: HfCheckpoint, other: HfCheckpoint, name: str) -> tuple[float, str]:
    """The largest difference, and how to say it."""
    info, dtypes = reference.tensors[name], f"{reference.tensors[name].dtype} against {other.tensors[name].dtype}"
    cast = "" if reference.tensors[name].dtype == other.tensors[name].dtype else f" ({dtypes})"
    size = math.prod(info.shape)
    if size > _LARGEST or any(c.tensors[name].dtype.startswith(("F4", "F6", "C")) for c in (reference, other)):
        return math.nan, f"not the same bytes{cast}"
    with np.errstate(invalid="ignore", over="ignore"):
        a, b = reference.read(name).astype(np.float64), other.read(name).astype(np.float64)
        gap = np.abs(a - b)
        gap[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    if np.isnan(gap).any():
        return math.inf, f"NaN on one side{cast}"
    most = float(gap.max(initial=0.0))
    return most, f"by {most:.6g} at most, {int((gap > 0).sum())} of {size} elements{cast}"


@rule(
    title="Two checkpoints of one model: tensors that are missing or differ, and by how much",
    severity="warning",
    certainty="certain",
    why="parameters that were converted or mapped wrongly generate garbled text from the first rollout",
    fix="look at the conversion of the named tensors; if one of the two was trained further, this is as it should be",
    sources=GUIDES,
)
def _weights_differ(reference: HfCheckpoint, other: HfCheckpoint) -> Iterator[Found]:
    if str(reference.path) >= str(other.path):
        return  # the pair comes in both orders
    if _unlike(reference.config, other.config):
        return
    twins = _quantization(reference) != _quantization(other)  # one was made from the other, to hold less
    shared = sorted(set(reference.tensors) & set(other.tensors))
    if len(shared) < (0.0 if twins else 0.5) * min(len(reference.tensors), len(other.tensors)) or not shared:
        return  # two models, not one twice
    if twins:
        shared = [name for name in shared if reference.tensors[name].dtype == other.tensors[name].dtype]
    for here, there in () if twins else ((reference, other), (other, reference)):
        gone = sorted(set(here.tensors) - set(there.tensors))
        if gone:
            names = ", ".join(gone[:3]) + (", ..." if len(gone) > 3 else "")
            where = Where(str(there.path), item=gone[0])
            yield Found(f"{there.path} lacks {count(len(gone), 'tensor')} that {here.path} has: {names}", where)
    unlike = [n for n in shared if reference.tensors[n].shape != other.tensors[n].shape]
    for name in unlike[:_MOST]:
        shapes = [list(checkpoint.tensors[name].shape) for checkpoint in (reference, other)]
        text = f"{name} is {shapes[0]} in {reference.path} and {shapes[1]} in {other.path}"
        yield Found(text, Where(str(other.path / other.tensors[name].file), item=name))
    alike = [name for name in shared if name not in set(unlike)]
    differing = [name for name in alike if reference.scan(name).digest != other.scan(name).digest]
    trained = len(differing) > 0.9 * len(alike)  # a step of training moves nearly all; a bad mapping moves some
    differences = [(name, _difference(reference, other, name)) for name in differing[:_MOST]]
    for name, (most, text) in differences:
        if most != 0:
            where = Where(str(other.path / other.tensors[name].file), item=name, value=text)
            yield Found(f"{name} differs: {text}", where, "note" if trained else None)
    if len(differing) > _MOST:
        text = f"{len(differing)} of {len(alike)} tensors differ" + (", as after training" if trained else "")
        yield Found(text, Where(str(other.path)), "note" if trained else None)
