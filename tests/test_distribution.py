"""What is published: wheel and sdist, built and installed where nothing else is, and what is said without an extra."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import SOURCE, Repo, environment
from history_kit import edit, note, start
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from repro_golden.base.extras import EXTRAS

PACKAGES = {"repro": ".", "repro_core": "core", "repro_golden": "golden", "repro_bisect": "bisect"}
PROJECT = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]


def run(*command: object, cwd: Path = SOURCE) -> subprocess.CompletedProcess[str]:
    """A program that must end well."""
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built of it."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def needed(names: Iterator[Requirement]) -> Iterator[importlib.metadata.Distribution]:
    """Installed distributions that satisfy requirements, and those that they need."""
    waiting, seen = list(names), set[str]()
    for need in waiting:  # which grows
        key = canonicalize_name(need.name)
        if key not in seen and (need.marker is None or need.marker.evaluate({"extra": ""})):
            seen.add(key)
            package = importlib.metadata.distribution(need.name)
            yield package
            waiting += map(Requirement, package.requires or [])


@pytest.fixture(scope="module")
def light(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment with the wheel and what it requires without extras, and nothing else; its `bin`."""
    folder = tmp_path_factory.mktemp("light")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", built[1])
    (site,) = folder.glob("lib/python*/site-packages")
    for requirement in needed(map(Requirement, PROJECT["dependencies"])):
        for name in {file.parts[0] for file in requirement.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            (site / name).symlink_to(requirement.locate_file(name))
    return folder / "bin"


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Repo:
    """Three commits of a trainer, of which the second moves its numbers."""
    repo = start(tmp_path_factory.mktemp("history"), case=None)
    note(repo, "one")
    edit(repo, "scale = 1.0", "scale = 1.0 + 1e-6", "Scale")
    note(repo, "two")
    return repo


def test_wheel_and_sdist_are_whole(built: tuple[Path, Path]) -> None:
    """Both pass twine; the wheel has the four packages with their types and templates, and nothing besides."""
    run(sys.executable, "-m", "twine", "check", "--strict", *built)
    with zipfile.ZipFile(built[1]) as wheel:
        names = set(wheel.namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)
    tracked = run("git", "ls-files", "--", *(f"{folder}/{name}" for name, folder in PACKAGES.items())).stdout.split()
    expected = {path.partition("/")[2] if not path.startswith("repro/") else path for path in tracked}
    assert expected <= names
    assert {f"{name}/py.typed" for name in PACKAGES} <= names
    with tarfile.open(built[0]) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO", *tracked} <= inside


WITHOUT = [
    ("init", "golden"),
    ("golden record toy -- python train.py", "golden"),
    ("doctor .", "doctor"),
    ("report pr HEAD~1..HEAD -- python train.py", "report"),
    ("report nightly", "report"),
    ("report publish --out site", "report"),
    ("report post comment.md", "report"),
    ("demo", "trainer,golden,report"),
    ("bisect HEAD~1..HEAD --ray auto -- python train.py", "ray"),
    ("diff events events", "tensorboard"),
]


COMMANDS = """
import contextlib, io, json, sys
from repro.__main__ import main
answers = []
for line in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(line.split())
    answers.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""
"""Several commands in one process, which costs less than a process for each."""


def test_a_light_installation_helps_lists_and_names_the_extra(light: Path, history: Repo) -> None:
    """With the bare requirements, help and lists are there, and what needs an extra says so in one line."""
    assert "bisect" in run(light / "repro", "--help").stdout
    (history.root / "events").mkdir()
    (history.root / "events" / "events.out.tfevents.1").touch()
    lines = ["golden list", "report pr --help", *(line for line, _ in WITHOUT)]
    done = run(light / "python", "-P", "-c", COMMANDS, json.dumps(lines), cwd=history.root)
    listed, helped, *answers = json.loads(done.stdout)
    assert listed[:2] == [0, "no golden runs: `repro golden record` records one\n"] and helped[0] == 0
    for (line, extras), (code, out, err) in zip(WITHOUT, answers, strict=True):
        told = [text for text in err.splitlines() if not text.startswith("repro: the program runs in")]
        assert (code, out, len(told)) == (2, "", 1), (line, err)
        assert told[0].endswith(f"pip install 'repro-harness[{extras}]'"), (line, told)


def test_the_trainer_says_that_it_needs_torch(light: Path) -> None:
    """Its command lines are one line and code 2 where the Python has none; help needs none."""
    run(light / "python", "-m", "repro_core.train", "--help", cwd=light)
    for module in ("repro_core.train", "repro_core.determinism"):
        command = [light / "python", "-P", "-m", module]
        done = subprocess.run(command, cwd=light, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert done.stderr.endswith("pip install 'repro-harness[trainer]'\n")


def test_the_shell_completes(light: Path, history: Repo) -> None:
    """The lines of docs/how-to/install.md give each shell a script, which is given commands and options."""
    page = (SOURCE / "docs" / "how-to" / "install.md").read_text()
    for shell in ("bash", "zsh", "fish"):
        line = re.search(rf"_REPRO_COMPLETE={shell}_source repro", page)
        assert line and "_REPRO_COMPLETE" in run("sh", "-c", f"PATH={light}:$PATH; {line[0]}").stdout
    for words, at, expected in (("repro gol", 1, "golden"), ("repro golden verify --pl", 3, "--plots")):
        asked = f"COMP_WORDS='{words}' COMP_CWORD={at} _REPRO_COMPLETE=bash_complete {light}/repro"
        assert run("sh", "-c", asked, cwd=history.root).stdout == f"plain,{expected}\n"


def test_a_light_installation_bisects(light: Path, history: Repo) -> None:
    """The verdict is told and its exit code given; one line says which reports were not written, and why."""
    command = [light / "repro", "bisect", "HEAD~3..HEAD", "--when", "exit", "--", "grep", "-q", "1.0$", "train.py"]
    done = run(*command, cwd=history.root)
    assert "Scale" in done.stdout
    (line,) = [text for text in done.stdout.splitlines() if text.startswith("not written:")]
    assert line.startswith("not written: report.md and report.html; ")
    assert line.endswith("pip install 'repro-harness[report]'")


@pytest.mark.whole
def test_a_light_installation_bisects_a_program_that_has_torch(light: Path, history: Repo) -> None:
    """A program runs in its own Python, whose torch repro lacks: traced, compared, bisected, listed and explained."""
    program, repro = [sys.executable, "train.py"], light / "repro"
    run(repro, "trace", "--out", "trace", "--", *program, cwd=history.root)
    assert "agrees" in run(repro, "diff", "trace", "trace", cwd=history.root).stdout
    printed = run(repro, "bisect", "HEAD~3..HEAD", "--", *program, cwd=history.root).stdout
    assert "Scale" in printed and "train.py:23" in printed and "not written:" in printed
    assert "Scale" in run(repro, "history", "HEAD~3..HEAD", "--", *program, cwd=history.root).stdout
    assert "train.py:23" in run(repro, "explain", "HEAD~1", "--", *program, cwd=history.root).stdout


@pytest.mark.whole
def test_the_demo_runs_from_the_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Installed with the demo's extras into an empty environment, the demo finds what it hid."""
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    wheel = f"repro-harness[trainer,golden,report,fast,doctor] @ {built[1].as_uri()}"
    pip = (tmp_path / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", SOURCE / "constraints.txt")
    run(*pip, wheel)
    run(tmp_path / "venv" / "bin" / "repro", "demo", cwd=tmp_path)
    assert (tmp_path / "demo-result" / "report.html").is_file()


# -- what is required, and by whom

OF_OTHERS = {
    "megatron": "megatron", "psutil": "megatron", "sglang": "sglang", "transformer_engine": "gpu", "triton": "gpu",
}  # fmt: skip
"""Modules that trainers import, by their extra."""
IN_USE = {
    "accelerate", "apex", "google", "IPython", "markupsafe", "pandas", "sgl_kernel", "tokenizers", "torchvision",
    "transformers", "urllib3", "wandb", "yaml",
}  # fmt: skip
"""What is looked at where a program has it, or comes along with what is required."""


def imported() -> dict[str, str]:
    """Top-level modules that our packages import, and a file that does."""
    imports: dict[str, str] = {}
    for package, folder in PACKAGES.items():
        for path in sorted((SOURCE / folder / package).rglob("*.py")):
            if "sglang/cpu" in str(path):
                continue  # stand-ins under the names of other packages
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                imports |= {name.split(".")[0]: str(path) for name in names}
    return {
        name: path for name, path in imports.items() if name not in {*sys.stdlib_module_names, *PACKAGES, "__main__"}
    }


def distributions(requirements: list[str]) -> set[str]:
    """The names of what is required."""
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def test_what_is_imported_is_required_and_what_is_required_is_imported() -> None:
    """Every module has a requirement or an extra that brings it, by the table of errors; none is idle."""
    homes = importlib.metadata.packages_distributions()
    bare, extras = distributions(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        brought = {canonicalize_name(homes[module][0]) for module in modules}
        assert brought == distributions(extras[extra]), extra
    of_extras = {module for modules in EXTRAS.values() for module in modules}
    used = set()
    for module, path in imported().items():
        home = canonicalize_name(homes[module][0]) if module in homes else module
        known = home in bare or module in of_extras | OF_OTHERS.keys() | IN_USE | {"pytest"}
        assert known, f"{path} imports {module}, which nothing requires"
        used.add(home)
    assert bare <= used, bare - used


def test_no_requirement_replaces_torch() -> None:
    """Nothing but the trainer's extra asks for torch, and it takes any: what a user has stays."""
    every = {extra: [Requirement(text) for text in texts] for extra, texts in PROJECT["optional-dependencies"].items()}
    every[""] = [Requirement(text) for text in PROJECT["dependencies"]]
    asks = {extra: str(need) for extra, needs in every.items() for need in needs if need.name == "torch"}
    assert asks == {"trainer": "torch"}


def test_all_is_every_extra_that_one_machine_can_have() -> None:
    """`all` names every extra for users but those for a GPU and for SGLang, whose pins are those of one machine."""
    (text,) = PROJECT["optional-dependencies"]["all"]
    rest = {"all", "dev", "whole", "mutants", "gpu", "sglang", "sglang-cpu"}
    assert set(Requirement(text).extras) == PROJECT["optional-dependencies"].keys() - rest


def test_a_plugin_of_pytest_and_typed_packages_are_declared() -> None:
    """The entry points are the command and the plugin."""
    assert PROJECT["scripts"] == {"repro": "repro.__main__:main"}
    assert PROJECT["entry-points"] == {"pytest11": {"repro": "repro.pytest_plugin"}}
    assert all((SOURCE / folder / name / "py.typed").is_file() for name, folder in PACKAGES.items())
