"""What stands still is ended: a process that waits for ever, and DVC at a remote that does not answer."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import Repo, environment

from repro_golden.base.errors import MachineFailureError
from repro_golden.base.machine.processes import StandstillError, output_of
from repro_golden.store.dvc import Dvc

WAITS = "import time; print('begun', flush=True); time.sleep(999)"
WORKS = """\
import time
for k in range(20):
    time.sleep(0.1)
    WORK
print("done")
"""


def started(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_who_waits_for_ever_stands_still() -> None:
    """A process that does nothing is told from one that ends, and from a slow one that calculates or reads."""
    with started(WAITS) as waits:
        with pytest.raises(StandstillError):
            output_of(waits, 1.0)
        assert waits.poll() is None
        waits.kill()
    for work in ("sum(range(2_000_000))", "open('/proc/cpuinfo').read()"):
        with started(WORKS.replace("WORK", work)) as works:
            assert output_of(works, 1.0) == (b"done\n", b"")


@pytest.fixture
def kept(tmp_path: Path) -> Repo:
    """A repository with a folder behind a pointer, whose default remote is `tmp_path / "remote"`."""
    repo = Repo(tmp_path / "repo")
    folder = repo.root / "golden" / "runs" / "m" / "toy"
    (folder / "trace").mkdir(parents=True)
    repo.git("init", "--quiet")
    Dvc(repo.root).init()
    (folder / "run.json").write_text("content")
    for name in ("header.json", "steps.jsonl", "rank-00000.log"):  # without them a push would refuse a part of a run
        (folder / "trace" / name).write_text(name)
    Dvc(repo.root).add(folder)
    healthy(repo)
    return repo


def healthy(repo: Repo) -> None:
    Dvc(repo.root).set_default_remote("store", str(repo.root.parent / "remote"), local=False)


@contextlib.contextmanager
def silent(repo: Repo) -> Iterator[None]:
    """Make its remote one that takes connections and says nothing; after a minute it takes none, or we would wait."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        Dvc(repo.root).set_default_remote("store", f"http://127.0.0.1:{server.getsockname()[1]}", local=False)
        gone = threading.Timer(60, server.close)
        gone.start()
        try:
            yield
        finally:
            gone.cancel()
            healthy(repo)


def working_on(repo: Repo) -> list[psutil.Process]:
    """The processes of DVC in it."""
    lines = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "dvc" in process.cmdline() and process.cwd() == str(repo.root):
                lines.append(process)
    return lines


@pytest.mark.whole
@pytest.mark.parametrize("verb", ["pull", "push"])
def test_a_silent_remote_is_one_line(kept: Repo, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """DVC would ask it again and again. It is ended, the line says why, and the next one does what it was to do."""
    dvc, (pointer,) = Dvc(kept.root), (kept.root / "golden" / "runs" / "m").glob("*.dvc")
    if verb == "pull":
        dvc.push(pointer)
        shutil.rmtree(pointer.with_suffix(""))
        shutil.rmtree(kept.root / ".dvc" / "cache")
    with silent(kept), monkeypatch.context() as patch:
        patch.setattr(Dvc, "patience", 5.0)
        with pytest.raises(MachineFailureError, match=rf"^`dvc {verb} .*` did nothing for 5 s: [^\n]*$"):
            getattr(dvc, verb)(pointer)
        assert not working_on(kept)
    getattr(dvc, verb)(pointer)
    assert (pointer.with_suffix("") / "run.json").read_text() == "content"
    assert len([path for path in (kept.root.parent / "remote").rglob("*") if path.is_file()]) == 5


@pytest.mark.whole
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["kill", "kill -9"])
def test_who_is_ended_at_a_silent_remote_ends_dvc(kept: Repo, number: signal.Signals) -> None:
    """DVC would hold its lock for as long as it waits: it goes too, and the next push finds nothing in its way."""
    with silent(kept):
        process = subprocess.Popen(
            [sys.executable, "-m", "repro", "golden", "push"], cwd=kept.root, env=environment(), stderr=subprocess.PIPE
        )
        while not any(each.net_connections() for each in working_on(kept)):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGTERM else -number), err
    if number == signal.SIGTERM:
        assert err.decode().splitlines()[-1].startswith("repro: interrupted"), err
    while working_on(kept):
        time.sleep(0.1)
    done = kept.repro("golden", "push")
    assert done.returncode == 0, done.stderr
