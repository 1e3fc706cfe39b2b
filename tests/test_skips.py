from __future__ import annotations

from pathlib import Path

import pytest

from repro.report.skips import skipped
from repro_bisect.driver.result import in_order
from repro_bisect.probe.answers import Skip, depends_on_the_question, reason_of, unusable
from repro_golden.replay.children import ChildFailure
from repro_golden.replay.output import last_line
from repro_golden.repository.git import Git

REASON = "ends before its first update: exited with 1: ModuleNotFoundError"


def test_skips_of_one_reason_are_one_line() -> None:
    """With a count, and with the first and the last of them in the order of the range."""
    newest_first = ["e" * 40, "d" * 40, "c" * 40, "b" * 40, "a" * 40]
    tested = {"d" * 40: REASON, "b" * 40: REASON, "c" * 40: "was yanked", "e" * 40: REASON}
    skips = {point: tested[point] for point in in_order(tested, newest_first)}
    skip, other = skipped(skips, "commit")
    assert skip.points == ["b" * 40, "d" * 40, "e" * 40] and skip.reason == REASON
    assert skip.who == f"3 commits, the first {'b' * 10}, the last {'e' * 10}"
    assert (other.who, other.count, other.reason) == ("c" * 10, "", "was yanked")


def test_another_diagnosis_is_another_line() -> None:
    """What is known of one failure is not said of another."""
    skips = skipped({"a": REASON, "b": REASON}, "commit", {"b": "torch is missing"})
    assert [(group.points, group.diagnosis) for group in skips] == [(["a"], ""), (["b"], "torch is missing")]


WEIGHTS = """\
step 10
Traceback (most recent call last):
  File "main.py", line 3, in <module>
    torch.load(path)
    ~~~~~~~~~~^^^^^^
_pickle.UnpicklingError: Weights only load failed. This file can still be loaded.
\t(1) Only do so if you trust it.

Check the documentation of torch.load to learn more.
"""


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (WEIGHTS, "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded."),
        (WEIGHTS.replace("\n", "\n(A pid=1) ").removesuffix("(A pid=1) "), f"(A pid=1) {WEIGHTS.splitlines()[5]}"),
        (
            f"{WEIGHTS}\nDuring handling of it:\n\nTraceback (most recent call last):\n  File\nKeyError: 1\n",
            "KeyError: 1",
        ),
        (
            "ValueError: In a worker.\nOriginal Traceback (most recent call last):\n  File\nIndexError: 2\n",
            "IndexError: 2",
        ),
        ("Traceback (most recent call last):\n  File", "  File"),
        (f"{WEIGHTS}{'trains on' * 2}\n" + "step\n" * 60 + "bad flag\n", "bad flag"),
    ],
)
def test_a_reason_is_the_line_that_names_the_error(tmp_path: Path, output: str, line: str) -> None:
    """An exception's message may be many lines, of which the last says nothing; who only printed ends with the last."""
    log = tmp_path / "log"
    log.write_text(output)
    assert last_line(log) == line


def test_an_end_that_fails_after_steps_is_told_what_helps(tmp_path: Path) -> None:
    """It has no step of that number, and no other end need help: fewer steps do. A skip is no end."""
    failure = ChildFailure("step", 11, "exited with 1: KeyError: 1", "log")
    reason = reason_of(failure, Git(tmp_path))
    assert reason == "fails after 11 steps: exited with 1: KeyError: 1" and depends_on_the_question(reason)
    assert unusable("GOOD", Skip(reason)).endswith(
        "; `--steps 11` (in a case, `steps`) ends before that; or choose another end for the range"
    )
    assert unusable("", Skip(reason)).endswith("KeyError: 1")
    assert str(failure).endswith("(after 11 steps; output in log)")


def test_an_end_without_a_module_is_told_that_it_can_be_installed() -> None:
    """At another end the range is another question, which nobody need ask for want of a package."""
    reason = f"{REASON}: No module named 'fid.score'"
    fix = "; install fid if it is a package of others, or choose another end for the range"
    assert unusable("BAD", Skip(reason)).endswith(f"'fid.score'{fix}")
    assert fix not in unusable("the culprit", Skip(reason))


def test_colours_of_ray_are_no_part_of_a_reason(tmp_path: Path) -> None:
    """The last line of a log is told without escape sequences, also links."""
    log = tmp_path / "log"
    log.write_text("x\n\x1b[36m(Actor pid=1)\x1b[0m \x1b]8;;file:///a\x1b\\Error\x1b]8;;\x1b\\: \x1b[1;31mno\x1b[0m\n")
    assert last_line(log) == "(Actor pid=1) Error: no"
