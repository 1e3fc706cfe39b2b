"""A copy of the code that an installer made is no commit's: it counts where it is what the tree under test has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attach_kit import traced
from conftest import Repo

from repro_golden.base.canonical import named_after
from repro_golden.case.file import Case
from repro_golden.recording.attach.code import installed
from repro_golden.recording.attach.code.working_trees import forget
from repro_golden.replay.children import ChildFailure
from repro_golden.repository.checkout import Place
from repro_golden.subjects import exit_code

CODE = {
    "pkg/__init__.py": "", "pkg/rate.py": "RATE = 1\n", "pkg/defaults.json": "1", "pkg/_version.py": "made",
    "pkg/made.py": "",
}  # fmt: skip
PROJECT = '[project]\nname = "pkg"\n[project.scripts]\nrun-it = "pkg.rate:main"\n'
KERNEL = "pkg/_fast.cpython-311-x86_64-linux-gnu.so"


@pytest.fixture(autouse=True)
def home(tmp_path: Path) -> Repo:
    """A checkout of a project whose builds write a version, and a worktree of it under test."""
    repo = Repo(tmp_path / "home")
    for name, text in CODE.items():
        path = repo.root / "lib" / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (repo.root / "lib" / "src" / "pkg" / "test_rate.py").touch()
    (repo.root / "lib" / "src" / "pkg" / "fast.cu").touch()
    (repo.root / "lib" / "src" / "pkg" / "_version.py").write_text("before a build")
    (repo.root / "lib" / "pyproject.toml").write_text(PROJECT)
    (repo.root / "lib" / "run-too").write_text("#!/usr/bin/env python\nimport pkg\n")
    (repo.root / ".gitignore").write_text("made.py\n*.so\n")
    repo.git("init", "--quiet", "--initial-branch=main")
    repo.git("remote", "add", "origin", "git@example.invalid:who/pkg.git")
    repo.commit("Start")
    repo.git("worktree", "add", "--quiet", "--detach", str(tmp_path / "tree"))
    return repo


def install(
    tmp_path: Path,
    about: dict[str, object] | None,
    files: dict[str, str] = CODE,
    starts: str = "pkg.rate:main",
    env: str = "env",
) -> Path:
    """What pip leaves of a project that it installed from somewhere; the folder of packages."""
    site = tmp_path / env / "lib" / "python3" / "site-packages"
    info = {"METADATA": "Name: pkg\nVersion: 1\n", "entry_points.txt": f"[console_scripts]\nrun-it = {starts}\n"}
    info |= {"direct_url.json": json.dumps(about)} if about else {}
    programs = {"../../../bin/run-it": "", "../../../bin/run-too": "#!/env/bin/python\nimport pkg\n"}
    every = files | {f"pkg-1.dist-info/{name}": text for name, text in info.items()} | programs
    for name, text in (every | {"pkg-1.dist-info/RECORD": "".join(f"{name},,\n" for name in every)}).items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    return site


def folder(path: Path, *, editable: bool = False) -> dict[str, object]:
    """What an installer notes of one that it was given."""
    return {"url": path.as_uri(), "dir_info": {"editable": True} if editable else {}}


def said(tmp_path: Path, site: Path, inside: str, place: str = "tree", *, tests: bool = False) -> str | None:
    """What is said of a file in that folder, or beside it."""
    tree, home = str(tmp_path / place), str(tmp_path / "home")
    forget()
    path = str((site / inside).resolve())
    copies = [copy for copy in installed.copies(str(site), tree, home) if copy.has(path)]
    return installed.said(copies[0], "pkg.rate", path, tree, tests=tests) if copies else None


def test_a_copy_of_the_tree_is_its_code(tmp_path: Path) -> None:
    """What is alike is the commit's; what a build writes, sources of what is compiled and tests are in no copy."""
    site = install(tmp_path, folder(tmp_path / "home" / "lib"))
    assert [said(tmp_path, site, name) for name in CODE] == [None] * len(CODE)
    (tmp_path / "tree" / "lib" / "src" / "pkg" / "rate.py").write_text("RATE = 2\n")
    assert said(tmp_path, site, "pkg/rate.py", place="home") is None


@pytest.mark.parametrize("name", ["rate.py", "defaults.json", "__init__.py"])
def test_a_copy_of_another_commit(tmp_path: Path, name: str) -> None:
    """A package counts as a whole: code and data that the commit has otherwise, or has not."""
    site, package = install(tmp_path, folder(tmp_path / "home" / "lib")), tmp_path / "tree" / "lib" / "src" / "pkg"
    if name == "__init__.py":
        (package / name).unlink()
    else:
        (package / name).write_text("2")
        Repo(tmp_path / "tree").git("add", "--all")
    line = said(tmp_path, site, "pkg/rate.py")
    assert line is not None
    assert line.startswith(f"pkg.rate ({site}/pkg/rate.py) was imported from a copy of this repository")
    assert f"where lib/src/pkg/{name} is not the same" in line


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ("remote", True), ("gone worktree", True), ("archive", True),
        ("index", False), ("another", False), ("elsewhere", False), ("conda", False), ("wheels", False),
    ],
)  # fmt: skip
def test_where_a_copy_is_from(tmp_path: Path, source: str, refused: bool) -> None:
    """Of the repository or its remote; a release, another's and what is from a folder that nobody knows are meant.

    So are their programs, as a launcher of ranks.
    """
    other = Repo(tmp_path / "another")
    other.root.mkdir()
    other.git("init", "--quiet")
    kept = tmp_path / "cache" / "repro" / "worktrees" / "disk-0" / named_after(tmp_path / "home")
    worktree = kept / "-0" / "at-0" / "tree"
    about: dict[str, dict[str, object] | None] = {
        "remote": {"url": "https://example.invalid/who/pkg", "vcs_info": {}, "subdirectory": "lib"},
        "conda": folder(tmp_path / "feedstock" / "work"), "gone worktree": folder(worktree / "lib"),
        "wheels": {"url": (tmp_path / "wheels" / "pkg-1.whl").as_uri(), "archive_info": {}},
        "archive": {"url": (tmp_path / "home" / "dist" / "pkg-1.whl").as_uri(), "archive_info": {}},
        "index": None, "another": folder(other.root),
        "elsewhere": {"url": "https://example.invalid/else/pkg", "vcs_info": {}},
    }  # fmt: skip
    site = install(tmp_path, about[source])
    (tmp_path / "tree" / "lib" / "src" / "pkg" / "rate.py").write_text("RATE = 2\n")
    (tmp_path / "tree" / "lib" / "pyproject.toml").write_text(PROJECT.replace("pkg.rate", "pkg.more"))
    assert (said(tmp_path, site, "pkg/rate.py") is not None) == refused
    # of an archive nobody knows which folder it is of
    assert (said(tmp_path, site, "../../../bin/run-it") is not None) == (refused and source != "archive")


def test_what_only_has_the_name_of_a_package(tmp_path: Path) -> None:
    """A folder of tests or data in the tree is no code of a library that was installed from somewhere."""
    other = {"pkg/rate.py": "RATE = 1\n", "data/__init__.py": "", "tests/a.py": "", "one.py": ""}
    site = install(tmp_path, folder(tmp_path / "home" / "other"), other)
    for name in ("data/a.json", "tests/one.py", "tests/data/b.py"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("2")
    Repo(tmp_path / "tree").git("add", "--all")
    assert said(tmp_path, site, "data/__init__.py") is None
    assert said(tmp_path, site, "one.py") is None


def test_what_tests_a_tree(tmp_path: Path) -> None:
    """A test may take from anywhere what the tree has not, and no other copy of what it has."""
    site = install(tmp_path, folder(tmp_path / "home" / "lib"), {**CODE, "more.py": ""})
    assert said(tmp_path, site, "more.py", tests=True) is None
    (tmp_path / "tree" / "lib" / "src" / "pkg" / "rate.py").write_text("RATE = 2\n")
    assert said(tmp_path, site, "pkg/rate.py", tests=True) is not None


@pytest.mark.parametrize("name", ["rate.py", "__init__.py"])
def test_a_copy_of_a_package_that_lies_under_another_name(tmp_path: Path, name: str) -> None:
    """A build may map a folder to a package: that folder is what the package is of."""
    site, tree = install(tmp_path, folder(tmp_path / "home" / "lib")), Repo(tmp_path / "tree")
    tree.git("mv", "lib/src/pkg", "lib/python")
    assert [said(tmp_path, site, name) for name in CODE] == [None] * len(CODE)
    (tree.root / "lib" / "python" / name).write_text("RATE = 2\n")
    line = said(tmp_path, site, "pkg/rate.py")
    assert line is not None
    assert f"where lib/python/{name} is not the same" in line
    assert "--target=built ./lib)" in line


@pytest.mark.parametrize("editable", [False, True])
@pytest.mark.parametrize("kernel", [KERNEL, "fast.cpython-311-x86_64-linux-gnu.so"])
def test_what_was_compiled(tmp_path: Path, kernel: str, editable: bool) -> None:
    """Nobody can tell which commit an extension module is of, unless it was made of the tree under test itself.

    One at top level is in no folder of the tree; that of a project which the tree has not is none of its code.
    """
    home, files = tmp_path / "home" / "lib", {**CODE, kernel: "", "__editable___finder.py": ""}
    site = install(tmp_path, folder(home, editable=editable), files)
    line = said(tmp_path, site, kernel)
    assert line is not None
    assert "was compiled when it was installed" in line
    assert said(tmp_path, site, kernel, place="home") is None
    if editable:
        assert said(tmp_path, site, "__editable___finder.py") is None
    locked = install(tmp_path, folder(home, editable=editable), files, env="cache/repro/environments/1")
    assert said(tmp_path, locked, kernel) is None
    assert said(tmp_path, install(tmp_path, folder(home.parent / "third", editable=editable), files), kernel) is None


def test_an_archive_that_lies_in_the_checkout(tmp_path: Path) -> None:
    """A wheel of another project may lie there: one of this has a package of its, or a module that it builds."""
    top, foreign = "fast.cpython-311-x86_64-linux-gnu.so", "attn/cuda.abi3.so"
    about = {"url": (tmp_path / "home" / "wheels" / "any-1.whl").as_uri(), "archive_info": {}}
    site = install(tmp_path, about, {**CODE, KERNEL: "", foreign: "", "attn_cuda.abi3.so": "", top: ""})
    assert [said(tmp_path, site, name) is None for name in (KERNEL, foreign, "attn_cuda.abi3.so", top)] == [
        False, True, True, False,
    ]  # fmt: skip


def test_a_wheel_of_another_project_in_the_checkout(tmp_path: Path) -> None:
    """Neither a dependency's name nor a module that is called as one of the tree's makes it this repository's."""
    about = {"url": (tmp_path / "home" / "wheels" / "any-1.whl").as_uri(), "archive_info": {}}
    names = "numlib.abi3.so", "numlib/core.abi3.so", "tiny/__init__.py", "tiny/rate.py"
    site = install(tmp_path, about, dict.fromkeys(names, "other"))
    needs = '[project]\ndependencies = ["numlib>=1", "tiny"]\n'
    (tmp_path / "tree" / "lib" / "pyproject.toml").write_text(PROJECT.replace("[project]\n", needs))
    assert [said(tmp_path, site, name) for name in names] == [None] * len(names)


@pytest.mark.parametrize("editable", [False, True])
def test_programs_that_start_what_an_installer_read(tmp_path: Path, editable: bool) -> None:
    """An entry point is that of the day it was installed, in an editable installation too; so is a script."""
    site = install(tmp_path, folder(tmp_path / "home" / "lib", editable=editable))
    programs = "../../../bin/run-it", "../../../bin/run-too"
    assert [said(tmp_path, site, name) for name in programs] == [None, None]
    tree = Repo(tmp_path / "tree")
    for text in ('run-it = { reference = "pkg.rate:main", type = "console" }', "# all of them are made in a loop"):
        (tree.root / "lib" / "pyproject.toml").write_text(text)
        assert said(tmp_path, site, programs[0]) is None
    (tree.root / "lib" / "pyproject.toml").write_text(PROJECT.replace("rate:main", "rate:main_ppo # not rate:main"))
    tree.edit("lib/run-too", "import pkg", "import pkg.more")
    moved, copied = (said(tmp_path, site, name) for name in programs)
    assert moved is not None
    assert copied is not None
    assert "env/bin/run-it starts pkg.rate:main, as it did when it was installed" in moved
    assert "lib/run-too of the commit under test is not the same" in copied


def test_a_program_that_runs_a_copy(tmp_path: Path) -> None:
    """Neither a module of a copy nor a program that an installer made says anything of a commit."""
    site = install(tmp_path, folder(tmp_path / "home" / "lib"))
    program = site / "../../../bin/run-it"
    program.write_text("import sys, pkg.rate\nsys.exit()\n")
    subject = {"kind": "command", "command": f"{{python}} {program}", "env": {"PYTHONPATH": str(site)}}
    case = Case.model_validate({"case": {"name": "toy", "steps": 3}, "subject": subject})
    place = Place(tmp_path / "tree", home=tmp_path / "home")
    assert exit_code(case, place, tmp_path / "log") == 0
    rate = tmp_path / "tree" / "lib" / "src" / "pkg" / "rate.py"
    rate.write_text("RATE = 2\n")
    with pytest.raises(ChildFailure, match=r"^pkg \(.* was imported from a copy of this repository"):
        exit_code(case, place, tmp_path / "log")
    rate.write_text("RATE = 1\n")
    (tmp_path / "tree" / "lib" / "pyproject.toml").write_text(PROJECT.replace("pkg.rate", "pkg.more"))
    with pytest.raises(ChildFailure, match=r"bin/run-it starts pkg\.rate:main"):
        exit_code(case, place, tmp_path / "log")


PROGRAM = """\
import sys, torch
sys.path[:0] = sys.argv[1:]
import alone, beside, pkg
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight])
weight.sum().backward()
optimizer.step()
"""


def test_what_is_imported_in_place_of_the_tree_is_named(tmp_path: Path) -> None:
    """A release may be what is wanted, as of another project: verdicts say that the tree's module was not looked at.

    Not where the environment is one that we make, of what is asked for, nor where it says which code it was made of.
    """
    tree, site = tmp_path / "home", tmp_path / "env" / "site-packages"
    asked_for = tmp_path / "repro" / "environments" / "key" / "site-packages"
    for name in ("lib/pkg/__init__.py", "beside.py"):
        for path in (tree / name, site / name, asked_for / name):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    (site / "alone.py").touch()
    (tree / "alone").mkdir()
    noted = install(tmp_path, folder(tree / "lib"), {"pkg/__init__.py": "", "beside.py": ""}, env="noted")
    reasons = []
    for out, first in (("a", site), ("b", tree), ("c", asked_for), ("d", noted)):
        trace, _ = traced(tree, PROGRAM, out, (), str(first / "lib"), str(first), str(site))
        reasons.append(trace.end and trace.end["unread"])
    named = {
        "lib/pkg": f"the program imported pkg from {site}/lib",
        "beside.py": f"the program imported beside from {site}",
    }
    assert reasons == [named, {}, {}, {}]
