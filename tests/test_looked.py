"""What verdicts say that they looked at: no more than what was judged, in text, JSON and reports alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nightly_kit import nightly_run
from pull_kit import flat, pair, report, trace, with_step
from test_beside import rows
from test_beside import trace as trace_of_rows

from repro.nightly.report import nightly_text, write_report
from repro.pulls.comment import comment
from repro.pulls.pair import compare_traces
from repro.pulls.report import pull_text
from repro.text import comparison_text, metrics_rows
from repro_bisect.predicates.predicates import of_case, parse_predicate
from repro_golden.base.errors import NotVerifiableError
from repro_golden.case.file import Bound, Compare
from repro_golden.compare.coverage import Coverage
from repro_golden.compare.traces import compare
from repro_golden.trace import Row, Trace
from repro_golden.trace.signals import Signals
from repro_golden.trace.writer import digest_row, metric_row

BOUNDS = {"loss": Bound(rtol=0.1), "kl": Bound(atol=1.0)}
RULE = Compare(mode="bounds", bounds=BOUNDS)
SAID = "2 metrics by their bounds (kl, loss); bits were not judged"


def tensors(*names: tuple[str, str]) -> list[Row]:
    signals = Signals()
    for phase, name in names:
        signals.take(phase, name, torch.ones(2))
    return signals.rows()


def whole(folder: Path) -> Trace:
    """A trace with something of each kind."""
    seen = tensors(("forward", "log_probs"), ("forward", "old_log_probs"), ("grad", "w"), ("update", "w"))
    return trace_of_rows(folder, [*seen, *rows(rng__torch=b"2"), metric_row("loss", "train/ppo_kl", 0.0)])


def test_bounds_judge_metrics_alone(tmp_path: Path) -> None:
    """With bounds the metrics that have one are named, and nothing else counts as looked at."""
    a, b = trace(tmp_path / "a", flat(loss=1.0, kl=0.5, x=1.0)), trace(tmp_path / "b", flat(loss=1.01, kl=0.5, x=9.0))
    comparison = compare(a, b, RULE)
    assert comparison.equal
    assert comparison_text(comparison).splitlines()[-1] == f"looked at {SAID}"
    told = comparison.to_mapping()["looked_at"]
    assert (told["text"], told["metrics"], told["parameters"]) == (SAID, 2, 0)
    assert str(compare(a, a).looked) == "3 metrics"


def test_a_pull_request_with_bounds_says_that_they_judged(tmp_path: Path) -> None:
    """Where bits moved, bounds judged; where they did not, bits did."""
    base = flat(loss=1.0, kl=0.5)
    moved = pair(tmp_path, base, with_step(1, base, loss=1.01), BOUNDS)
    assert moved.verdict == "within"
    assert f"Looked at {SAID}." in pull_text(report(moved))
    assert "2 metrics by their bounds" in comment(report(moved))
    assert moved.to_mapping()["compared"]["drift"]["looked_at"]["text"] == SAID
    assert "Looked at 2 metrics." in pull_text(report(pair(tmp_path, base, base, BOUNDS)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bitwise", "1 parameter, 1 gradient, 2 columns, 1 metric, 1 random generator"),
        ("finite", "NaN and infinite values in 1 parameter, 1 gradient, 2 columns, 1 metric; bits were not judged"),
        (
            "ulp>3",
            "the distance in ULP of the elements that traces keep in 1 parameter, 1 gradient, 2 columns, 1 metric; "
            "bits were not judged",
        ),
        ("kl>0.1", "KL by the column log_probs; bits were not judged"),
        ("metric:train/ppo_kl atol=1", "1 metric by its bound (train/ppo_kl); bits were not judged"),
        ("exit", "exit codes alone"),
        (
            "ci:ppo_kl",
            "what ci:ppo_kl reads, and nothing else: the column log_probs, the column old_log_probs, the metric "
            "train/ppo_kl",
        ),
        ("own.py:bad", "what own.py:bad reads, and nothing else"),
    ],
)
def test_a_predicate_says_what_it_judges(tmp_path: Path, text: str, message: str) -> None:
    """In words of its own, of a baseline's trace."""
    (tmp_path / "own.py").write_text("def bad(baseline, trace):\n    return False\n")
    looked = parse_predicate(text, tmp_path).looked(whole(tmp_path / "a")).to_mapping()
    assert looked["text"].partition("; seen but not looked at")[0] == message


def test_a_set_of_checks_says_which_hold(tmp_path: Path) -> None:
    """Of a system's checks those that the baseline shows; without a trace the set alone."""
    predicate = parse_predicate("ci:slime", tmp_path)
    text = str(predicate.looked(whole(tmp_path / "a")))
    assert "ci:ppo_kl" in text and "ci:kl_loss" not in text
    assert "ci:slime" in str(predicate.looked(None))


def test_a_case_says_it_by_its_rule(tmp_path: Path) -> None:
    """By bounds or by bits; without a trace nothing was looked at."""
    assert str(of_case(RULE).looked(None)) == SAID
    assert of_case(Compare()).looked(None) == Coverage() and Coverage().nothing
    assert not of_case(Compare()).looked(whole(tmp_path / "a")).nothing


def test_nothing_is_no_agreement(tmp_path: Path) -> None:
    """Two runs that have nothing in common are not verifiable, so that no night of them is green."""
    named = {"ema__w": b"1", "critic__v": b"2"}
    a, b = (trace_of_rows(tmp_path / name, rows(**{f"module__{name}": value})) for name, value in named.items())
    for rule in (Compare(), None):
        with pytest.raises(NotVerifiableError, match="nothing was looked at"):
            compare(a, b, rule)
    with pytest.raises(NotVerifiableError, match="nothing was looked at"):
        compare_traces(a, b, RULE)
    assert compare(a, a).equal


def test_a_night_says_what_it_looked_at(tmp_path: Path) -> None:
    """One line a case, in text and reports; of a replay that failed nothing, of an earlier version's result none."""
    coverage = Coverage(parameters=2, unread={"file x": "it is not `torch`'s"})
    runs = [nightly_run(looked_at=coverage.to_mapping()), nightly_run(chain="", status="error"), nightly_run()]
    files = [tmp_path / "x.json"] * 3
    message = "looked at 2 parameters; seen but not looked at: file x (it is not `torch`'s)"
    shown = nightly_text(runs, files).splitlines()
    assert [line for line in shown if "looked at" in line] == [f"  {message}", "  looked at nothing"]
    text, page = (path.read_text() for path in write_report(runs, files, tmp_path, "again"))
    assert "\nlooked at 2 parameters; seen but" in text and "\nlooked at nothing.\n" in text
    assert page.count("looked at 2 parameters; seen but") == page.count("looked at nothing.") == 1
    assert text.count("| metrics |") == text.count("| baseline |") - 3


def test_weights_that_were_not_read_are_never_folded() -> None:
    """The end is said to be without its weights, these are named whatever files there are, and before them."""
    files = {f"file {k}.json": "not torch's" for k in range(9)} | {"saved/last:args.bin": "settings"}
    of_end = {"the weights at the end": "let go of", "3 backward passes after the last step": "no optimizer"}
    text = str(Coverage(parameters=1, end=True, unread=files | {"buffer/m": "sparse"} | of_end))
    assert text.startswith("1 parameter, the state at the end without its weights; seen but not looked at: 3 backward")
    assert "the weights at the end (let go of), buffer/m (sparse), file 0.json" in text and text.endswith("7 more")
    assert str(Coverage(end=True, unread=files)).startswith("the state at the end; ")


def test_metrics_that_are_left_out_are_named() -> None:
    """Those that may be the training's own stand first, so that no other hides them."""
    coverage = Coverage(parameters=1, left_out=["a_time", "b_time", "c_time", "d_time", "time_loss"])
    named = "time_loss, a_time, b_time, c_time and 1 more"
    assert str(coverage) == f"1 parameter; left out as the clock's or the machine's: {named}"
    assert coverage.to_mapping()["left_out"] == coverage.left_out


def test_a_trainers_own_hash_is_one_of_a_parameter(tmp_path: Path) -> None:
    """The hash that a trainer writes of a layer's weights counts as a parameter, however its name is parted."""
    seen = [digest_row("update", "model_hash/decoder/layers.0", bytes(32)), metric_row("loss", "loss", 0.0)]
    a, b = (trace_of_rows(tmp_path / name, seen) for name in "ab")
    assert str(compare(a, b).looked).startswith("1 parameter, 1 metric; seen but not looked at: file x")


@pytest.mark.parametrize(
    ("a", "b", "there", "difference"),
    [
        (1.0, 2.0, "1 -> 2", "+1 (+100%)"),
        (1.0, 1.0625, "1 -> 1.0625", "+0.0625 (+6.2%)"),
        (1.0, 2.49, "1 -> 2.49", "+1.49 (+149%)"),
        (0.5, 5.25, "0.5 -> 5.25", "+4.75 (+950%)"),
        (0.5, 8.0, "0.5 -> 8", "+7.5 (x16)"),
        (1.0, 1.0000000000000002, "1 -> 1.0000000000000002", "+2.22e-16 (+2.2e-14%)"),
        (0.0, -0.0, "0 -> -0", "the sign of zero"),
        (-0.0, 1.0, "-0 -> 1", "+1"),
    ],
)
def test_a_metric_that_moved_looks_moved(tmp_path: Path, a: float, b: float, there: str, difference: str) -> None:
    """Both sides with the digits that tell them apart, and a share that reads as one."""
    comparison = compare(trace(tmp_path / "a", flat(loss=a)), trace(tmp_path / "b", flat(loss=b)))
    (row,) = metrics_rows(comparison)
    assert (row[2], row[4]) == (there, difference)
