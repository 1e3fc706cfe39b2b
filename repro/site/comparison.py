"""What a comparison's page says in tables: metrics, what both runs took, and the sources beside each other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from repro.report.change import Change, change_in
from repro.site.charts import unit_of
from repro_golden.base.canonical import decode_float

__all__ = ["Metric", "Side", "Told", "explanations", "metrics", "shown", "spent_rows"]

_PLACES = ("first", "worst", "last")


@dataclass(frozen=True)
class Metric:
    """A row of the metrics' table.

    Attributes:
        name: The metric.
        unit: Its unit, or empty.
        moved: Whether it differs anywhere.
        cells: At the first step that differs, the worst and the last: step, both values, and the relative
            difference; the absolute one where there is no relative one.
    """

    name: str
    unit: str
    moved: bool
    cells: Sequence[tuple[str, str, str, str] | None]


def shown(value: Any, digits: int = 7) -> str:
    """A number to read; a dash where there is none. Of a value written as bits, what it is."""
    if value is None:
        return "-"
    number = decode_float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "+inf" if number > 0 else "-inf"
    return f"{number:.{digits}g}"


def metrics(drift: Mapping[str, Any]) -> list[Metric]:
    """Every metric of a `repro_bisect.driver.drift.Drift` given as JSON, and KL; those that moved first."""
    rows = [
        Metric(name, unit_of(name), places["first"] is not None, [_gap(places[place]) for place in _PLACES])
        for name, places in drift["metrics"].items()
    ]
    for name, places in drift["kl"].items():
        cells = [_divergence(places.get(place)) for place in _PLACES]
        rows.append(Metric(f"KL {name}", "nats", "first" in places, cells))
    return sorted(rows, key=lambda metric: not metric.moved)


def _gap(gap: Mapping[str, Any] | None) -> tuple[str, str, str, str] | None:
    if gap is None:
        return None
    change = _signed(gap["relative"])
    if gap["a"] is not None and gap["b"] is not None and not math.isfinite(decode_float(gap["relative"])):
        difference = decode_float(gap["b"]) - decode_float(gap["a"])
        change = f"{_signed(difference)} abs" if math.isfinite(difference) else shown(difference)
    return str(gap["step"]), shown(gap["a"]), shown(gap["b"]), change


def _divergence(divergence: Mapping[str, Any] | None) -> tuple[str, str, str, str] | None:
    if divergence is None:
        return None
    return str(divergence["step"]), "", shown(divergence["value"], 4), ""


def _signed(value: Any) -> str:
    text = shown(value, 3)
    return f"+{text}" if text[0].isdigit() and text != "0" else text


def spent_rows(spent: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Step time and memory of each side that was measured."""
    if not any(spent.values()):
        return []
    quantities: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("median step time, s", lambda usage: _middle(usage["step_us"][1:] or usage["step_us"])),
        ("memory of the host, MiB", lambda usage: _mib(usage["host_bytes"])),
        ("memory of the device, MiB", lambda usage: _mib(usage["device_bytes"])),
    ]
    usages = [spent.get(side) for side in ("before", "after")]
    return [(name, [value(usage) if usage else "-" for usage in usages]) for name, value in quantities]


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}" if size else "-"


def _middle(micros: Sequence[int]) -> str:
    return f"{sorted(micros)[len(micros) // 2] / 1e6:.4g}" if micros else "-"


@dataclass(frozen=True)
class Side:
    """One version's operation and its source.

    Attributes:
        point: The version.
        subject: One line on it.
        explained: `repro_bisect.explain.result.Explained` as JSON.
        lines: Number (empty where unknown), text, and whether the change has that line, of the named statement.
    """

    point: str
    subject: str
    explained: Mapping[str, Any]
    lines: Sequence[tuple[str, str, bool]]


@dataclass(frozen=True)
class Told:
    """Why a commit moved the numbers.

    Attributes:
        commit: Its facts.
        environment: What its lock files changed.
        explanation: `repro_bisect.explain.result.Explanation` as JSON; None where there is none.
        sides: Before and after, those that have an operation.
        change: The part of the change that the named lines are in; None where it names none.
        unexplained: Why there is no explanation; may be empty.
        divergence: Where its numbers first differ, or None.
    """

    commit: Mapping[str, Any]
    environment: Sequence[str]
    explanation: Mapping[str, Any] | None
    sides: Sequence[Side]
    change: Change | None
    unexplained: str
    divergence: Mapping[str, Any] | None


def explanations(culprits: Sequence[Mapping[str, Any]]) -> Iterator[Told]:
    """What is known of each culprit, given as JSON."""
    for culprit in culprits:
        explanation = culprit.get("explanation")
        versions = [explanation["before"], explanation["after"]] if explanation else []
        operations = [
            Side(
                version["point"],
                version["subject"],
                version["explained"],
                list(_lines(version["explained"]["place"], sign)),
            )
            for sign, version in zip("-+", versions, strict=False)
            if version["explained"]
        ]
        places = [side.explained["place"] for side in operations if side.explained["place"]]
        places += [*explanation["mentions"], *explanation.get("ran", ())] if explanation else []
        yield Told(
            culprit["commit"],
            culprit.get("environment") or (),
            explanation,
            operations,
            change_in(culprit["commit"]["commit"], [(p["file"], p["hunk"], p["text"]) for p in places]),
            culprit.get("unexplained") or "",
            culprit.get("divergence"),
        )


def _lines(place: Mapping[str, Any] | None, sign: str) -> Iterator[tuple[str, str, bool]]:
    """A statement's lines with their numbers; `sign` says which lines of a hunk are this version's.

    Its first line's number is known where it has one line alone, or where the change shows one of its lines.
    """
    if not place:
        return
    lines = place["text"].splitlines()
    numbered = _numbered(place["hunk"], sign)
    begin = place["line"] if len(lines) == 1 else None
    for number, text in numbered.items():
        index = next((k for k, line in enumerate(lines) if text.strip() and line.strip() == text.strip()), None)
        if begin is None and index is not None and number - index <= place["line"] < number - index + len(lines):
            begin = number - index
    for index, text in enumerate(lines):
        at = None if begin is None else begin + index
        changed = at is not None and at in numbered and numbered[at].strip() == text.strip()
        yield ("" if at is None else str(at)), text, changed


def _numbered(hunk: str, sign: str) -> dict[int, str]:
    """The lines that a hunk removed (``-``) or added (``+``), by their number."""
    head = re.match(r"@@ -(\d+)(?:,\d+)? \+(\d+)", hunk)
    if not head:
        return {}
    lines = [line[1:] for line in hunk.splitlines()[1:] if line.startswith(sign)]
    return dict(enumerate(lines, int(head[1 if sign == "-" else 2])))
