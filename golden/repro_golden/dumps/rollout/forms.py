"""What a trainer's file is, from its content: the dump that was asked for, another one, or a form of former days."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from repro_golden.base.errors import ReproError

__all__ = ["FORMS", "WANTED", "Form", "Wanted", "form_of", "refuse"]

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
        value: As `archive.read_archive` or `archive.peek` gives it.
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
        what, cure = FORMS[form]
        raise ReproError(f"{path} is {what}: {cure or WANTED[wanted]}")
