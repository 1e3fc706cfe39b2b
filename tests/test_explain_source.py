"""Which statement a change touched on the way to an operation, by the source of the commits themselves."""

from __future__ import annotations

from pathlib import Path

import history_kit as kit
import pytest
from conftest import Repo

from repro_bisect.explain.source import Place, Sources, Version, read_diff
from repro_golden.recording.operations.stream import Frame, Operation, Stream
from repro_golden.repository.checkout import find_checkout

PLAIN = "def loss_of(x):\n    y = x + 1\n    return y * 2\n\nloss_of(1)\n"


def places(repo: Repo, line: int, file: str = "train.py") -> list[Place | None]:
    """The place of an operation that was asked for at a line, in the commit before HEAD and in HEAD."""
    checkout = find_checkout(repo.root)
    before, after = (repo.git("rev-parse", name) for name in ("HEAD~1", "HEAD"))
    diff = read_diff(checkout, before, after)
    frames = (Frame(file, line, "loss_of"), Frame(file, 7, "<module>"))
    stream = Stream([Operation(0, "aten.mul.Tensor", "forward", "", "", (), (), stack=frames)], 0)
    versions = Version(checkout, before, diff.before, "before"), Version(checkout, after, diff.after, "after")
    return [Sources(version, stream).place(stream.operations[0]) for version in versions]


def test_a_decorator_is_on_the_way_of_what_runs_in_its_function(tmp_path: Path) -> None:
    """A line above a function that changes all that is computed in it is the change."""
    repo = kit.start(tmp_path, PLAIN, case=None)
    (repo.root / "train.py").write_text("@torch.autocast('cpu')\n" + PLAIN)
    repo.commit("Autocast")
    _, after = places(repo, 4)
    assert after is not None and after.touched and "+@torch.autocast" in after.hunk
    (repo.root / "train.py").write_text(PLAIN)
    repo.commit("Take it back")
    before, _ = places(repo, 4)
    assert before is not None and before.touched


def test_a_file_behind_a_symlink_is_the_file(tmp_path: Path) -> None:
    """Python knows a program by the name that it was started by; the change is of the file that this leads to."""
    repo = kit.start(tmp_path, PLAIN, case=None)
    (repo.root / "src").mkdir()
    (repo.root / "train.py").rename(repo.root / "src" / "train.py")
    (repo.root / "train.py").symlink_to("src/train.py")
    (repo.root / "here").symlink_to("src")
    repo.commit("Move it")
    repo.edit("src/train.py", "y * 2", "y * 3")
    repo.commit("Change it")
    for name in ("train.py", "here/train.py", "src/train.py"):
        _, after = places(repo, 3, name)
        assert after is not None and after.touched and after.text == "return y * 3", name


@pytest.mark.parametrize("begin", ["\ufeff", "type X[T] = list[T]  # not ours\n)\n"], ids=["a mark", "another Python"])
def test_a_file_that_is_not_our_python_is_read_line_by_line(tmp_path: Path, begin: str) -> None:
    """A byte order mark, and syntax of another Python: the line that a change touched is known all the same."""
    repo = kit.start(tmp_path, begin + PLAIN, case=None)
    repo.edit("train.py", "y * 2", "y * 3")
    repo.commit("Change it")
    line = 3 + begin.count("\n")
    before, after = places(repo, line)
    assert before is not None and before.touched and before.text == "return y * 2"
    assert after is not None and after.touched and after.text == "return y * 3"
