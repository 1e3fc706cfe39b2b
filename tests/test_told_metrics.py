"""How often, how many times and in what form a program logs is no difference; what it says in text is told apart."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from pull_kit import flat, pair, report

from repro.pulls.pair import compare_traces
from repro.pulls.report import pull_text
from repro.text import comparison_text
from repro_bisect.predicates.predicates import Bitwise, looked_between
from repro_golden.case.file import Compare
from repro_golden.compare.renames import Parting
from repro_golden.compare.traces import compare
from repro_golden.trace import Trace, TraceWriter
from repro_golden.trace.model import RECORDER, Header
from repro_golden.trace.writer import metric_row

Told = dict[str, float]
OWN = {"grad_norm": "grad", "lr": "update", "w": "update"}
X, Y, Z = 0.123456, 0.234567, 0.345678


def told(
    folder: Path,
    *steps: Told,
    recorder: int = RECORDER,
    ended: bool = True,
    patterns: tuple[str, ...] = (),
    **closing: object,
) -> Trace:
    """A trace of steps with these numbers beside a weight; those in lines of text begin with ``~``.

    One that begins with ``=`` is told by the program, although the recorder may read one of that name.
    """
    subject = {"observe": {"metrics": list(patterns)}}
    writer = TraceWriter(folder, Header({}, "", subject, {}, len(steps), recorder=recorder))
    for step in steps:
        seen = {name: x for name, x in {"w": 1.0, **step}.items() if name[0] != "~"}
        rows = [
            metric_row(OWN.get(name.removesuffix("#1"), "loss"), name.lstrip("="), number)
            for name, number in seen.items()
        ]
        writer.write(rows, {name[1:]: x for name, x in step.items() if name[0] == "~"})
    if ended:
        writer.close({"reason": "finished", **closing})
    else:
        writer.let_go()
    return Trace(folder)


def same(tmp: Path, a: list[Told], b: list[Told]) -> bool:
    """Whether two programs that tell this agree."""
    n = len(list(tmp.iterdir()))
    return compare(told(tmp / f"a{n}", *a), told(tmp / f"b{n}", *b)).equal


@pytest.mark.parametrize(
    ("before", "after", "agree"),
    [
        pytest.param({"grad_norm": X}, {"grad_norm": X, "grad_norm#logged": Y}, True, id="norm-is-logged"),
        pytest.param({"lr": X}, {"lr": X, "lr#logged": Y}, True, id="rate-is-logged"),
        pytest.param({"lr": X}, {"lr": X, "lr#logged@0": Y}, True, id="rate-is-logged-by-a-rank"),
        pytest.param({"w": 1.0}, {"grad_norm": X}, False, id="clipped-for-the-first-time"),
        pytest.param({"lr": X, "lr#logged": X}, {"lr": X, "lr#logged": Y}, False, id="logged-rate-moves"),
        pytest.param({"grad_norm": X}, {"grad_norm": X, "grad_norm#1": Y}, False, id="clipped-twice"),
        pytest.param({"grad_norm": X}, {"w": 1.0}, False, id="clipped-no-more"),
        pytest.param({"loss": X}, {"loss": 0.123, "loss#1": X}, True, id="once-more"),
        pytest.param({"loss": X}, {"loss": X, "loss#1": Y}, True, id="another-beside-it"),
        pytest.param({"loss": X}, {"loss": Y, "loss#1": Z}, False, id="once-more-and-moved"),
        pytest.param({"loss": X, "loss#1": Y}, {"loss": X}, False, id="once-less"),
        pytest.param({"loss": X, "loss#1": 0.1235}, {"loss": X}, False, id="once-less-rounded"),
        pytest.param({"loss": X}, {"loss": X, "loss#after": Y}, True, id="after-the-last-step"),
        pytest.param({"loss": X}, {"loss": Y, "loss#after": Z}, False, id="after-the-last-step-and-moved"),
        pytest.param({"loss": X}, {"loss": Y, "loss#after": X}, False, id="after-the-last-step-in-its-place"),
        pytest.param({"loss": X, "loss#after": Y}, {"loss": Y, "loss#after": X}, False, id="the-other-way-round"),
        pytest.param({"loss@1": X}, {"loss@1": Y, "loss#after@1": X}, False, id="after-the-last-step-of-a-rank"),
        pytest.param(
            {"loss": X, "loss#after": Y}, {"loss": X, "loss#after": Z, "loss#after#1": Y}, True, id="twice-after-it"
        ),
        pytest.param({"loss": X, "loss#after": Y}, {"loss": X}, False, id="no-more-after-the-last-step"),
        pytest.param({"loss": X}, {"loss@0": X, "loss@1": Y}, False, id="ranks-part"),
    ],
)
def test_what_is_logged_beside_what_was_there_is_no_difference(
    tmp_path: Path, before: Told, after: Told, agree: bool
) -> None:
    """One more telling moves no number, whatever the recorder reads itself; one that moves or is gone is found."""
    assert same(tmp_path, [before] * 2, [after] * 2) is agree


@pytest.mark.parametrize(
    ("before", "after", "agree"),
    [
        pytest.param([{"loss": X}, {"loss": Y}, {"loss": Z}], [{}, {"loss": Y}, {}], True, id="less-often"),
        pytest.param([{"loss": X}, {"loss": Y}, {"loss": Z}], [{}, {"loss": X}, {}], False, id="less-often-and-moved"),
        pytest.param([{"loss": X}, {}, {}], [{}, {"loss": Y}, {}], False, id="no-common-step"),
        pytest.param([{"loss": X}, {"loss": Y}], [{}, {}], False, id="gone"),
        pytest.param([{"loss": X}, {"loss": Y}], [{"~loss": 0.123}, {"~loss": 0.235}], True, id="to-text"),
        pytest.param([{"loss": X}, {"loss": Y}], [{"~loss": 0.1235}, {"~loss": 0.2346}], True, id="to-more-digits"),
        pytest.param([{"loss": X}, {"loss": Y}], [{"~loss": 0.123}, {"~loss": 0.236}], False, id="to-text-and-moved"),
        pytest.param([{"loss": X}, {"loss": Y}], [{"~loss": 0.123}, {}], True, id="to-text-less-often"),
        pytest.param([{"loss": X}, {}], [{"~loss": 0.123}, {"~loss": math.nan}], False, id="to-text-not-a-number"),
    ],
)
def test_a_metric_is_compared_where_both_tell_it(
    tmp_path: Path, before: list[Told], after: list[Told], agree: bool
) -> None:
    """How often it is logged, and in what form, is no difference; that nothing of it could be compared is one."""
    assert same(tmp_path, before, after) is agree
    if agree and any("loss" in step for step in after):
        assert same(tmp_path, after, before)


def test_what_is_no_number_is_so_in_lines_of_text(tmp_path: Path) -> None:
    """A metric that is NaN on purpose and is told as text now moved no number; it agrees on nothing, as before."""
    a = told(tmp_path / "a", {"loss": X, "acc": math.nan}, {"loss": Y, "acc": math.nan})
    compared = compare(a, told(tmp_path / "b", {"loss": X, "~acc": math.nan}, {"loss": Y, "~acc": math.nan}))
    assert compared.divergence is None and not compared.equal and not compared.looked.moved


def test_steps_of_one_side_are_named(tmp_path: Path) -> None:
    """What one side told more often is said, and the metric counts as looked at."""
    a, b = told(tmp_path / "a", {"loss": X}, {"loss": Y}), told(tmp_path / "b", {}, {"loss": Y})
    assert "2 metrics" in str(compare(a, b).looked) and "loss of some steps" in str(compare(a, b).looked)


def test_a_run_under_way_may_tell_it_later(tmp_path: Path) -> None:
    """A replay that logs less often is not stopped before it could have."""
    whole = told(tmp_path / "a", {"loss": X}, {"loss": Y})
    part = told(tmp_path / "b", {}, ended=False)
    parting = Parting(str(whole.directory), str(part.directory))
    assert not parting.seen(part.steps)


@pytest.mark.parametrize("other", [19, RECORDER])
def test_numbers_that_an_earlier_recorder_put_elsewhere_are_not_compared(tmp_path: Path, other: int) -> None:
    """It put late ones a step too early and a printed norm to the next step; what both put alike is compared."""
    old = [{"acc": Y, "grad_norm": X, "loss": X}, {"grad_norm": X, "grad_norm#1": Z, "lr": X, "loss": Y}]
    new = [{"grad_norm": X, "grad_norm#logged": Z, "loss": X}, {"acc": Y, "grad_norm": X, "lr": X, "loss": Y}]
    a, b = told(tmp_path / "a", *old, recorder=17), told(tmp_path / "b", *new, recorder=other)
    assert compare(a, b).equal and compare(b, a).equal
    assert not compare(a, told(tmp_path / "c", new[0], {**new[1], "loss": Z}, recorder=other)).equal


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize(
    "old",
    [
        pytest.param([X, Y, Z, None], id="and-nothing-at-the-end"),
        pytest.param([X, Y, Z, 1.0], id="and-more-steps-than-asked-for"),
    ],
)
def test_what_stood_beside_a_patterns_number_a_step_early_is_not_compared(
    tmp_path: Path, old: list[float | None], ended: bool
) -> None:
    """The verdict names it, and every number beside it whose place is the same is compared."""
    patterns = ("(?P<loss>x)",)
    sides = (
        [{"loss": X} | ({} if x is None else {"acc": x}) for x in old],
        [{"loss": X, "acc": x} for x in (0.0, X, Y, Z)],
    )
    a = told(tmp_path / "a", *sides[0], recorder=19, patterns=patterns)
    b = told(tmp_path / "b", *sides[1], patterns=patterns, ended=ended)
    for compared in (compare(a, b), compare(b, a)):
        looked = f"{compared.looked};"
        assert compared.equal and "and not compared: acc;" in looked and "2 metrics" in looked, "loss and w"
    moved = [{**step, "loss": Y} if k == 1 else step for k, step in enumerate(sides[1])]
    assert not compare(a, told(tmp_path / "c", *moved, patterns=patterns)).equal
    # without patterns nothing moved
    assert not compare(told(tmp_path / "d", *sides[0], recorder=19), told(tmp_path / "e", *sides[1])).equal


@pytest.mark.parametrize("recorder", [17, 18, 19])
@pytest.mark.parametrize("patterns", [(), ("(?P<loss>x)",)])
def test_what_is_told_now_and_then_is_compared_with_earlier_recorders(
    tmp_path: Path, recorder: int, patterns: tuple[str, ...]
) -> None:
    """Both put it to the same steps, as the trainer of transformers does whose ``logging_steps`` are some."""
    old, new = ([{}, {}, {"loss": x}, {}, {}, {"loss": x}] for x in (X, Y))
    a = told(tmp_path / "a", *old, recorder=recorder, patterns=patterns)
    assert compare(a, told(tmp_path / "b", *old, patterns=patterns)).equal
    assert not compare(a, told(tmp_path / "c", *new, patterns=patterns)).equal


def test_lines_of_text_that_stood_a_step_early_do_not_differ(tmp_path: Path) -> None:
    """An earlier recorder put inner numbers and bools there; one that moved is told."""
    a = told(tmp_path / "a", *({"~acc": x} for x in (X, Y, Z)), recorder=19)
    assert not compare(a, told(tmp_path / "b", *({"~acc": x} for x in (0.0, X, Y)))).looked.moved
    assert compare(a, told(tmp_path / "c", *({"~acc": x} for x in (X, Y, 0.0)))).looked.moved


def test_what_stood_behind_a_pass_that_makes_its_steps_is_not_compared(tmp_path: Path) -> None:
    """Before the 20th it stood with the next pass' steps."""
    a = told(tmp_path / "a", {}, {"loss": X}, {"loss": Y}, recorder=19)
    assert compare(a, told(tmp_path / "b", {"loss": X}, {"loss": Y}, {"loss": Z})).equal


@pytest.mark.parametrize(
    ("after", "agree"),
    [
        pytest.param([{"acc": X}, {"loss": Y}, {"acc": Z}, {"loss": X}], True, id="as-before"),
        pytest.param([{}, {"acc": X, "loss": Y}, {}, {"acc": Z, "loss": X}], True, id="in-the-other-step"),
        pytest.param([{}, {"acc": X, "loss": Y}, {}, {"loss": X}], True, id="less-often"),
        pytest.param([{}, {"acc": Y, "loss": Y}, {}, {"acc": Z, "loss": X}], False, id="moved"),
        pytest.param([{}, {"acc": X, "acc#1": Y, "loss": Y}, {}, {"acc": Z, "loss": X}], False, id="twice"),
        pytest.param([{}, {"loss": Y, "acc": X}, {}, {"loss": Y, "acc": Z}], False, id="another-moved"),
        pytest.param([{}, {"loss": Y}, {"acc": X}, {"loss": X}], False, id="in-another-round"),
    ],
)
def test_where_in_a_round_of_optimizers_a_metric_is_told_is_no_difference(
    tmp_path: Path, after: list[Told], agree: bool
) -> None:
    """It is compared round by round; without rounds it is told in other steps, which is a difference."""
    before, rounds = [{"acc": X}, {"loss": Y}, {"acc": Z}, {"loss": X}], {"rounds": [[[2, [[0, 0], [1, 1]]]]]}
    a, b = told(tmp_path / "a", *before, **rounds), told(tmp_path / "b", *after, **rounds)
    assert compare(a, b).equal is agree is compare(b, a).equal
    if not any("acc" in step for step in after[::2]):
        assert not compare(told(tmp_path / "c", *before), told(tmp_path / "d", *after)).equal


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ([6.942], [6.9224], "val loss (6.942 became 6.9224 at step 0)"),
        ([0.5], [0.52], "val loss (0.5 became 0.52 at step 0)"),  # perhaps 0.50
        ([0.1234, 0.2345, 0.3456, 0.4567], [0.123, 0.234, 0.346, 0.457], ""),
        ([0.1234, 0.2345, 0.3456, 0.4567], [0.123, 0.234, 0.346, 0.459], "val loss (0.4567 became 0.459 at step 3)"),
    ],
)
def test_an_agreement_says_which_text_numbers_differ(
    tmp_path: Path, before: list[float], after: list[float], message: str
) -> None:
    """With both values and what would judge them, unless it is a matter of the digits that are written."""
    sides = (("a", before), ("b", after))
    a, b = (told(tmp_path / side, *({"~val loss": x} for x in numbers)) for side, numbers in sides)
    first, looked = comparison_text(compare(a, b)).splitlines()
    assert compare(a, b).equal and first.endswith(", but numbers in lines of text differ") is bool(message)
    assert message in looked and ("`repro bisect --when metric:'val loss'`, or a bound" in looked) is bool(message)
    assert str(looked_between(Bitwise(), a, b)) == looked.removeprefix("looked at ")


def test_a_number_that_the_run_tells_in_text_is_no_absent_one(tmp_path: Path) -> None:
    """What differs is said with both values and the step where it first does, also where text tells it in more steps.

    Text of more steps than the baseline's numbers is no difference where both are to the digits that are shown.
    """
    before: list[Told] = [{"w": 1.0}, {"acc": X}, {"w": 1.0}, {"acc": Y}]
    text = [{"~acc": 0.5}, {"~acc": 0.123}, {"~acc": 0.5}, {"~acc": 0.235}]
    assert same(tmp_path, before, text)
    text[1] = {"~acc": 0.5}
    differs = compare(told(tmp_path / "a", *before), told(tmp_path / "b", *text)).divergence
    assert str(differs) == f"step 1, loss, acc ({X} became 0.5 in lines of text)"


def test_a_pull_request_says_it_in_its_verdict(tmp_path: Path) -> None:
    """`report pr` passes, and does not say that all is as it was."""
    a, b = told(tmp_path / "x", {"~acc": 0.71}), told(tmp_path / "y", {"~acc": 0.68})
    text = pull_text(report(pair(tmp_path, flat(loss=X), flat(loss=X), compared=compare_traces(a, b, Compare()))))
    assert "bit-identical in 1 step, but numbers in lines of text differ" in text and "metric:'acc'" in text


# -- what is called otherwise

RETOLD = {
    "one step tells": ({"r": [0.5, 0.123, 0.5]}, {"s": [0.5, 0.123, 0.5]}, True),
    "all steps tell": ({"r": [4.0, 5.0, 6.0]}, {"s": [4.0, 5.0, 6.0]}, True),
    "none tells": ({"r": [0.0, 0.0, 0.0]}, {"s": [0.0, 0.0, 0.0]}, False),
    "another end": ({"r": [4.0, 5.0, 6.0]}, {"s": [4.0, 5.0, 7.0]}, False),
    "another step": ({"r": [4.0, 5.0, None]}, {"s": [4.0, None, 5.0]}, False),
    "its like": (
        {"r/len/mean": [1.0, 2.0, 1.0], "r/len/std": [0.0] * 3, "r/max": [0.0] * 3},
        {"r/uniq/mean": [1.0, 2.0, 1.0], "r/uniq/std": [0.0] * 3, "r/max": [0.0] * 3},
        True,
    ),
    "its like has another value": (
        {"r/len/mean": [1.0, 2.0, 1.0], "r/len/std": [0.0] * 3},
        {"r/uniq/mean": [1.0, 2.0, 1.0], "r/uniq/std": [1.0] * 3},
        False,
    ),
    "two for one": ({"r": [1.0, 2.0, 3.0], "q": [1.0, 2.0, 3.0]}, {"s": [1.0, 2.0, 3.0]}, False),
}


@pytest.mark.parametrize("name", RETOLD)
def test_a_metric_is_known_by_its_values_in_all_steps(tmp_path: Path, name: str) -> None:
    """Where one value is such as many have, several that differ tell, and what is always 0 goes with its like."""
    old, new, equal = RETOLD[name]
    before, after = (
        [{m: v for m, values in side.items() if (v := values[at]) is not None} for at in range(3)]
        for side in (old, new)
    )
    a, b = told(tmp_path / "a", *before), told(tmp_path / "b", *after)
    comparison = compare(a, b)
    assert comparison.equal is equal
    assert not equal or comparison.renames.signals == len(old.keys() - new.keys())
    early = told(tmp_path / "early", after[0], ended=False)
    assert not Parting(str(a.directory), str(early.directory)).seen(early.steps), "a later step may tell"


NESTED = {
    "all of it": ([{"loss": X}, {"loss": Y}], [{"~train/loss": X}, {"~train/loss": Y}], True),
    "always zero": ([{"kl": 0.0}] * 2, [{"~train/kl": 0.0}] * 2, False),
    "always zero, in another dict": (
        [{"loss": X, "kl": 0.0}, {"loss": Y, "kl": 0.0}],
        [{"~train/loss": X, "~eval/kl": 0.0}, {"~train/loss": Y, "~eval/kl": 0.0}],
        False,
    ),
    "what is logged of a norm": (
        [{"grad_norm": X, "grad_norm#logged": X}],
        [{"grad_norm": X, "~train/grad_norm": X}],
        True,
    ),
    "now and then": ([{}, {"acc": Y}, {}], [{}, {"~eval/acc": Y}, {}], True),
    "deeper": ([{"train/loss": X}], [{"~log/train/loss": X}], True),
    "moved": ([{"loss": X}, {"loss": Y}], [{"~train/loss": X}, {"~train/loss": Z}], False),
    "moved first": ([{"loss": X}, {"loss": Y}], [{"~train/loss": Z}, {"~train/loss": Y}], False),
    "fewer digits": ([{"loss": X}, {"loss": Y}], [{"~train/loss": 0.123}, {"~train/loss": 0.235}], False),
    "another": ([{"loss": X}, {"loss": Y}], [{"~train/kl": X}, {"~train/kl": Y}], False),
    "another end": ([{"loss": X}, {"loss": Y}], [{"~train/aux_loss": X}, {"~train/aux_loss": Y}], False),
    "another step": ([{"loss": X}, {}], [{}, {"~train/loss": X}], False),
    "one of two": ([{"a/loss": X, "b/loss": Y}], [{"~train/a/loss": X, "~train/b/loss": Z}], False),
}


@pytest.mark.parametrize("name", NESTED)
def test_an_inner_dict_tells_what_the_flat_one_did(tmp_path: Path, name: str) -> None:
    """A number is the same as ``train/loss``, under that end of its name, with equal bits; else it is gone."""
    before, after, agree = NESTED[name]
    a, b = told(tmp_path / "a", *before), told(tmp_path / "b", *after)
    compared = compare(a, b)
    assert compared.equal is agree
    assert not agree or (compared.renames.signals == 1 and " as a number" in str(compared.looked))
    assert not compare(a, b, Compare(names="strict")).equal


def test_a_number_that_moved_into_an_inner_dict_and_moved_is_named(tmp_path: Path) -> None:
    """Where others show which dict that is: in the first step in which it is another number, with both."""
    a = told(tmp_path / "a", *({"loss": x, "kl": X} for x in (X, Y, Z)))
    b = told(tmp_path / "b", *({"~train/loss": x, "~train/kl": k} for x, k in ((X, X), (Y, Z), (Z, X))))
    first = compare(a, b).divergence
    assert first is not None and (first.step, first.name) == (1, "kl")
    assert first.detail == f"{X} became {Z} in lines of text"


# -- who clips

OWN_CLIP = {
    "logged before": ([{"grad_norm": X, "grad_norm#logged": X}], [{"=grad_norm": X}], True),
    "not logged before": ([{"grad_norm": X}], [{"=grad_norm": X}], True),
    "under a name of before": ([{"grad_norm": X, "train/grad_norm": X}], [{"train/grad_norm": X}], False),
    "under a name of before, renamed": ([{"grad_norm": X, "gnorm": X}], [{"g_norm": X}], False),
    "under a name of before, in lines of text": (
        [{"grad_norm": X, "~train/grad_norm": 0.123}],
        [{"~train/grad_norm": 0.123}],
        False,
    ),
    "under a name of before, in another dict": (
        [{"grad_norm": X, "~train/grad_norm": 0.123}],
        [{"~log/grad_norm": 0.123}],
        False,
    ),
    "every second step": ([{"grad_norm": X, "gnorm": X}] * 2, [{"grad_norm": X, "gnorm": X}, {"gnorm": X}], False),
    "every second step, and logged now": ([{"grad_norm": X}] * 2, [{"grad_norm": X, "gnorm": X}, {"gnorm": X}], False),
    "every second step before": ([{"grad_norm": X}, {}], [{"=grad_norm": X}] * 2, False),
    "logs nothing": ([{"grad_norm": X}], [{}], False),
    "in lines of text": ([{"grad_norm": X, "~grad_norm#logged": 0.123}], [{"~grad_norm": 0.123}], True),
    "in an inner dict": (
        [{"grad_norm": X, "grad_norm#logged": X, "loss": Z}],
        [{"~train/grad_norm": X, "~train/loss": Z}],
        True,
    ),
    "in lines of text, and moved": ([{"grad_norm": X}], [{"~grad_norm": 0.124}], False),
    "in an inner dict, and moved": (
        [{"grad_norm": X, "grad_norm#logged": X, "loss": Z}],
        [{"~train/grad_norm": Y, "~train/loss": Z}],
        False,
    ),
    "in lines of text, of weights": ([{"grad_norm": X}], [{"~weight_norm": 0.123}], False),
    "in lines of text, of something else": ([{"grad_norm": X}], [{"~loss": 0.123}], False),
    "of ranks": ([{"grad_norm": X, "grad_norm#logged@0": X}], [{"=grad_norm@0": X}], True),
    "moved": ([{"grad_norm": X, "grad_norm#logged": X}] * 2, [{"=grad_norm": Y}, {"=grad_norm": X}], False),
    "moved last": ([{"grad_norm": X, "grad_norm#logged": X}] * 2, [{"=grad_norm": X}, {"=grad_norm": Y}], False),
    "not logged, and moved": ([{"grad_norm": X}], [{"=grad_norm": Y}], False),
    "another is logged": ([{"grad_norm": X, "grad_norm#logged": Y}], [{"=grad_norm": Y}], False),
    "rounded": ([{"grad_norm": X, "grad_norm#logged": X}], [{"=grad_norm": 0.123}], False),
    "no norm": ([{"grad_norm": X, "loss": X}], [{"loss": X}], False),
    "told less often": ([{"grad_norm": X, "grad_norm#logged": X}] * 2, [{"=grad_norm": X}, {}], False),
    "twice": ([{"grad_norm": X, "grad_norm#1": Y}], [{"=grad_norm": X}], False),
    "a step late": (
        [{"grad_norm": X, "grad_norm#logged": X}, {"grad_norm": Y, "grad_norm#logged": Y}],
        [{"=grad_norm": X}, {"grad_norm": X, "grad_norm#logged": Y}],
        False,
    ),
    "now and then": (
        [{"grad_norm": X, "grad_norm#logged": X}] * 2,
        [{"=grad_norm": X}, {"grad_norm": X, "grad_norm#logged": X}],
        False,
    ),
}


@pytest.mark.parametrize("name", OWN_CLIP)
def test_a_norm_is_the_same_whoever_clips(tmp_path: Path, name: str) -> None:
    """A program's own clipping tells the bits that torch's did, in every step; one that is moved or gone is found."""
    before, after, agree = OWN_CLIP[name]
    a, b = told(tmp_path / "a", *before), told(tmp_path / "b", *after)
    assert compare(a, b).equal is agree and compare(b, a).equal is agree
    assert agree or compare(a, b).divergence.detail != "not observed by the baseline"


def test_a_clip_of_its_own_may_log_a_norm_that_was_not_logged(tmp_path: Path) -> None:
    """Under any name of a norm, in every step, with the bits that torch's had."""
    new: list[Told] = [{"gnorm": X}, {"gnorm": Y}]
    assert same(tmp_path, [{"grad_norm": X}, {"grad_norm": Y}], new)
    assert same(tmp_path, [{"grad_norm": n, "grad_norm#logged": n} for n in (X, Y)], new)
    compared = compare(told(tmp_path / "a", {"grad_norm": X}), told(tmp_path / "b", {"=grad_norm": X}))
    assert "by one side only: grad_norm read of clipping" in str(compared.looked), "an agreement names it"
    assert not same(tmp_path, [{"grad_norm": X}, {"grad_norm": Z}], new)
    assert not same(tmp_path, [{"grad_norm": X}, {"grad_norm": Y}], [{"gnorm": X}, {}])


def test_a_norm_that_moved_under_another_clip_is_named_with_both(tmp_path: Path) -> None:
    """In the step in which it did, with what it was and became."""
    a = told(tmp_path / "a", *[{"grad_norm": X, "grad_norm#logged": X}] * 3)
    b = told(tmp_path / "b", {"=grad_norm": X}, {"=grad_norm": Y}, {"=grad_norm": X})
    first, other = compare(a, b).divergence, compare(b, a).divergence
    assert first is not None and (first.step, first.detail) == (1, f"{X} became {Y}")
    assert other is not None and (other.step, other.detail) == (1, f"{Y} became {X}")


# -- what counts steps


def counted(name: str, *numbers: float | None) -> list[Told]:
    """Steps that tell a counter beside a loss."""
    return [{"loss": X} if number is None else {"loss": X, name: number} for number in numbers]


COUNTERS = {
    "from one": (counted("step", 0, 1, 2), counted("step", 1, 2, 3), True),
    "from elsewhere": (counted("train/global_step", 0, 1, 2), counted("train/global_step", 100, 101, 102), True),
    "less often": (counted("step", 0, 1, 2, 3), counted("step", 1, None, 3, None), True),
    "gone": (counted("step", 0, 1, 2), counted("loss", X, X, X), True),
    "gone for another": (counted("step", 0, 1, 2), counted("progress", 0.25, 0.5, 0.75), True),
    "called otherwise": (counted("step", 0, 1, 2), counted("iteration", 1, 2, 3), True),
    "by two": (counted("step", 0, 1, 2), counted("step", 0, 2, 4), False),
    "one left out": (counted("step", 0, 1, 2, 3), counted("step", 0, 1, 3, 4), False),
    "none": (counted("step", 0, 1, 2), counted("step", 1, 1, 1), False),
    "by halves": (counted("step", 0, 1, 2), counted("step", 0.5, 1.5, 2.5), False),
    "of rounds, gone": (counted("iteration", 0, 0, 1, 1), counted("loss", X, X, X, X), False),
    "too few": (counted("step", 0, 1), counted("step", 1, 2), False),
    "too few, gone": (counted("step", 0, 1), counted("loss", X, X), False),
    "of something else": (counted("buffer_size", 0, 1, 2), counted("buffer_size", 1, 2, 3), False),
    "of a schedule": (counted("sched_step", 0, 1, 2), counted("sched_step", 1, 2, 3), False),
    "of a warm-up": (counted("rate", 0, 1, 2), counted("rate", 1, 2, 3), False),
    "of tokens": (counted("tokens", 0, 1, 2), counted("tokens", 1, 2, 3), False),
    "something else, gone": (counted("buffer_size", 0, 1, 2), counted("loss", X, X, X), False),
    "not a number": (counted("step", 0, 1, 2), counted("step", 0, math.nan, 2), False),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_of_steps_is_no_number_of_the_training(tmp_path: Path, name: str) -> None:
    """One that is called so and is the step's number and a constant may count from elsewhere, or be told no more."""
    before, after, agree = COUNTERS[name]
    assert same(tmp_path, before, after) is agree


def test_what_moves_beside_a_counter_is_found(tmp_path: Path) -> None:
    """And an agreement names the counter, which was not compared."""
    a, b = told(tmp_path / "a", *counted("step", 0, 1, 2)), told(tmp_path / "b", *counted("step", 1, 2, 3))
    assert "counts steps from another number on: step" in str(compare(a, b).looked)
    assert "one side only: step of some steps" in str(
        compare(a, told(tmp_path / "d", *counted("step", 0, None, 2))).looked
    )
    assert str(compare(a, told(tmp_path / "e", *counted("loss", X, X, X))).looked).endswith("baseline alone: step")
    moved = told(tmp_path / "c", *counted("step", 1, 2), {"loss": Y, "step": 3.0})
    assert (first := compare(a, moved).divergence) is not None and (first.step, first.signal) == (2, "loss")


def test_a_counter_is_known_by_the_steps_of_one_side(tmp_path: Path) -> None:
    """A replay that makes one step of three, or has made one so far, counts from elsewhere too."""
    whole = told(tmp_path / "a", *counted("step", 0, 1, 2))
    part = told(tmp_path / "b", *counted("step", 1), ended=False)
    assert not Parting(str(whole.directory), str(part.directory)).seen(part.steps)
    assert compare(whole, part, prefix=True).equal
