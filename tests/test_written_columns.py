from __future__ import annotations

from pathlib import Path

import pytest

from repro_bisect.predicates.predicates import Bitwise, first_violation
from repro_golden.base.errors import NotVerifiableError
from repro_golden.compare.traces import compare
from repro_golden.trace import Header, Row, Trace, TraceWriter
from repro_golden.trace.model import RECORDER
from repro_golden.trace.writer import digest_row, metric_row


def trace(folder: Path, *steps: list[Row], kind: str = "slime", recorder: int = RECORDER) -> Trace:
    """A finished trace of a kind of subject."""
    writer = TraceWriter(folder, Header({}, "", {"kind": kind}, {}, len(steps), recorder=recorder))
    for number, rows in enumerate(steps):
        for row in rows:
            writer.add(row)
        writer.end_step(number)
    writer.close({"reason": "finished"})
    return Trace(folder)


def row(phase: str, name: str, content: bytes = b"1") -> Row:
    """A signal."""
    return digest_row(phase, name, content)


TOKENS, WEIGHT, LOSS = row("input", "tokens"), row("update", "w"), metric_row("loss", "loss", 0.5)
COMMON = [TOKENS, WEIGHT, LOSS]
LOG_PROBS, ENTROPY, MORE = (
    row("forward", "log_probs"),
    row("forward", "entropy", b"2"),
    metric_row("loss", "kl_loss", 0.0),
)


def signal_of(a: Trace, b: Trace) -> str | None:
    """The first signal in which two traces differ; a bisect must say the same as a comparison."""
    divergence = compare(a, b).divergence
    assert first_violation(Bitwise(), a, b) == divergence
    return divergence.signal if divergence else None


def test_a_column_that_one_side_writes_is_a_note(tmp_path: Path) -> None:
    """A version of a trainer that writes other columns has moved no number; what both write is still compared."""
    a = trace(tmp_path / "a", [*COMMON, LOG_PROBS], [*COMMON, LOG_PROBS])
    b = trace(tmp_path / "b", [*COMMON, ENTROPY, MORE], [*COMMON, ENTROPY, MORE])
    assert signal_of(a, b) is None and signal_of(b, a) is None
    looked = compare(a, b).looked
    assert "3 columns are written by one side only: entropy, kl_loss, log_probs" in str(looked)
    assert (looked.columns, looked.metrics, looked.parameters) == (1, 1, 1)
    moved = trace(tmp_path / "c", [*COMMON, ENTROPY], [TOKENS, row("update", "w", b"2"), LOSS, ENTROPY])
    divergence = compare(a, moved).divergence
    assert divergence is not None and (divergence.step, divergence.signal, divergence.differing) == (
        1,
        "w",
        {"update": 1},
    )
    assert signal_of(a, moved) == "w"


def test_a_dump_that_an_earlier_recorder_saw_as_a_file_is_a_note(tmp_path: Path) -> None:
    """A golden run of its time holds them; a file of another kind that is no longer written is a difference."""
    dump, last = row("update", "saved/train_data:0_0.pt/rollout_data.advantages.0"), row("update", "saved/last.pt/w")
    a, b = trace(tmp_path / "a", [*COMMON, dump, last]), trace(tmp_path / "b", [*COMMON, last])
    assert signal_of(a, b) is None and signal_of(b, a) is None
    assert signal_of(a, trace(tmp_path / "c", [*COMMON, dump])) == "saved/last.pt/w"


@pytest.mark.parametrize(
    ("kept", "gone"),
    [
        (COMMON, row("grad", "w")),
        (COMMON, row("update", "exp_avg/w")),
        (COMMON, row("input", "start/w")),
        (COMMON, row("forward", "decoder.output")),
        (COMMON, metric_row("grad", "grad_norm", 1.0)),
        (COMMON, metric_row("update", "lr-pg_0", 1.0)),
        ([*COMMON, row("forward", "log_probs@0")], row("forward", "log_probs@1", b"2")),
        ([*COMMON, row("input", "multimodal_train_inputs/a")], row("input", "multimodal_train_inputs/b")),
    ],
    ids=lambda item: item.name if isinstance(item, Row) else "",
)
def test_what_is_recorded_or_is_a_part_must_be_there(tmp_path: Path, kept: list[Row], gone: Row) -> None:
    """A parameter, a gradient, a norm, an activation, and a part of a column that both write: a difference if gone."""
    a, b = trace(tmp_path / "a", [*kept, gone]), trace(tmp_path / "b", kept)
    assert signal_of(a, b) == signal_of(b, a) == gone.name


def test_replicas_that_part_are_a_difference(tmp_path: Path) -> None:
    """A column whose ranks no longer agree has other names, and is not one that is no longer written."""
    a = trace(tmp_path / "a", [*COMMON, LOG_PROBS])
    b = trace(tmp_path / "b", [*COMMON, row("forward", "log_probs@0"), row("forward", "log_probs@1", b"2")])
    assert signal_of(a, b) == "log_probs"  # that of one rank has its bits, and is no new name of it
    assert signal_of(b, a) is not None


def test_a_column_that_a_side_stops_writing_is_a_difference(tmp_path: Path) -> None:
    """What a run writes at one step it could have written at the other."""
    a = trace(tmp_path / "a", [*COMMON, LOG_PROBS], [*COMMON, LOG_PROBS])
    b = trace(tmp_path / "b", [*COMMON, LOG_PROBS], COMMON)
    assert signal_of(a, b) == "log_probs"


def test_a_program_of_ones_own_shows_what_it_shows(tmp_path: Path) -> None:
    """Only slime, Miles and Relax write columns of their own accord: what another program no longer shows is gone."""
    a = trace(tmp_path / "a", [*COMMON, LOG_PROBS], kind="command")
    b = trace(tmp_path / "b", COMMON, kind="command")
    assert signal_of(a, b) == "log_probs"


def test_nothing_in_common_is_not_verifiable(tmp_path: Path) -> None:
    """Where no column is written by both, neither a comparison nor a bisect says that they agree."""
    a, b = trace(tmp_path / "a", [LOG_PROBS, MORE]), trace(tmp_path / "b", [ENTROPY, LOSS])
    for judge in (compare, lambda a, b: first_violation(Bitwise(), a, b)):
        with pytest.raises(NotVerifiableError, match="no signal in common"):
            judge(a, b)


def test_a_port_of_an_earlier_recorder_is_a_note(tmp_path: Path) -> None:
    """A golden run that took a port for a metric is read as before by a recorder that leaves it out."""
    a = trace(tmp_path / "a", [*COMMON, metric_row("loss", "port", 1.0)], kind="command", recorder=3)
    b = trace(tmp_path / "b", COMMON, kind="command")
    assert signal_of(a, b) is None
    today = trace(tmp_path / "c", [*COMMON, metric_row("loss", "port", 1.0)], kind="command")
    assert signal_of(today, b) == "port"


def test_numbers_of_one_name_by_an_earlier_recorder(tmp_path: Path) -> None:
    """It dropped repeated ones, so that `#1` was another of them: between two recorders these say nothing."""
    last = metric_row("loss", "acc", 0.75)
    a = trace(tmp_path / "a", [*COMMON, last, metric_row("loss", "acc#1", 0.25)], kind="command", recorder=4)
    both = [metric_row("loss", "acc#1", 0.5), metric_row("loss", "acc#2", 0.5)]
    scale = row("update", "scaler/0/scale")
    b = trace(tmp_path / "b", [*COMMON, last, *both, scale], kind="command")
    assert signal_of(a, b) is None and signal_of(b, a) is None
    other = trace(tmp_path / "c", [*COMMON, last, both[0]], kind="command")
    assert signal_of(b, other) == "acc#2"


def test_a_number_after_the_last_step_needs_an_end_on_both_sides(tmp_path: Path) -> None:
    """A run that was stopped after its steps told none; one that ended by itself and is silent has lost it."""
    after, end = metric_row("loss", "acc#after", 0.5), row("update", "end/w")
    whole = trace(tmp_path / "a", [*COMMON, after, end], kind="command")
    stopped, silent = (
        trace(tmp_path / "b", COMMON, kind="command"),
        trace(tmp_path / "c", [*COMMON, end], kind="command"),
    )
    assert signal_of(whole, stopped) is None
    assert signal_of(whole, silent) == "acc#after"


def test_what_is_shown_is_no_row(tmp_path: Path) -> None:
    """A number of free text is in the step log, and neither in a root nor in what is said to be compared."""
    logs = []
    for name, shown in (("a", {}), ("b", {"loss": 9.0, "acc": 0.5})):
        writer = TraceWriter(tmp_path / name, Header({}, "", {"kind": "command"}, {}, 1))
        for row in COMMON:
            writer.add(row)
        writer.end_step(0, shown)
        writer.close({"reason": "finished"})
        logs.append(Trace(tmp_path / name))
    assert logs[0].steps[0].root == logs[1].steps[0].root
    assert logs[1].steps[0].metrics == {"loss": 0.5, "acc": 0.5} and logs[1].steps[0].compared == {"loss": 0.5}
    comparison = compare(*logs)
    assert comparison.equal and str(comparison.looked).endswith(
        "read from lines of text, and not compared by bits: acc"
    )
