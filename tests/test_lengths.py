"""Runs of different lengths: that one ended early is the verdict, whatever both made alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pull_kit import flat, trace
from trace_kit import write

from repro.commands.diff import diff
from repro.pulls.pair import compare_traces
from repro.text import comparison_text
from repro_bisect.driver.drift import drift
from repro_golden.base.errors import NotVerifiableError
from repro_golden.case.file import Compare
from repro_golden.compare.traces import compare
from repro_golden.trace import Trace
from repro_golden.trace.writer import digest_row

OBSERVE: dict[str, Any] = {"activations": [], "metrics": [], "ignore": []}


def of_lengths(folder: Path, a: int, b: int) -> tuple[Trace, Trace]:
    steps = flat(max(a, b), loss=1.0)
    return trace(folder / "a", steps[:a]), trace(folder / "b", steps[:b])


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (4, 3, "differs: the run ended after step 3 of 4; the 3 steps that both made agree"),
        (2, 1, "differs: the run ended after step 1 of 2; the 1 step that both made agrees"),
        (3, 4, "differs: the baseline ended after step 3 of 4; the 3 steps that both made agree"),
    ],
)
def test_a_run_that_ends_early_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], a: int, b: int, text: str
) -> None:
    """The first line says after which step a side ended, `repro diff` exits 1, and no caller takes it for equal."""
    traces = of_lengths(tmp_path, a, b)
    comparison = compare(*traces)
    assert comparison.divergence is None
    assert not comparison.equal
    assert comparison_text(comparison).splitlines()[0] == text
    assert comparison.to_mapping()["ended"] == text.removeprefix("differs: ").partition(";")[0]
    assert compare(*traces, prefix=True).equal, "a part that was asked for"
    assert diff.main([str(tmp_path / "a"), str(tmp_path / "b")], standalone_mode=False) == 1
    assert capsys.readouterr().out.splitlines()[0] == text
    compared = compare_traces(*traces, Compare())
    assert (compared.verdict, compared.drift.ended) == ("moved", comparison.ended)
    assert drift(*of_lengths(tmp_path / "equal", 3, 3)).ended == ""


def test_a_run_that_was_stopped_where_the_baseline_ended(tmp_path: Path) -> None:
    """It would have gone on, which is a difference; where the baseline was stopped too nobody asked for more."""
    steps = [
        [digest_row("update", f"{end}rng/torch", b"state") for end in ("", "end/")[: 1 + last]]
        for last in (False, True)
    ]
    ended, stopped, too = ({"stopped": value} for value in (False, True, True))
    made = [(ended, steps), (stopped, [steps[0]] * 2), (too, [steps[0]] * 2), ({}, steps)]
    a, b, c, before = (Trace(write(tmp_path / str(k), rows, **how)) for k, (how, rows) in enumerate(made))
    told = "the baseline ended after step 2, and the run goes on"
    for baseline in (a, before):  # a recorder that did not say so
        comparison = compare(baseline, b)
        assert comparison.ended == told and not comparison.equal and comparison.divergence is None
        assert compare(baseline, b, prefix=True).equal and compare(baseline, a).equal
    assert compare(c, b).equal and not compare(c, b).ended
    result = compare_traces(a, b, Compare())
    assert (result.verdict, result.drift.ended) == ("moved", told)


def test_what_nobody_asked_for_is_no_difference(tmp_path: Path) -> None:
    """A golden run's header says in its case what was to be observed and a trace's beside its command: both nothing."""
    a, b = of_lengths(tmp_path, 2, 2)
    golden = replace(a.header, case={"name": "toy", "observe": OBSERVE}, subject={"kind": "command"})
    traced = replace(b.header, case={"command": ["x"]}, subject={"kind": "command", "observe": OBSERVE})
    a.header, b.header = golden, traced
    assert compare(a, b).equal
    b.header = replace(traced, subject={"kind": "command", "observe": OBSERVE | {"activations": ["fc"]}})
    with pytest.raises(NotVerifiableError, match="--activations"):
        compare(a, b)
    a.header = replace(golden, case={"name": "toy", "observe": OBSERVE | {"activations": ["fc"]}})
    assert compare(a, b).equal, "both were asked for the same"
