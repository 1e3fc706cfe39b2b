"""What ended a program behind a launcher, or at a limit that it was started under, is never said of a commit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Repo, environment

from repro_golden.base.errors import MachineFailureError
from repro_golden.case.file import Case
from repro_golden.replay.children import blame_the_machine
from repro_golden.repository.checkout import Place
from repro_golden.subjects import exit_code

PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
DIES = "import os; print('step 3', flush=True); os.kill(os.getpid(), 9)\n"
"""A trainer that is killed."""
FILES = {
    "train.py": DIES,
    "Makefile": "test:\n\tpython train.py\nbelow:\n\t$(MAKE) test\nshell:\n\tcd . && python train.py\n",
    "run.sh": "if ! python train.py; then exit 1; fi\n",
    "late.sh": "python train.py || { echo it failed; exit 1; }\n",
    "started.sh": "python train.py & wait $! || exit 1\n",
    "run.py": "import subprocess, sys\nsubprocess.run([sys.executable, 'train.py'], check=True)\n",
    "script.py": "import subprocess, sys\nsubprocess.run(['sh', 'run.sh'], check=True)\n",
    "passed_on.py": "import subprocess\nsubprocess.run('python train.py; exit $?', shell=True, check=True)\n",
    "spawn.py": "import os\nimport torch.multiprocessing\n\ndef train(rank):\n    os.kill(os.getpid(), 9)\n\n"
    "if __name__ == '__main__':\n    torch.multiprocessing.spawn(train)\n",
    "loader.py": "import os\nimport torch.utils.data\n\nclass Data(torch.utils.data.Dataset):\n"
    "    def __len__(self):\n        return 4\n    def __getitem__(self, n):\n        os.kill(os.getpid(), 9)\n\n"
    "if __name__ == '__main__':\n    list(torch.utils.data.DataLoader(Data(), num_workers=1))\n",
}


def ended(folder: Path, command: str) -> int:
    """How a command ends, as `--when exit` asks it."""
    subject = {"kind": "command", "command": command, "env": {"PATH": PATH}}
    case = Case.model_validate({"case": {"name": "toy", "steps": 1}, "subject": subject})
    return exit_code(case, Place(folder), folder / "log")


@pytest.mark.parametrize(
    "command",
    [
        "make test",
        "make below",
        "make shell",
        *(f"{shell} {script}.sh" for shell in ("sh", "bash") for script in ("run", "late", "started")),
        "python run.py",
        "python script.py",
        "python passed_on.py",
        pytest.param("python spawn.py", marks=pytest.mark.whole),
        pytest.param("python loader.py", marks=pytest.mark.whole),
        pytest.param("accelerate launch --cpu --num_processes 1 train.py", marks=pytest.mark.whole),
    ],
)
def test_a_launcher_of_a_killed_trainer_fails_by_the_machine(tmp_path: Path, command: str) -> None:
    """`make` exits with 2, scripts with 1: the trainer was killed by SIGKILL all the same, and no commit is BAD."""
    if not shutil.which(command.split()[0], path=PATH):
        pytest.skip(f"no {command.split()[0]}")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(MachineFailureError, match="was killed by SIGKILL"):
        ended(tmp_path, command)


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.CalledProcessError: Command '['x']' died with <Signals.SIGBUS: 7>.",
        "make[2]: *** [Makefile:2: test] Bus error (core dumped)",
        "make: *** [test] Killed",
        "<Process name='Process-1' pid=17 parent=9 stopped exitcode=-SIGKILL>",
        "joblib.externals.loky.process_executor.TerminatedWorkerError: The exit codes of the workers are {SIGKILL(-9)}",
        "billiard.exceptions.WorkerLostError: Worker exited prematurely: signal 9 (SIGKILL) Job: 0.",
        "[rank: 1] Child process with PID 17 terminated with code -9. Forcefully terminating all other processes",
        "py: exit -9 (0.51 seconds) /work> python train.py pid=17",
        "error: recipe `test` was terminated on line 2 by signal 9",
        "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)",
        "srun: error: node1: tasks 0-3: Killed",
        "  (signal: 9, SIGKILL: kill)",
        "c++: fatal error: Killed signal terminated program cc1plus",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        "45%|####5     | 45/100 [00:01<00:01, 38.2it/s]Killed",
        "OSError: [Errno 23] Too many open files in system: 'x'",
    ],
)
def test_words_of_other_launchers(tmp_path: Path, line: str) -> None:
    """What they print of a process that was killed, also behind the program's own last words."""
    (tmp_path / "log").write_text(f"step 3\n{line}\n")
    with pytest.raises(MachineFailureError):
        blame_the_machine(1, tmp_path / "log")


@pytest.mark.parametrize(
    ("code", "words"),
    [(130, "exited with 130, .*SIGINT"), (137, "exited with 137, .*SIGKILL ended: free memory"), (-2, "by SIGINT")],
)
def test_an_exit_code_above_128_is_not_known_to_be_a_signal(tmp_path: Path, code: int, words: str) -> None:
    """A script may exit with such a number itself; each signal has its own cure, and memory is that of some alone."""
    (tmp_path / "log").touch()
    with pytest.raises(MachineFailureError, match=words) as failure:
        blame_the_machine(code, tmp_path / "log")
    assert ("was killed" in str(failure.value)) == (code < 0)
    assert ("memory" in str(failure.value)) == (code == 137)


SERVER = "run.sh: line 9: 17 Killed                  python server.py\n"


@pytest.mark.parametrize(
    "output",
    [
        "Task 3: Killed by the user\nworkers: 17 Killed  units\nreward of Killed units 9\nkilled=9 signal 9\n",
        "Killed\nTraceback (most recent call last):\n  File 'x'\nValueError: the reward is 9\n",
        f"Traceback (most recent call last):\nAssertionError: 3 != 4\n{SERVER}",
        f"FAILED test_train.py::test_loss - AssertionError\n1 failed in 2 s\n{SERVER}",
        "forcefully exiting via Signals.SIGKILL\n",
        "subprocess.CalledProcessError: Command '['x']' died with <Signals.SIGSEGV: 11>.",
        "make: *** [Makefile:2: test] Error 9\nmake: *** [Makefile:2: test] Segmentation fault\n",
        "make: *** [Makefile:2: test] Terminated\nrun.sh: line 1: 17 Segmentation fault     python t.py\n",
        "    return -9\n  exit code: 9\nreturned non-zero exit status 9.\n",
    ],
)
def test_words_that_tell_of_no_kill(tmp_path: Path, output: str) -> None:
    """A program's own text, a crash, and a server that a script kills after its tests failed leave BAD what is BAD."""
    (tmp_path / "log").write_text(output)
    blame_the_machine(1, tmp_path / "log")


TRAIN = """\
import os, pathlib, torch
killed = pathlib.Path({killed!r})
if {n} == 2 and not killed.exists():
    killed.touch()
    os.kill(os.getpid(), 9)
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    (model(torch.ones(2, 3)).sum() * (1 + {n} // 4)).backward()
    optimizer.step()
    optimizer.zero_grad()
raise SystemExit({n} >= 4)
"""


@pytest.mark.whole
@pytest.mark.parametrize("by", ["exit", "bits"])
def test_a_search_stops_at_a_kill_and_keeps_nothing_of_it(fork: Repo, tmp_path: Path, by: str) -> None:
    """A probe's trainer that was killed behind a launcher ends the search; the same command then names the culprit."""
    commits = []
    (fork.root / "run.py").write_text(FILES["run.py"])
    for n in range(5):
        text = TRAIN.format(killed=str(tmp_path / "killed"), n=n)
        (fork.root / "train.py").write_text(text if by == "exit" else text.partition("raise")[0])
        commits.append(fork.commit(f"version {n}"))
    asked = ["--when", "exit"] if by == "exit" else ["--no-explain"]
    search = ["bisect", f"{commits[0]}..HEAD", *asked, "-j", "1", "--quick", "--json", "--", sys.executable, "run.py"]
    done = fork.repro(*search)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "a process of the trainer was killed by SIGKILL" in done.stderr
    assert json.loads(fork.repro(*search).stdout)["culprit"]["commit"] == commits[4]


# -- limits

WITHIN = """\
import resource, signal, sys
from pathlib import Path
resource.setrlimit(getattr(resource, sys.argv[1]), (int(sys.argv[2]),) * 2)
sys.path.insert(0, {tests!r})
from test_killed import ended
print(ended(Path(".").resolve(), sys.argv[3]))
"""
MANY = "import sys\nkept = [open('/dev/null') for _ in range(int(sys.argv[1]))]\n"
LARGE = "bytes(1 << 40)\n"


def within(folder: Path, limit: str, value: int, command: str) -> str:
    """The last line of what comes of a command in a process of ours that has a limit."""
    script = WITHIN.format(tests=str(Path(__file__).parent))
    words = [sys.executable, "-c", script, limit, str(value), command]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).splitlines()[-1]


@contextlib.contextmanager
def limited(name: str, value: int) -> Iterator[None]:
    """A soft limit of ours, for the block; skips where the hard one is lower."""
    number = getattr(resource, name)
    before = resource.getrlimit(number)
    try:
        resource.setrlimit(number, (value, before[1]))
    except ValueError:
        pytest.skip("the limit cannot be raised here")
    try:
        yield
    finally:
        resource.setrlimit(number, before)


@pytest.mark.parametrize(
    ("limit", "value", "text", "told"),
    [
        ("RLIMIT_NOFILE", 64, MANY, "open files: raise it (ulimit -n 16384)"),
        ("RLIMIT_AS", 1 << 33, LARGE, "memory: raise it (ulimit -v)"),
        ("RLIMIT_DATA", 1 << 33, LARGE, "memory: raise it (ulimit -d)"),
    ],
)
def test_a_limit_that_was_met_is_the_machines(tmp_path: Path, limit: str, value: int, text: str, told: str) -> None:
    """A program that needs more than it was started with is no verdict, also behind a launcher."""
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "run.sh").write_text("if ! python train.py 100; then exit 1; fi\n")
    for command in ("python train.py 100", "sh run.sh"):
        assert f"MachineFailureError: the trainer met the limit on {told} and run again" in within(
            tmp_path, limit, value, command
        )
    (tmp_path / "train.py").write_text("raise ValueError('the loss is 3')")
    assert within(tmp_path, limit, value, "python train.py") == "1"


@pytest.mark.parametrize(
    ("limit", "value", "code", "line", "told"),
    [
        ("RLIMIT_CPU", 1 << 20, -signal.SIGXCPU, "step 3", "processor time: raise it (ulimit -t)"),
        ("RLIMIT_CPU", 1 << 20, 1, "run.sh: line 1: 17 CPU time limit exceeded python train.py", "processor time"),
        ("RLIMIT_CPU", 1 << 20, -signal.SIGKILL, "step 3", "raise the limit on processor time (ulimit -t) and run"),
        ("RLIMIT_NPROC", 4096, 1, "RuntimeError: can't start new thread", "processes: raise it (ulimit -u 16384)"),
        ("RLIMIT_NPROC", 4096, 1, "sh: 1: Cannot fork", "processes: raise it"),
    ],
)
def test_words_of_limits(tmp_path: Path, limit: str, value: int, code: int, line: str, told: str) -> None:
    """What programs say of a limit counts where there is one; without it they failed by themselves."""
    (tmp_path / "log").write_text(f"{line}\n")
    with limited(limit, value), pytest.raises(MachineFailureError, match=re.escape(told)):
        blame_the_machine(code, tmp_path / "log")
    if code != -signal.SIGKILL:
        with limited(limit, resource.RLIM_INFINITY if limit == "RLIMIT_CPU" else 1 << 14):
            blame_the_machine(code, tmp_path / "log")


def test_a_leak_is_the_programs_own(tmp_path: Path) -> None:
    """Who meets an ample limit on open files keeps what it opens: no larger one would do."""
    (tmp_path / "log").write_text("OSError: [Errno 24] Too many open files: 'x'\n")
    with limited("RLIMIT_NOFILE", 1 << 14):
        blame_the_machine(1, tmp_path / "log")


@pytest.mark.whole
def test_a_search_under_a_low_limit_leaves_nothing_to_reuse(fork: Repo) -> None:
    """What failed for want of open files is BAD neither then nor when the limit was raised."""
    commits = []
    for n in range(5):
        (fork.root / "t.py").write_text(
            f"kept = [open('/dev/null') for _ in range({n} * 60)]\nraise SystemExit({n} > 3)\n"
        )
        commits.append(fork.commit(f"version {n}"))
    search = ["bisect", f"{commits[0]}..HEAD", "--when", "exit", "-j", "1", "--quick", "--json", "--"]
    search += [sys.executable, "t.py"]
    low = ["sh", "-c", 'ulimit -n 128; exec "$0" "$@"', sys.executable, "-m", "repro", *search]
    done = subprocess.run(low, cwd=fork.root, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "open files: raise it (ulimit -n 16384)" in done.stderr
    assert json.loads(fork.repro(*search).stdout)["culprit"]["commit"] == commits[4]
