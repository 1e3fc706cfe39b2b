"""Predicates: what makes a probe BAD. Each is parsed from one line of text and never evaluated as code.

``bitwise``, ``finite``, ``exit``, ``kl>NUMBER``, ``ulp>NUMBER``, ``metric:NAME [rtol=NUMBER] [atol=NUMBER]``,
``ci:SYSTEM`` or ``ci:NAME`` (`ci.checks`), and ``FILE.py:FUNCTION``. A value that is NaN, infinite or absent never
passes for a good one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from repro_bisect.predicates.ci.checks import parse_ci
from repro_golden.base.errors import NotShownError, ReproError, UnjudgedError
from repro_golden.case.file import Bound, Compare
from repro_golden.compare.coverage import Coverage, coverage_of, only_bounds
from repro_golden.compare.kl import NoKl, kl_between
from repro_golden.compare.renames import aligned, first_other_chain
from repro_golden.compare.step_difference import differing, in_order, unlike
from repro_golden.compare.told_metrics import moved_text
from repro_golden.compare.traces import (
    Divergence,
    check_comparable,
    first_difference,
    first_divergent_index,
    measured,
    named_alike,
    violations,
)
from repro_golden.trace import Trace
from repro_golden.trace.model import DIGEST
from repro_golden.trace.token_columns import column_parts

__all__ = [
    "Bitwise",
    "Bounds",
    "Exceeds",
    "Exit",
    "Finite",
    "Own",
    "Predicate",
    "first_violation",
    "known_violation",
    "looked_between",
    "of_case",
    "parse_predicate",
    "predicate_of",
]

KNOWN = (
    "bitwise, finite, exit, kl>NUMBER, ulp>NUMBER, metric:NAME [rtol=NUMBER] [atol=NUMBER], ci:SYSTEM, ci:NAME or "
    "FILE.py:FUNCTION"
)


class Predicate(Protocol):
    """What makes a probe BAD."""

    @property
    def text(self) -> str:
        """As it is written."""

    def at(self, a: Trace, b: Trace, index: int) -> Divergence | None:
        """What of the `index`-th step that baseline `a` and probe `b` both have violates it.

        Raises:
            UnjudgedError: nobody can tell.
            NotShownError: `a` does not show what it reads.
        """

    def looked(self, baseline: Trace | None) -> Coverage:
        """What it judges of probes of a baseline; None where there are no traces."""


@dataclass(frozen=True)
class Bitwise:
    """Some signal has other bits than the baseline's.

    Attributes:
        text: As it is written.
        strict: Whether another name is a difference too.
    """

    text: str = "bitwise"
    strict: bool = False

    def at(self, a: Trace, b: Trace, index: int) -> Divergence | None:
        """See `Predicate`."""
        b = named_alike(a, b, strict=self.strict)
        if a.steps[index].root == b.steps[index].root:
            return None
        return first_difference(a, b, strict=True)

    def looked(self, baseline: Trace | None) -> Coverage:
        """See `Predicate`."""
        return coverage_of(baseline) if baseline else Coverage()


@dataclass(frozen=True)
class Finite:
    """Some signal or printed number is a NaN or an infinity, whatever the baseline holds; see `Trace.nonfinite`."""

    text: str = "finite"

    def at(self, a: Trace, b: Trace, index: int) -> Divergence | None:  # noqa: ARG002 - the baseline plays no part
        """See `Predicate`."""
        for row in b.nonfinite(index):
            detail = f"{row.nonfinite} non-finite of {row.dtype} {list(row.shape)}"
            return Divergence(b.steps[index].step, row.phase, row.name, "bound", detail)
        record = b.steps[index]
        shown = ((name, record.metrics[name]) for name in b.nonfinite_numbers(index))  # what was printed is in no row
        return next((Divergence(record.step, "loss", name, "bound", repr(value)) for name, value in shown), None)

    def looked(self, baseline: Trace | None) -> Coverage:
        """See `Predicate`."""
        return _numbers("NaN and infinite values", baseline)


@dataclass(frozen=True)
class Bounds:
    """Some metric left its bound around the baseline's: |b - a| <= atol + rtol * |a|."""

    text: str
    bounds: Mapping[str, Bound] = field(default_factory=dict)

    def at(self, a: Trace, b: Trace, index: int) -> Divergence | None:
        """See `Predicate`."""
        return next(iter(violations(a, b, index, self.bounds)), None)

    def looked(self, baseline: Trace | None) -> Coverage:  # noqa: ARG002 - every metric with a bound is there
        """See `Predicate`."""
        return only_bounds(self.bounds)


@dataclass(frozen=True)
class Exceeds:
    """A distance to the baseline is larger than a limit.

    Attributes:
        text: As it is written.
        what: ``kl``: the k3 estimate of KL(baseline || probe) over the step's tokens. ``ulp``: the most representable
            values between an element and the baseline's, in any signal, over the elements that traces keep (all of
            a per-token column or metric, a sketch of any other tensor).
        limit: The largest distance that is still good.
    """

    text: str
    what: str
    limit: float

    def at(self, a: Trace, b: Trace, index: int) -> Divergence | None:
        """See `Predicate`."""
        if self.what == "kl" and not _has_log_probs(a):
            raise NotShownError("has no log_probs in any step", f"{self.text} has nothing to measure")
        b = named_alike(a, b)
        if a.steps[index].root == b.steps[index].root:
            return None
        return self._kl(a, b, index) if self.what == "kl" else self._ulp(a, b, index)

    def looked(self, baseline: Trace | None) -> Coverage:
        """See `Predicate`."""
        if self.what == "ulp":
            return _numbers("the distance in ULP of the elements that traces keep", baseline)
        return Coverage(columns=1, judged="KL by the column log_probs; bits were not judged")

    def _kl(self, a: Trace, b: Trace, index: int) -> Divergence | None:
        step = a.steps[index].step
        kl = kl_between(a, b, index)
        if isinstance(kl, NoKl):
            if kl.of == "a":
                raise NotShownError(f"has {kl.why} at step {step}", f"{self.text} has nothing to measure")
            if kl.of == "both":
                raise UnjudgedError(f"{kl.why} at step {step}: {self.text} has nothing to measure")
            return Divergence(step, "forward", "log_probs", "bound", kl.why)
        if kl[1] <= self.limit:  # NaN is not
            return None
        return Divergence(step, "forward", "log_probs", "bound", f"KL k3 {kl[1]:.3g}, allowed {self.limit:.3g}")

    def _ulp(self, a: Trace, b: Trace, index: int) -> Divergence | None:
        step = a.steps[index].step
        for kind, row, other in differing(a.rows(index), b.rows(index), unlike(a, b).at(index)):
            if kind != "value" or other is None:
                return Divergence(step, row.phase, row.name, "bound", f"{kind}: no distance in ULP")
            size = measured(a, b, step, row, other)
            # of a dtype that has no ULP here; a hash, of what may differ by roundings, says no more than that it does
            unknown = size.differing > 0 and size.max_ulp is None and row.dtype != DIGEST
            # of a tensor that was added up of shards no element is kept
            unknown = unknown or (row.dtype != DIGEST and not row.sketch and row.values is None)
            if size.nonfinite or row.nonfinite != other.nonfinite or unknown or (size.max_ulp or 0) > self.limit:
                detail = f"{row.dtype} {list(row.shape)}, allowed {self.limit:.3g} ULP"
                now = b.name_of(row.phase, row.name)
                now = "" if now == row.name else now
                return Divergence(step, row.phase, row.name, "bound", detail, size, now=now)
        return None


@dataclass(frozen=True)
class Own:
    """A function of the user's own: ``function(baseline, trace) -> bool``, True for BAD, once a probe has ended.

    Attributes:
        text: ``FILE.py:FUNCTION``, the file relative to the checkout.
        call: The function.
    """

    text: str
    call: Callable[[Trace, Trace], object]

    def at(self, a: Trace, b: Trace, index: int) -> Divergence | None:
        """See `Predicate`; asked of the last step alone, because it judges the whole."""
        try:
            verdict = self.call(a, b)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            if a is b or self._fails_of(a):
                raise NotShownError(f"makes {self.text} fail ({why})", "correct it") from error
            raise ReproError(f"{self.text} failed ({why}): correct it") from error
        if not isinstance(verdict, bool):
            raise ReproError(f"{self.text} returned {verdict!r}: return True for BAD and False for GOOD")
        if not verdict:
            return None
        return Divergence(b.steps[index].step, "update", self.text, "bound", "says that it is BAD")

    def looked(self, baseline: Trace | None) -> Coverage:  # noqa: ARG002 - only the function knows
        """See `Predicate`."""
        return Coverage(judged=f"what {self.text} reads, and nothing else")

    def _fails_of(self, a: Trace) -> bool:
        """Whether it fails of a baseline, whatever that is compared with."""
        with contextlib.suppress(Exception):
            self.call(a, a)
            return False
        return True


@dataclass(frozen=True)
class Exit:
    """The program's exit code, as `git bisect run` reads it: 0 good, 125 skip, 1 to 127 bad. It leaves no trace."""

    text: str = "exit"

    def at(self, a: Trace, b: Trace, index: int) -> Divergence | None:  # noqa: ARG002 - there are no traces
        """Refuses: who asks has traces, and an exit code says nothing of those."""
        raise ReproError("an exit code is judged without traces: use another predicate for two traces")

    def looked(self, baseline: Trace | None) -> Coverage:  # noqa: ARG002 - there is none
        """See `Predicate`."""
        return Coverage(judged="exit codes alone")


@functools.lru_cache(maxsize=64)
def _has_log_probs(trace: Trace) -> bool:
    """Whether any step has them: asked at each step."""
    return any(column_parts(trace.rows(index), "log_probs") for index in range(len(trace.steps)))


def looked_between(predicate: Predicate, baseline: Trace | None, other: Trace | None) -> Coverage:
    """What a predicate judges of a trace beside a baseline: what one of both alone has is named, and does not count."""
    if isinstance(predicate, Bitwise) and baseline and other:
        alignment = aligned(baseline, other, strict=predicate.strict)
        differs = first_other_chain(baseline, alignment.trace) is not None
        return coverage_of(baseline, alignment.alone, moved=[] if differs else moved_text(baseline, alignment.trace))
    return predicate.looked(baseline)


def _numbers(what: str, baseline: Trace | None) -> Coverage:
    """What is judged by a property of the numbers that a trace keeps."""
    coverage = coverage_of(baseline, hashes=False) if baseline else Coverage()
    return replace(coverage, judged=f"{what} in {coverage.counted}; bits were not judged")


def of_case(rule: Compare) -> Predicate:
    """The predicate that a case's ``[compare]`` stands for."""
    return Bounds("bounds", rule.bounds) if rule.mode == "bounds" else Bitwise(strict=rule.strict)


def predicate_of(when: str | None, rule: Compare, root: Path) -> Predicate:
    """The predicate that was asked for, else that of a case; names count in it as the case says."""
    predicate = parse_predicate(when, root) if when else of_case(rule)
    return Bitwise(strict=rule.strict) if isinstance(predicate, Bitwise) else predicate


_NUMBER = r"[0-9.eE+-]+"
_EXCEEDS = re.compile(rf"(kl|ulp)\s*>\s*({_NUMBER})")
_METRIC = re.compile(rf"metric:(\S+(?: +[^\s=]+)*?)((?:\s+(?:rtol|atol)={_NUMBER})*)")
_OWN = re.compile(r"(.+\.py):([A-Za-z_][A-Za-z0-9_]*)")


def parse_predicate(text: str, root: Path) -> Predicate:
    """A predicate from its text.

    Args:
        text: See the module.
        root: Folder that the path of an own function is relative to.

    Raises:
        ReproError: none of the known forms, a number that is none, or a file without that function.
    """
    text = text.strip()
    plain: dict[str, Predicate] = {"bitwise": Bitwise(), "finite": Finite(), "exit": Exit()}
    if text in plain:
        return plain[text]
    if match := _EXCEEDS.fullmatch(text):
        return Exceeds(text, match[1], _number(match[2], text))
    if match := _METRIC.fullmatch(text):
        pairs = [part.split("=") for part in match[2].split()]
        if len({name for name, _ in pairs}) < len(pairs):
            raise ReproError(f"{text!r} says a tolerance twice")
        tolerances = {name: _number(value, text) for name, value in pairs}
        return Bounds(text, {match[1]: Bound(**tolerances)})
    if text.startswith("ci:"):
        return parse_ci(text)
    if match := _OWN.fullmatch(text):
        return Own(text, _function(root / match[1], match[2]))
    raise ReproError(f"{text!r} is no predicate: use {KNOWN}")


def _number(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ReproError(f"{text!r} in {whole!r} is no number of 0 or more")
    return value


def _function(path: Path, name: str) -> Callable[[Trace, Trace], Any]:
    spec = importlib.util.spec_from_file_location("_repro_predicate", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ReproError(f"no file {path}: correct the predicate")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ReproError(f"{path} does not import ({type(error).__name__}: {error}): correct it") from error
    attribute = getattr(module, name, None)
    if not callable(attribute):
        raise ReproError(f"{path} has no function {name}: correct the predicate")
    function: Callable[[Trace, Trace], Any] = attribute
    return function


def first_violation(predicate: Predicate, a: Trace, b: Trace, steps: int | None = None) -> Divergence | None:
    """What makes `b` BAD within its first `steps` steps, or None.

    Raises:
        ReproError: the traces cannot be compared.
    """
    check_comparable(a, b)
    common = min(len(a.steps), len(b.steps))
    if isinstance(predicate, Bitwise):
        index = first_divergent_index(a, b, strict=predicate.strict)
        late = index is None or (steps is not None and index >= steps)
        return None if late else first_difference(a, b, strict=predicate.strict)
    if isinstance(predicate, Own):  # it judges the whole, whatever that is
        return predicate.at(a, b, common - 1)
    count = min(common, steps or common)
    # what lives beside the optimizers is judged too, and stands with the last of a round in the trace's order
    for index in range(count) if isinstance(predicate, Finite) else in_order(a, b, count):
        if divergence := predicate.at(a, b, index):
            return divergence
    return None


def known_violation(predicate: Predicate, a: Trace, b: Trace, steps: int | None = None) -> Divergence | None:
    """`first_violation` where the answer stands without it: None also where nobody can tell."""
    try:
        return first_violation(predicate, a, b, steps)
    except UnjudgedError:
        return None
