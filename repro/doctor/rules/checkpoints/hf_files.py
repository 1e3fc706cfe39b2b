"""Hugging Face checkpoints as files: indices, shards, tensors that are there."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from repro.doctor.artefacts.checkpoints.hf import INDEX
from repro.doctor.artefacts.checkpoints.safetensors_header import BITS
from repro.doctor.artefacts.kinds import HfCheckpoint, TensorInfo
from repro.doctor.facts.sources import SLIME
from repro.doctor.facts.tensor_names import (
    Stack,
    expert_count,
    first_number,
    is_router,
    kind_of,
    kind_of_layer,
    layer_count,
    main_stack,
    ranges,
    stacks,
    text_values,
)
from repro_golden.base.checks import Found, Severity, Where, rule

_NAMES = {"bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32", "float": "F32", "float64": "F64"}


def _config(checkpoint: HfCheckpoint) -> Iterator[Found]:
    assert checkpoint.config is not None
    values = text_values(checkpoint.config.values)
    key = "torch_dtype" if "torch_dtype" in values else "dtype"
    configured = values.get(key)
    named = _NAMES.get(configured.removeprefix("torch.")) if isinstance(configured, str) else None
    sizes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        if info.dtype in _NAMES.values():
            sizes[info.dtype] += math.prod(info.shape)
    if named is None or not sizes:
        return
    most = max(sizes, key=lambda dtype: (sizes[dtype], dtype))
    if most != named:
        fix = f"write {key} as the weights are, or convert the weights to {configured}"
        message = f"the config says {key} {configured}, and most weights are {most}"
        yield Found(message, Where(str(checkpoint.config.path), item=key, value=str(configured)), fix=fix)


@rule(
    title="Tensors of one kind in several dtypes, or in another than the config says",
    severity="warning",
    certainty="likely",
    why="a weight that was rounded on the way no longer equals the trainer's, and log-probs of trainer and engine part",
    fix="write all tensors of a kind in one dtype; keep what must stay in float32 (router biases, A_log) out of the "
    "cast",
    sources=("slime guide: Debugging", "radixark/miles@85fe6519a: parameters in float32 were cast at load"),
)
def _hf_dtype_drift(checkpoint: HfCheckpoint) -> Iterator[Found]:
    kinds: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(checkpoint.tensors):
        kinds[kind_of(name)][checkpoint.tensors[name].dtype].append(name)
    values = checkpoint.config.values if checkpoint.config else {}
    quantised = isinstance(text_values(values).get("quantization_config"), dict)
    for kind, dtypes in sorted(kinds.items()):
        if len(dtypes) < 2 or (quantised and any(BITS.get(dtype, 8) <= 8 for dtype in dtypes)):
            continue  # some layers of a quantised model are kept in their own dtype on purpose
        common = max(dtypes, key=lambda dtype: (len(dtypes[dtype]), dtype))
        for dtype, names in sorted(dtypes.items()):
            if dtype != common:
                where = Where(str(checkpoint.path / checkpoint.tensors[names[0]].file), item=names[0], value=dtype)
                yield Found(f"{kind}: {len(names)} in {dtype}, {len(dtypes[common])} peers in {common}", where)
    if not quantised and checkpoint.config is not None:
        yield from _config(checkpoint)


def _size(checkpoint: HfCheckpoint, path: str) -> Iterator[Found]:
    if not checkpoint.total_size:
        return
    held = sum(math.prod(info.shape) * BITS.get(info.dtype, 8) // 8 for info in checkpoint.tensors.values())
    if held != checkpoint.total_size:
        message = f"the index says {checkpoint.total_size} bytes in all, and the shards hold {held}"
        fix = "nothing, if the index was kept from before a change of dtype; otherwise write the checkpoint again"
        severity: Severity = "warning" if held < 0.99 * checkpoint.total_size else "note"
        yield Found(message, Where(path, item="metadata.total_size"), severity, "possible", fix)


def _shown(names: Sequence[str]) -> str:
    listed = ", ".join(name[:120] for name in names[:3])
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({listed}{', ...' if len(names) > 3 else ''})"


@rule(
    title="model.safetensors.index.json and shards that disagree",
    severity="error",
    certainty="certain",
    why="a loader that goes by the index fails on the tensor, or leaves it as it was initialised",
    fix="write the index again from the shards' headers, or convert the checkpoint again",
    sources=("slime guide: Debugging",),
)
def _hf_index(checkpoint: HfCheckpoint) -> Iterator[Found]:
    index = checkpoint.index
    if index is None:
        return
    path = str(checkpoint.path / INDEX)
    readable = set(checkpoint.shards) - set(checkpoint.unreadable)
    absent, moved = [], []
    for name in sorted(index):
        if index[name] not in readable:
            continue  # other rules speak of missing and corrupt shards
        held = checkpoint.tensors.get(name)
        if held is None:
            absent.append(name)
        elif held.file != index[name]:
            moved.append(name)
    if absent:
        yield Found(
            f"the index names {_shown(absent)}, and the shard it gives does not hold them",
            Where(path, item=absent[0], value=index[absent[0]]),
        )
    if moved:
        message = f"the index gives another shard than the one that holds {_shown(moved)}"
        where = Where(path, item=moved[0], value=index[moved[0]])
        yield Found(f"{message} ({checkpoint.tensors[moved[0]].file})", where)
    unnamed = sorted(n for n, info in checkpoint.tensors.items() if n not in index and info.file in set(index.values()))
    if unnamed:
        yield Found(
            f"shards hold {_shown(unnamed)}, which the index does not name", Where(path, item=unnamed[0]), "warning"
        )
    if not (absent or moved or unnamed) and readable >= set(index.values()):
        yield from _size(checkpoint, path)


_Keys = frozenset[str]


def _fewer(checkpoint: HfCheckpoint, stack: Stack, values: Mapping[str, Any]) -> Iterator[Found]:
    """Layers whose keys are a part of what the layers of their kind have."""
    kinds: dict[str, dict[int, _Keys]] = defaultdict(dict)
    for layer, rests in stack.layers.items():
        kinds[kind_of_layer(values, layer, rests)][layer] = frozenset(rests)
    for kind, layers in sorted(kinds.items()):
        sets = Counter(layers.values())
        for keys in sorted(sets, key=sorted):
            wider = [other for other in sets if keys < other]
            if not wider:
                continue
            full = max(wider, key=lambda other: (sets[other], len(other), sorted(other)))
            peers = sum(count for other, count in sets.items() if full <= other)
            those = sorted(layer for layer, held in layers.items() if held == keys)
            missing = sorted(full - keys)
            names = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
            who = f"layers {ranges(those)} have" if len(those) > 1 else f"layer {those[0]} has"
            message = (
                f"{stack.name}: {who} {len(keys)} of the {len(full)} tensors of {peers} {kind} peers: without {names}"
            )
            where = Where(str(checkpoint.path), item=f"{stack.name}.{those[0]}.{missing[0]}")
            yield Found(message, where, _severity(checkpoint, stack, missing, those, peers))


def _severity(
    checkpoint: HfCheckpoint, stack: Stack, missing: list[str], those: list[int], peers: int
) -> Severity | None:
    """An error where single layers lack matrices; models are made with layers that differ, but in whole groups."""
    matrices = any(
        len(info.shape) >= 2
        for layer in stack.layers
        for rest in missing
        if (info := checkpoint.tensors.get(f"{stack.name}.{layer}.{rest.replace('experts.*', 'experts.0')}"))
    )
    return None if matrices and len(those) <= 2 < peers else "warning"


def _holes(checkpoint: HfCheckpoint, stack: Stack, values: Mapping[str, Any]) -> Iterator[Found]:
    """Experts that are missing in the numbering of a layer."""
    configured = expert_count(values)
    for layer, rests in sorted(stack.layers.items()):
        groups = [experts for rest, experts in rests.items() if "experts.*" in rest]
        if not groups:
            continue
        count = max(max((max(e) + 1 for e in groups if e), default=0), configured or 0)
        if count > 100_000:
            continue
        missing = {n for experts in groups for n in set(range(count)) - experts} if count else set()
        if missing:
            rest = next(
                rest
                for rest, experts in sorted(rests.items())
                if "experts.*" in rest and missing & (set(range(count)) - experts)
            )
            where = Where(str(checkpoint.path), item=f"{stack.name}.{layer}.{rest}")
            whose = f"the config says {configured}" if configured else f"the highest is {count - 1}"
            yield Found(f"{stack.name}.{layer}: experts {ranges(missing)} lack tensors ({whose})", where)


@rule(
    title="Layers with fewer tensors than their peers, and missing experts",
    severity="error",
    certainty="likely",
    why="what is missing keeps what it was initialised with: the first MoE layer without its router is the known case",
    fix="convert the checkpoint again, and compare the layer with its peers in the index; check that every pipeline "
    "stage and every expert rank was written",
    sources=("slime guide: Debugging",),
)
def _hf_layer_keys(checkpoint: HfCheckpoint) -> Iterator[Found]:
    values = checkpoint.config.values if checkpoint.config else {}
    names = {*checkpoint.tensors, *(checkpoint.index or {})}
    main = main_stack(names)
    for stack in sorted(stacks(names).values(), key=lambda s: s.name):
        config = values if main is not None and stack.name == main.name else {}
        yield from _fewer(checkpoint, stack, config)
        yield from _holes(checkpoint, stack, config)


_AHEAD = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""How many layers behind the others predict further tokens."""


@rule(
    title="Layers of the config without any tensor",
    severity="error",
    certainty="certain",
    why="loading fails, or the layer runs on what it was initialised with and the text is garbled",
    fix="convert the checkpoint again with all pipeline stages, and look at the layer numbers of its second stage",
    sources=("slime guide: Debugging",),
)
def _hf_layer_missing(checkpoint: HfCheckpoint) -> Iterator[Found]:
    if checkpoint.config is None or not (checkpoint.tensors or checkpoint.index):
        return
    values = checkpoint.config.values
    count = layer_count(values)
    if count is None or values.get("is_encoder_decoder") is True or count > 10_000:
        return
    names = {*checkpoint.tensors, *(checkpoint.index or {})}  # what a missing shard holds is another rule's
    stack = main_stack(names)
    where = Where(str(checkpoint.config.path), item="num_hidden_layers", value=str(count))
    if stack is None:
        if any(not name.startswith(("lora", "base_model.")) for name in names):
            yield Found(f"the config says {count} layers, and no tensor belongs to one", where, "warning", "likely")
        return
    missing = set(range(count)) - set(stack.layers)
    if missing:
        subject, has = ("layers", "have") if len(missing) > 1 else ("layer", "has")
        yield Found(f"{subject} {ranges(missing)} of {count} {has} no tensor in {stack.name}", where)
    draft = first_number(text_values(values), *_AHEAD) or 0
    beyond = {layer for layer in stack.layers if layer >= count + draft}
    if beyond:
        message = (
            f"{stack.name} has layer{'s' if len(beyond) > 1 else ''} {ranges(beyond)}, and the config says {count}"
            + (f" and {draft} to predict ahead" if draft else "")
        )
        yield Found(message, where, "warning", "likely", "give the config the number of layers that the weights have")


_MOST = 8


@rule(
    title="NaN or infinity in weights",
    severity="error",
    certainty="certain",
    why="everything that such a weight touches becomes NaN, and metrics may hide it",
    fix="go back to the checkpoint before; look for an overflow in FP16 or FP8 or for a block of zeros with scale 0 "
    "in the conversion",
    sources=("Miles guide: Debugging", "THUDM/slime@dd4851f26 (#2256): a block of zeros becomes NaN in FP8"),
)
def _hf_not_finite(checkpoint: HfCheckpoint) -> Iterator[Found]:
    total = 0
    for name in sorted(checkpoint.tensors):
        stats = checkpoint.scan(name)
        if not (stats.nan or stats.inf):
            continue
        total += 1
        if total <= _MOST:
            parts = [f"{count} {what}" for count, what in ((stats.nan, "NaN"), (stats.inf, "inf")) if count]
            info = checkpoint.tensors[name]
            where = Where(str(checkpoint.path / info.file), item=name, value=" and ".join(parts))
            seen = "" if stats.whole else " in the parts that were looked at"
            yield Found(f"{name} ({info.dtype}) has {' and '.join(parts)}{seen}", where)
    if total > _MOST:
        yield Found(f"{total - _MOST} more tensors are not finite", Where(str(checkpoint.path)))


_TOTAL = re.compile(r"-of-(\d{5,6})\.safetensors$", re.ASCII)


@rule(
    title="Shards that the index does not name",
    severity="warning",
    certainty="certain",
    why="a loader that takes every file reads another conversion's weights, and one that goes by the index leaves "
    "them out",
    fix="delete them if they are left over from another conversion, or write the index again",
    sources=("slime guide: Debugging",),
)
def _hf_shard_extra(checkpoint: HfCheckpoint) -> Iterator[Found]:
    totals = sorted({match[1] for name in checkpoint.shards if (match := _TOTAL.search(name))})
    if checkpoint.index is None:
        if len(totals) > 1:
            message = f"shards of several conversions lie here: of {', of '.join(totals)}"
            yield Found(message, Where(str(checkpoint.path)), fix="keep the shards of one conversion and its index")
        return
    extra = sorted(set(checkpoint.shards) - set(checkpoint.index.values()))
    if extra:
        names = ", ".join(extra[:4]) + (f" and {len(extra) - 4} more" if len(extra) > 4 else "")
        files = f"{len(checkpoint.shards)} safetensors files, and the index names {len(set(checkpoint.index.values()))}"
        yield Found(f"not in the index: {names} ({files})", Where(str(checkpoint.path / INDEX), item=extra[0]))


_NUMBERED = re.compile(r"(model.*?)-?(\d{5,6})-of-(\d{5,6})\.safetensors", re.ASCII)


@rule(
    title="Shards that the index names, or that 'of NNNNN' promises, and that are not there",
    severity="error",
    certainty="certain",
    why="the weights in them are missing: loading fails, or layers keep what they were initialised with",
    fix="fetch or convert the missing shard again, then count the .safetensors files against the names' 'of NNNNN'",
    sources=("slime guide: Debugging",),
)
def _hf_shard_missing(checkpoint: HfCheckpoint) -> Iterator[Found]:
    there = set(checkpoint.shards)
    if checkpoint.index is not None:
        lost: dict[str, list[str]] = defaultdict(list)
        for tensor, file in checkpoint.index.items():
            if file not in there:
                lost[file].append(tensor)
        for file in sorted(lost)[:_MOST]:
            tensors = sorted(lost[file])
            more = f" and {len(tensors) - 2} more" if len(tensors) > 2 else ""
            text = f"{file[:200]} is missing, and {len(tensors)} tensors with it ({', '.join(tensors[:2])}{more})"
            yield Found(text, Where(str(checkpoint.path / INDEX), item=file[:200]))
        if len(lost) > _MOST:
            yield Found(
                f"{len(lost) - _MOST} more shards of the index are missing", Where(str(checkpoint.path / INDEX))
            )
        return
    groups: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name in there:
        match = _NUMBERED.fullmatch(name)
        if match:
            groups[match[1], match[3]].add(int(match[2]))
    for (prefix, total), numbers in sorted(groups.items()):
        width, count = len(total), int(total)
        if 0 < count <= 100_000 and (missing := sorted(set(range(1, count + 1)) - numbers)):
            names = ", ".join(f"{prefix}-{n:0{width}d}-of-{total}.safetensors" for n in missing[:3])
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            text = f"{len(numbers)} of {count} shards are there, without {names}{more}; there is no index either"
            yield Found(text, Where(str(checkpoint.path)))


_KEY = "tie_word_embeddings"


def _tied(values: Mapping[str, Any]) -> bool | None:
    """What the config says; None where it does not, or says both."""
    inner = values.get("text_config")
    flags = {value for table in (values, inner) if isinstance(table, dict) and type(value := table.get(_KEY)) is bool}
    return flags.pop() if len(flags) == 1 else None


def _generates(values: Mapping[str, Any]) -> bool:
    names = values.get("architectures")
    return isinstance(names, list) and any(
        isinstance(name, str) and name.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"))
        for name in names
    )


def _ending(names: set[str], end: str) -> str | None:
    return min(
        (name for name in names if name == end or name.endswith(f".{end}")), key=lambda n: (len(n), n), default=None
    )


@rule(
    title="tie_word_embeddings that the lm_head contradicts",
    severity="error",
    certainty="certain",
    why="the output layer is another than the one that was trained, or one that nobody trained",
    fix="make tie_word_embeddings, lm_head.weight and --untie-embeddings-and-output-weights say the same",
    sources=("slime guide: Debugging", f"{SLIME} slime/backends/megatron_utils/arguments.py:125"),
)
def _hf_tied_embeddings(checkpoint: HfCheckpoint) -> Iterator[Found]:
    if checkpoint.config is None:
        return
    tied = _tied(checkpoint.config.values)
    names = {*checkpoint.tensors, *(checkpoint.index or {})}
    head, embedding = _ending(names, "lm_head.weight"), _ending(names, "embed_tokens.weight")
    if tied is None or embedding is None:
        return
    where = Where(str(checkpoint.config.path), item=_KEY, value=str(tied).lower())
    if tied and head in checkpoint.tensors and embedding in checkpoint.tensors:
        assert head is not None
        alike = checkpoint.tensors[head][1:] == checkpoint.tensors[embedding][1:]
        if alike and checkpoint.scan(head).digest != checkpoint.scan(embedding).digest:
            message = f"{head} differs from {embedding}, and the config ties them: every loader drops {head}"
            fix = f"set {_KEY} to false (and --untie-embeddings-and-output-weights), or convert the tied model again"
            yield Found(message, where, None, "likely", fix)
    elif not tied and head is None and _generates(checkpoint.config.values):
        fix = f"set {_KEY} to true if the model ties them, or convert the output layer again"
        yield Found(f"there is no lm_head.weight, and the config does not tie it to {embedding}", where, fix=fix)


@rule(
    title="Safetensors files whose header is corrupt or whose data is cut short",
    severity="error",
    certainty="certain",
    why="loading fails, or reads other bytes than were written",
    fix="fetch or convert the file again, and compare its size or checksum with the source",
    sources=("slime guide: Debugging",),
)
def _hf_truncated(checkpoint: HfCheckpoint) -> Iterator[Found]:
    for name, why in sorted(checkpoint.unreadable.items()):
        yield Found(why, Where(str(checkpoint.path / name)))


_STARTS_AT_ZERO = re.compile(r"lora_|score\.|value_head|v_head|classifier|gating|adapter", re.IGNORECASE)
"""Heads and adapters that are made of zeros on purpose before they are trained."""
_CENTRED = ("gemma", "qwen3_next", "qwen3_5", "olmo_hybrid")
"""Models whose norms add one to their weight, so that zeros are its start."""


def _looked_at(name: str, info: TensorInfo, model: str) -> bool:
    """Matrices of more than one element, and norms, whose zeros switch a layer off."""
    if math.prod(info.shape) < 2 or info.dtype == "BOOL" or name.endswith("weight_shape"):
        return False
    if len(info.shape) >= 2:
        return name.endswith(("weight", "weight_packed", "weight_scale", "weight_scale_inv", "_proj")) and not (
            _STARTS_AT_ZERO.search(name)
        )
    return "norm" in name and name.endswith("weight") and not model.startswith(_CENTRED)


def _zero(checkpoint: HfCheckpoint, kind: str, names: list[str]) -> Found:
    info = checkpoint.tensors[names[0]]
    where = Where(str(checkpoint.path / info.file), item=names[0], value="0")
    message = f"{_count(kind, names)}: {_shape(checkpoint, names[0])} of zeros"
    if len(info.shape) < 2:
        message += ", which a norm that multiplies by its weight turns into a layer of zeros"
        return Found(message, where, "warning", "likely")
    if is_router(names[0], info.shape):
        message += ": a router that was quantised by mistake, or that no conversion wrote, looks like this"
    fix = ""
    if kind != names[0]:
        fix = "compare with peers in other layers and convert again; then run with --check-weight-update-equal"
    return Found(message, where, fix=fix)


def _count(kind: str, names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{kind} ({len(names)} tensors, the first is {names[0]})"


def _shape(checkpoint: HfCheckpoint, name: str) -> str:
    return " x ".join(map(str, checkpoint.tensors[name].shape))


@rule(
    title="Weights that are all zeros, or all one value",
    severity="error",
    certainty="likely",
    why="a matrix of zeros passes nothing on: a router of zeros sends every token to the same experts",
    fix="convert the checkpoint again; for INT4 put routers and other weights that are no Linear into "
    "quantization_config.ignore; then run with --check-weight-update-equal",
    sources=("slime guide: Debugging",),
)
def _hf_zero_tensor(checkpoint: HfCheckpoint) -> Iterator[Found]:
    model = str(checkpoint.config.values.get("model_type", "")) if checkpoint.config else ""
    zeros: dict[str, list[str]] = defaultdict(list)
    others: dict[str, list[str]] = defaultdict(list)
    for name in sorted(checkpoint.tensors):
        info = checkpoint.tensors[name]
        if not _looked_at(name, info, model):
            continue
        constant = checkpoint.scan(name).constant
        if constant == 0:
            zeros[kind_of(name)].append(name)
        elif constant is not None and len(info.shape) >= 2:
            others[kind_of(name)].append(name)
    for kind, names in zeros.items():
        yield _zero(checkpoint, kind, names)
    for kind, names in others.items():
        value = checkpoint.scan(names[0]).constant
        where = Where(str(checkpoint.path / checkpoint.tensors[names[0]].file), item=names[0], value=f"{value:.6g}")
        message = f"{_count(kind, names)}: every element of {_shape(checkpoint, names[0])} is {value:.6g}"
        yield Found(message, where, "warning", "likely")
