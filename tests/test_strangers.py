"""Code of another working tree than the one under test is refused, wherever and whenever a process imports it."""

from __future__ import annotations

import contextlib
import shutil
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import flaky_kit
import pytest
import warm_kit
from conftest import Repo
from trace_kit import tensor_row, write

from repro_bisect.predicates.predicates import Bitwise
from repro_bisect.probe.executors import Outcome, Task
from repro_golden import subjects
from repro_golden.case.file import Case
from repro_golden.recording.attach.code import identify, met, strangers
from repro_golden.replay.children import ChildFailure, Run
from repro_golden.repository.checkout import Place
from repro_golden.trace import Trace

launch, exit_code = warm_kit.called(subjects.launch), warm_kit.called(subjects.exit_code)

TRAIN = """\
import sys
sys.path.insert(0, {place!r})
{early}
import torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    {late}
    optimizer.zero_grad()
    model(torch.randn(2, 3)).square().sum().backward()
    optimizer.step()
"""
LATE = "if step == 2: import lib.rate"


@pytest.fixture(autouse=True)
def _trees(tmp_path: Path) -> None:
    """A checkout with a package in src/, a worktree of it under test, and other ones."""
    repo = Repo(tmp_path / "home")
    (repo.root / "src" / "lib").mkdir(parents=True)
    for name in ("__init__", "rate"):
        (repo.root / "src" / "lib" / f"{name}.py").write_text("RATE = 1\n")
    for name in ("one.py", "settings.json", "lib/defaults.json", "lib/conf/a.yaml", "conf/defaults.json"):
        (repo.root / "src" / name).parent.mkdir(exist_ok=True)
        (repo.root / "src" / name).write_text("1")
    (repo.root / "shared").mkdir()
    (repo.root / "shared" / "b.json").write_text("1")
    (repo.root / "src" / "lib" / "shared").symlink_to("../../shared")
    repo.git("init", "--quiet", "--initial-branch=main")
    repo.commit("Start")
    for name in ("tree", "other"):
        repo.git("worktree", "add", "--quiet", "--detach", str(tmp_path / name))
    shutil.copytree(repo.root / "src", tmp_path / "free" / "src")
    repo.git("clone", "--quiet", str(repo.root), str(tmp_path / "clone"))
    (tmp_path / "tree" / "src" / "lib" / "rate.py").write_text("RATE = 2\n")  # of the commit under test
    (tmp_path / "alias").symlink_to(repo.root)
    (tmp_path / "env" / "site-packages").mkdir(parents=True)
    (tmp_path / "env" / "site-packages" / "src").symlink_to(repo.root / "src")


def case(**subject: object) -> Case:
    """Of a program that makes three steps."""
    command = {"kind": "command", "command": "{python} train.py", "path": "src", **subject}
    return Case.model_validate({"case": {"name": "toy", "steps": 3}, "subject": command})


def put(tmp_path: Path, source: str, *, early: str = "import lib.rate", late: str = "pass") -> Place:
    """The tree under test with a program that imports the package from somewhere."""
    place = Place(tmp_path / "tree", home=tmp_path / "home")
    (place.root / "train.py").write_text(TRAIN.format(place=str(tmp_path / source / "src"), early=early, late=late))
    return place


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("source", ["home", "alias", "other", "clone", "env/site-packages"])
def test_a_recorded_program(tmp_path: Path, source: str, late: bool) -> None:
    """Of the checkout, also by a link, in an environment too; of another worktree or clone; first or late imported."""
    place = put(tmp_path, source, **({"early": "", "late": LATE} if late else {}))
    with pytest.raises(ChildFailure, match=r"^lib.* was imported from another working tree, not from the commit"):
        launch(case(), place, [Run(3, trace=str(tmp_path / "t"))], tmp_path / "log")


@pytest.mark.parametrize("source", ["tree", "free", "same", "sibling"])
def test_code_that_is_meant(tmp_path: Path, source: str) -> None:
    """The tree's own, what no working tree holds, what is equal to the tree's, and another repository's."""
    place = put(tmp_path, "other" if source == "same" else source, late=LATE)
    if source == "same":
        shutil.copy(place.root / "src" / "lib" / "rate.py", tmp_path / "other" / "src" / "lib")
    if source == "sibling":
        shutil.copytree(tmp_path / "free", tmp_path / "sibling")
        Repo(tmp_path / "sibling").git("init", "--quiet")
        for repository, key in (("sibling", "remote.origin.url"), ("home", "submodule.lib.url")):
            Repo(tmp_path / repository).git("config", key, "https://example.com/lib")
    (result,) = launch(case(), place, [Run(3, trace=str(tmp_path / "t"))], tmp_path / "log")
    assert result.steps == 3


def test_programs_that_are_not_recorded(tmp_path: Path) -> None:
    """An exit code, a check and a crash before the first step say nothing of a commit whose code was not run."""
    place = put(tmp_path, "home")
    with pytest.raises(ChildFailure, match="lib"):
        exit_code(case(), place, tmp_path / "log")
    checked = case(check="{python} train.py", command="{python} -c 1")
    with pytest.raises(ChildFailure, match="lib"):
        exit_code(checked, place, tmp_path / "log")
    place = put(tmp_path, "home", early="import lib.rate; lib.rate.GONE")
    with pytest.raises(ChildFailure, match="lib"):
        launch(case(), place, [Run(3, trace=str(tmp_path / "t"))], tmp_path / "log")
    assert exit_code(case(), put(tmp_path, "tree"), tmp_path / "log") == 0


def test_a_file_that_is_read_in_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by a variable or a link, it is no commit's unless it is the same; what git does not track is data."""
    monkeypatch.setenv("PROJECT", str(tmp_path / "alias"))
    home, place = tmp_path / "home", put(tmp_path, "tree", early="import os")
    (home / "data.json").write_text("1")
    for name in ("VERSION", "version.txt", "dev-requirements.txt", "conversion.txt"):
        (home / name).write_text("1")
        Repo(home).git("add", name)
    (tmp_path / "current.json").symlink_to("alias/src/settings.json")
    (tmp_path / "newest.json").symlink_to("current.json")
    monkeypatch.setenv("NEWEST", str(tmp_path / "newest.json"))
    reading = '{python} -c "import os, pathlib; {what}"'
    for what, read in (
        ("open(os.environ['PROJECT'] + '/src/settings.json')", "settings.json"),
        ("os.chdir(os.environ['PROJECT']); pathlib.Path('src/one.py').read_text()", "one.py"),
        ("open(os.environ['PROJECT'] + '/data.json'), open(os.environ['PROJECT'] + '/shared/b.json')", ""),
        ("open('src/settings.json'), open(os.environ['PWD'] + '/src/settings.json')", ""),
        ("open(os.environ['PROJECT'] + '/src/one.py', 'w').write('1')", ""),
        ("open(os.environ['NEWEST'])", "newest.json"),
        ("[open(os.environ['PROJECT'] + f'/{n}') for n in ('VERSION', 'version.txt', 'dev-requirements.txt')]", ""),
        ("os.chdir(os.environ['PROJECT']); os.open('one.py', 0, dir_fd=os.open(os.environ['PWD'] + '/src', 0))", ""),
    ):
        for name in ("settings.json", "one.py"):
            (place.root / "src" / name).write_text("2")
        asked = case(command=reading.replace("{what}", what))
        if not read:
            assert exit_code(asked, place, tmp_path / "log") == 0, what
            continue
        with pytest.raises(ChildFailure, match=rf"{read} was read in your checkout, which git tracks, and the com"):
            exit_code(asked, place, tmp_path / "log")
        for name in ("settings.json", "one.py"):
            (place.root / "src" / name).write_text("1")
        assert exit_code(asked, place, tmp_path / "log") == 0
    with pytest.raises(ChildFailure, match=r"conversion\.txt was read in your checkout"):
        exit_code(case(command=reading.replace("{what}", f"open('{home}/conversion.txt')")), place, tmp_path / "log")
    (home / "src" / "settings.json").write_text("3")
    reads = "open(os.environ['PROJECT'] + '/src/settings.json') if step == 2 else 0"
    put(tmp_path, "tree", early="import os", late=reads)
    with pytest.raises(ChildFailure, match=r"settings\.json was read in your checkout"):
        launch(case(), place, [Run(3, trace=str(tmp_path / "t"))], tmp_path / "log")


def test_git_is_asked_once_for_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process keeps nothing of files that it does not track; where the index is another, it is asked again."""
    home, asked, ask = Repo(tmp_path / "home"), list[list[str]](), identify._asked
    monkeypatch.setattr(identify, "_asked", lambda folder, *given: asked.append(given[0]) or ask(folder, *given))
    paths = [str(home.root / f"shard-{n}") for n in range(3)]
    for path in paths:
        Path(path).write_text("1")

    def read() -> str | None:
        strangers.prepare(tmp_path, home.root)
        process = met._Process(str(tmp_path / "tree"), str(home.root), str(tmp_path), False)
        for path in (*paths, *paths):
            process.opened(path, "r", 0)
        assert len(process._read) == len(asked) - 1
        return strangers.said(tmp_path, tmp_path / "tree", home.root)

    assert read() is None and read() is None and len(asked) == 1
    home.git("add", paths[0])
    assert (read() or "").startswith(f"{paths[0]} was read in your checkout")


def test_a_module_behind_a_link(tmp_path: Path) -> None:
    """A link to a file of the checkout brings today's, wherever it lies; one that the tree has is meant."""
    (tmp_path / "links" / "src").mkdir(parents=True)
    link = tmp_path / "links" / "src" / "one.py"
    link.symlink_to("../../home/src/one.py")
    place = bare(tmp_path, "links", "import one")
    assert exit_code(case(), place, tmp_path / "log") == 0
    (place.root / "src" / "one.py").write_text("2")
    with pytest.raises(ChildFailure, match=r"^one \(.*/home/src/one\.py\) was imported from another working tree"):
        exit_code(case(), place, tmp_path / "log")
    (place.root / "one.py").symlink_to(tmp_path / "home" / "src" / "one.py")
    assert exit_code(case(), bare(tmp_path, "tree", "sys.path.pop(0); import one"), tmp_path / "log") == 0


ENDS = {
    "_exit": "{code}; import os; os._exit(0)",
    "exec": "{code}; import os; os.execv('/bin/true', ['true'])",
    "kill": "import os; os.fork() or ({call}, os.kill(os.getpid(), 9)); os.wait()",
    "pool": "import multiprocessing as m; p = m.get_context('fork').Pool(1); p.map(work, [0]); p.terminate()",
}


@pytest.mark.parametrize("what", ["module", "file"])
@pytest.mark.parametrize("end", ["_exit", "exec", "kill", "pool"])
def test_a_process_whose_end_nobody_sees(tmp_path: Path, end: str, what: str) -> None:
    """Code and files of the checkout count from when they are met, however the process that met them ends."""
    read = f"open({str(tmp_path / 'home' / 'src' / 'lib' / 'rate.py')!r}).read()"
    met = "__import__('lib.rate')" if what == "module" else read
    place = bare(tmp_path, "home", f"def work(_): {met}\n{ENDS[end].format(code=met, call=met)}")
    with pytest.raises(ChildFailure, match=r"^lib.* was imported|rate\.py was read in your checkout"):
        exit_code(case(), place, tmp_path / "log")
    place = bare(tmp_path, "tree", f"def work(_): import lib.rate\n{ENDS[end].format(code='work(0)', call='work(0)')}")
    assert exit_code(case(), place, tmp_path / "log") == 0


def test_a_python_that_tells_nothing(tmp_path: Path) -> None:
    """One that was started with -I, or with variables of its own, is named among what was not looked at."""
    starts = "import os, subprocess; subprocess.run({words}, env={env}, check=True)"
    for words, env, named in (
        (["-X", "dev", "-I", "-c", "1"], None, True),
        (["-c", "1", "-I"], None, False),
        (["-c", "1"], {}, True),
        (["-c", "2"], "{**os.environ, 'PYTHONPATH': 'src'}", True),
        (["-c", "3"], "{**os.environ, 'PYTHONPATH': 'src:' + os.environ['PYTHONPATH']}", False),
        (["-c", "4"], "os.environ.update(PYTHONPATH='src')", True),
    ):
        early = starts.format(words=[sys.executable, *words], env=env)
        trace = tmp_path / "-".join(words) / "t"
        (result,) = launch(case(), put(tmp_path, "tree", early=early), [Run(3, trace=str(trace))], tmp_path / "log")
        told = [name for name in (Trace(trace).end or {})["unread"] if name.startswith("the code of")]
        assert (result.steps, told != []) == (3, named), words


def test_a_note_that_was_not_written_whole(tmp_path: Path) -> None:
    """What a process could not tell is named among what was not looked at."""
    cut = "import json, os, pathlib, subprocess; subprocess.run([sys.executable, '-I', '-c', '1'], check=True); "
    cut += "next(pathlib.Path(json.loads(os.environ['REPRO_TRACE'])['out']).glob('note-deaf-*')).write_text('{')"
    launch(case(), put(tmp_path, "tree", early=cut), [Run(3, trace=str(tmp_path / "t"))], tmp_path / "log")
    assert "what a process could not tell" in (Trace(tmp_path / "t").end or {})["unread"]


@pytest.mark.whole
def test_workers_that_load_data(tmp_path: Path) -> None:
    """What a `DataLoader`'s worker imports is known, and the training process never imports it."""
    rows = "class Rows(list):\n    def __getitem__(self, at):\n        import lib.rate\n        return at\n"
    loading = "list(torch.utils.data.DataLoader(Rows(range(4)), num_workers=1)) if step == 0 else 0"
    place = put(tmp_path, "home", early=rows, late=loading)
    with pytest.raises(ChildFailure, match=r"^lib.* was imported from another working tree"):
        launch(case(), place, [Run(3, trace=str(tmp_path / "t"))], tmp_path / "log")


def test_a_test_of_the_users_own(tmp_path: Path) -> None:
    """What tests the commits may lie in the checkout and in none of them; a copy of what they have may not."""
    place = put(tmp_path, "tree")
    mine = tmp_path / "home" / "mine.py"
    mine.write_text("import sys; sys.exit(3)\n")
    assert exit_code(case(command=f"{{python}} {mine}"), place, tmp_path / "log") == 3
    (place.root / "mine.py").write_text("")
    with pytest.raises(ChildFailure, match=r"mine\.py was imported"):
        exit_code(case(command=f"{{python}} {mine}"), place, tmp_path / "log")


def test_a_checkout_with_anothers_code(tmp_path: Path) -> None:
    """A golden run of a checkout is not recorded of another one's code either."""
    place = put(tmp_path, "other")
    with pytest.raises(ChildFailure, match="lib"):
        launch(case(), Place(place.root), [Run(3, trace=str(tmp_path / "t"))], tmp_path / "log")


def bare(tmp_path: Path, source: str, early: str) -> Place:
    """The tree under test with a program that imports from somewhere, and trains nothing."""
    place = put(tmp_path, source)
    (place.root / "train.py").write_text(
        f"import sys\nsys.path.insert(0, {str(tmp_path / source / 'src')!r})\n{early}\n"
    )
    return place


@pytest.mark.parametrize("what", ["data", "gone", "more", "linked", "untracked"])
def test_what_a_package_reads_beside_its_code(tmp_path: Path, what: str) -> None:
    """A package is another's if any file of it is; what the checkout has there and git does not track is nobody's."""
    place, home = bare(tmp_path, "home", "import lib.rate"), Repo(tmp_path / "home")
    lib = place.root / "src" / "lib"
    shutil.copy(home.root / "src" / "lib" / "rate.py", lib)  # its modules are alike
    if what == "data":
        (lib / "defaults.json").write_text("2")
    elif what == "gone":
        (home.root / "src" / "lib" / "conf" / "a.yaml").unlink()
    elif what == "more":
        (home.root / "src" / "lib" / "kernel.cu").write_text("2")
        home.git("add", "src/lib/kernel.cu")
    elif what == "linked":
        (place.root / "shared" / "b.json").write_text("2")
    else:  # built in place, tried, written
        for name in ("lib/_fast.so", "lib/scratch.py", "lib/log.json", "other.json"):
            (home.root / "src" / name).write_text("2")
        (lib / "written.json").write_text("2")
        assert exit_code(case(), place, tmp_path / "log") == 0
        return
    names = {"data": "src/lib/defaults.json", "gone": "src/lib/conf/a.yaml", "more": "src/lib/kernel.cu"}
    where = names.get(what, "shared/b.json")
    with pytest.raises(ChildFailure, match=rf"under test, where {where} is not the same \(an editable"):
        exit_code(case(), place, tmp_path / "log")


@pytest.mark.parametrize("spelled", ["{home}/src/../src", "{home}//src", "../home/src"])
def test_a_package_by_another_spelling(tmp_path: Path, spelled: str) -> None:
    """A package is looked at as a whole however the path that leads to it is written."""
    path = spelled.format(home=tmp_path / "home")
    place = bare(tmp_path, "tree", f"sys.path.insert(0, {path!r}); import lib.rate")
    (place.root / "src" / "lib" / "rate.py").write_text("RATE = 1\n")
    assert exit_code(case(), place, tmp_path / "log") == 0
    (place.root / "src" / "lib" / "conf" / "a.yaml").write_text("2")
    with pytest.raises(ChildFailure, match=r"^lib.* where src/lib/conf/a.yaml is not the same"):
        exit_code(case(), place, tmp_path / "log")


MET = "next(pathlib.Path(json.loads(os.environ['REPRO_TRACE'])['out']).glob('met-*')).stat().st_size"


@pytest.mark.parametrize("size", ["0", "90", MET, f"{MET} + 90"], ids=["none", "part", "one", "more"])
def test_what_was_not_written_whole(tmp_path: Path, size: str) -> None:
    """Where a process could not write down what it met, part of a line or all of it, nothing is said of the commit."""
    limits = f"import json, os, pathlib, resource{', lib' * (MET in size)}; n = {size}; "
    limits += "resource.setrlimit(resource.RLIMIT_FSIZE, (n, n))"
    with pytest.raises(ChildFailure, match=r"^what a process imported and read was not written down whole"):
        exit_code(case(), bare(tmp_path, "home", f"{limits}; import lib.rate, one"), tmp_path / "log")


@pytest.mark.parametrize(
    "how", ["os.execv(sys.executable, {words})", "runpy.run_path('train.py', run_name='__main__')"]
)
def test_a_launcher_of_an_environment_in_the_checkout(tmp_path: Path, how: str) -> None:
    """A program that an environment brings is none of the checkout's, wherever the environment lies."""
    home, place = tmp_path / "home", put(tmp_path, "tree")
    venv.create(home / ".venv", symlinks=True)
    packages = next((home / ".venv").glob("lib/python3*/site-packages"))
    (packages / "all.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
    program = home / ".venv" / "bin" / "drive"
    program.write_text(
        f"#!{home}/.venv/bin/python\nimport os, runpy, sys\n{how.format(words=['python', 'train.py'])}\n"
    )
    program.chmod(0o755)
    (result,) = launch(case(command=str(program)), place, [Run(3, trace=str(tmp_path / "t"))], tmp_path / "log")
    assert result.steps == 3
    (home / ".venv" / "own.py").write_text("")
    place = bare(tmp_path, "tree", f"sys.path.insert(0, {str(home / '.venv')!r}); import own")
    train = (place.root / "train.py").read_text()
    (place.root / "train.py").write_text(train + TRAIN.format(place="", early="", late="pass"))
    with pytest.raises(ChildFailure, match=r"^own .* was imported from another working tree"):
        launch(case(command=str(program)), place, [Run(3, trace=str(tmp_path / "u"))], tmp_path / "log")


MADE = {
    "written": ("open(path, 'w').write('A = 1'); runpy.run_path(path)", True),
    "renamed": ("open(spare, 'w').write('A = 1'); os.replace(spare, path); runpy.run_path(path)", True),
    "moved": ("open('k', 'w').write('A = 1'); os.link('k', path); runpy.run_path(path)", True),
    "unpacked": ("os.mkdir(spare); open(spare + '/k', 'w'); os.rename(spare, path); runpy.run_path(path + '/k')", True),
    "renamed only": ("os.rename(path, spare); runpy.run_path(spare)", False),
    "not renamed": ("open(spare, 'w'); sys.audit('os.rename', spare, path, -1, -1); runpy.run_path(path)", False),
    "in memory": ("eval(compile('1', path, 'eval'))", True),
    "appended": ("open(path, 'a').write('A = 1'); runpy.run_path(path)", False),
    "not allowed": ("sys.audit('open', path, 'w', os.O_WRONLY | os.O_TRUNC); runpy.run_path(path)", False),
    "zipped": ("sys.path.insert(0, path + '.zip'); import k", False),
    "pyc": ("os.remove(path); py_compile.compile(__file__, path + 'c', path); sys.path += [folder]; import k", False),
}


@pytest.mark.parametrize(("code", "runs"), MADE.values(), ids=list(MADE))
def test_code_that_the_run_makes_in_the_checkout(tmp_path: Path, code: str, runs: bool) -> None:
    """What a run has written itself, or never wrote, is its own; what lay there before is the checkout's."""
    (folder := tmp_path / "home" / "build").mkdir()
    if not runs:
        (folder / "k.py").write_text("")
        with zipfile.ZipFile(folder / "k.py.zip", "w") as archive:
            archive.writestr("k.py", "")
    early = f"import os, py_compile, runpy; folder = {str(folder)!r}; path, spare = folder + '/k.py', folder + '/k.tmp'"
    place = put(tmp_path, "tree", early=f"{early}; {code}")
    (place.root / "train.py").write_text((place.root / "train.py").read_text() + "import os; os._exit(0)\n")
    fix = ".* name a cache of code that runs make so too" if "runpy" in code else ""
    refused = pytest.raises(ChildFailure, match=rf"k\.\w+.* was imported from another working tree{fix}")
    with contextlib.nullcontext() if runs else refused:
        launch(case(), place, [Run(3, trace=str(tmp_path / "t"))], tmp_path / "log")


def test_code_of_elsewhere_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that is run again and again costs a program next to nothing, whatever it is of."""
    process, asked = met._Process(str(tmp_path / "tree"), str(tmp_path / "home"), str(tmp_path), False), list[str]()
    monkeypatch.setattr(process, "_origin", lambda path: asked.append(path))
    for _ in range(3):
        process.ran(compile("1", str(tmp_path / "free" / "x.py"), "eval"))
    assert len(asked) == 1


def test_a_test_of_the_checkouts_own(tmp_path: Path) -> None:
    """A new test that no commit has is run at each of them, whatever else of the tests a commit changes."""
    place, home = put(tmp_path, "home"), Repo(tmp_path / "home")
    for root in (place.root, home.root):
        (root / "tests").mkdir()
        (root / "tests" / "conftest.py").touch()
        (root / "tests" / "test_old.py").write_text(str(root))
        (root / "NEWS.md").write_text(str(root))
    home.commit("Tests")
    (home.root / "tests" / "test_new.py").touch()
    tests = home.root / "tests"
    (place.root / "train.py").write_text(f"import sys\nsys.path.insert(0, {str(tests)!r})\nimport conftest, test_new\n")
    assert exit_code(case(), place, tmp_path / "log") == 0


def test_a_recorded_program_that_reads_beside_its_code(tmp_path: Path) -> None:
    """Its steps are another's where only data of the package is, and so is a check."""
    place = put(tmp_path, "home", early="import lib")
    (place.root / "src" / "lib" / "rate.py").write_text("RATE = 1\n")
    (place.root / "src" / "lib" / "defaults.json").write_text("2")
    with pytest.raises(ChildFailure, match=r"^lib .* where src/lib/defaults.json is not the same"):
        launch(case(), place, [Run(3, trace=str(tmp_path / "t"))], tmp_path / "log")
    checked = case(check="{python} train.py", command="{python} -c 1")
    with pytest.raises(ChildFailure, match="lib"):
        exit_code(checked, bare(tmp_path, "home", "import lib"), tmp_path / "log")


def test_a_namespace_package(tmp_path: Path) -> None:
    """A folder without modules counts by what git tracks there, unless the tree's own stands before it."""
    place = bare(tmp_path, "home", "import conf")
    assert exit_code(case(), place, tmp_path / "log") == 0
    (place.root / "src" / "conf" / "defaults.json").write_text("2")
    with pytest.raises(ChildFailure, match=r"^conf \(.*/home/src/conf\) was imported.*where src/conf/defaults.json"):
        exit_code(case(), place, tmp_path / "log")
    place = bare(tmp_path, "home", "sys.path.insert(0, 'src'); import conf")  # what is printed as the cure
    assert exit_code(case(), place, tmp_path / "log") == 0
    (tmp_path / "home" / "src" / "wandb").mkdir()
    assert exit_code(case(), bare(tmp_path, "home", "import wandb"), tmp_path / "log") == 0


def test_a_module_of_one_file(tmp_path: Path) -> None:
    """It reads what lies beside it, and nothing of the folders there."""
    place = bare(tmp_path, "home", "import one")
    (place.root / "src" / "lib" / "defaults.json").write_text("2")
    assert exit_code(case(), place, tmp_path / "log") == 0
    for name in ("version.txt", "requirements.txt", "notes.rst"):  # as when they are opened
        (tmp_path / "home" / "src" / name).write_text("1")
        Repo(tmp_path / "home").git("add", f"src/{name}")
    assert exit_code(case(), bare(tmp_path, "home", "import one"), tmp_path / "log") == 0
    (place.root / "src" / "settings.json").write_text("2")
    with pytest.raises(ChildFailure, match=r"^one \(.*/home/src/one.py\) .* where src/settings.json is not the same"):
        exit_code(case(), place, tmp_path / "log")


@pytest.mark.parametrize("where", ["home", "worktree", "clone", "unreadable", "foreign"])
def test_a_submodule_of_another_tree(tmp_path: Path, where: str) -> None:
    """What a submodule of another worktree or clone brings is not the commit's, nor what nobody can tell of."""
    allow = ("-c", "protocol.file.allow=always")
    library, home, other = Repo(tmp_path / "library"), Repo(tmp_path / "home"), Repo(tmp_path / "again")
    (library.root / "sub").mkdir(parents=True)
    (library.root / "sub" / "__init__.py").write_text("RATE = 1\n")
    library.git("init", "--quiet", "--initial-branch=main")
    library.commit("Start")
    home.git(*allow, "submodule", "--quiet", "add", str(library.root), "third")
    home.commit("Add a submodule")
    path = library.root if where == "foreign" else home.root / "third"
    if where in ("worktree", "clone"):
        add = (
            ("worktree", "add", "--quiet", "--detach") if where == "worktree" else ("clone", "--quiet", str(home.root))
        )
        home.git(*add, str(other.root))
        other.git(*allow, "submodule", "--quiet", "update", "--init")
        path = other.root / "third"
    if where == "unreadable":
        (path / ".git").write_text("gitdir: /nowhere\n")
    tree = bare(tmp_path, "tree", f"sys.path.insert(0, {str(path)!r}); import sub").root
    place = Place(tree, home=home.root if where == "home" else tree)
    (tree / "third" / "sub").mkdir(parents=True)  # without a repository, as worktrees of ours have them
    (tree / "third" / "sub" / "__init__.py").write_text("RATE = 1\n")
    assert exit_code(case(), place, tmp_path / "log") == 0
    (tree / "third" / "sub" / "__init__.py").write_text("RATE = 2\n")
    refused = pytest.raises(ChildFailure, match=r"^sub .* was imported from another working tree")
    with contextlib.nullcontext() if where == "foreign" else refused:
        assert exit_code(case(), place, tmp_path / "log") == 0


@pytest.mark.parametrize(("stage", "skipped"), [("other", True), ("start", True), ("step", False), ("timeout", False)])
def test_numbers_of_other_code_are_no_commits(tmp_path: Path, stage: Any, skipped: bool) -> None:
    """A run that crashes after its numbers moved is BAD; one of other code, or that was no replay, is a skip."""

    def run(task: Task, folder: Path) -> Outcome:
        moved = task.commit != "good"
        write(folder / "trace", [[tensor_row("grad", "w", bytes([moved] * 4))]] * 3, end=False)
        return Outcome(ChildFailure(stage, 2, "said", str(folder / "log"))) if task.commit == "c0" else Outcome()

    axis = flaky_kit.Points({"c1": ["c0"], "c0": ["good"]}, "good", "c1")
    result = flaky_kit.bisect(axis, flaky_kit.Told(run), Bitwise(), tmp_path)
    assert list(result.skips) == (["c0"] if skipped else [])
    assert (len(result.suspects) == 2) == skipped
