"""Scratch folders: whatever their process was doing when it was killed, the next one removes what is left."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from repro_golden.base.files import scratch_folder, sweep

WRITER = """\
import itertools
print("begun", flush=True)
for k in itertools.count():
    open(f"f{k}", "w").close()
"""


@pytest.mark.parametrize("files", [[], ["lock"]], ids=["before it made the lock", "before it held the lock"])
def test_killed_while_it_made_the_folder(files: list[str], tmp_path: Path) -> None:
    """What stands under a name that its maker was about to change goes, locked by nobody."""
    (tmp_path / ".new-abcd").mkdir()
    for name in files:
        (tmp_path / ".new-abcd" / name).touch()
    with scratch_folder(tmp_path, "probe") as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_scratch_folder_stays(tmp_path: Path) -> None:
    """Folders without a lock, hidden ones and files are somebody's."""
    for name in ("mine", ".mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine", "file", "mine"]


def test_what_is_written_while_it_is_removed_is_removed_later(tmp_path: Path) -> None:
    """A process that still writes keeps its folder for a while, and not for good."""
    for trial in range(5):
        folder = tmp_path / f"probe-{trial}"
        (folder / "tree").mkdir(parents=True)
        (folder / "lock").touch()
        with subprocess.Popen([sys.executable, "-c", WRITER], cwd=folder / "tree", stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            sweep(tmp_path)
            writer.kill()
        sweep(tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_many_at_once_keep_their_own(tmp_path: Path) -> None:
    """Makers and sweepers that meet take nothing of each other, and leave nothing."""

    def make(number: int) -> bool:
        with scratch_folder(tmp_path, "probe") as folder:
            (folder / "mine").write_text(str(number))
            sweep(tmp_path)
            with (folder / "lock").open() as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return (folder / "mine").read_text() == str(number)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(make, range(600)))
    assert list(tmp_path.iterdir()) == []
