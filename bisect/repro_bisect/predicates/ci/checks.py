"""Predicates ``ci:``: what slime, Miles and Relax assert in their CI, asked of a baseline and a probe.

``ci:SYSTEM`` asks every check of a system that the baseline shows, ``ci:SYSTEM:NAME`` one of them, ``ci:NAME`` one with
the strictest of its thresholds. Behind it may stand thresholds (``atol=5e-3``; in a set ``log_probs.atol=5e-3``),
``-NAME`` to leave a check out of a set, and ``steps_per_rollout=N`` where the case does not say it. See `ci.table`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from repro_bisect.predicates.ci.inputs import Seen, steps_per_rollout
from repro_bisect.predicates.ci.table import CHECKS, OPTIONS, CiCheck, How, Threshold, check_called
from repro_golden.base.errors import NotShownError, ReproError
from repro_golden.base.systems import SYSTEMS
from repro_golden.compare.coverage import Coverage
from repro_golden.compare.mismatch.measured import difference, exact_sum
from repro_golden.compare.step_difference import differing, unlike
from repro_golden.compare.traces import Divergence
from repro_golden.trace import Trace
from repro_golden.trace.model import DIGEST
from repro_golden.trace.token_columns import Floats

__all__ = ["CiChecks", "parse_ci"]


@dataclass(frozen=True)
class CiChecks:
    """Some check of a trainer's CI is broken.

    Attributes:
        text: As it is written.
        asked: The checks, in order.
        alone: Whether it is one check by its name, which the baseline has to show, or a set, of which that counts which
            the baseline shows.
        per_rollout: Updates that are made from one rollout; None for what the baseline's case says.
    """

    text: str
    asked: Sequence[_Asked]
    alone: bool
    per_rollout: int | None = None

    def at(self, a: Trace, b: Trace, index: int) -> Divergence | None:
        """See `predicates.Predicate`.

        Raises:
            NotShownError: the baseline does not show what one check reads, or anything that a set of them reads.
        """
        before, after = Seen(a, index), Seen(b, index)
        holding = self._asked(before)
        if not holding:
            self._asked_somewhere(a)
        return next((divergence for asked in holding if (divergence := asked.broken(before, after))), None)

    def looked(self, baseline: Trace | None) -> Coverage:
        """See `predicates.Predicate`: the checks that hold at some step of the baseline, and what of it they read."""
        held = self._held(baseline) if baseline else {}
        names = ", ".join(f"ci:{name}" for name in held) or self.text
        read = sorted({read for reads in held.values() for read in reads})
        return Coverage(judged=f"what {names} reads, and nothing else" + (f": {', '.join(read)}" if read else ""))

    def _held(self, baseline: Trace) -> dict[str, set[str]]:
        """What each check reads, at the first step at which it holds."""
        per_rollout, reads = self.per_rollout or steps_per_rollout(baseline), dict[str, set[str]]()
        for asked in self.asked:
            for index, record in enumerate(baseline.steps):
                if not asked.due(record.step, per_rollout):
                    continue
                seen = Seen(baseline, index)
                if asked.shown(seen) and (self.alone or not _another_mode(asked, seen)):
                    reads[asked.check.name] = _reads(asked.check, seen)
                    break
        return reads

    def _asked(self, seen: Seen) -> list[_Asked]:
        """The checks that hold at a step of the baseline."""
        per_rollout = self.per_rollout or steps_per_rollout(seen.trace)
        due = [asked for asked in self.asked if asked.due(seen.step, per_rollout)]
        holding = [asked for asked in due if asked.shown(seen) and (self.alone or not _another_mode(asked, seen))]
        if self.alone and len(holding) < len(due):
            check = due[0].check
            raise NotShownError(
                f"does not show {_needs(check)} at step {seen.step}, which {self.text} reads "
                f"(it has the metrics: {_names(seen)})",
                "record it with them, or ask another check",
            )
        return holding

    def _asked_somewhere(self, a: Trace) -> None:
        """Refuse a comparison in which no step of the baseline is looked at: it would pass whatever the probe does."""
        if any(self._asked(Seen(a, index)) for index in range(len(a.steps))):
            return
        if self.alone:
            when = "first update of all" if self.asked[0].check.when == "first" else "first update of a rollout"
            numbers = f"{a.steps[0].step} to {a.steps[-1].step}"
            raise NotShownError(f"has updates {numbers}, and {self.text} holds at the {when}", "ask another")
        raise NotShownError(
            f"shows nothing that {self.text} reads (its first step has the metrics: {_names(Seen(a, 0))})",
            "record it with the trainer's log or dumps, or ask another predicate",
        )


def _needs(check: CiCheck) -> str:
    """What it reads, in words."""
    if check.how == "hashes":
        return "tensors or checksums of the update phase"
    metrics, columns = (" and ".join(names) for names in (check.metrics, check.columns))
    if check.how in ("near", "relative"):
        return f"the metric {check.metrics[0]}"
    kind = "columns" if len(check.columns) > 1 else "column"
    read = f"the {kind} {columns} with unmasked tokens"
    return f"the {'metrics' if len(check.metrics) > 1 else 'metric'} {metrics} or {read}" if metrics else read


def _reads(check: CiCheck, seen: Seen) -> set[str]:
    """What a check reads of a step that it holds at."""
    metrics = {f"the metric {name}" for wanted in check.metrics for name in seen.metric(wanted)}
    columns = {f"the column {name}" for name in check.columns if seen.tokens(name) is not None}
    return metrics | columns | ({"every tensor of the phase update"} if check.how == "hashes" else set())


def _names(seen: Seen) -> str:
    return ", ".join(sorted(seen.metrics)) or "none"


def _another_mode(asked: _Asked, seen: Seen) -> bool:
    """Whether a baseline was trained without the mode that a check belongs to, so that no set of checks asks it.

    A run is meant to be true on policy or it is not; a trainer was told to write checksums or it was not. What a
    recorder keeps of weights says nothing of that, and would turn every set into a question of bits.
    """
    if asked.check.how == "hashes":
        return all(row.dtype != DIGEST for row in seen.updated())
    return asked.check.how == "bits" and asked.broken(seen, seen) is not None


# -- text

_NUMBER = re.compile(r"-?[0-9][0-9.eE+-]*|-?\.[0-9][0-9eE+-]*")
_FORM = re.compile(r"ci:(\S+)((?:\s+\S+)*)")


def parse_ci(text: str) -> CiChecks:
    """A predicate from its text; see the module.

    Raises:
        ReproError: no such system or check, a threshold that the check has not, or a number that is none.
    """
    match = _FORM.fullmatch(text)
    target = match[1] if match else ""
    head, colon, name = target.partition(":")
    if not colon and head in SYSTEMS:
        checks = {check.name: (check, [rule]) for check in CHECKS for of, rule in check.rules.items() if of == head}
    else:
        check = check_called(name if colon else head)
        rules = [rule for of, rule in check.rules.items() if not colon or of == head] if check else []
        if check is None or not rules:
            raise ReproError(_unknown(target, head if colon else "", name))
        checks = {check.name: (check, rules)}
    alone = bool(colon) or head not in SYSTEMS
    options = _Options(text, list(checks), alone).read(match[2].split() if match else [])
    chosen = [_asked(check, rules, options.limits.get(check.name, {}), text) for check, rules in checks.values()]
    left = [asked for asked in chosen if asked.check.name not in options.left_out]
    if not left:
        raise ReproError(f"{text!r} leaves every check out: keep one")
    return CiChecks(text, tuple(left), alone, options.per_rollout)


def _unknown(target: str, system: str, name: str) -> str:
    known = [check.name for check in CHECKS if not system or system in check.rules]
    if system and system not in SYSTEMS:
        return f"{target!r} names no system: write ci:SYSTEM:NAME with {', '.join(SYSTEMS)}"
    whose = f"check of {system}" if system else "check or system"
    also = "" if system else f"{', '.join(SYSTEMS)}, "
    return f"{name or target!r} is no {whose}: use {also}{', '.join(known)}"


def _asked(check: CiCheck, rules: Sequence[Threshold], overrides: Mapping[str, float], text: str) -> _Asked:
    """A check with the strictest of some thresholds, or the user's own."""
    # a `low` is the stricter the larger it is, every other threshold the smaller
    limits = {n: (max if n == "low" else min)(rule.limits[n] for rule in rules) for n in OPTIONS[check.how]}
    strict = min(rules, key=lambda rule: rule.limits.get("atol", 0.0)).strict
    limits |= overrides
    if check.how == "range" and not limits["low"] < limits["high"]:
        raise ReproError(f"{text!r} leaves {check.name} no number between {limits['low']:g} and {limits['high']:g}")
    return _Asked(check, limits, strict)


class _Options:
    """What stands behind the check: thresholds by check, checks left out, updates of a rollout."""

    def __init__(self, text: str, names: Sequence[str], alone: bool) -> None:
        self.text, self.names, self.alone = text, names, alone
        self.limits: dict[str, dict[str, float]] = {}
        self.left_out: set[str] = set()
        self.per_rollout: int | None = None

    def read(self, terms: Sequence[str]) -> _Options:
        """Each word."""
        for word in terms:
            key, equal, value = word.partition("=")
            if equal and key == "steps_per_rollout":
                self._rollout(value)
            elif equal:
                self._limit(key, value)
            elif word.startswith("-") and not self.alone and word[1:] in self.names:
                self.left_out.add(word[1:])
            else:
                raise ReproError(f"{word!r} in {self.text!r} is no option: use {self._known()}")
        return self

    def _rollout(self, value: str) -> None:
        if not re.fullmatch(r"[1-9][0-9]{0,5}", value):
            raise ReproError(f"{value!r} in {self.text!r} is no number of updates from 1")
        if self.per_rollout is not None:
            raise ReproError(f"{self.text!r} says steps_per_rollout twice")
        self.per_rollout = int(value)

    def _limit(self, key: str, value: str) -> None:
        name, dot, option = key.rpartition(".")
        name = name if dot else self.names[0]
        check = check_called(name) if name in self.names and (dot or self.alone) else None
        if check is None or option not in OPTIONS[check.how]:
            raise ReproError(f"{key!r} in {self.text!r} is no threshold: use {self._known()}")
        number = float(value) if _is_number(value) else math.nan
        wrong = not math.isfinite(number) or (option in ("atol", "rtol") and number < 0)
        if wrong or (option == "rtol" and number >= 1):
            what = "a number of 0 or more and less than 1" if option == "rtol" else "a number of 0 or more"
            raise ReproError(f"{value!r} in {self.text!r} is not {what if option[1:] == 'tol' else 'a finite number'}")
        limits = self.limits.setdefault(name, {})
        if option in limits:
            raise ReproError(f"{self.text!r} says {option} twice")
        limits[option] = number

    def _known(self) -> str:
        dotted = [f"{'' if self.alone else name + '.'}{option}=NUMBER" for name in self.names for option in _of(name)]
        return ", ".join([*dotted, "steps_per_rollout=N", *([] if self.alone else ["-NAME"])])


def _of(name: str) -> tuple[str, ...]:
    check = check_called(name)
    return OPTIONS[check.how] if check else ()


def _is_number(text: str) -> bool:
    if not _NUMBER.fullmatch(text):
        return False
    try:
        float(text)
    except ValueError:
        return False
    return True


# -- one check of a trainer's CI, asked of one step: whether the baseline shows what it reads, and what breaks it


@dataclass(frozen=True)
class _Asked:
    """A check with the thresholds that it is asked with.

    Attributes:
        check: Which.
        limits: By name, as `ci.table.OPTIONS` has them.
        strict: Whether the threshold itself is over it.
    """

    check: CiCheck
    limits: Mapping[str, float]
    strict: bool

    @property
    def allowed(self) -> str:
        """What is good, in words."""
        under = "<" if self.strict else "<="
        limits = {name: f"{value:.6g}" for name, value in self.limits.items()}
        return {
            "near": "|x| {under} {atol}", "range": "{low} < x < {high}", "tokens": "|x - y| {under} {atol}",
            "means": "|x - y| {under} {atol}", "relative": "+-{rtol} of the larger", "hashes": "equal", "bits": "equal",
        }[self.check.how].format(under=under, **limits)  # fmt: skip

    def due(self, step: int, per_rollout: int) -> bool:
        """Whether it holds at an update, by its number from 0."""
        when = self.check.when
        return when == "every" or step == 0 or (when == "rollout" and step % per_rollout == 0)

    def shown(self, seen: Seen) -> bool:
        """Whether a baseline's step shows what it reads."""
        return _SHOWN[self.check.how](self.check, seen)

    def broken(self, a: Seen, b: Seen) -> Divergence | None:
        """What of a probe's step `b` breaks it, where the baseline's step `a` shows what it reads."""
        return next(_not_finite(self.check, a, b), None) or next(_BROKEN[self.check.how](self, a, b), None)

    def near(self, x: float) -> bool:
        """Whether a number is near 0; NaN and infinities never are."""
        limit = self.limits["atol"]
        return math.isfinite(x) and (x == 0 or abs(x) < limit or (not self.strict and abs(x) <= limit))

    def found(self, seen: Seen, phase: str, signal: str, what: str) -> Divergence:
        """A violation."""
        return Divergence(seen.step, phase, signal, "bound", f"{what}; ci:{self.check.name} allows {self.allowed}")


# -- what a baseline shows


def _metrics_shown(check: CiCheck, seen: Seen) -> bool:
    return all(seen.metric(name) for name in check.metrics)


def _columns_shown(check: CiCheck, seen: Seen) -> bool:
    return seen.tokens(*check.columns) is not None


def _either_shown(check: CiCheck, seen: Seen) -> bool:
    return _metrics_shown(check, seen) or _columns_shown(check, seen)


_SHOWN: Mapping[How, Callable[[CiCheck, Seen], bool]] = {
    "near": _metrics_shown, "range": _either_shown, "tokens": _either_shown, "means": _either_shown,
    "relative": lambda check, seen: any(seen.metric(name) for name in check.metrics),
    "hashes": lambda _, seen: bool(seen.updated()), "bits": _columns_shown,
}  # fmt: skip


# -- what breaks a check


def _not_finite(check: CiCheck, a: Seen, b: Seen) -> Iterator[Divergence]:
    """Columns with values that no metric may show: a trainer can turn them into 0 on the way."""
    for name in check.columns:
        if a.tokens(name) is None:
            continue
        tokens = b.tokens(name)
        bad = 0 if tokens is None else int((~np.isfinite(tokens[0])).sum())
        what = "it has no unmasked tokens any more" if tokens is None else f"{bad} unmasked tokens are not finite"
        if tokens is None or bad:
            yield Divergence(b.step, a.column_phase(name), name, "bound", f"{what}; ci:{check.name} reads it")


def _pairs(check: CiCheck, a: Seen, b: Seen) -> Iterator[tuple[str, float | None]]:
    """Each name that the baseline has a check's metrics by, with the probe's number; None where it has none."""
    for metric in check.metrics:
        if names := a.metric(metric):
            now = b.metric(metric)
            yield from now.items() if now else [(next(iter(names)), None)]


def _near(asked: _Asked, a: Seen, b: Seen) -> Iterator[Divergence]:
    for name, x in _pairs(asked.check, a, b):
        if x is None or not asked.near(x):
            yield asked.found(b, b.phase(name), name, _said(x))


def _relative(asked: _Asked, a: Seen, b: Seen) -> Iterator[Divergence]:
    for metric in asked.check.metrics:
        for name, x in a.metric(metric).items():
            y = b.alike(metric, name)
            if y is None or not _alike(x, y, asked.limits["rtol"]):
                yield asked.found(b, b.phase(name), name, f"{x!r} became {_said(y)}")


def _alike(x: float, y: float, rtol: float) -> bool:
    """Whether two numbers are within a share of the larger; NaN and infinities never are, two zeros always."""
    return math.isfinite(x) and math.isfinite(y) and abs(y - x) <= rtol * max(abs(x), abs(y))


def _range(asked: _Asked, a: Seen, b: Seen) -> Iterator[Divergence]:
    def inside(x: float | None) -> bool:
        return x is not None and math.isfinite(x) and asked.limits["low"] < x < asked.limits["high"]

    pairs = list(_pairs(asked.check, a, b))
    for name, x in pairs:
        if not inside(x):
            yield asked.found(b, b.phase(name), name, _said(x))
    if not pairs:
        tokens = b.tokens(*asked.check.columns)
        mean = None if tokens is None else _mean(tokens[0])
        if not inside(mean):
            yield asked.found(b, "forward", asked.check.columns[0], _said(mean, "mean over tokens "))


def _two(asked: _Asked, a: Seen, b: Seen) -> Iterator[Divergence]:
    """Two means; of columns where the log shows none. For `tokens` also of |x - y|, which no two signs hide in."""
    x_name, y_name = asked.check.metrics
    logged = _metrics_shown(asked.check, a)
    if logged:
        x_base, y_base = (name.partition("/")[2] for name in (x_name, y_name))
        for where in b.metric(x_name) or a.metric(x_name):
            x, y = b.alike(x_name, where), b.alike(y_name, where.replace(x_base, y_base, 1))
            if x is None or y is None or not asked.near(x - y):
                yield asked.found(b, b.phase(where), where, f"{_said(x)}, {y_base} {_said(y)}")
    if (logged and asked.check.how == "means") or not _columns_shown(asked.check, a):
        return
    tokens, (column, other) = b.tokens(*asked.check.columns), asked.check.columns
    if tokens is None:
        yield asked.found(b, "forward", column, f"not of the same tokens as {other} any more")
        return
    d = difference(tokens[0], tokens[1])
    gap, what = (abs(_mean(d)), "mean x - y") if asked.check.how == "means" else (_mean(np.abs(d)), "mean |x - y|")
    if not asked.near(gap):
        yield asked.found(b, "forward", column, f"{what} against {other} {gap!r}")


def _hashes(asked: _Asked, a: Seen, b: Seen) -> Iterator[Divergence]:
    for row in b.updated():
        if row.nonfinite:
            yield asked.found(b, "update", row.name, f"{row.nonfinite} values are not finite")
    for kind, row, _ in differing(a.updated(), b.updated(), unlike(a.trace, b.trace)):
        yield asked.found(b, "update", row.name, "not the baseline's" if kind in ("value", "dtype", "shape") else kind)


def _bits(asked: _Asked, a: Seen, b: Seen) -> Iterator[Divergence]:  # noqa: ARG001 - the baseline plays no part
    tokens, (column, other) = b.tokens(*asked.check.columns), asked.check.columns
    if tokens is None:
        yield asked.found(b, "forward", column, f"not of the same tokens as {other}")
        return
    x, y = (side.view(np.int64) for side in tokens)  # widening to fp64 is exact: equal bits stay equal, others apart
    count = int((x != y).sum())
    if count:
        yield asked.found(b, "forward", column, f"{count} of {len(x)} unmasked tokens are not those of {other}")


_BROKEN: Mapping[How, Callable[[_Asked, Seen, Seen], Iterator[Divergence]]] = {
    "near": _near, "range": _range, "tokens": _two, "means": _two, "relative": _relative, "hashes": _hashes,
    "bits": _bits,
}  # fmt: skip


def _said(x: float | None, what: str = "") -> str:
    return "not shown any more" if x is None else f"{what}{x!r}"


def _mean(values: Floats) -> float:
    return exact_sum(values) / len(values)
