"""Predicates: what each says of two traces, how it is written, and what never passes for good."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from repro_bisect.driver.confirm import explains_end
from repro_bisect.predicates.predicates import (
    Bitwise,
    Bounds,
    Exceeds,
    Exit,
    Finite,
    first_violation,
    known_violation,
    parse_predicate,
)  # fmt: skip
from repro_bisect.probe.answers import Skip, judge
from repro_golden.base.errors import NotShownError, ReproError, UnjudgedError
from repro_golden.case.file import Bound
from repro_golden.compare.kl import kl_of_step
from repro_golden.trace import Header, Row, Trace, TraceWriter
from repro_golden.trace.signals import Signals
from repro_golden.trace.writer import digest_row, metric_row

torch.set_num_threads(1)
HEADER = Header({"name": "t"}, "rollouts", {}, {}, steps=9)
NUMBERS = st.floats(0, 1e300, allow_nan=False, allow_infinity=False)
NAMES = st.text(string.ascii_letters + string.digits + "_/.-[]", min_size=1)
HERE = Path(__file__).parent


def trace(directory: Path, steps: Sequence[Sequence[Row]]) -> Trace:
    """A trace of these rows."""
    writer = TraceWriter(directory, HEADER)
    for number, rows in enumerate(steps):
        for row in rows:
            writer.add(row)
        writer.end_step(number)
    writer.close({"reason": "finished"})
    return Trace(directory)


def tensor(phase: str, name: str, *values: float, dtype: torch.dtype = torch.float32) -> Row:
    """The row of a column of values."""
    signals = Signals()
    signals.take(phase, name, torch.tensor(values, dtype=dtype))
    return signals.rows()[0]


def pair(folder: Path, a: Sequence[Sequence[Row]], b: Sequence[Sequence[Row]]) -> tuple[Trace, Trace]:
    """A baseline and a probe."""
    return trace(folder / "a", a), trace(folder / "b", b)


@given(NUMBERS)
def test_limits_are_read_exactly(limit: float) -> None:
    """`kl>` and `ulp>` keep every finite number of 0 or more to the last bit, with or without spaces."""
    for what in ("kl", "ulp"):
        for text in (f"{what}>{limit!r}", f"  {what} > {limit!r} "):
            predicate = parse_predicate(text, HERE)
            assert isinstance(predicate, Exceeds)
            assert (predicate.what, predicate.limit) == (what, limit)


@given(NAMES, st.none() | NUMBERS, st.none() | NUMBERS)
def test_tolerances_are_read_exactly(name: str, rtol: float | None, atol: float | None) -> None:
    """`metric:NAME` keeps the name and both tolerances, in any order; one that is not given is 0."""
    parts = [f"{key}={value!r}" for key, value in (("rtol", rtol), ("atol", atol)) if value is not None]
    for order in (parts, parts[::-1]):
        predicate = parse_predicate(" ".join([f"metric:{name}", *order]), HERE)
        assert isinstance(predicate, Bounds)
        assert dict(predicate.bounds) == {name: Bound(rtol=rtol or 0.0, atol=atol or 0.0)}


@pytest.mark.parametrize(
    "text",
    ["", "bits", "kl>", "kl>nan", "kl>inf", "kl>-1", "kl>1e", "ulp>1;2", "metric:", "metric:a rtol=",
     "metric:a rtol=nan", "metric:a rtol=1 rtol=2", "metric:a tol=1", "kl > __import__('os')", "tests.py",
     "missing.py:f", "a.py:b.c"],
)  # fmt: skip
def test_anything_else_is_refused_in_one_line(text: str) -> None:
    """What is no predicate is an error of one line that lists the forms, and nothing of it is evaluated."""
    with pytest.raises(ReproError) as error:
        parse_predicate(text, HERE)
    assert "\n" not in str(error.value)


def test_plain_words() -> None:
    """`bitwise`, `finite` and `exit` are what they say."""
    assert [type(parse_predicate(word, HERE)) for word in ("bitwise", "finite", "exit")] == [Bitwise, Finite, Exit]


def test_an_exit_code_says_nothing_of_traces(tmp_path: Path) -> None:
    """Two traces are never judged by `exit`: that is refused, rather than called good."""
    rows = [[metric_row("loss", "m", 1.0)]]
    with pytest.raises(ReproError, match="without traces"):
        first_violation(Exit(), *pair(tmp_path, rows, rows))


def test_metric_bounds_include_their_edge_and_no_nan(tmp_path: Path) -> None:
    """A metric at its bound is good; beyond it, NaN, infinite or gone it is BAD, at the first such step."""
    base = [[metric_row("loss", "m", 2.0)] for _ in range(2)]
    rule = parse_predicate("metric:m rtol=0.25 atol=0.5", HERE)
    for name, value, bad in (("edge", 3.0, False), ("past", math.nextafter(3.0, 4.0), True), ("nan", math.nan, True),
                             ("inf", math.inf, True), ("less", 1.0, False)):  # fmt: skip
        a, b = pair(tmp_path / name, base, [base[0], [metric_row("loss", "m", value)]])
        violation = first_violation(rule, a, b)
        assert (violation is not None) is bad, name
        assert violation is None or violation.step == 1
    a, b = pair(tmp_path / "gone", base, [base[0], [metric_row("loss", "other", 2.0)]])
    assert first_violation(rule, a, b) is not None


def test_a_bound_holds_for_each_time_that_a_metric_is_told(tmp_path: Path) -> None:
    """A trainer that logs four digits, and then prints them all, is judged by both."""
    told = [
        [metric_row("loss", "entropy", 3.459), metric_row("loss", "entropy#1", last)] for last in (3.45921, 3.45899)
    ]
    a, b = pair(tmp_path, told[:1], told[1:])
    violation = first_violation(parse_predicate("metric:entropy rtol=1e-5", HERE), a, b)
    assert violation is not None and violation.signal == "entropy#1"
    assert first_violation(parse_predicate("metric:entropy rtol=1e-3", HERE), a, b) is None
    assert first_violation(parse_predicate("metric:entropy rtol=1", HERE), b, trace(tmp_path / "c", [told[0][:1]]))


@pytest.mark.parametrize("numbers", [(2.0, math.nan), (2.0, math.inf), (2.0000001, 2.0)])
def test_what_the_probe_alone_tells_is_judged_too(tmp_path: Path, numbers: tuple[float, float]) -> None:
    """A metric that only the probe tells a second time has no value to be near to, unless each of GOOD's is there."""
    value, more = numbers
    first, probe = metric_row("loss", "m", 2.0), [metric_row("loss", "m", value), metric_row("loss", "m#1", more)]
    a, b = pair(tmp_path, [[first]], [probe])
    violation = first_violation(parse_predicate("metric:m rtol=0.1", HERE), a, b)
    assert (violation is None) is math.isfinite(more)
    assert violation is None or (violation.signal, violation.phase) == ("m#1", "loss")
    c, d = pair(tmp_path / "other", [[first]], [[metric_row("loss", "m", 2.1), metric_row("loss", "m#1", 1.9)]])
    assert first_violation(parse_predicate("metric:m rtol=0.1", HERE), c, d) is not None


def test_finite_needs_no_baseline(tmp_path: Path) -> None:
    """`finite` is violated by any NaN or infinity of the probe, even one that the baseline has too."""
    rows = [[tensor("grad", "w", 1.0, math.nan)]]
    a, b = pair(tmp_path, rows, rows)
    assert first_violation(Bitwise(), a, b) is None
    violation = first_violation(Finite(), a, b)
    assert violation is not None
    assert (violation.phase, violation.signal) == ("grad", "w")


def test_kl_is_over_its_limit_or_not(tmp_path: Path) -> None:
    """`kl>` compares k3 of a step's log-probs; NaN and another shape are BAD, no column at all is an error."""
    log_probs = [-1.0, -2.0, -0.5]
    moved = [-1.5, -2.0, -0.5]
    k3 = (math.expm1(-0.5) + 0.5) / 3
    base = [[tensor("forward", "log_probs", *log_probs)]]
    for name, other, text, bad in (
        ("over", moved, f"kl>{k3 * 0.999}", True), ("under", moved, f"kl>{k3 * 1.001}", False),
        ("nan", [math.nan, -2.0, -0.5], "kl>1", True), ("shape", [-1.0], "kl>1", True),
        ("same", log_probs, "kl>0", False),
    ):  # fmt: skip
        a, b = pair(tmp_path / name, base, [[tensor("forward", "log_probs", *other)]])
        assert (first_violation(parse_predicate(text, HERE), a, b) is not None) is bad, name
    a, b = pair(tmp_path / "none", [[tensor("forward", "x", 1.0)]], [[tensor("forward", "x", 2.0)]])
    with pytest.raises(ReproError, match="no log_probs"):
        first_violation(parse_predicate("kl>1", HERE), a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_kl_is_of_log_probs_of_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """A policy in half or double precision moved by as much as its log-probs did, and by nothing where they did not."""

    def made(loss: float, first: float) -> list[list[Row]]:
        log_probs = tensor("forward", "log_probs", first, -2.0, -0.5, dtype=dtype)
        return [[tensor("forward", "loss", loss), log_probs]]

    a, b = pair(tmp_path / "loss", made(1.0, -1.0), made(2.0, -1.0))
    assert first_violation(parse_predicate("kl>0", HERE), a, b) is None
    a, b = pair(tmp_path / "moved", made(1.0, -1.0), made(2.0, -1.5))
    assert first_violation(parse_predicate("kl>0.01", HERE), a, b) is not None


def test_kl_is_of_the_same_tokens(tmp_path: Path) -> None:
    """Log-probs of other tokens are no change of the policy: such a probe is neither good nor bad."""
    rule = parse_predicate("kl>0.01", HERE)
    tokens, log_probs = [tensor("input", "tokens", 1.0, 2.0)], [tensor("forward", "log_probs", -1.0, -2.0)]
    others, swapped = [tensor("input", "tokens", 2.0, 1.0)], [tensor("forward", "log_probs", -2.0, -1.0)]
    a, b = pair(tmp_path / "a", [tokens + log_probs], [others + swapped])
    assert judge(rule, a, b, 1) == Skip("the two show other tokens (tokens) at step 0: kl>0.01 has nothing to measure")
    assert kl_of_step(a, b, 0) is None
    with pytest.raises(UnjudgedError):
        first_violation(rule, a, b)
    a, b = pair(tmp_path / "b", [tokens + log_probs], [tokens + swapped])
    assert first_violation(rule, a, b) is not None
    masks = [tensor("input", "loss_mask", *mask) for mask in ((1.0, 1.0), (0.0, 1.0))]
    near = [tensor("forward", "log_probs", -5.0, -2.0)]
    a, b = pair(tmp_path / "c", [[masks[0], *tokens, *log_probs]], [[masks[1], *tokens, *near]])
    assert first_violation(rule, a, b) is None, "of tokens that both sides count"
    ids = [tensor("input", "tokens", 1, 2, dtype=kind) for kind in (torch.int64, torch.int32)]
    a, b = pair(tmp_path / "e", [[ids[0], *log_probs]], [[ids[1], *swapped]])
    assert kl_of_step(a, b, 0) is not None, "the same numbers of another dtype"
    padded = [[masks[1], tensor("input", "tokens", pad, 2.0), *log_probs] for pad in (0.0, 7.0)]
    a, b = pair(tmp_path / "f", padded[:1], padded[1:])
    assert kl_of_step(a, b, 0) == (0.0, 0.0), "padding that nobody counts"
    wide = [tensor("input", "loss_mask", 1.0, 1.0, 1.0)]
    a, b = pair(tmp_path / "d", [wide + log_probs], [wide + swapped])
    with pytest.raises(ReproError, match="the baseline has a loss_mask that is not of log_probs"):
        first_violation(rule, a, b)


def test_kl_is_of_all_parts_of_the_column(tmp_path: Path) -> None:
    """A second micro-batch's log-probs count with the first's, each under its own mask; a part that is gone is BAD."""
    first = [tensor("input", "loss_mask", 1.0, 0.0), tensor("forward", "log_probs", -1.0, -2.0)]
    second = [tensor("forward", "log_probs.1", -0.5, -3.0)]
    moved = [tensor("forward", "log_probs.1", -0.5, -2.0)]
    k3 = (math.expm1(1.0) - 1.0) / 3
    for text, bad in ((f"kl>{k3 * 0.999}", True), (f"kl>{k3 * 1.001}", False)):
        a, b = pair(tmp_path / text[:12], [first + second], [first + moved])
        assert (first_violation(parse_predicate(text, HERE), a, b) is not None) is bad
    a, b = pair(tmp_path / "gone", [first + second], [first])
    assert first_violation(parse_predicate("kl>1", HERE), a, b) is not None


def test_ulp_lets_nothing_pass_that_it_cannot_measure(tmp_path: Path) -> None:
    """A NaN where no sample was taken, and complex numbers, of which no distance in ULP is known."""
    rule, values = parse_predicate("ulp>4", HERE), torch.linspace(0, 1, 5000)
    for name, other in (("nan", values.clone()), ("complex", values * 5)):
        sides = []
        other[1] = math.nan if name == "nan" else 0.5
        for tensors in (values, other):
            signals = Signals()
            signals.take("grad", "w", tensors if name == "nan" else torch.complex(tensors, tensors))
            sides.append([signals.rows()])
        a, b = pair(tmp_path / name, *sides)
        if name == "nan":
            assert a.rows(0)[0].sketch == b.rows(0)[0].sketch, "else the sample shows it"
        assert first_violation(rule, a, b) is not None, name


def test_ulp_does_not_judge_hashes(tmp_path: Path) -> None:
    """A file that differs by a rounding has another hash, which says no more than that: it is no violation."""
    rows = [digest_row("update", "saved/last.pt", bytes([n]) * 32) for n in (1, 2)]
    a, b = pair(tmp_path, [[tensor("grad", "w", 1.0), rows[0]]], [[tensor("grad", "w", 1.0), rows[1]]])
    assert first_violation(Bitwise(), a, b) is not None
    assert first_violation(parse_predicate("ulp>4", HERE), a, b) is None


def test_ulp_counts_representable_values(tmp_path: Path) -> None:
    """`ulp>4` allows four representable values and not five, in any signal; NaN and another dtype are BAD."""
    number = torch.tensor(1.0)
    steps = [number]
    for _ in range(5):
        steps.append(torch.nextafter(steps[-1], torch.tensor(2.0)))
    base = [[tensor("grad", "w", 1.0, 3.0)]]
    rule = parse_predicate("ulp>4", HERE)
    for name, value, bad in (
        ("four", steps[4].item(), False),
        ("five", steps[5].item(), True),
        ("nan", math.nan, True),
    ):
        a, b = pair(tmp_path / name, base, [[tensor("grad", "w", value, 3.0)]])
        assert (first_violation(rule, a, b) is not None) is bad, name
    a, b = pair(tmp_path / "dtype", base, [[tensor("grad", "w", 1.0, 3.0, dtype=torch.float64)]])
    assert first_violation(rule, a, b) is not None
    a, b = pair(tmp_path / "zero", [[tensor("grad", "w", 0.0)]], [[tensor("grad", "w", -0.0)]])
    assert first_violation(Bitwise(), a, b) is not None
    assert first_violation(parse_predicate("ulp>0", HERE), a, b) is None, "both zeros are one value"


def test_own_function_judges_the_whole(tmp_path: Path) -> None:
    """FILE.py:FUNCTION gets both traces; what it raises, and an answer that is no bool, are errors of one line."""
    (tmp_path / "own.py").write_text(
        "def grew(a, b):\n    return b.steps[-1].metrics['m'] > a.steps[-1].metrics['m']\n"
        "def vague(a, b):\n    return 1\ndef broken(a, b):\n    return a.nothing\n"
    )
    a, b = pair(tmp_path, [[metric_row("loss", "m", 1.0)]] * 2, [[metric_row("loss", "m", v)] for v in (0.0, 2.0)])
    predicate = parse_predicate("own.py:grew", tmp_path)
    violation = first_violation(predicate, a, b)
    assert violation is not None
    assert (violation.step, violation.signal) == (1, "own.py:grew")
    assert first_violation(predicate, b, a) is None
    for name in ("vague", "broken"):
        with pytest.raises(ReproError) as error:
            first_violation(parse_predicate(f"own.py:{name}", tmp_path), a, b)
        assert "\n" not in str(error.value)
    with pytest.raises(ReproError, match="no function none"):
        parse_predicate("own.py:none", tmp_path)


def test_an_answer_stands_without_what_nobody_can_judge(tmp_path: Path) -> None:
    """Culprit and BAD may show other tokens in a later step: whether it explains BAD is not known, and no more."""
    step = [tensor("input", "tokens", 1.0, 2.0), tensor("forward", "log_probs", -1.0, -2.0)]
    other = [tensor("input", "tokens", 3.0, 4.0), tensor("forward", "log_probs", -3.0, -2.0)]
    a, b = pair(tmp_path, [step, step], [step, other])
    rule = parse_predicate("kl>0.01", HERE)
    assert known_violation(rule, a, b) is None and explains_end(rule, a, b)[0] is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("metric:m rtol=1e-1", metric_row("loss", "m", 7.0)),
        ("metric:m", metric_row("loss", "m", 7.0)),
        ("kl>0.01", tensor("forward", "log_probs", -1.0, -2.0)),
        ("ci:miles:grad_norm", metric_row("update", "train/grad_norm", 1.0)),
        ("own.py:rose", metric_row("loss", "m", 7.0)),
    ],
)
def test_a_culprit_that_loses_what_is_read_is_no_wrong_question(tmp_path: Path, text: str, shown: Row) -> None:
    """GOOD alone has to show what a predicate reads: beside a culprit that does not, nothing more is told."""
    (tmp_path / "own.py").write_text(
        "def rose(a, b):\n    return b.steps[-1].metrics.get('m', 99) > a.steps[-1].metrics['m']\n"
    )
    x, y = tensor("forward", "x", 1.0), tensor("forward", "x", 2.0)
    good, culprit = pair(tmp_path / "one", [[shown, x]] * 2, [[x]] * 2)
    _, last = pair(tmp_path / "two", [[x]], [[y]] * 2)
    rule = parse_predicate(text, tmp_path)
    assert first_violation(rule, good, good) is None and first_violation(rule, good, culprit) is not None
    for b in (culprit, last):
        with pytest.raises(NotShownError, match=r"^the baseline .*: \w+"):
            first_violation(rule, culprit, b)
    explains, why = explains_end(rule, culprit, last)
    assert explains is None and why.startswith("it ") and why.endswith("; ask from it with another --when")
    assert known_violation(rule, culprit, last) is None and isinstance(judge(rule, culprit, last, 2), Skip)
