"""The checks of slime's, Miles' and Relax's CI as predicates: thresholds, when they hold, and what never passes."""

from __future__ import annotations

import math
import re
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st

from repro_bisect.predicates.ci.checks import CiChecks, parse_ci
from repro_bisect.predicates.ci.table import CHECKS, OPTIONS, CiCheck, check_called
from repro_bisect.predicates.predicates import first_violation, parse_predicate
from repro_golden.base.errors import ReproError
from repro_golden.base.systems import SYSTEMS
from repro_golden.compare.traces import Divergence
from repro_golden.fingerprint import reference
from repro_golden.trace import Header, Row, Trace, TraceWriter
from repro_golden.trace.signals import Signals
from repro_golden.trace.writer import metric_row

torch.set_num_threads(1)
HERE = Path(__file__).parent
RAM = next(iter(Path("/dev").glob("shm")), None)
HEADER = Header({"name": "t"}, "rollouts", {}, {}, steps=9)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
LIMITS = st.floats(0, 1e300)
NOT_FINITE = st.sampled_from([math.nan, -math.nan, math.inf, -math.inf])
GOOD = {
    "train/ppo_kl": 0.0, "train/pg_clipfrac": 0.0, "train/kl_loss": 0.0, "rollout/log_probs": -0.4,
    "rollout/ref_log_probs": -0.4, "rollout/rollout_log_probs": -0.41, "rollout/entropy": 0.3,
    "train/train_rollout_logprob_abs_diff": 0.01, "train/grad_norm": 0.28, "train/critic-grad_norm": 3.0,
    "train/mtp_loss": 0.5,
}  # fmt: skip
"""Metrics that pass every check."""

Step = Sequence[Row]


def metrics(**changed: float | None) -> list[Row]:
    """`GOOD` with some of it changed, by names without a folder; None leaves one out."""
    values = {name: changed.get(name.partition("/")[2].replace("-", "_"), value) for name, value in GOOD.items()}
    return [metric_row("loss", name, value) for name, value in values.items() if value is not None]


def column(name: str, *values: float, phase: str = "forward", dtype: torch.dtype = torch.float32) -> Row:
    """A per-token column."""
    signals = Signals()
    signals.take(phase, name, torch.tensor(values, dtype=dtype))
    return signals.rows()[0]


def mask(*values: int) -> Row:
    return column("loss_mask", *values, phase="input", dtype=torch.int32)


def digest_row(name: str, content: bytes) -> Row:
    """A checksum of the update phase."""
    raw = content.ljust(32, b"\0")
    return Row("update", name, "sha256", (), reference(raw), 0, 0.0, 0.0, b"", raw)


@contextmanager
def pair(a: Sequence[Step], b: Sequence[Step], header: Header = HEADER) -> Iterator[tuple[Trace, Trace]]:
    """Two traces."""
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        traces = []
        for name, steps in (("a", a), ("b", b)):
            writer = TraceWriter(Path(folder, name), header)
            for number, rows in enumerate(steps, header.first_step):
                for row in rows:
                    writer.add(row)
                writer.end_step(number)
            writer.close({"reason": "finished"})
            traces.append(Trace(Path(folder, name)))
        yield traces[0], traces[1]


def violation(text: str, a: Step | Sequence[Step], b: Step | Sequence[Step], header: Header = HEADER) -> str | None:
    """What of a probe's steps violates a predicate, as text; a single step may stand for a list of one."""
    both = [[side] if not side or isinstance(side[0], Row) else side for side in (a, b)]
    with pair(*both, header) as (x, y):  # type: ignore[arg-type]
        divergence: Divergence | None = first_violation(parse_predicate(text, HERE), x, y)
        return None if divergence is None else str(divergence)


def texts(check: CiCheck) -> list[str]:
    """The ways to ask for one check."""
    return [f"ci:{check.name}", *(f"ci:{system}:{check.name}" for system in check.rules)]


OF_METRICS = [check for check in CHECKS if check.metrics]
EACH = [pytest.param(check, id=check.name) for check in OF_METRICS]


# -- the table


def test_every_row_says_where_its_threshold_is_from() -> None:
    """Each check has the thresholds that its kind takes, from a file of the system at a commit, and its own name."""
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert not {check.name for check in CHECKS} & set(SYSTEMS)
    for check in CHECKS:
        assert check.rules
        assert check.metrics or check.columns or check.how == "hashes"
        for system, rule in check.rules.items():
            assert set(rule.limits) == set(OPTIONS[check.how]), check.name
            assert re.fullmatch(rf"{system}/[a-z_/]+\.py@[0-9a-f]{{9}}", rule.source)


def documented(check: CiCheck) -> str:
    """What a check's row in the documentation must match: its numbers, with words around them."""

    def limits_of(limits: Mapping[str, float]) -> str:
        if "low" in limits:
            return f"{limits['low']:g} to {limits['high']:g}"
        return f"{next(iter(limits.values())):g}" if limits else "yes"

    reads = ", ".join(f"`{name.partition('/')[2]}`" for name in check.metrics) or {
        "hashes": "phase `update`", "bits": "columns `log_probs`, `rollout_log_probs`",
    }[check.how]  # fmt: skip
    when = {"first": "first of all", "rollout": "first of a rollout", "every": "every"}[check.when]
    limits = [limits_of(check.rules[system].limits) if system in check.rules else "" for system in SYSTEMS]
    numbers = " ".join(f"| {cell}" if cell else "|" for cell in (reads, when, *limits))
    words = r"(?:[^|\n]|\\\|)+"
    return rf"(?m)^\| `{check.name}`: {words} {re.escape(numbers)} \| {words} \| {words} \|$"


def test_the_documentation_has_every_row() -> None:
    """docs/reference/bisect.md shows each check: what it asks, when, its thresholds, its hole and the cure."""
    text = (HERE.parent / "docs" / "reference" / "bisect.md").read_text(encoding="utf-8")
    for check in CHECKS:
        assert re.search(documented(check), text), f"docs/reference/bisect.md lacks a row like {documented(check)}"
        for rule in check.rules.values():
            assert f"`{rule.source}`" in text


# -- what never passes


@pytest.mark.parametrize("check", EACH)
@given(bad=NOT_FINITE, both=st.booleans(), data=st.data())
@at_most(15)
def test_what_is_not_finite_breaks_every_check(check: CiCheck, bad: float, both: bool, data: st.DataObject) -> None:
    """NaN and infinities of any metric that a check reads violate it, in each system, also where both have them."""
    name = data.draw(st.sampled_from(check.metrics)).partition("/")[2].replace("-", "_")
    probe = metrics(**{name: bad})
    for text in texts(check):
        assert violation(text, metrics(), metrics()) is None
        assert violation(text, probe if both else metrics(), probe) is not None, text


@pytest.mark.parametrize("check", EACH)
def test_what_is_gone_breaks_every_check(check: CiCheck) -> None:
    """A metric that the baseline shows and the probe does not violates the check, alone and among all of its system."""
    for metric in check.metrics:
        probe = metrics(**{metric.partition("/")[2].replace("-", "_"): None})
        for text in (*texts(check), *(f"ci:{system}" for system in check.rules)):
            assert "not shown any more" in (violation(text, metrics(), probe) or ""), text


def test_known_escapes_are_caught() -> None:
    """What passes elsewhere: a negative KL, 0.26 for 0.28, NaN for 2.0, infinity for itself, a negative loss."""
    for text in ("ci:ppo_kl", "ci:slime:ppo_kl", "ci:relax:ppo_kl", "ci:miles:ppo_kl", *(f"ci:{s}" for s in SYSTEMS)):
        assert violation(text, metrics(), metrics(ppo_kl=-1e-3)) is not None, text
    for text in ("ci:slime:kl_loss", "ci:miles:kl_loss", "ci:relax:kl_loss"):
        assert violation(text, metrics(), metrics(kl_loss=-1e-3)) is not None, text
    for text in ("ci:miles:grad_norm", "ci:miles"):
        assert math.isclose(0.28, 0.26, rel_tol=0.03, abs_tol=0.03)
        assert violation(text, metrics(), metrics(grad_norm=0.26)) is not None
        assert violation(text, metrics(), metrics(grad_norm=0.28 * 0.98)) is None
        assert violation(text, metrics(grad_norm=math.nan), metrics(grad_norm=2.0)) is not None
        assert violation(text, metrics(grad_norm=2.0), metrics(grad_norm=math.nan)) is not None
        assert violation(text, metrics(grad_norm=math.inf), metrics(grad_norm=math.inf)) is not None
        assert violation(text, metrics(grad_norm=0.0), metrics(grad_norm=-0.0)) is None, "two zeros are equal"
        assert violation(text, metrics(grad_norm=0.0), metrics(grad_norm=5e-324)) is not None
    assert violation("ci:slime", metrics(), metrics(mtp_loss=-2.0)) is not None


def test_a_nan_that_metrics_hide_is_seen_in_the_columns() -> None:
    """One NaN in the old log-probs with every metric as it was breaks each check that rests on them; masked, none."""
    base = [*metrics(), column("log_probs", -0.4, -0.5, -0.6), mask(1, 1, 0)]
    hidden = [*metrics(), column("log_probs", -0.4, math.nan, -0.6), mask(1, 1, 0)]
    masked = [*metrics(), column("log_probs", -0.4, -0.5, math.nan), mask(1, 1, 0)]
    for name in ("ppo_kl", "pg_clipfrac", "kl_loss", "log_probs_range", "train_rollout_logprob_abs_diff"):
        breach = violation(f"ci:{name}", base, hidden)
        assert breach is not None
        assert "step 0, forward, log_probs (1 unmasked tokens are not finite" in breach
        assert violation(f"ci:{name}", base, masked) is None
    gone = [*metrics(), mask(1, 1, 0)]
    assert "no unmasked tokens any more" in (violation("ci:ppo_kl", base, gone) or "")


def test_two_signs_hide_in_no_mean_of_the_reference() -> None:
    """Log-probs that differ from the reference's by both signs have its mean, and break ci:log_probs all the same."""
    base = [*metrics(), column("log_probs", -0.5, -0.25), column("ref_log_probs", -0.5, -0.25), mask(1, 1)]
    moved = [*metrics(), column("log_probs", -0.375, -0.375), column("ref_log_probs", -0.5, -0.25), mask(1, 1)]
    for text in ("ci:log_probs", "ci:slime", "ci:miles", "ci:relax"):
        assert violation(text, base, base) is None
        assert "mean |x - y| against ref_log_probs 0.125" in (violation(text, base, moved) or ""), text
    assert violation("ci:log_probs atol=0.13", base, moved) is None


# -- thresholds


@pytest.mark.parametrize("name", ["ppo_kl", "pg_clipfrac", "kl_loss", "train_rollout_logprob_abs_diff", "mtp_loss"])
@given(x=FINITE, limits=st.tuples(LIMITS, LIMITS))
@at_most(60)
def test_near_is_monotone_and_has_two_sides(name: str, x: float, limits: tuple[float, float]) -> None:
    """A number that is near 0 by a threshold is near it by every larger one, and so is its negative; 0 by all."""
    low, high = (parse_ci(f"ci:{name} atol={limit!r}").asked[0] for limit in sorted(limits))
    assert low.near(x) == low.near(-x)
    assert high.near(x) or not low.near(x)
    assert low.near(0.0)
    assert low.near(x) == (x == 0 or abs(x) < low.limits["atol"] or (not low.strict and abs(x) == low.limits["atol"]))


@given(
    a=FINITE,
    b=FINITE | st.floats(0.5, 2),
    near=st.booleans(),
    rtols=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
)
@at_most(60)
def test_grad_norm_is_monotone_and_the_same_from_both_sides(
    a: float, b: float, near: bool, rtols: tuple[float, float]
) -> None:
    """What is within a share is within every larger one, whichever side is the baseline, and with both signs turned."""
    low, high = (f"ci:grad_norm rtol={rtol!r}" for rtol in sorted(rtols))
    if near:  # by half the tolerance to twice
        a, b = min(max(a, -1e300), 1e300), min(max(a, -1e300), 1e300) * (1 + min(max(b, 0.5), 2) * min(rtols))

    def bad(text: str, x: float, y: float) -> bool:
        return violation(text, metrics(grad_norm=x), metrics(grad_norm=y)) is not None

    assert bad(low, a, b) == bad(low, b, a) == bad(low, -a, -b)
    assert bad(low, a, b) or not bad(high, a, b)
    assert not bad(low, a, a)


@given(x=FINITE, ends=st.lists(FINITE, min_size=4, max_size=4, unique=True))
@at_most(60)
def test_a_wider_range_holds_what_a_narrower_holds(x: float, ends: list[float]) -> None:
    """A mean inside of a range is inside of every range around it, and its ends are outside."""
    a, b, c, d = sorted(ends)

    def bad(low: float, high: float) -> bool:
        return violation(f"ci:entropy low={low!r} high={high!r}", metrics(), metrics(entropy=x)) is not None

    assert bad(b, c) == (not b < x < c)
    assert violation(f"ci:entropy low={b!r} high={c!r}", metrics(), metrics(entropy=b)) is not None
    assert violation(f"ci:entropy low={b!r} high={c!r}", metrics(), metrics(entropy=c)) is not None
    assert bad(b, c) or not bad(a, d)


@given(st.lists(st.tuples(st.floats(-50, 0, width=32), st.floats(-50, 0, width=32)), min_size=1, max_size=5))
@at_most(60)
def test_columns_are_enough_and_from_both_sides(tokens: list[tuple[float, float]]) -> None:
    """Without metrics the columns answer: |x - y| in the mean, whichever is which, at its threshold and not below."""
    x, y = zip(*tokens, strict=True)
    rows = [column("log_probs", *x), column("ref_log_probs", *y)]
    turned = [column("log_probs", *y), column("ref_log_probs", *x)]
    mean = math.fsum(abs(p - q) for p, q in tokens) / len(tokens)
    for limit in (mean * 0.999, mean * 1.001):
        bad = violation(f"ci:log_probs atol={limit!r}", rows, rows) is not None
        assert bad == (mean > 0 and limit < mean)
        assert bad == (violation(f"ci:log_probs atol={limit!r}", turned, turned) is not None)


def test_each_system_has_its_own_threshold() -> None:
    """A value between two systems' thresholds breaks the one and not the other, and by the name alone the strictest."""
    for name, value, good, bad in (
        ("ppo_kl", 5e-9, ("slime", "relax"), ("miles",)), ("kl_loss", 5e-9, ("slime",), ("miles", "relax")),
        ("kl_loss", 5e-10, ("slime", "miles"), ("relax",)), ("entropy", 0.8, ("slime",), ("miles", "relax")),
        ("entropy", 0.6, ("slime", "miles"), ("relax",)), ("grad_norm", 0.275, ("miles",), ("slime", "relax")),
    ):  # fmt: skip
        probe = metrics(**{name: value})
        for systems, broken in ((good, False), (bad, True)):
            for system in systems:
                for text in (f"ci:{system}", f"ci:{system}:{name}"):
                    assert (violation(text, metrics(), probe) is not None) is broken, (text, value)
        assert violation(f"ci:{name}", metrics(), probe) is not None
    probe = metrics(log_probs=-0.7, ref_log_probs=-0.7, rollout_log_probs=-0.7)
    assert [violation(f"ci:{system}", metrics(), probe) is not None for system in SYSTEMS] == [False, False, True]
    for value, broken in ((0.1, False), (math.nextafter(0.1, 1), True)):
        assert (violation("ci:slime", metrics(), metrics(train_rollout_logprob_abs_diff=value)) is not None) is broken
    for value, broken in ((9.9e-9, False), (1e-8, True)):
        assert (violation("ci:slime", metrics(), metrics(ppo_kl=value)) is not None) is broken


def test_thresholds_can_be_set_and_checks_left_out() -> None:
    """`atol=` for routing replay, `NAME.atol=` within a set, `-NAME` out of it."""
    probe = metrics(ref_log_probs=-0.404)
    assert violation("ci:log_probs", metrics(), probe) is not None
    assert violation("ci:log_probs atol=5e-3", metrics(), probe) is None
    assert violation("ci:miles", metrics(), probe) is not None
    assert violation("ci:miles log_probs.atol=5e-3", metrics(), probe) is None
    assert violation("ci:miles -log_probs", metrics(), probe) is None
    assert violation("ci:grad_norm rtol=0.05", metrics(), metrics(grad_norm=0.27)) is None
    assert violation("ci:grad_norm", metrics(), metrics(critic_grad_norm=4.0)) is not None


# -- when a check holds


def test_checks_hold_at_their_updates() -> None:
    """The first update of all, the first of each rollout, or every one; the case or the text says how many it has."""
    case = {"name": "t", "subject": {"kind": "slime", "steps_per_rollout": 2}}
    core = {"name": "t", "subject": {"kind": "core", "config": {"num_steps_per_rollout": 2}}}
    bad = {"kl_loss": 1.0, "ppo_kl": 1.0, "entropy": 2.0, "grad_norm": 9.0}
    for header, more in ((replace(HEADER, case=case), ""), (replace(HEADER, case=core), ""),
                         (HEADER, " steps_per_rollout=2")):  # fmt: skip
        for name, value in bad.items():
            for step in range(4):
                probe = [metrics(**{name: value}) if k == step else metrics() for k in range(4)]
                breach = violation(f"ci:{name}{more}", [metrics()] * 4, probe, header)
                check = check_called(name)
                assert check is not None
                holds = {"first": step == 0, "rollout": step % 2 == 0, "every": True}[check.when]
                assert (breach is not None) is holds, (name, step)
                assert breach is None or breach.startswith(f"step {step},")
    probe = [metrics(), metrics(ppo_kl=1.0)]
    assert violation("ci:ppo_kl", [metrics()] * 2, probe) is not None, "one update makes a rollout unless it is said"
    # a case that says it is not asked again where the predicate says it
    assert violation("ci:ppo_kl steps_per_rollout=1", [metrics()] * 2, probe, replace(HEADER, case=case)) is not None


def test_metrics_go_by_two_names() -> None:
    """A metric is found with its folder and without, on each side by itself; under both names both are asked."""
    bare = [metric_row("loss", name.partition("/")[2], value) for name, value in GOOD.items()]
    for system in SYSTEMS:
        for a, b in ((bare, bare), (bare, metrics()), (metrics(), bare)):
            assert violation(f"ci:{system}", a, b) is None
    assert violation("ci:ppo_kl", metrics(), [metric_row("loss", "ppo_kl", 1.0)]) is not None
    both = [metric_row("loss", "ppo_kl", 1.0), metric_row("loss", "train/ppo_kl", 0.0)]
    assert violation("ci:ppo_kl", metrics(), both) is not None


# -- what is not shown


@pytest.mark.parametrize("check", [pytest.param(check, id=check.name) for check in CHECKS])
def test_one_check_needs_a_baseline_that_shows_it(check: CiCheck) -> None:
    """A check by its name, on a baseline that lacks what it reads, is an error of one line that names what it lacks."""
    other = [metric_row("loss", "other", 1.0)]
    for text in texts(check):
        with pytest.raises(ReproError) as error:
            violation(text, other, other)
        assert "\n" not in str(error.value)
        assert all(name in str(error.value) for name in (*check.metrics[:1], "other", text))
    if check.when != "first":
        with pytest.raises(ReproError, match="at step 1"):
            violation(f"ci:{check.name}", [everything(), other], [everything(), other])


def everything() -> list[Row]:
    """A step that shows all that any check reads, and breaks none."""
    x = (-0.4, -0.5)
    named = [column(name, *x) for name in ("log_probs", "ref_log_probs")]
    return [*metrics(), *named, column("rollout_log_probs", *x, phase="input"), mask(1, 1), digest_row("w", b"1")]


def test_a_check_that_holds_nowhere_is_an_error() -> None:
    """Where no update is the first of all, who asks for such a check alone is told, and a set goes on without it."""
    late = replace(HEADER, first_step=3)
    for text in ("ci:kl_loss", "ci:log_probs", "ci:ppo_kl steps_per_rollout=5"):
        with pytest.raises(ReproError, match="holds at the first update of"):
            violation(text, metrics(), metrics(), late)
    assert violation("ci:slime", metrics(), metrics(), late) is None
    assert violation("ci:slime", metrics(), metrics(grad_norm=0.2), late) is not None


def test_a_set_asks_what_the_baseline_shows() -> None:
    """In a set what no baseline shows is left out, at each step by itself; where it shows nothing, nothing passes."""
    few = [metric_row("loss", "grad_norm", 1.0)]
    more = [*few, metric_row("loss", "ppo_kl", 1.0)]
    assert violation("ci:slime", few, more) is None, "the baseline has no ppo_kl"
    assert violation("ci:slime", more, few) is not None
    assert violation("ci:slime -grad_norm -ppo_kl steps_per_rollout=2", [metrics(), few], [metrics(), few]) is None
    other = [metric_row("loss", "loss", 1.0)]
    for steps in ([other], [other, other]):
        for text in ("ci:slime", "ci:miles", "ci:relax", "ci:slime -ppo_kl"):
            with pytest.raises(ReproError, match=r"shows nothing that ci:\w+.* reads .*loss\)"):
                violation(text, steps, steps)
    with pytest.raises(ReproError, match="shows nothing"):
        violation("ci:miles -grad_norm", few, few)


def test_parts_of_a_column_are_all_read() -> None:
    """Columns by micro-batch and rank are one column; a part that one of two columns lacks is no pair of columns."""
    names = ("log_probs@0", "log_probs.1@0", "log_probs@1")
    base = [column(part.replace("log_probs", name), -0.4) for name in ("log_probs", "ref_log_probs") for part in names]
    assert violation("ci:log_probs", base, base) is None
    for number in range(3):
        probe = [*base]
        probe[number] = column(names[number], -0.5)
        assert violation("ci:log_probs", base, probe) is not None
        assert "not of the same tokens" in (violation("ci:log_probs", base, [r for r in base if r != base[3]]) or "")
    with pytest.raises(ReproError, match="does not show"):
        violation("ci:log_probs", base[:5], base[:5])
    assert "not of the same tokens" in (violation("ci:log_probs", base, [r for r in base if r != base[2]]) or "")


# -- bits and hashes


def test_true_on_policy_is_asked_token_by_token() -> None:
    """One bit of one unmasked token breaks it, whatever the means are; -0.0 is not 0.0, and NaN is not itself."""

    def rows(trainer: tuple[float, ...], rollout: tuple[float, ...], *keep: int) -> list[Row]:
        return [column("log_probs", *trainer), column("rollout_log_probs", *rollout, phase="input"), mask(*keep)]

    base = rows((-0.5, -0.25, -9.0), (-0.5, -0.25, 0.0), 1, 1, 0)
    off = struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", -0.25))[0] + 1))[0]
    for text in ("ci:true_on_policy", "ci:miles:true_on_policy", "ci:miles"):
        assert violation(text, base, base) is None
        for trainer, rollout in (((-0.5, off, 0.0), (-0.5, -0.25, 0.0)), ((-0.25, -0.5, 0.0), (-0.5, -0.25, 0.0)),
                                 ((-0.5, -0.0, 0.0), (-0.5, 0.0, 0.0)),
                                 ((-0.5, math.nan, 0.0), (-0.5, math.nan, 0.0))):  # fmt: skip
            assert violation(text, base, rows(trainer, rollout, 1, 1, 0)) is not None, (text, trainer)
        assert violation(text, base, rows((-0.5, -0.25), (-0.5, -0.25), 0, 0)) is not None, "no token is left"
    wide = [base[0], column("rollout_log_probs", -0.5, -0.25, 0.0, dtype=torch.float64), base[2]]
    assert violation("ci:true_on_policy", base, wide) is None, "the same numbers in a wider dtype"
    apart = rows((-0.5, off, 0.0), (-0.5, -0.25, 0.0), 1, 1, 0)
    assert violation("ci:true_on_policy", apart, apart) is not None
    assert violation("ci:miles", apart, apart) is None, "a baseline that is not true on policy was not meant to be"


def test_the_model_hash_is_asked_after_every_update() -> None:
    """A checksum that moved, is gone or is new breaks it, as does a parameter's fingerprint, and NaN on both sides."""
    base = [digest_row("w", b"1"), digest_row("w/exp_avg", b"2")]
    for text in ("ci:model_hash", "ci:miles:model_hash", "ci:miles"):
        assert violation(text, [base] * 3, [base] * 3) is None
        other = [[*base, column("w", value, phase="grad"), metric_row("update", "lr", value)] for value in (1.0, 2.0)]
        assert violation(text, other[0], other[1]) is None, "a gradient and a metric are no weights"
        for probe in ([base[0], digest_row("w/exp_avg", b"3")], base[:1], [*base, digest_row("v", b"1")]):
            assert (violation(text, [base] * 3, [base, base, probe]) or "").startswith("step 2, update"), text
    weights = [[column("w", 1.0, value, phase="update")] for value in (2.0, 2.5, math.nan)]
    assert violation("ci:model_hash", weights[0], weights[0]) is None
    assert violation("ci:model_hash", weights[0], weights[1]) is not None
    assert violation("ci:model_hash", weights[2], weights[2]) is not None
    seen = [[*metrics(), *rows] for rows in weights]
    assert violation("ci:miles", seen[0], seen[1]) is None, "a set asks of the checksums that the trainer made"


# -- text


@given(st.sampled_from([check for check in CHECKS if OPTIONS[check.how][:1] == ("atol",)]), LIMITS)
@at_most(60)
def test_thresholds_are_read_exactly(check: CiCheck, limit: float) -> None:
    """Every finite number of 0 or more is kept to the last bit; a predicate's text is what was written."""
    for head in texts(check):
        predicate = parse_predicate(f"  {head}  atol={limit!r} ", HERE)
        assert isinstance(predicate, CiChecks)
        assert predicate.asked[0].limits == {"atol": limit}
        assert predicate.text == f"{head}  atol={limit!r}"
    system = next(iter(check.rules))
    predicate = parse_ci(f"ci:{system} {check.name}.atol={limit!r} steps_per_rollout=4")
    assert {entry.check.name: entry.limits for entry in predicate.asked}[check.name] == {"atol": limit}
    assert (predicate.per_rollout, predicate.alone) == (4, False)
    assert len(predicate.asked) == sum(system in check.rules for check in CHECKS)


@pytest.mark.parametrize(
    "text",
    ["ci:", "ci: slime", "ci:none", "ci:slime:none", "ci:slime:pg_clipfrac", "ci:verl:ppo_kl", "ci:ppo_kl:slime",
     "ci:slime:", "ci:ppo_kl atol", "ci:ppo_kl atol=", "ci:ppo_kl atol=nan", "ci:ppo_kl atol=inf", "ci:ppo_kl atol=-1",
     "ci:ppo_kl atol=1_0", "ci:ppo_kl atol=1e400", "ci:ppo_kl rtol=1", "ci:ppo_kl atol=1 atol=1",
     "ci:grad_norm atol=0.03", "ci:grad_norm rtol=1", "ci:grad_norm rtol=-0.1", "ci:slime atol=1",
     "ci:slime pg_clipfrac.atol=1", "ci:slime -pg_clipfrac", "ci:ppo_kl -ppo_kl", "ci:entropy low=1",
     "ci:entropy low=inf", "ci:model_hash atol=1", "ci:ppo_kl steps_per_rollout=0", "ci:ppo_kl steps_per_rollout=1.5",
     "ci:ppo_kl steps_per_rollout=1 steps_per_rollout=2", "ci:ppo_kl __import__('os')",
     "ci:relax -ppo_kl -kl_loss -log_probs -log_probs_range -entropy -grad_norm -mtp_loss"],
)  # fmt: skip
def test_anything_else_is_refused_in_one_line(text: str) -> None:
    """What is no check, no threshold of it or no number is an error of one line, and nothing of it is evaluated."""
    with pytest.raises(ReproError) as error:
        parse_predicate(text, HERE)
    assert "\n" not in str(error.value)
