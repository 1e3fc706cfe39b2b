"""`repro trace` as a user meets it: real programs, real signals, full disks, and nothing that the program notices."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm_kit
from conftest import environment

from repro_golden.base.errors import ReproError
from repro_golden.recording.attach.gathered.collect import Gathering
from repro_golden.trace import Header, Trace
from repro_golden.trace.families import family
from repro_golden.trace.model import root

TRAIN = """\
import atexit, glob, os, resource, shutil, signal, subprocess, sys
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.Adam(model.parameters())
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).pow(2).sum().backward()
        optimizer.step()
def full_disk():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
"""
END = 'print("trained")\nsys.exit(7)\n'
QUICK = {"OMP_NUM_THREADS": "1"}
TRACE = [sys.executable, "-m", "repro", "trace", "--out", "trace", "--"]


def traced(
    folder: Path, *command: str, text: str = "", **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """One command under `repro trace` in `folder`; how it ended and its lines on stderr."""
    done = subprocess.run(
        [*TRACE, *command], cwd=folder, env=environment() | QUICK | variables, input=text, capture_output=True,
        text=True, timeout=100, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done, done.stderr.splitlines()


def python(folder: Path, program: str, *flags: str) -> list[str]:
    """The command that runs a program's text."""
    (folder / "train.py").write_text(program)
    return [sys.executable, *flags, str(folder / "train.py")]


def roots(trace: Path) -> list[str]:
    """What was recorded of each step, with every row read back; not what was left when the program ended."""
    opened = Trace(trace)
    steps = [opened.rows(k) for k in range(len(opened.steps))]
    assert all(steps)
    return [root([row for row in rows if family(row.phase, row.name) != "end"]) for rows in steps]


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The roots of the program's first five steps, of a run in which nothing goes wrong."""
    folder = tmp_path_factory.mktemp("five")
    done, _ = traced(folder, *python(folder, TRAIN + "train(5)"))
    assert done.returncode == 0, done.stderr
    names = roots(folder / "trace")
    assert len(set(names)) == 5
    return names


@pytest.mark.whole
def test_pass_through(tmp_path: Path, five: list[str]) -> None:
    """Input, output and exit code are the program's own; a fork that does not train leaves no mark on the trace."""
    fork = "if os.fork() == 0:\n    sys.exit(0)\nos.wait()\n"  # by sys.exit, so that the child's atexit runs too
    end = "print(sys.stdin.read()[::-1])\nprint('to stderr', file=sys.stderr)\nsys.exit(7)"
    program = python(tmp_path, TRAIN + "train(2)\n" + fork + "train(3)\n" + end)
    done, errors = traced(tmp_path, *program, text="input")
    assert (done.stdout, done.returncode) == ("tupni\n", 7)
    assert errors == ["to stderr", "repro: 5 steps of 1 rank in trace"]
    assert roots(tmp_path / "trace") == five
    trace = Trace(tmp_path / "trace")
    assert trace.complete
    assert trace.end is not None
    assert trace.end["exit"] == 7
    assert not list((tmp_path / "trace").glob("raw-*"))


@pytest.mark.whole
def test_signals_pass_through(tmp_path: Path, five: list[str]) -> None:
    """A SIGTERM sent to `repro trace` alone reaches the program, whose handler runs; the steps before are there."""
    handler = "signal.signal(signal.SIGTERM, lambda *_: (print('handled', flush=True), sys.exit(5)))\n"
    wait = "train(2)\nsignal.alarm(60)\nprint('ready', flush=True)\nwhile True:\n    signal.pause()\n"
    program = python(tmp_path, TRAIN + handler + wait)
    with subprocess.Popen(
        [*TRACE, *program], cwd=tmp_path, env=environment() | QUICK, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=60)
    assert (out, process.returncode) == ("handled\n", 5)
    assert errors == "repro: 2 steps of 1 rank in trace\n"
    assert roots(tmp_path / "trace") == five[:2]


def test_killed(tmp_path: Path, five: list[str]) -> None:
    """A kill in a step: 128 + 9; the steps are readable but the last, which waited for its numbers; stderr says so."""
    kill = "train(3)\nmodel.weight.register_hook(lambda g: os.kill(os.getpid(), signal.SIGKILL))\ntrain(1)\n"
    done, errors = traced(tmp_path, *python(tmp_path, TRAIN + kill))
    assert done.returncode == 128 + signal.SIGKILL
    assert len(errors) == 1
    assert "2 steps of 1 rank in trace; incomplete" in errors[0]
    assert roots(tmp_path / "trace") == five[:2]
    assert not Trace(tmp_path / "trace").complete


@pytest.mark.whole
@pytest.mark.parametrize("variant", ["no torch", "no torch, failed", "no training, failed", "isolated"])
def test_no_step_seen(tmp_path: Path, variant: str) -> None:
    """No step, no trace: one line that names the program's exit code, and 2 whatever that code was."""
    text, flags, code = {
        "no torch": ("", (), 0),
        "no torch, failed": ("raise SystemExit(3)", (), 3),
        "no training, failed": (TRAIN + "train(0)\n" + END, (), 7),
        "isolated": (TRAIN + "train(1)", ("-I",), 0),
    }[variant]
    done, errors = traced(tmp_path, *python(tmp_path, text, *flags))
    assert done.returncode == 2
    assert len(errors) == 1
    assert ("failed before its first optimizer step" if code else "no optimizer step was seen") in errors[0]
    assert f"exit code {code})" in errors[0]
    assert ("reads PYTHONPATH" in errors[0]) is (code == 0)


def test_a_program_that_fails_is_no_matter_of_how_it_trains(tmp_path: Path) -> None:
    """What it raised is told, that of a launcher's child first; where it ended well, how steps are seen."""
    for number, (name, text) in enumerate({"raised-9": "ValueError: no data", "idle-9": "one steps by hand"}.items()):
        (tmp_path / name).write_text(text)
        (tmp_path / "raised-10").write_text("ChildFailedError: train.py FAILED")
        os.utime(tmp_path / name, (number, number))
    gathering = Gathering(tmp_path, tmp_path / "out", lambda *_: Header({}, "", {}, {}, 1), None)
    with pytest.raises(ReproError) as told:
        gathering.finish(["python"], 1)
    assert str(told.value) == "python failed before its first optimizer step (exit code 1): ValueError: no data"
    with pytest.raises(ReproError, match=r"no optimizer step was seen .* one steps by hand"):
        gathering.finish(["python"], 0)


@pytest.mark.parametrize(
    ("words", "text", "where"),
    [
        ("make train", "train:\n\tPYTHONPATH=src python -m pkg.train", "Makefile:2"),
        ("make train", "train:\n\tPYTHONPATH=src:$$PYTHONPATH python -m pkg.train", ""),
        ("bash run.sh", '# PYTHONPATH=src\nexport PYTHONPATH="$PWD/src"\npython train.py', "run.sh:2"),
        ("bash run.sh", "export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}\nexport MY_PYTHONPATH=src", ""),
        ("sh -c 'PYTHONPATH=src python -m pkg.train'", "", "`PYTHONPATH=src python -m pkg.train`"),
        ("env PYTHONPATH=src python train.py", "PYTHONPATH=src", "`PYTHONPATH=src`"),
        ("python train.py", "PYTHONPATH=src", ""),
        ("bash run.sh", 'export PYTHONPATH="$PWD/src":$PYTHONPATH', ""),
        ("bash run.sh", "PYTHONPATH=$(git rev-parse --show-toplevel):$PYTHONPATH python t.py", ""),
        ("bash run.sh", "PYTHONPATH=`pwd`/'my src'/a:$PYTHONPATH python t.py", ""),
        ("bash run.sh", ": ${PYTHONPATH:=src}", ""),
        ("bash run.sh", "X=1 PYTHONPATH=$(pwd) python t.py  # $PYTHONPATH", "run.sh:1"),
    ],
)
def test_a_launch_that_sets_the_path_anew(tmp_path: Path, words: str, text: str, where: str) -> None:
    """The line that keeps the recorder out is named, in the command, its script or its Makefile."""
    command = shlex.split(words)
    name = {"make": "Makefile", "bash": "run.sh"}.get(command[0], "train.py")
    (tmp_path / name).write_text(text)
    gathering = Gathering(tmp_path, tmp_path / "out", lambda *_: Header({}, "", {}, {}, 1), None, root=tmp_path)
    with pytest.raises(ReproError, match="no optimizer step was seen") as told:
        gathering.finish(command, 0)
    assert (f"): {where} sets PYTHONPATH anew" in str(told.value)) is bool(where)
    assert "does it train with torch.optim" in str(told.value)  # it may be that all the same


def test_nothing_to_run(tmp_path: Path) -> None:
    """A command that cannot be started, or an output folder in use, is one line and exit code 2."""
    (tmp_path / "words").write_text("no program\n")
    for command in ("no-such-command", "./words", "."):
        done, errors = traced(tmp_path, command)
        assert (done.returncode, len(errors)) == (2, 1)
        assert command in errors[0]
    assert list((tmp_path / "trace").iterdir()) == []
    (tmp_path / "trace" / "mine").touch()
    done, errors = traced(tmp_path, "touch", "ran")
    assert (done.returncode, errors) == (2, ["repro: trace is not empty: choose another folder or remove it"])
    assert not (tmp_path / "ran").exists()
    (tmp_path / "trace" / "mine").unlink()
    (tmp_path / "trace").rmdir()
    (tmp_path / "trace").touch()
    done, errors = traced(tmp_path, "touch", "ran")
    assert (done.returncode, len(errors)) == (2, 1)
    assert not (tmp_path / "ran").exists()


FAILURES = {  # what goes wrong, and the steps that are recorded all the same
    "disk full before": ("full_disk()\ntrain(4)\n", 0),
    "disk full": ("train(2)\nfull_disk()\ntrain(2)\n", 1),
    "disk full after": ("train(4)\nfull_disk()\n", 3),
    "raw folder gone before": ("shutil.rmtree(*glob.glob('trace/raw-*'))\ntrain(4)\n", 0),
    "all folders gone": ("train(2)\nshutil.rmtree('trace')\ntrain(2)\n", 0),
    "a parameter without content": (
        "train(2)\nmeta = torch.ones(2, device='meta', requires_grad=True)\n"
        "optimizer.add_param_group({'params': [meta]})\ntrain(2)\n", 2,
    ),
}  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize("failure", FAILURES)
def test_failed_recording(tmp_path: Path, five: list[str], failure: str) -> None:
    """A recorder that fails says so in one line and stops; the program goes on, and the steps before are readable."""
    program, steps = FAILURES[failure]
    done, errors = traced(tmp_path, *python(tmp_path, TRAIN + program + END))
    assert done.stdout == "trained\n"
    assert sum("recording stopped at step" in line for line in errors) == 1
    assert len(errors) == 2, errors
    if steps:
        assert done.returncode == 7
        assert f"{steps} step{'s' * (steps != 1)} of 1 rank in trace; incomplete" in errors[1]
        assert roots(tmp_path / "trace") == five[:steps]
        assert not Trace(tmp_path / "trace").complete
    else:  # no trace: the instrument's failure, which names the program's code
        assert done.returncode == 2
        assert "exit code 7" in errors[1]


def test_failed_recording_without_stderr(tmp_path: Path, five: list[str]) -> None:
    """A recorder that fails in a program that closed its stderr: the program goes on all the same."""
    program = "train(2)\nsys.stderr.close()\nfull_disk()\ntrain(2)\n"
    done, errors = traced(tmp_path, *python(tmp_path, TRAIN + program + END))
    assert (done.stdout, done.returncode) == ("trained\n", 7)
    assert len(errors) == 1
    assert roots(tmp_path / "trace") == five[:1]


@pytest.mark.whole
def test_child_elsewhere(tmp_path: Path, five: list[str]) -> None:
    """The Python process below a shell is recorded; the trace is where it was asked for, wherever the program goes."""
    (tmp_path / "below").mkdir()
    program = python(tmp_path, "import os\nos.chdir('/')\n" + TRAIN + "train(2)\nos.chdir('/usr')\ntrain(1)\n" + END)
    done, errors = traced(tmp_path, "sh", "-c", f"cd below && {' '.join(program)}; exit 9")
    assert (done.stdout, done.returncode) == ("trained\n", 9)
    assert errors == ["repro: 3 steps of 1 rank in trace"]
    assert roots(tmp_path / "trace") == five[:3]


def test_json_is_all_that_stdout_gets(tmp_path: Path) -> None:
    """With --json stdout holds one object, of a trace as of an error; what the program prints goes to stderr."""
    program = python(tmp_path, TRAIN + "train(2)\n" + END)
    told = [*TRACE[:-1], "--steps", "3", "--json", "--"]
    for code, words in ((7, program), (2, ["no-such-program"])):
        done = warm_kit.run([*told, *words], tmp_path, environment() | QUICK)
        data = json.loads(done.stdout)
        assert done.returncode == data["exit_code"] == code, done.stderr
        if code == 7:
            assert (data["steps"], data["ranks"], data["complete"], data["trace"]) == (2, 1, True, "trace")
            assert data["notes"] == ["the program ended before the 3 that were asked for"]
            assert done.stderr == "trained\n" and roots(tmp_path / "trace")
            shutil.rmtree(tmp_path / "trace")
        else:
            assert "no-such-program" in data["error"]


@pytest.mark.whole
def test_fork_that_trains(tmp_path: Path) -> None:
    """Two processes that train as one rank are an error of one line, never a trace mixed of both."""
    fork = "train(1)\nchild = os.fork()\nif child:\n    os.wait()\ntrain(2)\n"
    done, errors = traced(tmp_path, *python(tmp_path, TRAIN + fork))
    assert (done.returncode, len(errors)) == (2, 1)
    assert "2 processes trained as rank 0" in errors[0]
    assert list((tmp_path / "trace").iterdir()) == []


def test_other_processes(tmp_path: Path) -> None:
    """The user's sitecustomize and PYTHONPATH work as ever; a process without torch gets nothing else loaded."""
    for name, text in (("sitecustomize", "import sys\nsys.side_effect = 'seen'"), ("mine", "there = True")):
        (tmp_path / "path").mkdir(exist_ok=True)
        (tmp_path / "path" / f"{name}.py").write_text(text)
    program = """
import sys, mine, sitecustomize
print(sys.side_effect, mine.there, sitecustomize.__file__)
print([m for m in ("repro_golden", "numpy", "torch", "repro") if m in sys.modules])
"""
    done, _ = traced(tmp_path, *python(tmp_path, program), PYTHONPATH=str(tmp_path / "path"))
    assert done.stdout.splitlines() == [f"seen True {tmp_path / 'path' / 'sitecustomize.py'}", "[]"]


@pytest.mark.whole
def test_sitecustomize(tmp_path: Path, five: list[str]) -> None:
    """Whatever the user's sitecustomize does, importing torch and failing, the program is recorded."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text("import torch\nraise ValueError('not today')\n")
    program = python(tmp_path, TRAIN + "train(1)\n" + END)
    done, errors = traced(tmp_path, *program, PYTHONPATH=str(tmp_path / "path"))
    assert (done.stdout, done.returncode) == ("trained\n", 7)
    assert "repro: 1 step of 1 rank in trace" in errors
    assert roots(tmp_path / "trace") == five[:1]


@pytest.mark.whole
def test_torch_sought_before(tmp_path: Path, five: list[str]) -> None:
    """A program that looks whether there is a torch, or fails to import it, before it imports it is recorded."""
    look = """\
import importlib.util, sys
assert importlib.util.find_spec("torch")  # as libraries do that support several frameworks
path, sys.path = sys.path, sys.path[:1]
try:
    import torch
except ImportError:
    sys.path = path
"""
    done, _ = traced(tmp_path, *python(tmp_path, look + TRAIN + "train(1)\n" + END))
    assert (done.stdout, done.returncode) == ("trained\n", 7)
    assert roots(tmp_path / "trace") == five[:1]


def test_help() -> None:
    """The list of commands has `trace`, and its own help an example."""
    for arguments, words in (("--help",), "trace "), (("trace", "--help"), "Example: repro trace --out"):
        done = warm_kit.run([sys.executable, "-m", "repro", *arguments], Path.cwd())
        assert any(line.strip().startswith(words) for line in done.stdout.splitlines())


@pytest.mark.whole
def test_signals_reach_the_program(tmp_path: Path) -> None:
    """A signal sent to the instrument alone, as a scheduler does, reaches the program, which ends in its own way."""
    program = (
        "import time\nsignal.signal(signal.SIGUSR1, lambda *_: (print('told', flush=True), sys.exit(5)))\n"
        "train(2)\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen(
        [*TRACE, *python(tmp_path, TRAIN + program)], cwd=tmp_path, env=environment() | QUICK, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    out, errors = process.communicate(timeout=60)
    assert (out, process.returncode) == ("told\n", 5)
    assert "2 steps of 1 rank" in errors


@pytest.mark.whole
def test_an_incomplete_trace_does_not_agree(tmp_path: Path) -> None:
    """A recording that broke off, or whose program failed, proves nothing by agreeing as far as it goes: exit 3."""
    for out, steps, end in (("whole", 4, ""), ("failed", 2, "sys.exit(3)"), ("killed", 3, "os.kill(os.getpid(), 9)")):
        command = python(tmp_path, TRAIN + f"train({steps})\n{end}")
        subprocess.run([*TRACE[:-2], out, "--", *command], cwd=tmp_path, env=environment() | QUICK, check=False)
    for other, why in (("failed", "its program failed (exit code 3)"), ("killed", "its recording broke off")):
        command = [sys.executable, "-m", "repro", "diff", "whole", other]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 3
        assert f"B is incomplete: {why}" in done.stdout
        done = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True, check=False)
        data = json.loads(done.stdout)
        assert (data["equal"], data["divergence"], len(data["incomplete"])) == (False, None, 1)


@pytest.mark.whole
def test_options_of_the_program_are_its_own(tmp_path: Path) -> None:
    """Without `--`, what follows the command is the command's; asking for what is not there is said."""
    command = python(tmp_path, TRAIN + "train(2)\nprint(sys.argv[1:])")
    options = ["--out", "trace", "--steps", "9", "--activations", "nothing.*"]
    done = subprocess.run(
        [*TRACE[:-3], *options, *command, "--steps", "3", "--out", "x"], cwd=tmp_path, env=environment() | QUICK,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "['--steps', '3', '--out', 'x']\n"
    assert "ended before the 9 that were asked for; no module fits 'nothing.*'" in done.stderr


def test_light_signals(tmp_path: Path) -> None:
    """Optimizer state is read after each N-th step alone, the rest after each; the header says so, and so does a diff.

    The folder's name has a colon, which is no address.
    """
    program = [sys.executable, "-c", TRAIN + "train(4)\n"]
    line = [sys.executable, "-m", "repro", "trace", "--out"]
    for name, words in (("a:light", ["--signals", "light:2"]), ("full", [])):
        assert warm_kit.run([*line, name, *words, "--", *program], tmp_path, environment() | QUICK).returncode == 0
    light, full = Trace(tmp_path / "a:light"), Trace(tmp_path / "full")
    assert light.header.subject["observe"]["signals"] == "light:2" and "signals" not in full.header.subject["observe"]
    for index in range(4):
        names = [{row.name for row in trace.rows(index)} for trace in (light, full)]
        assert names[1] - names[0] == (
            set() if index % 2 else {n for n in names[1] if n.startswith(("exp_avg", "step/"))}
        )
        assert names[0] <= names[1] and {"weight", "bias"} <= names[0]
    done = warm_kit.run([sys.executable, "-m", "repro", "diff", "full", "a:light"], tmp_path, environment())
    assert done.returncode == 3 and "--signals: record both with the same" in done.stderr
    done = subprocess.run([*line, "x", "--signals", "lite", "--", "true"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--signals is full, light or light:N, not 'lite'" in done.stderr
