"""Names of a checkpoint's tensors taken apart: the stack of layers, the layer, the expert, and what is left."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = [
    "TABLES",
    "Place",
    "Stack",
    "expert_count",
    "first_number",
    "is_router",
    "kind_of",
    "kind_of_layer",
    "layer_count",
    "main_stack",
    "number",
    "place",
    "ranges",
    "stacks",
    "text_values",
    "why_slow",
]

TABLES = frozenset(
    f"{prefix}{name}.weight"
    for prefix in ("", "language_model.", "model.", "model.language_model.", "language_model.model.")
    for name in ("embed_tokens", "lm_head")
)
"""The embedding and the head of a language model, and not those of what hears, sees or speaks beside it."""

_LAYER = re.compile(r"^(?:(.*?)\.)?(layers|h|blocks|block)\.(\d{1,6})\.(.+)$", re.ASCII)
_EXPERT = re.compile(r"\bexperts\.(\d{1,6})\b", re.ASCII)
_OTHER = re.compile(r"vis|audio|image|patch|draft|mtp|tower|speech|codec|talker", re.IGNORECASE)
_ROUTER = re.compile(r"(?:^|\.)(?:gate|router|router\.(?:layer|gate|classifier|weight))\.weight$")


class Place(NamedTuple):
    """Where a tensor belongs: stack (``model.layers``), layer, the rest with ``*`` for the expert, and the expert."""

    stack: str
    layer: int
    rest: str
    expert: int | None


@dataclass
class Stack:
    """The layers of one stack: for each, the rest of its tensors' names, and of each of them the experts."""

    name: str
    layers: dict[int, dict[str, set[int]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))


def place(name: str) -> Place | None:
    """A tensor's place; None for one outside of layers."""
    match = _LAYER.match(name)
    if match is None:
        return None
    prefix, word, layer, rest = match.groups()
    expert = _EXPERT.search(rest)
    return Place(
        f"{prefix}.{word}" if prefix else word, int(layer), _EXPERT.sub("experts.*", rest),
        int(expert[1]) if expert else None,
    )  # fmt: skip


def kind_of(name: str) -> str:
    """The name with ``*`` for its layer and expert: what its peers share."""
    where = place(name)
    return name if where is None else f"{where.stack}.*.{where.rest}"


def stacks(names: Iterable[str]) -> dict[str, Stack]:
    """All stacks of layers, by name."""
    by_name: dict[str, Stack] = {}
    for name in names:
        where = place(name)
        if where is None:
            continue
        experts = by_name.setdefault(where.stack, Stack(where.stack)).layers[where.layer][where.rest]
        if where.expert is not None:
            experts.add(where.expert)
    return by_name


def main_stack(names: Iterable[str]) -> Stack | None:
    """The language model's own layers: the stack with most tensors that is not of pictures, sound or a draft."""
    candidates = [stack for stack in stacks(names).values() if not _OTHER.search(stack.name)]
    return max(candidates, key=lambda stack: (sum(map(len, stack.layers.values())), stack.name), default=None)


def is_router(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight decides which experts take a token."""
    return len(shape) >= 2 and _ROUTER.search(name) is not None


def ranges(numbers: Iterable[int]) -> str:
    """``0-2, 5``."""
    spans: list[list[int]] = []
    for value in sorted(set(numbers)):
        if spans and value == spans[-1][1] + 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in spans[:12]]
    return ", ".join(texts) + (f" and {len(spans) - 12} more" if len(spans) > 12 else "")


def number(value: Any) -> int | None:
    """A count of a config; None for everything that is no reasonable whole number."""
    return value if type(value) is int and 0 <= value < 1 << 40 else None


def first_number(values: Mapping[str, Any], *keys: str) -> int | None:
    """The first of several keys that has a count above 0."""
    return next((count for key in keys if (count := number(values.get(key)))), None)


def text_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values of the language model: a multimodal config has them in ``text_config``."""
    for key in ("text_config", "llm_config", "thinker_config"):
        inner = values.get(key)
        if isinstance(inner, dict):
            return text_values(inner) if key == "thinker_config" else {**values, **inner}
    return values


def layer_count(values: Mapping[str, Any]) -> int | None:
    """How many layers a config says that there are."""
    return first_number(text_values(values), "num_hidden_layers", "n_layer", "num_layers")


def expert_count(values: Mapping[str, Any]) -> int | None:
    """How many experts a layer of experts has, by a config."""
    keys = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
    return first_number(text_values(values), *keys)


# -- which layers are peers: a dense layer and one of experts are not, nor are two kinds of attention


def kind_of_layer(values: Mapping[str, Any], layer: int, rests: Iterable[str]) -> str:
    """The kind of a layer, by the config where it says so, else by its tensors.

    Args:
        values: The config; empty where there is none.
        layer: Its number.
        rests: Names of its tensors behind the number.
    """
    text = text_values(values)
    count = layer_count(values)
    if count is not None and layer >= count:
        return "ahead"  # predicts further tokens: it has parts of its own
    types = text.get("layer_types")
    attention = types[layer] if isinstance(types, list) and layer < len(types) and isinstance(types[layer], str) else ""
    experts = _has_experts(text, layer)
    if experts is None:
        experts = any(part in rest for rest in rests for part in ("experts.", "router", "mlp.gate.", "moe."))
    return f"{attention[:40]} {'experts' if experts else 'dense'}".strip()


def _has_experts(text: Mapping[str, Any], layer: int) -> bool | None:
    """Whether the config gives a layer experts; None where it does not say."""
    if not expert_count(text):
        return None
    kinds = text.get("mlp_layer_types")
    if isinstance(kinds, list) and layer < len(kinds):
        return str(kinds[layer]) != "dense"
    dense = text.get("mlp_only_layers")
    if isinstance(dense, list) and layer in [index for index in dense if type(index) is int]:
        return False
    first, frequency = number(text.get("first_k_dense_replace")), text.get("moe_layer_freq")
    if isinstance(frequency, list):
        return bool(frequency[layer]) if layer < len(frequency) else None
    if first is not None:
        step = number(frequency) or 1
        return layer >= first and layer % step == 0
    sparse = number(text.get("decoder_sparse_step"))
    if sparse:
        return (layer + 1) % sparse == 0
    return None


# -- whether a regular expression of a file may be tried: some take longer than the age of the universe

_LONGEST = 1000
_REPEATS = 4

_TOKEN = re.compile(
    r"(?P<back>\\[1-9]|\(\?P=)|(?P<one>\\.|\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<open>\()|(?P<close>\))|(?P<branch>\|)"
    r"|(?P<repeat>[*+]|\{\d*,\d*\}|\{\d+\})|(?P<option>(?<!\()\?)|(?P<other>.)",
    re.DOTALL,
)


def why_slow(pattern: str) -> str:
    """Why a pattern is not tried; '' where it may be.

    Python's engine is exponential on a repetition of what repeats or branches itself, and on back references. Both are
    found by reading the pattern from left to right; patterns of quantisation need neither.
    """
    if len(pattern) > _LONGEST:
        return f"is longer than {_LONGEST} characters"
    groups = [False]  # for each open group: whether something in it repeats or branches
    last = False  # the same of what a quantifier here would repeat
    repeats = 0
    for token in _TOKEN.finditer(pattern):
        kind = token.lastgroup
        if kind == "back":
            return "refers back to a group"
        if kind == "repeat":
            if last:
                return "repeats what repeats or branches itself"
            repeats += 1
            last = groups[-1] = True
        elif kind == "option":
            groups[-1] = True
        elif kind == "close":
            last = groups.pop() if len(groups) > 1 else False
            groups[-1] = groups[-1] or last
        else:
            if kind == "open":
                groups.append(False)
            groups[-1] = groups[-1] or kind == "branch"
            last = False
    return "" if repeats <= _REPEATS else f"repeats more than {_REPEATS} times"
