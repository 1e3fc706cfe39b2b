"""A disk that is really full (a small tmpfs): always the machine's failure, and never a verdict on a commit."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import Repo, environment
from history_kit import TRAIN, edit, note, start


def mounts() -> bool:
    """Whether this user may mount a file system of its own."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "true"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


pytestmark = pytest.mark.skipif(not mounts(), reason="a small disk needs a mount namespace of its own: denied here")

FILL = """\
import os, sys, time
def fill(folder):
    try:
        HOW
    except OSError:
        pass
    os.sync()
"""
BYTES = "file = open(folder + '/filler', 'wb', buffering=0)\n        while file.write(bytes(1 << 16)): pass"
INODES = "for k in range(10**6): open(f'{folder}/filler-{k}', 'wb').close()"
KEEP, CLEAN = "", "time.sleep(0.3); [os.unlink(f'{disk}/{f}') for f in os.listdir(disk) if f.startswith('filler')]"

PROGRAM = """\
disk = os.environ["TMPDIR"]
if open("fills").read().strip() == "yes" and not os.path.exists(disk + "/room"):
    fill(disk)
    AFTER
    END
sys.exit(int(open("code").read()))
"""
SILENT = "sys.exit(1)"
TOLD = """\
try:
        while open(disk + "/checkpoint", "ab", buffering=0).write(bytes(1 << 20)): pass
    finally:
        for name in ("checkpoint", "filler"): os.unlink(f"{disk}/{name}")"""


@dataclass
class Disk:
    """A small disk of its own with a repository, a temporary folder and nothing else on it."""

    folder: Path
    repo: Repo
    size: str = "16m,nr_inodes=4k"

    def run(self, *steps: str) -> list[subprocess.CompletedProcess[str]]:
        """Shell lines one after the other, in a checkout that lies on the disk; what came of each."""
        place, out = self.folder / "disk", self.folder / "out"
        place.mkdir()
        out.mkdir()
        lines = [
            f"mount -t tmpfs -o size={self.size} tmpfs {place}",
            f"mkdir {place}/scratch && cp -r {self.repo.root} {place}/repo && cd {place}/repo",
            f"export TMPDIR={place}/scratch; set +e",
            *(f"{{ {step}; }} >{out}/{k}.out 2>{out}/{k}.err; echo $? >{out}/{k}.code" for k, step in enumerate(steps)),
        ]
        whole = subprocess.run(
            ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", "\n".join(["set -e", *lines, "true"])],
            env=environment(), capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert whole.returncode == 0, whole.stdout + whole.stderr
        return [
            subprocess.CompletedProcess(step, int(_text(out, k, "code")), _text(out, k, "out"), _text(out, k, "err"))
            for k, step in enumerate(steps)
        ]


def _text(out: Path, number: int, kind: str) -> str:
    return (out / f"{number}.{kind}").read_text()


def repro(*words: str) -> str:
    return shlex.join([sys.executable, "-m", "repro", *words])


JOURNAL = "cat .git/repro/journal.jsonl"
ROOM = 'rm -f "$TMPDIR"/filler* && touch "$TMPDIR"/room'


@pytest.mark.whole
@pytest.mark.parametrize(
    ("how", "after", "end"),
    [(BYTES, CLEAN, SILENT), (INODES, KEEP, SILENT), (BYTES, KEEP, TOLD)],
    ids=["full for a moment", "no inode", "told"],
)
def test_a_full_disk_names_no_commit(tmp_path: Path, how: str, after: str, end: str) -> None:
    """A program that fails because the disk is full stops the search; with space again it names the right commit."""
    repo = start(tmp_path, case=None)
    (repo.root / "test.py").write_text((FILL + PROGRAM).replace("HOW", how).replace("AFTER", after).replace("END", end))
    (repo.root / "code").write_text("0")
    (repo.root / "fills").write_text("no")
    good = repo.commit("Good")
    (repo.root / "fills").write_text("yes")
    fills = repo.commit("Fill the disk")
    (repo.root / "fills").write_text("no")
    (repo.root / "code").write_text("1")
    culprit = repo.commit("Culprit")
    bisect = repro(
        "bisect",
        "--no-explain",
        f"{good}..HEAD",
        "--when",
        "exit",
        "-j",
        "1",
        "--json",
        "--",
        sys.executable,
        "test.py",
    )
    full, journal, _, again = Disk(tmp_path, repo).run(bisect, JOURNAL, ROOM, bisect)
    assert full.returncode == 2, full.stdout + full.stderr
    assert "space" in full.stderr.splitlines()[-1]
    assert fills not in journal.stdout
    assert json.loads(again.stdout)["culprit"]["commit"] == culprit, again.stderr


@pytest.mark.whole
def test_a_recording_that_the_disk_cut_is_no_verdict(tmp_path: Path) -> None:
    """A trainer that ends well, its recording cut by a full disk and its output closed, stops the search likewise."""
    fill = (
        FILL.replace("HOW", BYTES)
        + "disk = os.environ['TMPDIR']\nfull = os.path.exists('fills') and not os.path.exists(disk + '/room')\n"
    )
    at = "    if step == 2 and full: fill(disk); os.dup2(os.open(os.devnull, os.O_WRONLY), 2); os.dup2(2, 1)\n"
    train = (
        fill + TRAIN.replace("    scale = 1.0\n", at + "    scale = 1.0\n") + "if full: os.unlink(disk + '/filler')\n"
    )
    repo = start(tmp_path, train, case=None)
    good = repo.git("rev-parse", "HEAD")
    (repo.root / "fills").touch()
    fills = note(repo, "fills")
    (repo.root / "fills").unlink()
    culprit = edit(repo, "    scale = 1.0\n", "    scale = 1.0 + 1e-6 * (step > 3)\n", "Warm up")
    bisect = repro("bisect", "--no-explain", f"{good}..HEAD", "-j", "1", "--json", "--", sys.executable, "train.py")
    full, journal, _, again = Disk(tmp_path, repo).run(bisect, JOURNAL, ROOM, bisect)
    assert full.returncode == 2, full.stdout + full.stderr
    assert "space" in full.stderr.splitlines()[-1]
    assert fills not in journal.stdout
    assert json.loads(again.stdout)["culprit"]["commit"] == culprit, again.stderr


WATCH = """\
import os, sys, time
from pathlib import Path
from repro_golden.base.machine.disks import DiskWatch, reserved
from repro_golden.base.errors import MachineFailureError
disk = Path(os.environ["TMPDIR"])
def told(act, *, needed=(disk,), environ={}, counts=None, told=()):
    try:
        with DiskWatch(needed, environ, counts, told) as watch:
            act()
            watch.blame()
    except MachineFailureError as error:
        assert "\\n" not in str(error)
        return str(error)
    return ""
def fill(keep=0):
    with open(disk / "filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                if keep and os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize < keep: break
        except OSError: pass
def moment():
    fill(); time.sleep(0.2); os.unlink(disk / "filler")
assert told(lambda: None) == "", "there is room"
assert "no space was left on the disk of" in told(moment)
assert "no space was left on the disk of" in told(fill)
assert "no space left on the disk of" in told(lambda: None), "it is full from the start"
assert told(lambda: None, needed=(Path("/"),), environ={"HOME": str(disk)}) .startswith("no space"), "TMPDIR is needed"
os.unlink(disk / "filler")
fill(6 << 20); time.sleep(0.1)
assert told(lambda: time.sleep(0.1)) == "", "a nearly full disk takes what is written to it"
os.unlink(disk / "filler")
import tempfile
tempfile.tempdir = "/"
assert told(moment, needed=()) == "", "a disk that nobody named"
assert "no space was left on the disk of" in told(moment, needed=(), told=(disk,))
fill()
assert told(lambda: None, needed=(), told=(disk,)) == "", "what is full from the start may be data alone"
os.unlink(disk / "filler")
tempfile.tempdir = None
for file, name, words in (
    (disk / "memory.events", "oom_kill", "for want of memory"),
    (disk / "pids.events", "max", "one too many"),
):
    file.write_text(f"oom 0\\n{name} 3\\n")
    assert told(lambda: None, counts={name: file}) == ""
    assert words in told(lambda: file.write_text(f"oom 1\\n{name} 4\\n") and None, counts={name: file})
with open(disk / "log", "ab") as log:
    log.write(b"begin "); log.flush()
    with reserved(log):
        fill()
        assert os.write(log.fileno(), b"x" * 100_000) == 100_000, "the log has room of its own"
        assert os.fstat(log.fileno()).st_size == 100_006
    assert os.fstat(log.fileno()).st_blocks * 512 < 200_000, "what was not used is given back"
"""


def test_what_is_said_of_a_disk(tmp_path: Path) -> None:
    """Full at the start, full for a moment, full at the end, and a kill for memory are told; a nearly full disk is not.

    A log has room of its own on a disk that is full.
    """
    repo = start(tmp_path, case=None)
    (repo.root / "watch.py").write_text(WATCH)
    (done,) = Disk(tmp_path, repo).run(shlex.join([sys.executable, "watch.py"]))
    assert done.returncode == 0, done.stderr
