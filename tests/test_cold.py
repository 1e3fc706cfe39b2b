"""Every command once in a process that begins as a user's does; elsewhere the tests' processes begin warm."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest
import warm_kit
from conftest import Repo, environment
from history_kit import edit, note, start

from repro_golden.trace import Trace

COMMAND = f"{sys.executable} train.py"


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Repo:
    """A guarded history of five commits, of which one moves the numbers."""
    folder = tmp_path_factory.mktemp("cold")
    repo = start(folder)
    assert repo.repro("init", "--remote", str(folder / "remote")).returncode == 0
    assert repo.repro("golden", "record", "toy").returncode == 0
    repo.commit("Record")
    note(repo, "one")
    edit(repo, "scale = 1.0", "scale = 1.0 + 1e-6", "Scale")
    note(repo, "two")
    assert repo.repro("trace", "--out", "before", "--", *COMMAND.split()).returncode == 0
    return repo


def whole(*values: object) -> object:
    """A row of the whole tier."""
    return pytest.param(*values, marks=pytest.mark.whole)


@pytest.mark.parametrize(("words", "code", "message"), [
    ("golden list", 0, "toy"),
    ("golden show toy", 0, "toy"),
    ("golden verify", 1, "step 0"),
    ("bisect HEAD~3..HEAD --no-explain --when exit -- grep -q 1.0$ train.py", 0, "Scale"),
    (f"trace --out again -- {COMMAND}", 0, "6 steps"),
    ("diff before before", 0, "agree"),
    ("doctor .", 0, "rules tried"),
    ("check rollout toy", 2, "repro:"),
    whole("bisect HEAD~3..HEAD --no-explain", 0, "Scale"),
    whole("history HEAD~3..HEAD", 0, "Scale"),
    whole("explain HEAD~1", 0, "train.py:23"),
    whole("report pr HEAD~3..HEAD", 1, "step 0"),
], ids=lambda value: " ".join(value.split()[:2]) if isinstance(value, str) else "")  # fmt: skip
def test_a_command_begins_cold(day: Repo, words: str, code: int, message: str) -> None:
    """Each command does its work in a process of its own, and so does what it starts, and does not load torch."""
    done = day.cold(*words.split(), flags=("-X", "importtime"))
    imported, told = [], []
    for line in done.stderr.splitlines():
        (imported if line.startswith("import time:") else told).append(line)
    assert done.returncode == code, (done.stdout, told)
    assert message in "\n".join([done.stdout, *told])
    assert not any("Traceback" in line for line in told)
    modules = {line.rpartition("|")[2].strip() for line in imported}
    assert "repro.cli" in modules
    assert "torch" not in modules


def test_a_fork_gives_the_bits_of_a_fresh_process(tmp_path: Path) -> None:
    """A program that begins warm prints the same, and its trace has the same roots and the same identity."""
    repo = start(tmp_path)
    for out, run in (("warm", repo.repro), ("cold", repo.cold)):
        done = run("trace", "--out", out, "--", *COMMAND.split())
        assert done.returncode == 0, done.stderr
        (repo.root / f"{out}.txt").write_text(done.stdout)
    warm, cold = Trace(repo.root / "warm"), Trace(repo.root / "cold")
    assert [step.root for step in warm.steps] == [step.root for step in cold.steps]
    assert warm.header.identity == cold.header.identity
    assert (repo.root / "warm.txt").read_text() == (repo.root / "cold.txt").read_text()


@pytest.mark.parametrize(("program", "code"), [
    ("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", 3),
    ("raise ValueError('no')", 1),
    ("import sys; sys.exit('last words')", 1),
    ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
    ("import os; print(os.getcwd(), sorted(k for k in os.environ if k.startswith('MINE')), __name__)", 0),
    ("import sys; print(sys.argv, sys.path[0], 'repro' in sys.modules, 'repro_core' in sys.modules)", 0),
    ("import random, threading; print(threading.current_thread() is threading.main_thread())", 0),
    ("import atexit; atexit.register(print, 'at the end')", 0),
])  # fmt: skip
def test_a_fork_is_the_process_that_was_asked_for(tmp_path: Path, program: str, code: int) -> None:
    """Output, exit code, signals, folder, variables, arguments and modules are those of a fresh process."""
    (tmp_path / "program.py").write_text(program)
    variables = environment() | {"MINE": "1"}
    for command in ([sys.executable, "program.py", "a"], [sys.executable, "-c", program, "b"]):
        warm = warm_kit.run(command, tmp_path, variables)
        cold = warm_kit.run(command, tmp_path, variables | {"PYTHONMALLOC": "malloc"})
        assert (warm.returncode, warm.stdout) == (cold.returncode, cold.stdout) == (code, cold.stdout)
        assert warm.stderr.splitlines()[-1:] == cold.stderr.splitlines()[-1:]


def test_what_a_search_starts_begins_warm(tmp_path: Path) -> None:
    """No variable that a search gives its probes has them begin cold, which nobody would see but by the clock."""
    repo = start(tmp_path, case=None)
    (repo.root / "train.py").write_text("import sys\nwarm = 'altair' in sys.modules\nsys.exit(not warm)\n")
    good = repo.commit("Good where it is warm")
    culprit = edit(repo, "sys.exit(not warm)", "sys.exit(1)", "Bad")
    done = repo.repro("bisect", "--when", "exit", f"{good}..HEAD", "--", sys.executable, "train.py")
    assert done.returncode == 0 and culprit[:10] in done.stdout, done.stderr


HEARING = """\
import os, signal, sys
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Becomes a process that hears signals, also where the tests' own is deaf to them, as behind nohup."""


@pytest.mark.parametrize("numbers", [[signal.SIGHUP], [signal.SIGINT] * 4, [signal.SIGTERM, signal.SIGHUP]], ids=str)
def test_whoever_ends_a_search_leaves_no_trainer(tmp_path: Path, numbers: list[signal.Signals]) -> None:
    """A terminal that is closed, and more signals while it cleans up, end it as one does: with all that it started."""
    repo = start(tmp_path, case=None)
    token = uuid.uuid4().hex
    for code in (0, 1):  # behind a launcher, which a signal to us does not reach
        program = (
            f"open({str(tmp_path / token)!r}, 'w').close(); import time; time.sleep(999); raise SystemExit({code})"
        )
        (repo.root / "run.sh").write_text(f'{sys.executable} -c "{program}" {token}\nexit $?\n')
        repo.commit(f"Exits with {code}")
    words = ["bisect", "HEAD~1..HEAD", "--when", "exit", "-j", "1", "--", "sh", "run.sh"]
    command = [sys.executable, "-c", HEARING, "-m", "repro", *words]
    process = subprocess.Popen(
        command, cwd=repo.root, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    limit = time.monotonic() + 120
    while not (tmp_path / token).exists():
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.05)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.03)
    _, output = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in output, output
    assert output.splitlines()[-1].startswith("repro: interrupted"), output
    assert not [each.pid for each in psutil.process_iter(["cmdline"]) if token in (each.info["cmdline"] or ())]
    assert [*repo.worktrees, *(repo.root / ".git" / "repro").glob("tmp/*")] == []
