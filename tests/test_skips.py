from __future__ import annotations

from pathlib import Path

from repro.report.skips import skipped
from repro_bisect.driver.result import in_order
from repro_golden.replay.children import last_line

REASON = "ends before its first update: exited with 1: ModuleNotFoundError"


def test_skips_of_one_reason_are_one_line() -> None:
    """With a count, and with the first and the last of them in the order of the range."""
    newest_first = ["e" * 40, "d" * 40, "c" * 40, "b" * 40, "a" * 40]
    tested = {"d" * 40: REASON, "b" * 40: REASON, "c" * 40: "was yanked", "e" * 40: REASON}
    skips = {point: tested[point] for point in in_order(tested, newest_first)}
    one, other = skipped(skips, "commit")
    assert one.points == ["b" * 40, "d" * 40, "e" * 40] and one.reason == REASON
    assert one.who == f"3 commits, the first {'b' * 10}, the last {'e' * 10}"
    assert (other.who, other.count, other.reason) == ("c" * 10, "", "was yanked")


def test_another_diagnosis_is_another_line() -> None:
    """What is known of one failure is not said of another."""
    skips = skipped({"a": REASON, "b": REASON}, "commit", {"b": "torch is missing"})
    assert [(group.points, group.diagnosis) for group in skips] == [(["a"], ""), (["b"], "torch is missing")]


def test_colours_of_ray_are_no_part_of_a_reason(tmp_path: Path) -> None:
    """The last line of a log is told without escape sequences, also links."""
    log = tmp_path / "log"
    log.write_text("x\n\x1b[36m(Actor pid=1)\x1b[0m \x1b]8;;file:///a\x1b\\Error\x1b]8;;\x1b\\: \x1b[1;31mno\x1b[0m\n")
    assert last_line(log) == "(Actor pid=1) Error: no"
