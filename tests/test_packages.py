"""Cases that ask for versions of packages: both kinds of subject train with them, and say what moved."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import history_kit as kit
import pytest
from conftest import Repo
from index_kit import TORCH_FOLDER, Index, serving, wheel

from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case
from repro_golden.replay.children import ChildFailure, Run
from repro_golden.repository.checkout import Place
from repro_golden.subjects import exit_code, identity_of, launch, packages_of, try_out
from repro_golden.subjects.environments.builds import environment_changes
from repro_golden.subjects.environments.overlays import Overlay
from repro_golden.trace import Trace

TRAIN = kit.TRAIN.replace("import torch\n", "import tinyscale\nimport torch\n", 1).replace(
    "scale = 1.0", "scale = tinyscale.SCALE"
)
INTERFACE = (Path(__file__).parent / "interface_example.py").read_text()
INTERFACE = INTERFACE.replace("import torch\n", "import tinyscale\nimport torch\n", 1).replace(
    "len(actions), 1)", "len(actions), 1) * tinyscale.SCALE"
)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    """The package that holds the scale, in three versions, and one that the third needs in another version."""
    folder, made = tmp_path_factory.mktemp("wheels"), Index()
    for version, scale, needs in (("1", 1.0, []), ("2", 1.5, []), ("3", 1.5, ["Tiny-Rest==2"])):
        files = {"tinyscale.py": f"SCALE = {scale}\n", "tests/__init__.py": ""}
        made.add("tinyscale", wheel(folder, "tinyscale", version, files, needs=needs))
    for version in "12":
        made.add("tiny-rest", wheel(folder, "tiny_rest", version, {"tinyrest.py": ""}))
    made.add("torchlink", wheel(folder, "torchlink", "1", {"torchlink.pth": TORCH_FOLDER + "\n"}))  # where torch is
    with serving(made):
        yield made


@pytest.fixture(scope="module")
def base(index: Index, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The subject's own environment: the scale, what it may need, and torch."""
    folder = tmp_path_factory.mktemp("base") / "v"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (pure,) = folder.glob("lib/python*/site-packages")
    (pure / "pip").symlink_to(Path(str(distribution("pip").locate_file("pip"))))
    install = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--no-deps", "--quiet"]
    wanted = ["tinyscale==1", "tiny-rest==1", "torchlink"]
    subprocess.run([*install, "--index-url", index.url, *wanted], check=True, env=plain())
    return str(folder / "bin" / "python")


def plain() -> dict[str, str]:
    """The environment without settings of pip's."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_", "GIT_", "PYTHON"))}
    return keep | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "UV_NO_CACHE": "1"}


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, index: Index) -> None:
    """Packages come from the index of this module alone."""
    for name in set(os.environ) - set(plain()):
        monkeypatch.delenv(name)
    for name, value in (plain() | {"PIP_INDEX_URL": index.url}).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Repo:
    """A repository with a trainer of each kind."""
    made = kit.start(tmp_path_factory.mktemp("repo"), TRAIN, None)
    (made.root / "training").mkdir()
    (made.root / "training" / "interface.py").write_text(INTERFACE)
    made.commit("Add an interface")
    return made


def command(base: str, packages: dict[str, str], **subject: Any) -> Case:
    """A case of the command, in the base's environment with packages replaced."""
    raw = {"kind": "command", "command": "{python} train.py", "python": base, "path": "train.py", "timeout": "2m"}
    return Case.model_validate({"case": {"name": "toy", "steps": 2}, "subject": raw | subject | {"packages": packages}})


def trained(repo: Repo, case: Case, out: Path) -> Trace:
    """A trace of two steps."""
    launch(case, Place(repo.root), [Run(2, trace=str(out / "trace"))], out / "log")
    return Trace(out / "trace")


def moved(a: Trace, b: Trace) -> list[str]:
    """What is told of two environments."""
    return [str(change) for change in environment_changes(a.header, b.header)]


@pytest.mark.whole
def test_a_command_trains_with_the_versions_that_its_case_asks_for(repo: Repo, base: str, tmp_path: Path) -> None:
    """Numbers, identity, variables and what is told of the environment are those of the version; the base stays.

    What a version needs moves along and is named. What the case's `env` says wins, but for PATH.
    """
    trace, other = (
        trained(repo, command(base, {"TinyScale": version}), tmp_path / version) for version in ("1.0", "3")
    )
    assert trace.steps[0].root != other.steps[0].root
    assert moved(trace, trace) == []
    assert moved(trace, other) == ["environment tiny-rest: 1 -> 2", "environment tinyscale: 1 -> 3"]
    case = command(base, {"tinyscale": "3"})
    packages = packages_of(case, repo.root)
    assert {"tinyscale==3", "tiny_rest==2"} <= set(packages) == set(other.header.subject["environment"]["packages"])
    assert sum(p.startswith("tinyscale=") for p in packages) == 1
    assert identity_of(case, repo.root).to_mapping() == other.header.identity
    look = (
        "import os, shutil, sys, tinyscale; from pathlib import Path;"
        " bin = str(Path(sys.executable).parent);"
        " good = [tinyscale.SCALE == 1.5, os.environ['PATH'].split(':')[0] == bin, os.environ['VIRTUAL_ENV'] == 'mine',"
        " '{python}' == sys.executable, shutil.which('python') == sys.executable, '/mine' in os.environ['PATH']];"
        " sys.exit(not all(good))"
    )
    told = command(
        base, {"tinyscale": "3"}, command=f'{{python}} -c "{look}"', env={"VIRTUAL_ENV": "mine", "PATH": "/mine"}
    )
    assert exit_code(told, Place(repo.root), tmp_path / "log") == 0, (tmp_path / "log").read_text()
    try_out(
        command(base, {"tinyscale": "3"}, check=f'{{python}} -c "{look.split(";")[0]}"'),
        Place(repo.root),
        tmp_path / "t",
    )


@pytest.mark.whole
def test_an_overlay_stands_on_the_environment_of_lock_files(repo: Repo, base: str, tmp_path: Path) -> None:
    """A package of theirs is replaced, and the rest of it stays."""
    (repo.root / "lock").write_text("tinyscale==1")
    built = {"python": None, "lock": ["lock"], "setup": f"cp -a {Path(base).parent.parent}/. {{out}}"}
    traces = [trained(repo, command(base, packages, **built), tmp_path / str(len(packages))) for packages in VERSIONS]
    assert traces[0].steps[0].root != traces[1].steps[0].root
    assert moved(*traces) == ["environment tinyscale: 1 -> 2"]


VERSIONS: list[dict[str, str]] = [{}, {"tinyscale": "2"}]


def test_what_moves_with_a_compiler_is_compiled_apart(base: str) -> None:
    """Machine code of another numba or llvmlite is kept with the overlay, never where the base's lies."""
    folder = Path(base).parent.parent
    for moved_, apart in ((["numba"], True), (["llvmlite", "x"], True), (["numpy"], False)):
        made = Overlay(folder, folder.name, base, [], [], moved_).variables({})
        assert ("NUMBA_CACHE_DIR" in made) == apart
        assert "NUMBA_CACHE_DIR" not in Overlay(folder, "other", base, [], [], moved_).variables({})


def test_another_copy_is_noticed(repo: Repo, base: str, tmp_path: Path) -> None:
    """On PYTHONPATH it is looked for before a run, for the base's own version too; beside a program it is refused.

    What both merely call their tests is nobody's copy.
    """
    (repo.root / "vendored").mkdir()
    (repo.root / "vendored" / "tinyscale.py").write_text("SCALE = 9.0\n")
    (repo.root / "vendored" / "train.py").write_text(TRAIN)
    for version in "12":
        case = command(base, {"tinyscale": version}, env={"PYTHONPATH": "vendored"})
        with pytest.raises(ChildFailure) as failure:
            trained(repo, case, tmp_path / version)
        assert (failure.value.stage, failure.value.message) == (
            "build",
            f"tinyscale {version} is hidden by vendored/tinyscale.py: take its folder off PYTHONPATH in subject.env",
        )
        with pytest.raises(ReproError, match=f"tinyscale {version} is hidden by vendored/tinyscale.py"):
            identity_of(case, repo.root)
    beside = command(base, {"tinyscale": "2"}, command="{python} vendored/train.py")
    with pytest.raises(ChildFailure, match=r"RuntimeError: tinyscale 2 is hidden by .*/vendored/tinyscale\.py"):
        trained(repo, beside, tmp_path / "beside")
    (repo.root / "own" / "tests").mkdir(parents=True)
    (repo.root / "own" / "tests" / "__init__.py").touch()
    same = command(
        base,
        {"tinyscale": "2"},
        command="""{python} -c 'import tinyscale, tests; exit("own" not in tests.__file__)'""",
        env={"PYTHONPATH": "own"},
    )
    assert exit_code(same, Place(repo.root), tmp_path / "log") == 0


CORE = """\
import sys
from pathlib import Path
from repro_golden.case.file import Case
from repro_golden.replay.children import Place, Run
from repro_golden.subjects import identity_of, launch, packages_of
from repro_golden.trace import Trace
case, root, out = Case.model_validate_json(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
runs = [Run(2, save_rollouts=sys.argv[3] + "/rollouts", trace=sys.argv[3] + "/trace")]
launch(case, Place(root), runs, out / "log")
print(identity_of(case, root).to_mapping() == Trace(out / "trace").header.identity)
print(*[p for p in packages_of(case, root) if p.startswith("tiny")])
"""


def core(repo: Repo, base: str, out: Path, packages: dict[str, str]) -> tuple[Trace, list[str]]:
    """A trace of a core subject, made by an instrument that runs in the base: there a replay child has its Python."""
    raw = {
        "case": {"name": "bandit", "steps": 2, "rollouts": "golden/rollouts/bandit"},
        "subject": {
            "module": "training.interface",
            "path": ".",
            "config": {"arms": 4, "seed": 3},
            "packages": packages,
        },
    }
    case = Case.model_validate(raw)
    out.mkdir()
    command = [base, "-c", CORE, case.model_dump_json(), str(repo.root), str(out)]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Trace(out / "trace"), done.stdout.split()


@pytest.mark.whole
def test_a_core_subject_trains_with_the_versions_that_its_case_asks_for(repo: Repo, base: str, tmp_path: Path) -> None:
    """Likewise in process, where the instrument comes from the base."""
    link = Path(base).parent.parent / next(Path(base).parent.parent.glob("lib/python*/site-packages/torchlink.pth"))
    # and so what `.pth` files there name
    link.write_text(f"{TORCH_FOLDER}\nimport site; site.addsitedir({TORCH_FOLDER!r})\n")
    trace, lines = core(repo, base, tmp_path / "1", {"tinyscale": "1"})
    assert lines == ["True", "tiny_rest==1", "tinyscale==1"]
    other, lines = core(repo, base, tmp_path / "3", {"tinyscale": "3"})
    assert lines == ["True", "tiny_rest==2", "tinyscale==3"]
    assert trace.steps[0].root != other.steps[0].root
    assert moved(trace, other) == ["environment tiny-rest: 1 -> 2", "environment tinyscale: 1 -> 3"]
    assert trace.header.case["subject"]["packages"] == {"tinyscale": "1"}
