"""The words of a trace as data: rows, step records, the header, and how roots and the chain are made."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from repro_golden.base.canonical import (
    canonical_json,
    decode_float,
    digest,
    encode_float,
    frame,
    parse_json,
    xxh3_128_hexdigest,
)
from repro_golden.base.systems import SYSTEMS, System
from repro_golden.fingerprint.definition import SCHEME, Lanes, bind
from repro_golden.fingerprint.share import Share

__all__ = ["FORMAT", "PHASES", "RECORDER", "Header", "NotFinite", "Row", "StepRecord", "chain", "dump_path", "root"]

FORMAT = 3
"""Since 2 several steps share a row group of the sealed rows, and the step log has an index; since 3 a step's line is
without its chain, which its digest covers, and the index in columns."""
RECORDER = 23
"""Version of what the recorder observes and how; part of the key under which probes are reused."""

PHASES = ("input", "forward", "loss", "grad", "update")
METRIC = "metric"
"""The dtype name of a metric: one Python float."""
DIGEST = "sha256"
"""The dtype name of a row that holds a digest of a tensor or file, in place of its content."""


@dataclass(slots=True)
class Row:
    """One signal of one step. Nothing changes a row; it is not frozen because freezing makes each one dearer.

    Attributes:
        phase: One of `PHASES`.
        name: The signal's name, the same in every layout.
        dtype: torch's name, or ``metric`` for a Python float.
        shape: The global shape.
        lanes: The additive fingerprint of the content (`fingerprint.definition`).
        nonfinite: NaN and infinite elements.
        absmax: Largest finite magnitude.
        l2: Root of the sum of squares of the finite values.
        sketch: Raw values at fixed pseudo-random positions.
        values: All raw values, for per-token columns and metrics; None for weights and gradients.
        placement: Which bytes of the canonical tensor this row covers (`Share.cover_text`); None for the whole. Only
            between ranks and their trace it may also say that a rank holds all of them.
    """

    phase: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    lanes: Lanes
    nonfinite: int
    absmax: float
    l2: float
    sketch: bytes
    values: bytes | None = None
    placement: str | None = None

    @property
    def fingerprint(self) -> str:
        """32 hex digits over content, dtype and shape; of a part, also over what it covers and its cut words."""
        bound = bind(self.lanes, self.dtype, self.shape)
        return bound if self.placement is None else digest("share", bound, self.placement)

    @property
    def share(self) -> Share | None:
        """What this row gives to the whole tensor's fingerprint (`share.merge`); None where it is the whole."""
        if self.placement is None:
            return None
        return Share.from_cover(self.dtype, self.shape, self.lanes, self.placement)

    @property
    def whole(self) -> bool:
        """Whether this row is of all of the tensor."""
        share = self.share
        return share is None or share.whole

    @property
    def number(self) -> float | None:
        """The number of a metric; None of what is no metric, or has lost it."""
        return struct.unpack("<d", self.values)[0] if self.dtype == METRIC and self.values is not None else None

    @property
    def key(self) -> tuple[int, str]:
        """Where the signal stands in a step: its phase's number, then its name."""
        return PHASES.index(self.phase), self.name


def dump_path(trace: Path, step: int, phase: str, name: str) -> Path:
    """Where the raw bytes of a dumped signal lie in a trace's folder. Different names never share a file."""
    return trace / "dumps" / f"{step}-{phase}-{quote(name, safe='')}.bin"


def root(rows: Iterable[Row]) -> str:
    """A step's root: over its signals by phase and name, so the order of observation plays no part."""
    leaves = sorted([(*_leaf(row.phase, row.name), row.fingerprint) for row in rows])
    return digest("root", *[xxh3_128_hexdigest(start + frame(print_)) for _, start, print_ in leaves])


@functools.lru_cache(maxsize=1 << 16)
def _leaf(phase: str, name: str) -> tuple[tuple[int, str], bytes]:
    """Where a signal is sorted, and the start of its leaf: ``digest("leaf", phase, name, fingerprint)``."""
    return (PHASES.index(phase), name), frame("leaf") + frame(phase) + frame(name)


def chain(previous: str, step: int, step_root: str) -> str:
    """The chain after a step. Equal chains mean equal roots in this step and in every one before it."""
    return digest("chain", previous, str(step), step_root)


_CHECK = 16
"""Hex digits of the digest that a line carries of itself."""
_CHECKED, _BEHIND = '{"check":"', '",'
"""What stands before and behind them in a line without an earlier key."""
_REST = len(_CHECKED) + _CHECK + len(_BEHIND)


def to_checked_line(value: dict[str, Any]) -> str:
    """One canonical JSON line that carries a digest of itself."""
    return canonical_json({**value, "check": _check_of(value)})


def from_checked_line(line: str) -> dict[str, Any]:
    """The inverse of `to_checked_line`; ValueError, KeyError or TypeError when any byte was changed."""
    before, mark, rest = line.partition('"check":"')
    end = _CHECK + len(_BEHIND)  # without them the line is as it was when its digest was made
    if mark and rest[_CHECK:end] == '",' and digest(content := before + rest[end:])[:_CHECK] == rest[:_CHECK]:
        return dict(parse_json(content))
    raw: dict[str, Any] = parse_json(line)  # the first of that name may be another one
    check = raw["check"]
    values = checked(raw)
    if canonical_json({**values, "check": check}) != line:
        raise ValueError("damaged line")
    return values


def closing(line: str) -> Mapping[str, Any] | None:
    """What a step log's closing line says; None of another line, ValueError or KeyError of a damaged one."""
    return from_checked_line(line)["end"] if line.startswith('"end":', _REST) else None


def checked(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping without the digest of itself, if it carries one; ValueError or TypeError where that is of another.

    The first mappings carried none. One that carries it under another name is none of them: that name was damaged.
    """
    content = _without(raw, "check")
    if "check" in raw:
        whole = _check_of(content) == raw["check"]
    else:
        texts = [name for name, value in raw.items() if isinstance(value, str) and len(value) == _CHECK]
        whole = not any(_check_of(_without(raw, name)) == raw[name] for name in texts)
    if not whole:
        raise ValueError("its content is not what was written")
    return content


def _check_of(value: Mapping[str, Any]) -> str:
    return digest(canonical_json(value))[:_CHECK]


def _without(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key != name}


class NotFinite(NamedTuple):
    """Where a value is NaN or infinite; no phase for a number that was printed."""

    step: int
    phase: str
    name: str

    def __str__(self) -> str:
        phase = f" in phase {self.phase}" if self.phase else ""
        return f"{self.name}{phase} of step {self.step}"

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        return {"step": self.step, "phase": self.phase, "signal": self.name}


@dataclass(frozen=True)
class StepRecord:
    """One line of the step log.

    Attributes:
        step: The optimizer update's number, from 0.
        root: `root` of its rows.
        chain: `chain` up to here.
        signals: How many rows the step has.
        content: Digest of the whole rows, with statistics, sketches and values.
        metrics: The program's own numbers, exact.
        shown: Which of them were read from free text: no row has them, and no root.
    """

    step: int
    root: str
    chain: str
    signals: int
    content: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    shown: Sequence[str] = ()

    @property
    def nonfinite(self) -> list[str]:
        """The metrics that are NaN or infinite."""
        return [name for name, value in self.metrics.items() if not math.isfinite(value)]

    @property
    def compared(self) -> dict[str, float]:
        """The metrics that rows have, which are compared by bits."""
        return {name: value for name, value in self.metrics.items() if name not in self.shown}

    def to_line(self) -> str:
        """One canonical JSON line. The chain is not in it, and part of what its digest is of."""
        content = {
            "step": self.step,
            "root": self.root,
            "signals": self.signals,
            "content": self.content,
            **({"metrics": {n: encode_float(value) for n, value in self.metrics.items()}} if self.metrics else {}),
            **({"shown": list(self.shown)} if self.shown else {}),
        }
        return canonical_json({**content, "check": _check_of({**content, "chain": self.chain})})

    @classmethod
    def from_line(cls, line: str, previous: str) -> StepRecord:
        """The inverse of `to_line` behind a step with the chain `previous`.

        Raises:
            ValueError, KeyError, TypeError or AttributeError: it is anything else.
        """
        if not line.startswith(_CHECKED):  # until format 2 the chain stood in the line
            raw = from_checked_line(line)
            follows = raw["chain"] == chain(previous, raw["step"], raw["root"])
        else:
            rest = line[_REST:]
            raw = parse_json(f"{{{rest}")
            raw["chain"] = chain(previous, raw["step"], raw["root"])
            content = f'{{"chain":"{raw["chain"]}",{rest}'
            follows = line == f'{_CHECKED}{digest(content)[:_CHECK]}",{rest}'
        if not follows:
            raise ValueError("another line, or behind another")
        return cls.from_mapping(raw, raw["chain"])

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any], step_chain: str) -> StepRecord:
        """A step from its line's content; KeyError, TypeError or ValueError on anything else."""
        metrics = {name: decode_float(value) for name, value in raw.get("metrics", {}).items()}
        return cls(
            raw["step"], raw["root"], step_chain, raw["signals"], raw["content"], metrics, tuple(raw.get("shown", ()))
        )


@dataclass(frozen=True)
class Header:
    """What a trace is a trace of.

    Attributes:
        case: The canonical case (`file.Case.canonical`).
        rollouts: Digest of the rollouts that were consumed.
        subject: ``kind``, ``commit`` and ``tree`` of the code under test, where known.
        identity: `identity.Identity.to_mapping` of the process.
        steps: How many steps the run was meant to make.
        first_step: The step it started from: 0, or that of the state it was loaded from.
        recorder: Number of the recorder that made it.
    """

    case: Mapping[str, Any]
    rollouts: str
    subject: Mapping[str, Any]
    identity: Mapping[str, Any]
    steps: int
    first_step: int = 0
    recorder: int = RECORDER

    @property
    def system(self) -> System | None:
        """The trainer that wrote columns in its own form, also where a run's folder was read; None where none did."""
        return next((system for system in SYSTEMS if system == self.subject.get("kind")), None)

    def to_mapping(self) -> dict[str, Any]:
        """JSON types, with the format number."""
        return {
            "format": FORMAT,
            "recorder": self.recorder,
            "scheme": SCHEME,
            "case": dict(self.case),
            "rollouts": self.rollouts,
            "subject": dict(self.subject),
            "identity": dict(self.identity),
            "steps": self.steps,
            "first_step": self.first_step,
        }

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Header:
        """The inverse of `to_mapping`; KeyError when a part is missing."""
        steps, first_step, recorder = int(raw["steps"]), int(raw["first_step"]), int(raw.get("recorder", 1))
        return cls(raw["case"], raw["rollouts"], raw["subject"], raw["identity"], steps, first_step, recorder)
