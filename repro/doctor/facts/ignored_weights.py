"""Which weights the trainers would pack to INT4 on their way to the engine: their ignore list, played through.

As slime and Miles have it: a weight is left alone where a rule ``re:PATTERN`` matches from its name's start, a rule is
its name or its name begins with a rule; every other ``.weight`` of two or more dimensions is packed.
(THUDM/slime@624b824a8 slime/backends/megatron_utils/megatron_to_hf/processors/quantizer_compressed_tensors.py)
"""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from repro.doctor.artefacts.kinds import HfCheckpoint, HfConfig, Launch, TensorInfo
from repro.doctor.facts.tensor_names import is_router, kind_of, number, place, text_values, why_slow
from repro_golden.base.errors import ReproError

__all__ = [
    "RECOMMENDED",
    "Ignoring",
    "Taken",
    "bridged",
    "decides",
    "fix_of",
    "ignoring_of",
    "is_gate",
    "is_linear",
    "packed_names",
    "taken",
]  # fmt: skip

RECOMMENDED = (
    "lm_head", "model.embed_tokens.weight", "re:.*self_attn.*", r"re:.*mlp\.shared_experts.*",
    r"re:.*mlp\.gate_up_proj.*", r"re:.*mlp\.gate_proj.*", r"re:.*mlp\.up_proj.*", r"re:.*mlp\.down_proj.*",
    "re:.*eh_proj.*", r"re:.*mlp\.gate\..*",
)  # fmt: skip
"""The list of slime's guide for MoE models like GLM."""

_SECONDS = 30.0
"""How long patterns may be tried: they are untrusted, and Python's have no clock of their own."""

_TABLE = re.compile(
    r"(?:^|\.)(?:\w*embed(?:ding)?s?|embed_tokens|wte|wpe|word_embeddings|position_embeddings?|patch_embed\w*|lm_head"
    r"|gate|router|conv\w*|\w*norm\w*|proj_in)(?:\.\w*proj)?\.weight$"
)

_GATE = re.compile(r"(?:^|(?<!attn)\.)\w+_gate\.weight$")
"""Gates besides routers, as that of Qwen's shared expert; ``gate_proj`` and an attention's gate are Linears."""

_SHAPES = 4096
"""How many ``weight_shape`` are read: each is a read of its own."""


@dataclass(frozen=True)
class Ignoring:
    """A list of rules.

    Attributes:
        rules: As written; what is no text is left out.
        patterns: The rules ``re:`` that can be tried, by the rule.
        refused: Rules that cannot be, with the reason.
    """

    rules: tuple[str, ...]
    patterns: Mapping[str, re.Pattern[str]]
    refused: Mapping[str, str]

    def matches(self, rule: str, name: str) -> bool:
        """Whether a rule keeps a name from being packed."""
        pattern = self.patterns.get(rule)
        return (pattern is not None and pattern.match(name) is not None) or name.startswith(rule)

    def ignores(self, name: str) -> bool:
        """Whether any rule does."""
        return any(self.matches(rule, name) for rule in self.rules)

    def packed(self, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
        """The weights that would be packed, in order, as far as 30 s suffice."""
        end = time.monotonic() + _SECONDS
        for name in sorted(tensors):
            if name.endswith(".weight") and len(tensors[name].shape) >= 2 and not self.ignores(name):
                yield name
            if time.monotonic() > end:
                return


def ignoring_of(config: HfConfig | None) -> Ignoring | None:
    """The list of a config that is quantised by compressed-tensors; None for others."""
    quantization = (text_values(config.values) if config else {}).get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "compressed-tensors":
        return None
    if not _is_packed(quantization):
        return None
    rules = quantization.get("ignore")
    texts = tuple(rule for rule in (rules if isinstance(rules, list) else []) if isinstance(rule, str))
    patterns: dict[str, re.Pattern[str]] = {}
    refused: dict[str, str] = {}
    for rule in texts:
        if not rule.startswith("re:"):
            continue
        try:
            slow = why_slow(rule[3:])
            if slow:
                refused[rule] = slow
            else:
                with warnings.catch_warnings():  # of what a later Python may read otherwise
                    warnings.simplefilter("ignore")
                    patterns[rule] = re.compile(rule[3:])
        except (re.error, RecursionError, OverflowError, MemoryError) as error:
            refused[rule] = f"is no regular expression ({error})"
    return Ignoring(texts, patterns, refused)


def _is_packed(quantization: Mapping[str, Any]) -> bool:
    """Whether weights are packed integers: the FP8 forms of compressed-tensors have other rules."""
    groups = quantization.get("config_groups")
    group = groups.get("group_0") if isinstance(groups, dict) else None
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        return quantization.get("format") == "pack-quantized"
    return weights.get("type", "int") == "int" and weights.get("num_bits", 4) in (4, 8)


@dataclass(frozen=True)
class Taken:
    """A weight that is packed, or would be.

    Attributes:
        name: As it is called unpacked.
        shape: Unpacked; empty where a packed one does not say it.
        stored: Whether the checkpoint itself holds it packed.
    """

    name: str
    shape: tuple[int, ...]
    stored: bool

    def __str__(self) -> str:
        return f"{self.name} ({' x '.join(map(str, self.shape)) or 'shape unknown'})"


def taken(ignoring: Ignoring, checkpoint: HfCheckpoint) -> list[Taken]:
    """The weights that the list leaves to be packed, and those that the checkpoint holds packed and are no Linear."""
    tensors = checkpoint.tensors
    weights = {name: Taken(name, tensors[name].shape, False) for name in ignoring.packed(tensors)}
    stored = sorted(name for name in packed_names(tensors) if not is_linear(name) and not ignoring.ignores(name))
    for nth, name in enumerate(stored):
        weights[name] = Taken(name, _unpacked(checkpoint, f"{name}_shape") if nth < _SHAPES else (), True)
    return [weights[name] for name in sorted(weights)]


def _unpacked(checkpoint: HfCheckpoint, name: str) -> tuple[int, ...]:
    """The shape that is stored beside a packed weight; empty where there is none."""
    info = checkpoint.tensors.get(name)
    if info is None or len(info.shape) != 1 or info.shape[0] > 8:
        return ()
    try:
        sizes = checkpoint.read(name).tolist()
    except ReproError:
        return ()
    return tuple(sizes) if all(number(size) is not None for size in sizes) else ()


def fix_of(taken: Iterable[Taken]) -> str:
    """What to add to the list for these weights: a pattern for each kind of them."""
    kinds: dict[str, list[Taken]] = {}
    for weight in taken:
        kinds.setdefault(kind_of(weight.name), []).append(weight)
    rules = [_rule(kind, [weight.name for weight in members]) for kind, members in kinds.items()]
    again = any(weight.stored for members in kinds.values() for weight in members)
    return (
        f"add {', '.join(map(json.dumps, dict.fromkeys(rules)))} to quantization_config.ignore of config.json"
        + (" and convert the checkpoint again with that list" if again else "")
        + f"; for MoE models like GLM: {json.dumps(list(RECOMMENDED))}"
    )


def _rule(kind: str, names: list[str]) -> str:
    """A rule that keeps the weights of one kind, and no other."""
    where = place(names[0])
    if where is not None and is_router(names[0], (0, 0)):  # as the guides write it
        return rf"re:.*{re.escape(where.rest.removesuffix('.weight'))}\..*"
    if len(names) == 1:
        return names[0]
    return f"re:{re.escape(kind).replace(re.escape('*'), '[0-9]+')}"


def packed_names(tensors: Mapping[str, TensorInfo]) -> set[str]:
    """Names of weights that the checkpoint itself stores packed, as they are called unpacked."""
    return {n.removesuffix("_packed") for n in tensors if n.endswith(".weight_packed")}


def is_linear(name: str) -> bool:
    """Whether a matrix is the weight of a Linear, by its name: no table, no router or gate, no convolution."""
    return _TABLE.search(name) is None and not is_gate(name)


def is_gate(name: str) -> bool:
    """Whether a weight is a gate besides the router."""
    return _GATE.search(name) is not None


def bridged(launch: Launch | None) -> bool:
    """Whether a launch syncs weights by a bridge, which does not go by this list.

    Miles' bridge packs what the checkpoint holds packed, whatever the list says
    (radixark/miles@31f1ca961 miles/backends/megatron_utils/update_weight/hf_weight_iterator_bridge.py:20).
    """
    return launch is not None and launch.value("--megatron-to-hf-mode") == "bridge"


def decides(launch: Launch | None, checkpoint: HfCheckpoint) -> bool:
    """Whether a launch is at hand that packs by this list."""
    if launch is None or launch.system not in ("slime", "miles") or bridged(launch):
        return False
    named = launch.value("--hf-checkpoint")
    return named is not None and named.rstrip("/").rpartition("/")[2] == checkpoint.path.absolute().name
