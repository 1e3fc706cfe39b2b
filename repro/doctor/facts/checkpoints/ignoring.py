"""Which weights the trainers would pack to INT4 on their way to the engine: their ignore list, played through.

As slime and Miles have it: a weight is left alone where a rule ``re:PATTERN`` matches from its name's start, a rule is
its name or its name begins with a rule; every other ``.weight`` of two or more dimensions is packed.
(THUDM/slime@624b824a8 slime/backends/megatron_utils/megatron_to_hf/processors/quantizer_compressed_tensors.py)
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from repro.doctor.artefacts.kinds import HfCheckpoint, HfConfig, Launch, TensorInfo
from repro.doctor.facts.checkpoints.names import text_values
from repro.doctor.facts.checkpoints.patterns import why_slow

__all__ = ["RECOMMENDED", "Ignoring", "decides", "ignoring_of", "is_linear", "packed_names"]

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
    found = (text_values(config.values) if config else {}).get("quantization_config")
    if not isinstance(found, dict) or found.get("quant_method") != "compressed-tensors":
        return None
    if not _is_packed(found):
        return None
    rules = found.get("ignore")
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


def packed_names(tensors: Mapping[str, TensorInfo]) -> set[str]:
    """Names of weights that the checkpoint itself stores packed, as they are called unpacked."""
    return {n.removesuffix("_packed") for n in tensors if n.endswith(".weight_packed")}


def is_linear(name: str) -> bool:
    """Whether a matrix is the weight of a Linear, by its name: no table, no router, no convolution."""
    return _TABLE.search(name) is None


def decides(launch: Launch | None, checkpoint: HfCheckpoint) -> bool:
    """Whether a launch is at hand that packs by this list.

    Miles' bridge packs what the checkpoint holds packed, whatever the list says
    (radixark/miles@31f1ca961 miles/backends/megatron_utils/update_weight/hf_weight_iterator_bridge.py:20).
    """
    if launch is None or launch.system not in ("slime", "miles") or launch.value("--megatron-to-hf-mode") == "bridge":
        return False
    named = launch.value("--hf-checkpoint")
    return named is not None and named.rstrip("/").rpartition("/")[2] == checkpoint.path.absolute().name
