"""Which Python a command's program runs in: the one that the user's shell would run, never simply repro's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import Repo
from history_kit import TRAIN
from ray_kit import Node
from test_bisect_ray import answer, needs_ray, node  # noqa: F401
from test_surroundings import Bisect, bisect, commanded, history  # noqa: F401

from repro_bisect.probe.around import Around, Pythons
from repro_golden.case.command_line import CommandLine
from repro_golden.case.python_of import Interpreter, is_ours, python_of
from repro_golden.recording.attach.code import met
from repro_golden.subjects.environments import builds
from repro_golden.subjects.pythons import is_one_of
from repro_golden.subjects.watched import Snapshot


def executable(path: Path, text: str = "") -> Path:
    """A program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Two environments, one of which is activated, and a Python of the system."""
    for name in ("active", "other", "system"):
        executable(tmp_path / name / "bin" / "python")
    executable(tmp_path / "active" / "bin" / "torchrun", f"#!{tmp_path}/other/bin/python3.12\n")
    executable(tmp_path / "other" / "bin" / "python3.12")
    long = f"#!/bin/sh\n'''exec' \"{tmp_path}/a b/bin/python\" \"$0\"\n"
    executable(tmp_path / "active" / "bin" / "accelerate", long)
    executable(tmp_path / "a b" / "bin" / "python")
    executable(tmp_path / "active" / "bin" / "nice")
    executable(tmp_path / "active" / "bin" / "env")
    executable(tmp_path / "active" / "bin" / "bash")
    executable(tmp_path / "launch.py", "#!/usr/bin/env python\n")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("{home}/other/bin/python train.py", "other/bin/python"),
        ("other/bin/python train.py", "other/bin/python"),
        ("python train.py", "active/bin/python"),
        ("torchrun --nproc-per-node 2 train.py", "other/bin/python3.12"),
        ("accelerate launch train.py", "a b/bin/python"),
        ("./launch.py", "active/bin/python"),
        ("nice -n 5 python train.py", "active/bin/python"),
        ("env LR=1 other/bin/python train.py", "other/bin/python"),
        ("bash run.sh", "venv/bin/python"),
        ("nowhere train.py", "venv/bin/python"),
    ],
)
def test_a_command_runs_in_the_python_that_it_names(home: Path, command: str, expected: str) -> None:
    """An interpreter, else a script of one, behind wrappers too; else the active environment's."""
    executable(home / "venv" / "bin" / "python")
    variables = {"PATH": f"{home}/active/bin:{home}/system/bin", "VIRTUAL_ENV": str(home / "venv")}
    interpreter = python_of(command.replace("{home}", str(home)).split(), home, variables)
    assert interpreter and interpreter.path == str(home / expected)


def test_without_any_environment_the_first_on_path_is_it(home: Path) -> None:
    """Conda's, then that of PATH; where there is none at all nothing is said."""
    path = {"PATH": str(home / "system" / "bin")}
    interpreter = python_of(["bash", "run.sh"], home, path)
    assert interpreter == Interpreter(str(home / "system/bin/python"))
    interpreter = python_of(["bash", "run.sh"], home, path | {"CONDA_PREFIX": str(home / "other")})
    assert interpreter == Interpreter(str(home / "other/bin/python"))
    assert python_of(["bash", "run.sh"], home, {"PATH": str(home)}) is None


def test_a_case_says_its_python_where_it_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of another environment stands in the case; one in the checkout by its place there; our own by nothing.

    The command says it by name alone, so that a path makes no other case; behind a program as ``{python}``.
    """
    monkeypatch.chdir(tmp_path)
    executable(tmp_path / "venv" / "bin" / "python")
    ours = CommandLine([sys.executable, "train.py"]).case(tmp_path).subject
    assert ours.program and ours.program.python is None and is_ours(sys.executable)
    inside = CommandLine(["venv/bin/python", "train.py"]).case(tmp_path).subject.program
    assert inside and (inside.python, inside.command) == ("venv/bin/python", "python train.py")
    behind = CommandLine(["nice", "venv/bin/python", "train.py"]).case(tmp_path).subject.program
    assert behind and (behind.python, behind.command) == ("venv/bin/python", "nice '{python}' train.py")
    monkeypatch.setenv("PATH", f"{tmp_path}/venv/bin:/usr/bin:/bin")
    (tmp_path / "sub").mkdir()
    named = CommandLine(["python", "train.py"]).case(tmp_path / "sub").subject.program
    assert named and named.python == str(tmp_path / "venv/bin/python")


def test_a_bisect_runs_the_program_where_the_user_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With repro in an environment of its own, the program has the packages of the active one; which is said once."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.glob("lib/python3*/site-packages")
    (packages / "users_own.py").write_text("CODE = 0\n")
    repo = Repo(tmp_path / "repo")
    (repo.root).mkdir()
    repo.git("init", "--quiet")
    train = repo.root / "train.py"
    commits = []
    for code in ("users_own.CODE", "users_own.CODE + 0", "users_own.CODE + 1"):
        train.write_text(f"import sys, users_own\nsys.exit({code})\n")
        commits.append(repo.commit(code))
    monkeypatch.setenv("PATH", f"{venv}/bin{os.pathsep}{os.environ['PATH']}")
    done = repo.repro("bisect", f"{commits[0]}..HEAD", "--when", "exit", "--", "python", "train.py")
    assert done.returncode == 0 and f"commit {commits[2]}" in done.stdout, done.stdout + done.stderr
    assert done.stderr.count(f"repro: the program runs in {venv}/bin/python") == 1
    assert done.stdout.strip().endswith("python train.py")


def environment(folder: Path) -> tuple[Path, Path]:
    """A Python of its own, and the folder of its packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python", next(folder.glob("lib/python3*/site-packages"))


def test_a_python_behind_a_script(tmp_path: Path) -> None:
    """A process of a shim's (pyenv) says what that starts; one of an environment beside it is another."""
    shim = executable(tmp_path / "shims" / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python, _ = environment(tmp_path / "venv")
    assert is_one_of(sys.executable, [str(shim)]) and is_one_of(f"{python}3", [str(python)])
    assert not is_one_of(str(python), [str(shim), sys.executable])


@pytest.mark.parametrize("named", [True, False])
def test_a_python_that_no_word_names(tmp_path: Path, bisect: Bisect, named: bool) -> None:  # noqa: F811
    """A probe is used again while the environment that its processes said they ran in has the same packages.

    Of one that no variable names the first search knows nothing before its first probe, which serves it alone.
    """
    repo, commits = history(tmp_path, "__import__('dep').LIMIT")
    python, site = environment(tmp_path / "venv")
    script = tmp_path / "train.sh"
    script.write_text(f"exec {'$HOME_OF/bin/python' if named else python} judge.py\n")
    results = []
    for limit in (2, 2, 3):
        (site / "dep.py").write_text(f"LIMIT = {limit}\n")
        builds.asked.cache_clear()  # as another process
        results.append(bisect(repo, "sh", str(script), **({"HOME_OF": str(tmp_path / "venv")} if named else {})))
    assert [result["culprit"]["commit"] for result in results] == [commits[2], commits[2], commits[3]]
    assert [result["cost"]["probes"] for result in results[1:]] == [0 if named else 1, results[0]["cost"]["probes"]]


@pytest.mark.whole
def test_a_golden_run_in_a_python_that_no_word_names_is_no_replay(recorded: Repo, tmp_path: Path) -> None:
    """It does not say what that held: GOOD is replayed twice, and the search says why."""
    python, site = environment(tmp_path / "venv")
    torch = find_spec("torch")
    assert torch and torch.origin
    (site / "torch.pth").write_text(str(Path(torch.origin).parents[1]))
    script = tmp_path / "train.sh"
    script.write_text(f"exec {python} train.py --steps 2\n")
    (recorded.root / "train.py").write_text(TRAIN)
    recorded.commit("Train")
    done = recorded.repro("golden", "record", "toy", "--steps", "2", "--", "sh", str(script))
    assert done.returncode == 0, done.stdout + done.stderr
    recorded.commit("Golden run")
    recorded.edit("train.py", "scale = 1.0", "scale = 1.5")
    culprit = recorded.commit("Scale")
    done = recorded.repro("bisect", "--no-explain", "HEAD~1..HEAD", "--case", "toy")
    assert f"commit {culprit}" in done.stdout, done.stdout + done.stderr
    assert f"the golden run of GOOD is not used: it was recorded in {python}, and does not say" in done.stderr


def test_what_a_process_says_of_its_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that becomes another both are known; a build of a package, and what it starts, says nothing."""
    for python in ("/a/bin/python", "/b/bin/python3"):
        monkeypatch.setattr(sys, "executable", python)
        met._say_python(str(tmp_path))
    assert {json.loads(path.read_text()) for path in tmp_path.glob(met.PYTHONS)} == {"/a/bin/python", "/b/bin/python3"}
    monkeypatch.setattr(sys, "orig_argv", ["python", "tools/build_wheel.py", "all"])
    monkeypatch.setattr(sys, "executable", "/c/bin/python")
    met._say_python(str(tmp_path))
    for hook in (["_in_process.py", "build_editable", str(tmp_path)], ["-c", "hook.build_wheel('.')"]):
        monkeypatch.setenv("REPRO_BUILDS", "")
        monkeypatch.delenv("REPRO_BUILDS")
        for words in (hook, ["-m", "cmake"]):
            monkeypatch.setattr(sys, "orig_argv", ["python", *words])
            met._say_python(str(tmp_path))
    assert len([*tmp_path.glob(met.PYTHONS)]) == 3


def test_what_a_probe_rests_on_is_what_was_known_of_its_pythons() -> None:
    """One that was met first, or is gone, is no reason to keep a state or an answer; none met is none to ask for."""
    snapshots = {"/a": Snapshot(("1",), {}, dict), "/b": Snapshot(("2",), {}, dict), "/gone": Snapshot((), {}, dict)}
    around = Around(commanded("x"), [], Pythons(lambda python, _: snapshots[python], lambda: ["/a"]))
    began = around.moment
    assert around.expects([]) and around.expects(["/a"]) and not around.expects(["/a", "/b"])
    assert around.lasted(began, []) and around.lasted(began, ["/a"])
    assert not around.lasted(began, ["/b"]) and around.lasted(around.moment, ["/b"])
    assert not around.lasted(around.moment, ["/gone"])
    assert (
        around.pythons.are({"/b": "2"})
        and not around.pythons.are({"/b": "1"})
        and not around.pythons.are({"/gone": ""})
    )


@pytest.mark.whole
@needs_ray
def test_what_the_nodes_have_in_a_python_that_a_script_starts_counts(tmp_path: Path, node: Node) -> None:  # noqa: F811
    """A later search uses no probe of an environment whose packages on the nodes have become others."""
    repo, commits = history(tmp_path, "__import__('dep').LIMIT")
    _, site = environment(tmp_path / "venv")
    (tmp_path / "train.sh").write_text("exec $1/bin/python judge.py\n")
    command = "--when", "exit", "--", "sh", str(tmp_path / "train.sh"), str(tmp_path / "venv")
    answers = []
    for limit in (2, 2, 3):
        (site / "dep.py").write_text(f"LIMIT = {limit}\n")
        answers.append(answer(repo, tmp_path, "HEAD~4..HEAD", "--ray", node.address, *command))
    assert [result["culprit"]["commit"] for result in answers] == [commits[2], commits[2], commits[3]]
    assert answers[1]["cost"]["probes"] == 0


@pytest.mark.parametrize(
    ("words", "deaf"),
    [
        ("python3.11 -I x.py", True),
        ("python -W ignore -Es x.py", True),
        ("python -Wignore -mI -I", False),
        ("python - -I", False),
        ("python x.py -I", False),
        ("python-config -I", False),
    ],
)
def test_options_of_python(words: str, deaf: bool) -> None:
    """Python's own options shut the recorder out, not their arguments nor what is the program's."""
    assert met.is_deaf(words.split(), bare=False) is deaf
    assert met.is_deaf(words.split(), bare=True) is ("config" not in words)
