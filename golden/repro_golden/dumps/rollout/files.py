"""Rollout dumps of slime, Miles and Relax: read in every form since 2025-07-23, written as their loaders take them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from repro_golden.base.canonical import canonical_json, digest
from repro_golden.base.errors import ReproError
from repro_golden.base.systems import SYSTEMS, System
from repro_golden.dumps.archive.bounds import shown
from repro_golden.dumps.archive.pickling import write_archive
from repro_golden.dumps.archive.reading import LIMIT, peek, read_archive
from repro_golden.dumps.rollout.fields import FIELDS, KNOWN_CLASSES, NAMES, ONLY, STATUSES, defaults, refuse
from repro_golden.dumps.rollout.typed_json import FORMAT, Encoder
from repro_golden.dumps.values import Tensor, same

__all__ = [
    "NAME",
    "RolloutDump",
    "dump_files",
    "dump_name",
    "form_text",
    "read_rollout_dump",
    "system_of",
    "write_rollout_dump",
]

NAME = re.compile(r"(eval_)?(\d+)\.pt")
"""What their templates make of ``{rollout_id}.pt``."""
_KIND = re.compile(r"(?:.*?[^0-9A-Za-z])??(eval_)?(\d+)\.pt")
"""And of ``data_{rollout_id}.pt``, as their guides have it."""


@dataclass
class RolloutDump:
    """A rollout dump as plain values.

    Give `samples` as the file holds them: each becomes a whole sample, with the trainer's default for every field that
    it lacks and today's name for a field that was renamed. What it lacked is remembered: `stored` invents nothing.

    Attributes:
        system: Whose form it has.
        rollout_id: Its number; of an evaluation the number of the rollout after which it was made.
        evaluation: Whether it holds evaluation samples (``eval_N.pt``).
        metadata: What Miles writes beside the samples; {} in the others, and in Miles' dumps before 2026-07-10.
        samples: One dict for each sample: every field of the system, then those that no version of it has.
        lacks: Keys that the file itself lacks: ``metadata``, ``rollout_id``.
        extra: Keys of the file that no version of the system writes.
        missing: For each sample, the fields that the file lacks.
        former: For each sample, old names by today's.
    """

    system: System
    rollout_id: int
    evaluation: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    lacks: frozenset[str] = frozenset()
    extra: dict[str, Any] = field(default_factory=dict)
    missing: list[frozenset[str]] = field(init=False)
    former: list[dict[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        """Make whole samples of what the file holds."""
        self.former = [_former(self.system, sample) for sample in self.samples]
        named = [
            {**{new: sample[old] for new, old in names.items()}, **_without(sample, names.values())}
            for sample, names in zip(self.samples, self.former, strict=True)
        ]
        self.missing = [NAMES[self.system] - sample.keys() for sample in named]
        # defaults first: the order of the class, whatever the file's
        self.samples = [{**defaults(self.system), **sample} for sample in named]

    @property
    def unknown_fields(self) -> set[str]:
        """Names in the samples that no version of the system has: its loader sets them as attributes."""
        return {name for sample in self.samples for name in sample} - NAMES[self.system]

    def stored(self) -> list[dict[str, Any]]:
        """The samples as the file held them: without fields that it lacked, unless they have been set since."""
        untouched = defaults(self.system)
        samples = []
        for sample, missing, former in zip(self.samples, self.missing, self.former, strict=True):
            fields = {k: v for k, v in sample.items() if k not in missing or not same(v, untouched[k])}
            samples.append({former.get(name, name): value for name, value in fields.items()})
        return samples

    def content(self) -> dict[str, Any]:
        """What the file holds."""
        head: dict[str, Any] = {"rollout_id": self.rollout_id}
        if self.system == "miles":
            head["metadata"] = self.metadata
        whole = {k: v for k, v in head.items() if k not in self.lacks or (k == "metadata" and v)}
        return {**whole, **self.extra, "samples": self.stored()}


def read_rollout_dump(
    path: Path, *, system: System | None = None, allow: Collection[str] = (), limit: int = LIMIT
) -> RolloutDump:
    """Read a rollout dump. Nothing that it names is imported or run.

    Args:
        path: The file. ``eval_N.pt`` is an evaluation.
        system: Whose it is; recognised by its fields where None.
        allow: Names of classes whose objects are kept as plain fields; those of Miles itself always are.
        limit: Most bytes of memory that it may take.

    Raises:
        ReproError: missing, damaged, beyond the limit, naming another class, in a form before 2025-07-23, or something
            else altogether; the line names the form and the way out.
    """
    try:
        value = read_archive(path, allow={*allow, *KNOWN_CLASSES}, limit=limit)
    except ReproError as refusal:
        # the classes of an old form are of no interest: its own refusal says more
        try:
            seen = peek(path, limit=limit)
        except ReproError:
            raise refusal from None
        refuse(seen, path, "rollout")
        raise
    refuse(value, path, "rollout")
    name = _KIND.fullmatch(path.name)
    samples = value["samples"]
    for number, sample in enumerate(samples):
        _check_sample(sample, number, path)
    lacks = frozenset({"rollout_id", "metadata"} - value.keys())
    rollout_id = value.get("rollout_id", int(name[2]) if name else None)
    if type(rollout_id) is not int or rollout_id.bit_length() > 63:
        what = "number beyond 64 bits" if type(rollout_id) is int else f"{type(rollout_id).__name__}, no whole number"
        raise ReproError(f"{path}: its rollout_id is a {what}: record it again")
    metadata = value.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise ReproError(f"{path}: its metadata is a {type(metadata).__name__}, no dict: record it again")
    whose = system or system_of(value)
    extra = {k: v for k, v in value.items() if k not in ("rollout_id", "metadata", "samples")}
    if whose != "miles" and "metadata" in value:
        extra["metadata"] = metadata
        metadata = None
    return RolloutDump(whose, rollout_id, bool(name and name[1]), metadata or {}, list(samples), lacks, extra)


def write_rollout_dump(path: Path, dump: RolloutDump) -> None:
    """Write a dump that its system's own loader takes; equal content gives equal bytes.

    Raises:
        ReproError: a sample has no status, or one that the loader refuses; or a value that cannot be written.
    """
    for number, sample in enumerate(dump.samples):
        _check_sample(sample, number, path)
    write_archive(path, dump.content())


def system_of(value: Mapping[str, Any]) -> System:
    """Whose dump this is, by the fields that only one of them has; slime where nothing tells.

    Args:
        value: A dump's dict, with ``samples``.
    """
    names = {name for sample in value["samples"] for name in sample}
    marks = {system: len(names & ONLY[system]) for system in SYSTEMS}
    marks["miles"] += "metadata" in value
    return max(SYSTEMS, key=lambda system: (marks[system], system == "slime"))


def form_text(dump: RolloutDump) -> str:
    """The dump's form in a few words: whose, and of which revision the newest of its fields is."""
    held = NAMES[dump.system].difference(*dump.missing) if dump.missing else frozenset[str]()
    dated = [f.since for f in FIELDS[dump.system] if f.name in held and f.since]
    if dump.system == "miles" and "metadata" not in dump.lacks:
        dated.append("e0540eb29 2026-07-10")
    newest = max(dated, key=lambda since: since.split()[1], default="")
    age = f", fields of {newest} or later" if newest else ""
    old = sorted({name for names in dump.former for name in names.values()})
    renamed = f", with {', '.join(old)} of former weeks" if old else ""
    return f"{dump.system}{' evaluation' if dump.evaluation else ''}{age}{renamed}"


def dump_name(dump: RolloutDump) -> str:
    """The file name that their templates ``{rollout_id}.pt`` give it."""
    return f"{'eval_' if dump.evaluation else ''}{dump.rollout_id}.pt"


def dump_files(folder: Path, *, evaluation: bool = True) -> list[Path]:
    """The files ``N.pt`` of a folder by number, then its ``eval_N.pt``."""
    dumps = [(bool(name[1]), int(name[2]), path) for path in folder.iterdir() if (name := NAME.fullmatch(path.name))]
    return [path for is_eval, _, path in sorted(dumps) if evaluation or not is_eval]


def content_digest(dump: RolloutDump) -> str:
    """32 hex digits over what a dump holds; equal for equal content, whatever its file's bytes and name."""
    encoder = Encoder(by_key=True)
    head = encoder.encode({k: v for k, v in dump.content().items() if k != "samples"})
    samples = [encoder.encode(sample) for sample in dump.stored()]
    content = [dump.system, dump.evaluation, head, samples]
    return digest("rollout dump", str(FORMAT), canonical_json(content), bytes(encoder.block))


def _former(system: System, sample: Mapping[str, Any]) -> dict[str, str]:
    """Old names in a sample, by today's."""
    return {
        f.name: old for f in FIELDS[system] if f.name not in sample for old in f.former if old in sample
    }  # fmt: skip


def _without(sample: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {k: v for k, v in sample.items() if k not in names}


_WHOLE = (int, np.integer)

_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "group_index": ((*_WHOLE, type(None)), "no whole number"),
    "index": ((*_WHOLE, type(None)), "no whole number"),
    "rollout_id": ((*_WHOLE, type(None)), "no whole number"),
    "response_length": (_WHOLE, "no whole number"),
    "tokens": ((list, np.ndarray, Tensor), "no list"),
    "weight_versions": ((list,), "no list"),
    "remove_sample": ((bool, int), "neither true nor false"),
}
"""What the rest of the code relies on."""


def _check_sample(sample: Mapping[str, Any], number: int, path: Path) -> None:
    """Refuse a sample that the trainer's own loader refuses, or whose numbers are none."""
    status = sample.get("status")
    if not isinstance(status, str) or status not in STATUSES:
        named = shown(status) if isinstance(status, str) else f"of type {type(status).__name__}"
        text = f"a status {named}" if "status" in sample else "no status"
        raise ReproError(
            f"{path}: sample {number} has {text}, and its loader takes {', '.join(STATUSES)} alone: record it again"
        )
    for name, (types, what) in _TYPES.items():
        if name in sample and not isinstance(sample[name], types):
            raise ReproError(
                f"{path}: {name} of sample {number} is a {type(sample[name]).__name__}, {what}: record it again"
            )
    if "response_length" in sample and int(sample["response_length"]).bit_length() > 63:
        raise ReproError(f"{path}: response_length of sample {number} is beyond 64 bits: record it again")
