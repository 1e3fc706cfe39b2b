"""Results of nights: one small JSON file for each machine, case and night, in folders that anyone can merge by copying.

The layout is asv's (``results/MACHINE/…``): no file is ever changed by a later night, so branches and machines never
conflict, and git or DVC keeps them.
"""

from __future__ import annotations

import itertools
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from repro_golden.base.canonical import check_format, decode_float, mapping_of, read_json, write_atomic
from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.trace.model import checked, to_checked_line

__all__ = [
    "EVENTS",
    "FORMAT",
    "STATUSES",
    "Baseline",
    "Check",
    "NightlyRun",
    "NightlyRuns",
    "Status",
    "Summary",
    "worst",
]

FORMAT = 2
"""1 has no digest of itself."""

Status = Literal["green", "not judged", "flaky", "changed", "error"]
STATUSES: tuple[Status, ...] = get_args(Status)
"""From the best to the worst."""
EVENTS = "events"
"""Name of the check that compares with event files, which its command names: of them no commit says anything."""


def worst(statuses: Sequence[Status]) -> Status:
    """The worst of some; of none ``not judged``, which is never a pass."""
    return max(statuses, key=STATUSES.index, default="not judged")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: ``run-to-run``, ``baseline``, ``metrics``, ``mismatch``, ``events``, ``threads=N``, ``batch NAME`` or
            ``layout NAME``.
        status: What came of it.
        text: In one line.
    """

    name: str
    status: Status
    text: str


@dataclass(frozen=True)
class Baseline:
    """What a night's numbers were compared with.

    Attributes:
        kind: A ``golden`` run of this machine; the ``last green`` night's commit, or the one at which somebody
            ``approved`` a golden run of another machine, replayed here; or ``none``.
        commit: Full id; empty for none, or where the golden run was recorded from changes of its own.
        chain: The chain after its last step.
    """

    kind: Literal["golden", "last green", "approved", "none"]
    commit: str = ""
    chain: str = ""


@dataclass(frozen=True)
class Summary:
    """One metric over a night's steps. A value that is not finite is farther out than any number.

    Attributes:
        first: At the first step.
        last: At the last.
        low: The smallest.
        high: The largest.
        median: The middle; NaN where a step's value is NaN.
    """

    first: float
    last: float
    low: float
    high: float
    median: float


@dataclass(frozen=True)
class NightlyRun:
    """What a night found of a case on a machine.

    Attributes:
        case: The case's name.
        machine: Short name of the identity.
        at: When, in UTC: ``2026-11-22T03:12:45Z``.
        commit: The commit, as `repro_bisect.axes.axis.PointInfo` has it.
        tree: Hash of the subject's code in it.
        key: Digest of the case.
        rollouts: Digest of its rollouts.
        identity: See `identity.Identity`.
        status: The worst of the checks.
        steps: How many were made.
        chain: The chain after the last one; empty where there is no trace.
        checks: What was looked at.
        baseline: What the numbers were compared with.
        metrics: Every metric.
        kl: KL(baseline || tonight) by ``k1`` and ``k3`` where it is farthest from 0.
        compared: `repro.pulls.pair.Compared` as JSON; None where bits are equal or nothing was compared.
        culprits: `repro_bisect.driver.result.Culprit`, each as JSON.
        bisect: ``range``, ``outcome`` and ``reproduce`` of the search that named them, ``why`` not all are named, and
            its ``remarks``, which earlier versions did not write; None where there was none.
        spent: `usage.Usage` as JSON, or None.
        seconds: Wall time of everything.
        reproduce: The command that does it again.
        version: Of repro.
        looked_at: `coverage.Coverage` as JSON: what the numbers were judged by; None without a trace.
        number: Which one it is, from 1, of the nights of one second and commit. The file's name says it.
    """

    case: str
    machine: str
    at: str
    commit: Mapping[str, Any]
    tree: str
    key: str
    rollouts: str
    identity: Mapping[str, Any]
    status: Status
    steps: int
    chain: str
    checks: Sequence[Check]
    baseline: Baseline
    metrics: Mapping[str, Summary]
    kl: Mapping[str, float]
    compared: Mapping[str, Any] | None = None
    culprits: Sequence[Mapping[str, Any]] = ()
    bisect: Mapping[str, Any] | None = None
    spent: Mapping[str, Any] | None = None
    seconds: float = 0.0
    reproduce: str = ""
    version: str = field(default="")
    looked_at: Mapping[str, Any] | None = None
    number: int = 1

    @property
    def looked(self) -> str:
        """What was looked at, in words; empty where a night of an earlier version does not say it."""
        if self.looked_at is None:
            return "" if self.chain else "nothing"
        return str(self.looked_at["text"])

    @property
    def search(self) -> list[str]:
        """What is to be known of the search: why it does not name every commit, and what else it met."""
        bisect = self.bisect or {}
        return [str(text) for text in (bisect.get("why"), *(bisect.get("remarks") or ())) if text]

    @property
    def place(self) -> tuple[str, ...]:
        """What no other night has: case, machine, time and commit, and its number from the second on."""
        return self.case, self.machine, self.at, str(self.commit["commit"]), *([f"{self.number}"] * (self.number > 1))

    @property
    def name(self) -> str:
        """Its file's name: when, and of what."""
        return f"{self.at.replace(':', '')}-{str(self.commit['commit'])[:10]}.json"

    def to_mapping(self) -> dict[str, Any]:
        """JSON types, with the format number."""
        return mapping_of(self, "number", format=FORMAT)

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> NightlyRun:
        """The inverse of `to_mapping`; KeyError, TypeError or ValueError where a part is missing or is none."""
        fields = dict(raw)
        fields.pop("format")
        if fields["status"] not in STATUSES or not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", fields["at"]):
            raise ValueError("status or time")
        if (looked := fields.get("looked_at")) is not None and not isinstance(looked["text"], str):
            raise ValueError("what was looked at")
        metrics = {
            name: Summary(**{k: decode_float(v) for k, v in summary.items()})
            for name, summary in fields["metrics"].items()
        }
        parsed = {
            "checks": [Check(**check) for check in fields["checks"]],
            "baseline": Baseline(**fields["baseline"]),
            "metrics": metrics,
            "kl": {name: decode_float(value) for name, value in fields["kl"].items()},
        }
        return cls(**fields | parsed)


class NightlyRuns:
    """A folder of results: ``MACHINE/CASE/TIME-COMMIT.json``. Files are added and never changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, run: NightlyRun) -> Path:
        """Add a night and return its file; a second one of the same second and commit gets a number behind its name.

        Raises:
            MachineFailureError: the disk is full or the folder cannot be written.
        """
        folder = self.folder / run.machine / run.case
        raw = json.loads(to_checked_line(run.to_mapping()))  # with a digest of itself: a flipped digit is no night
        text = json.dumps(raw, sort_keys=True, indent=1, allow_nan=False) + "\n"
        whole = folder / f".{uuid.uuid4().hex}"
        write_atomic(whole, text)
        try:
            return _linked(whole, folder / run.name)
        finally:
            whole.unlink(missing_ok=True)

    def read(self, machine: str = "*", case: str = "*") -> list[NightlyRun]:
        """Every night, oldest first; of one machine or case where that is named.

        Raises:
            ReproError: a file is damaged, or of a newer format.
        """
        runs = []
        for path in sorted(self.folder.glob("*/*/*.json")):
            if machine not in ("*", path.parent.parent.name) or case not in ("*", path.parent.name):
                continue
            raw = read_json(path, "result of a night")
            check_format(raw.get("format"), FORMAT, f"the result {path}")
            try:
                run = NightlyRun.from_mapping(checked(raw))
                again = re.fullmatch(r"-(\d+)", path.stem.removeprefix(run.name.removesuffix(".json")))
                runs.append(replace(run, number=int(again[1])) if again else run)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ReproError(f"{path} is damaged ({error}): restore it from git or DVC, or remove it") from None
        return sorted(runs, key=lambda run: (run.at, run.machine, run.case, run.number))


def _linked(whole: Path, wanted: Path) -> Path:
    """Give a whole file its name, or the first one like it that is free: unlike a rename, a link replaces nothing."""
    for number in itertools.count(1):
        path = wanted if number == 1 else wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
        try:
            path.hardlink_to(whole)
        except FileExistsError:
            continue
        except OSError as error:
            raise MachineFailureError(f"cannot write {path}: {error.strerror}; use a folder on another disk") from error
        return path
    raise AssertionError("there is always a next number")
