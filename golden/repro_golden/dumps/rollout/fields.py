"""What a sample holds in each of the three trainers: names, defaults, lengths, and since when.

Read from the classes `Sample` in slime/utils/types.py (624b824a8), miles/utils/types.py (31f1ca961) and
relax/utils/types.py (2765d18a5), and from every version of the first two. A dump holds ``Sample.to_dict()``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from repro_golden.base.errors import ReproError
from repro_golden.base.systems import SYSTEMS, System

__all__ = [
    "FIELDS",
    "FORMS",
    "KNOWN_CLASSES",
    "NAMES",
    "ONLY",
    "STATUSES",
    "WANTED",
    "Field",
    "Form",
    "Length",
    "Wanted",
    "defaults",
    "form_of",
    "refuse",
]

Length = Literal["", "response", "response + 1", "tokens - 1"]
"""How many entries a per-token field has; '' for a field that is not per token."""

STATUSES = ("pending", "completed", "truncated", "aborted", "failed")
"""The values of `Sample.Status` in all three."""

KNOWN_CLASSES = ("miles.utils.types.AdapterRef", "miles.utils.types.RewardSpec")
"""Classes that trainers' own dumps name: frozen dataclasses of strings and numbers, read as plain fields."""


@dataclass(frozen=True)
class Field:
    """One field of a sample.

    Attributes:
        name: Its key in the dump.
        default: What the trainer's loader takes where a dump lacks it. Never handed out itself: see `defaults`.
        kind: What it holds, in words.
        length: How many entries it has, where it is per token.
        since: Commit and date since when dumps have it; '' where the first dumps of this form had it, or where the
            history was not to be had (Relax).
        former: Keys that dumps of some weeks had in its place.
        added: Whether the trainer adds it to the dump beside the fields of the class.
    """

    name: str
    default: Any = None
    kind: str = ""
    length: Length = ""
    since: str = ""
    former: tuple[str, ...] = ()
    added: bool = False


_SPEC_INFO = {"spec_accept_token_num": 0, "spec_draft_token_num": 0, "spec_verify_ct": 0, "completion_token_num": 0}
_CACHE_INFO = {"cached_tokens": 0, "total_prompt_tokens": 0}


def _spec(since: str = "") -> Field:
    return Field("spec_info", _SPEC_INFO, "four counts", since=since)


def _cache(since: str = "") -> Field:
    return Field("prefix_cache_info", _CACHE_INFO, "two counts", since=since)


_SLIME = (
    Field("group_index", kind="int", since="c7dc52e60 2025-10-13"),
    Field("index", kind="int"),
    # called group_id in the dumps of a3c5462a7 2026-05-30 up to 44d29ee59 2026-06-04
    Field("rollout_id", kind="int; siblings of one execution share it", since="7405851ff 2026-05-25",
          former=("group_id",)),
    Field("prompt", "", "text or chat"),
    Field("tokens", [], "list of int, prompt and response"),
    Field("multimodal_inputs", kind="dict", since="81d8cd69c 2025-12-04"),
    Field("multimodal_train_inputs", kind="dict of arrays", since="63e63efda 2025-12-27"),
    Field("multimodal_train_input_id", kind="text", since="d495f61c2 2026-06-21"),
    Field("apply_chat_template_kwargs", {}, "dict", since="4c058f65c 2026-06-15"),
    Field("response", "", "text"),
    Field("response_length", 0, "int"),
    Field("label", kind="text"),
    Field("reward", kind="float, or dict of floats"),
    Field("loss_mask", kind="list of 0 and 1", length="response"),
    Field("weight_versions", [], "list of text, one for each turn", since="2395239c8 2025-09-09"),
    Field("rollout_log_probs", kind="list of float, nats", length="response", since="067d65a4a 2025-08-26"),
    Field("rollout_top_p_token_ids", kind="list or int32 tensor", since="8f5e21519 2026-06-19"),
    Field("rollout_top_p_token_offsets", kind="list or int32 tensor", length="response + 1",
          since="8f5e21519 2026-06-19"),
    Field("rollout_routed_experts", kind="list or tensor [tokens - 1, layers, top-k]", length="tokens - 1",
          since="7551dc60a 2025-11-13"),
    Field("remove_sample", False, "bool: trained with a mask of zeros", since="b9d548059 2025-11-30"),
    Field("teacher_log_probs", kind="list of float, nats", length="response", since="5073e32da 2026-02-03"),
    Field("status", "pending", "text"),
    Field("metadata", {}, "dict"),
    Field("generate_function_path", kind="text", since="2235fa2ea 2026-01-15"),
    Field("custom_rm_path", kind="text", since="4c058f65c 2026-06-15"),
    Field("train_metadata", kind="dict", since="675ca6e75 2025-09-05"),
    Field("session_id", kind="text", since="1d9472bf7 2026-02-14"),
    Field("non_generation_time", 0.0, "seconds", since="1452e6ca9 2026-01-04"),
    _spec("f81ecfee2 2025-10-31"),
    _cache("cbe233461 2026-01-04"),
)  # fmt: skip

_MILES = (
    Field("group_index", kind="int", since="8b4cac456 2025-10-12"),
    Field("index", kind="int"),
    Field("rollout_id", kind="int; siblings of one execution share it", since="11cc23263 2026-08-04"),
    Field("prompt", "", "text or chat"),
    Field("tokens", [], "list of int, prompt and response"),
    Field("multimodal_inputs", kind="dict", since="67ba097a7 2025-12-10"),
    Field("multimodal_train_inputs", kind="dict of arrays", since="8a988dc3d 2026-01-02"),
    Field("response", "", "text"),
    Field("response_length", 0, "int"),
    Field("label", kind="text"),
    Field("reward", kind="float, or dict of floats"),
    Field("loss_mask", kind="list of 0 and 1", length="response"),
    Field("weight_versions", [], "list of text, one for each turn", since="2395239c8 2025-09-09"),
    Field("rollout_log_probs", kind="list of float, nats", length="response", since="067d65a4a 2025-08-26"),
    Field("rollout_routed_experts", kind="int32 array [tokens - 1, layers, top-k]", length="tokens - 1",
          since="350c5ee44 2025-11-14"),
    Field("rollout_indexer_topk", kind="int32 array [tokens - 1, layers, top-k]", length="tokens - 1",
          since="b39634df4 2026-06-01"),
    Field("remove_sample", False, "bool: trained with a mask of zeros", since="424facf86 2025-12-01"),
    Field("teacher_log_probs", kind="list of float, nats", length="response", since="74198b451 2026-06-04"),
    Field("opd_reverse_kl", kind="list of float, nats", length="response", since="af28a061d 2026-06-15"),
    Field("status", "pending", "text"),
    Field("metadata", {}, "dict"),
    Field("generate_function_path", kind="text", since="ab33bf9f4 2026-02-23"),
    Field("train_metadata", kind="dict", since="675ca6e75 2025-09-05"),
    Field("adapter", kind="AdapterRef: name, slot", since="ad21ac17a 2026-07-21"),
    Field("reward_spec", kind="RewardSpec: rm_type, custom_rm_path", since="ad21ac17a 2026-07-21"),
    # called session_id in the dumps of c198efa60 2026-04-06 up to b93219b4c 2026-07-20
    Field("routing_key", kind="text", since="c198efa60 2026-04-06", former=("session_id",)),
    Field("non_generation_time", 0.0, "seconds", since="c77bdcf2a 2026-01-05"),
    _spec("a9ad745a9 2025-11-01"),
    _cache("c77bdcf2a 2026-01-05"),
)  # fmt: skip

_RELAX = (
    Field("group_index", kind="int"),
    Field("index", kind="int"),
    Field("prompt", "", "text or chat"),
    Field("tokens", [], "list of int, prompt and response"),
    Field("rollout_tokens", [], "list of int"),
    Field("multimodal_inputs", kind="dict"),
    Field("multimodal_train_inputs", kind="dict of arrays"),
    Field("response", "", "text"),
    Field("response_length", 0, "int"),
    Field("label", kind="text"),
    Field("reward", kind="float, or dict of floats"),
    Field("custom_advantage", kind="float, list, or list of lists"),
    Field("loss_mask", kind="list of 0 and 1", length="response"),
    Field("weight_versions", [], "list of text, one for each turn"),
    Field("rollout_log_probs", kind="list of float, nats", length="response"),
    Field("rollout_log_probs_mask", kind="list of bool", length="response"),
    Field("rollout_routed_experts", kind="list [tokens - 1, layers, top-k]", length="tokens - 1"),
    Field("remove_sample", False, "bool: trained with a mask of zeros"),
    Field("abort_count", 0, "int"),
    Field("teacher_log_probs", kind="list of float, nats", length="response"),
    Field("student_topk_token_ids", kind="array [response, k]"),
    Field("student_topk_log_probs", kind="array [response, k]"),
    Field("teacher_at_student_topk_log_probs", kind="array [response, k]"),
    Field("teacher_topk_token_ids", kind="array [response, k]"),
    Field("teacher_topk_log_probs", kind="array [response, k]"),
    Field("student_at_teacher_topk_log_probs", kind="array [response, k]"),
    Field("opd_topk_token_ids", kind="list of arrays"),
    Field("opd_topk_student_log_probs", kind="list of arrays"),
    Field("opd_topk_teacher_log_probs", kind="list of arrays"),
    Field("opd_topk_ksz", kind="array"),
    Field("teacher_prompt", kind="text or chat"),
    Field("teacher_multimodal_inputs", kind="dict"),
    Field("teacher_tokens", kind="list of int"),
    Field("teacher_prompt_length", kind="int"),
    Field("teacher_image_data", kind="dict of lists"),
    Field("teacher_image_b64_list", kind="list of text"),
    Field("teacher_image_grid_thw", kind="list of [t, h, w]"),
    Field("status", "pending", "text"),
    Field("metadata", {}, "dict"),
    Field("generate_function_path", kind="text"),
    Field("train_metadata", kind="dict"),
    Field("session_id", kind="text"),
    Field("non_generation_time", 0.0, "seconds"),
    _spec(),
    _cache(),
    Field("decoded_tokens", [], "list of text; [] without a tokenizer", added=True),
)

FIELDS: Mapping[System, tuple[Field, ...]] = MappingProxyType({"slime": _SLIME, "miles": _MILES, "relax": _RELAX})
"""The fields of a sample, in the order of the class."""

NAMES: Mapping[System, frozenset[str]] = MappingProxyType(
    {system: frozenset(f.name for f in FIELDS[system]) for system in SYSTEMS}
)
"""Their names."""

ONLY: Mapping[System, frozenset[str]] = MappingProxyType(
    {
        system: NAMES[system] - frozenset[str]().union(*(NAMES[other] for other in SYSTEMS if other != system))
        for system in SYSTEMS
    }
)
"""Names that no other system has: what a dump is recognised by."""


def defaults(system: System) -> dict[str, Any]:
    """A fresh sample of a system as a dump holds it, with nothing set."""
    return {f.name: copy.deepcopy(f.default) for f in FIELDS[system]}


# -- what a trainer's file is, from its content: the dump that was asked for, another one, or a form of former days

Form = Literal["rollout", "columns of 2025-06", "pickle of 2025-06", "train", "policy loss", "number", "other"]
Wanted = Literal["rollout", "train"]

_RECORD = "record the rollout again with --save-debug-rollout-data"

FORMS: Mapping[Form, tuple[str, str]] = MappingProxyType(
    {
        "rollout": ("a rollout dump", ""),
        "columns of 2025-06": (
            "a rollout dump of slime e0be9a075 (2025-06-18), which holds train columns and no samples",
            f"nothing brings the samples back, so {_RECORD} and slime ed2f3a999 (2025-07-23) or later",
        ),
        "pickle of 2025-06": (
            "a rollout dump of slime 1dc85516d (2025-06-24) up to ed2f3a999 (2025-07-23), a pickled list of samples",
            'in that checkout, unpickle it and torch.save({"rollout_id": N, "samples": [each one\'s dict, '
            f'status as text]}}, "N.pt"), or {_RECORD}',
        ),
        "train": ("a train dump, as --save-debug-train-data writes", ""),
        "policy loss": ("a policy-loss dump of Miles (policy_loss_debug/)", ""),
        "number": ("a single number, as --ci-save-grad-norm writes", ""),
        "other": ("no dump of slime, Miles or Relax", ""),
    }
)
"""Each form in words, and the way out where it is one of its own."""

WANTED: Mapping[Wanted, str] = MappingProxyType(
    {
        "rollout": "give the rollout dump (--save-debug-rollout-data, or rollout_data/ in the --dump-details folder)",
        "train": "give the train dump (--save-debug-train-data, or train_data/ in the --dump-details folder)",
    }
)
"""Where the file that was asked for is."""

_COLUMNS = {"tokens", "response_lengths", "rewards", "truncated", "loss_masks"}
_PICKLED = {"tokens", "response", "response_length", "prompt"}
_SAMPLE = {"status", "response_length", "response"}


def form_of(value: Any) -> Form:
    """The form of a file's content.

    Args:
        value: As `reading.read_archive` or `reading.peek` gives it.
    """
    if isinstance(value, list):
        pickled = bool(value) and all(isinstance(item, dict) and item.keys() >= _PICKLED for item in value)
        return "pickle of 2025-06" if pickled else "other"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number"
    if not isinstance(value, dict):
        return "other"
    if "call" in value and "ppo_kl" in value:
        return "policy loss"
    if value.keys() & {"rollout_data", "dp_shards", "format_version"}:
        return "train"
    if "samples" in value:
        return _of_samples(value)
    return "columns of 2025-06" if len(value.keys() & _COLUMNS) >= 3 else "other"


def _of_samples(value: Mapping[str, Any]) -> Form:
    samples = value["samples"]
    whole = isinstance(samples, list) and all(isinstance(s, dict) for s in samples)
    if not whole or not all(isinstance(name, str) for sample in samples for name in sample):
        return "other"
    if "rank" in value:
        return "train"  # Relax's, whose other keys are a rollout dump's
    return "rollout" if not samples or any(s.keys() & _SAMPLE for s in samples) else "other"


def refuse(value: Any, path: Path, wanted: Wanted) -> None:
    """Refuse a file that is not what was asked for.

    Args:
        value: Its content.
        path: For the message.
        wanted: What was asked for.

    Raises:
        ReproError: it is of another form; the line has its name and the way out.
    """
    form = form_of(value)
    if form != wanted:
        what, fix = FORMS[form]
        raise ReproError(f"{path} is {what}: {fix or WANTED[wanted]}")
