"""Environments from lock files: built once for each content, whole or not there, and a possible culprit."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import history_kit as kit
import pytest
from conftest import Repo
from index_kit import TORCH_FOLDER

from repro_bisect.axes.commits import History
from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.case.file import Case, find_case
from repro_golden.replay.children import CancelledError, ChildFailure
from repro_golden.repository.checkout import Place, find_checkout
from repro_golden.repository.worktrees import Worktrees
from repro_golden.subjects import exit_code, identity_of, try_out
from repro_golden.subjects.environments.builds import (
    Environment,
    environment_changes,
    held,
    pip_options,
    uv_command,
)
from repro_golden.trace import Header, Trace

TRAIN = kit.TRAIN.replace("import torch\n", "import tinyscale\nimport torch\n", 1).replace(
    "scale = 1.0", "scale = tinyscale.SCALE"
)
CASE = """\
[case]
name = "toy"
steps = 3

[subject]
kind = "command"
command = "{{python}} train.py"
setup = "pip"
path = "{path}"
timeout = "10m"
env = {{ PIP_NO_INDEX = "1", PIP_FIND_LINKS = "{wheels}" }}
"""


def wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """A pure Python wheel, by hand."""
    about = f"{name}-{version}.dist-info"
    files = files | {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{about}/RECORD"])
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in (files | {f"{about}/RECORD": record}).items():
            archive.writestr(path, text)


def requirements(repo: Repo, version: str) -> str:
    """A commit that asks for a version of the package that holds the scale."""
    (repo.root / "requirements.txt").write_text(f"torchlink==1\ntinyscale=={version}\n")
    return repo.commit(f"Use tinyscale {version}")


def start(folder: Path, path: str = ".") -> Repo:
    """A repository whose trainer takes its scale from a package; where torch is, another package says."""
    wheels = folder / "wheels"
    for version, scale in (("1.0", "1.0"), ("2.0", "1.5")):
        wheel(wheels, "tinyscale", version, {"tinyscale.py": f"SCALE = {scale}\n"})
    wheel(wheels, "torchlink", "1", {"torchlink.pth": TORCH_FOLDER + "\n"})
    repo = kit.start(folder, TRAIN, CASE.format(path=path, wheels=wheels))
    requirements(repo, "1.0")
    return repo


def built(repo: Repo) -> list[str]:
    """The environments that are there."""
    return sorted(path.stem for path in (repo.root / ".git" / "repro" / "environments").glob("*.built"))


@pytest.mark.whole
def test_a_bisect_names_the_commit_that_changed_the_lock_file(tmp_path: Path) -> None:
    """With pip: one environment per content, the lock file's commit is found, and what changed in it can be listed.

    What runs in the user's own checkout has the environment of the lock file there, which is one of the two.
    """
    repo = start(tmp_path)
    good = repo.git("rev-parse", "HEAD")
    kit.note(repo, "one")
    culprit = requirements(repo, "2.0")
    done = repo.repro("bisect", "--no-explain", f"{good}..HEAD", "--json", "-j", "2")
    data = json.loads(done.stdout)
    assert (data["outcome"], data["culprit"]["commit"]) == ("found", culprit), done.stderr
    assert len(built(repo)) == 2
    probes = [Trace(path).header for path in (repo.root / ".git" / "repro" / "probes").iterdir()]
    headers: dict[str, Header] = {header.subject["commit"]: header for header in probes}
    (change,) = environment_changes(headers[good], headers[culprit])
    assert str(change) == "environment tinyscale: 1.0 -> 2.0"
    assert environment_changes(headers[good], headers[good]) == []
    case = find_case(repo.root, "toy").model_dump()
    case["subject"] |= {"command": "{python} -c 'import tinyscale; exit(tinyscale.SCALE != 1.5)'"}
    assert exit_code(Case.model_validate(case), Place(repo.root), tmp_path / "log") == 0
    assert len(built(repo)) == 2


def test_trees_know_the_lock_files(tmp_path: Path) -> None:
    """Two commits with the same code and other lock files are two, in a range and in the checkout alike."""
    repo = start(tmp_path, path="train.py")
    case, checkout = find_case(repo.root, "toy"), find_checkout(repo.root)
    assert case.paths() == ["train.py", "requirements.txt"]
    assert (case.paths(["a", "b"]), case.paths(["."])) == (["a", "b", "requirements.txt"], ["."])
    good, first = repo.git("rev-parse", "HEAD"), checkout.place(case).tree
    kit.note(repo, "elsewhere", "notes.txt")
    assert checkout.place(case).tree == first
    bad = requirements(repo, "2.0")
    history = History(checkout, f"{good}..{bad}", case.paths())
    assert (history.tree(good), history.tree(bad)) == (first, checkout.place(case).tree)
    assert history.tree(good) != history.tree(bad)
    (repo.root / "requirements.txt").write_text("changed\n")
    assert checkout.place(case).tree is None


# -- the store of environments, with setups that take no time


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    """A repository with a lock file and no trainer."""
    return locked(tmp_path)


def locked(folder: Path) -> Repo:
    """A new one in a folder."""
    repo = Repo(folder / "repo")
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    (repo.root / "lock").write_text("one")
    (repo.root / ".gitignore").write_text("made*\n")
    repo.commit("Start")
    return repo


def toy(setup: str, **subject: object) -> Case:
    """A case with a setup that is a line of the shell."""
    raw = {"kind": "command", "command": "true", "setup": setup, "lock": ["lock"], "shell": True}
    return Case.model_validate({"case": {"name": "toy", "steps": 1}, "subject": raw | subject})


@contextlib.contextmanager
def using(case: Case, place: Place, cancel: threading.Event | None = None) -> Iterator[Environment]:
    """The environment of a case that has one."""
    with held(case, case.subject, place, cancel) as environment:  # type: ignore[arg-type]
        assert environment is not None
        yield environment


def together(count: int, work: object) -> list[object]:
    """What several threads that start at once return or raise."""
    environments: list[object] = []

    def one() -> None:
        try:
            environments.append(work())  # type: ignore[operator]
        except ChildFailure as failure:
            environments.append(failure.message)

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return environments


COUNT = "echo x >> {root}/made; "


def test_one_is_built_for_each_content(repo: Repo) -> None:
    """Probes that want the same build it once, at once or later, in any worktree; another content is another."""
    case = toy(COUNT + "sleep 0.3; echo $PYTHONPATH > {out}/path", env={"PYTHONPATH": "code"})
    made = repo.root / "made"

    def work() -> Path:
        with using(case, Place(repo.root)) as environment:
            return environment.folder

    folders = together(4, work)
    assert len(set(folders)) == 1
    assert made.read_text() == "x\n"
    assert (folders[0] / "path").read_text() == "\n"  # type: ignore[operator] # the code is no part of it
    worktrees = Worktrees(find_checkout(repo.root))
    with worktrees.at(repo.git("rev-parse", "HEAD"), None) as place, using(case, place) as environment:
        assert environment.folder == folders[0]
        (place.root / "lock").write_text("two")
        with using(case, place) as other:
            assert other.folder != environment.folder
        changed = toy(COUNT + "touch {out}/x")
        with using(changed, place) as other:
            assert other.folder != environment.folder
    worktrees.close()
    assert made.read_text() == "x\n" * 3
    shutil.rmtree(environment.folder)  # by whoever cleans up
    assert work() == environment.folder


def test_a_program_of_another_environment_says_nothing(repo: Repo, tmp_path: Path) -> None:
    """One that runs in no Python of the environment that was built for it is refused; a helper may run in another."""
    (tmp_path / "log").touch()

    def code(command: str) -> int:
        case = toy(f"{sys.executable} -m venv --without-pip {{out}}", command=command)
        return exit_code(case, Place(repo.root), tmp_path / "log")

    other = f"{sys.executable} -c 'raise SystemExit(3)'"
    assert code(f"python3 -c pass; {other}") == 3
    with pytest.raises(ChildFailure, match=r"not in the environment that lock asks for") as failure:
        code(other)
    assert failure.value.stage == "elsewhere"


def test_what_does_not_build_is_skipped_with_its_cause(repo: Repo, tmp_path: Path) -> None:
    """A failure is the commit's, at stage build, with equal text wherever it happens, and leaves nothing half built.

    Those who waited for a build that failed do not try again; those who come later do.
    """
    case = toy(COUNT + "sleep 0.5; touch {out}/half; echo cannot read $PWD/x for {out}; exit 3")
    message = f"{case.subject.setup} exited with 3: cannot read ./x for {{out}}"  # type: ignore[union-attr]

    def work() -> object:
        with using(case, Place(repo.root)):
            return None

    assert together(3, work) == [message] * 3
    assert (repo.root / "made").read_text() == "x\n"
    worktrees = Worktrees(find_checkout(repo.root))
    with worktrees.at(repo.git("rev-parse", "HEAD"), None) as place:
        with pytest.raises(ChildFailure) as failure:
            exit_code(case, place, tmp_path / "log")
        assert (failure.value.stage, failure.value.message) == ("build", message)
        (place.root / "lock").unlink()
        with pytest.raises(ChildFailure, match="there is no lock") as failure:
            exit_code(case, place, tmp_path / "log")
        assert failure.value.stage == "build"
    worktrees.close()
    assert (repo.root / "made").read_text() == "x\n" * 2
    environments = repo.root / ".git" / "repro" / "environments"
    assert not any(path.is_dir() for path in environments.iterdir())
    with pytest.raises(ReproError, match="no environment for"):
        identity_of(case, repo.root)
    away = toy("echo 'Temporary failure in name resolution'; false {out}")
    with pytest.raises(MachineFailureError, match="temporary failure"), using(away, Place(repo.root)):
        pass


def test_the_checkout_has_its_own_environment(repo: Repo, tmp_path: Path) -> None:
    """Who a program is, its check and its command are asked of the environment's Python, found first on PATH too.

    One without torch has an identity like any other: a program that is judged by its exit code may need none.
    """
    link = f"import site, sys; open(site.getsitepackages()[0] + '/x.pth', 'w').write({TORCH_FOLDER!r})"
    setup = f'{{python}} -m venv --without-pip {{out}}; grep -q one lock || {{out}}/bin/python -c "{link}"'
    inside = '{python} -c "import sys; assert sys.prefix != sys.base_prefix"'
    case = toy(setup, command=f'{inside} && test $(command -v python) = {{python}} && test -d "$VIRTUAL_ENV"')
    assert exit_code(case, Place(repo.root), tmp_path / "log") == 0
    bare = identity_of(case, repo.root)
    assert not any(name.startswith("torch") for name in bare.environment) and "-no-torch-" in bare.machine
    (repo.root / "lock").write_text("with torch")
    case = toy(setup, check=inside)
    try_out(case, Place(repo.root), tmp_path / "log")
    with using(case, Place(repo.root)) as place:
        assert any(package.startswith("torch==") for package in place.packages)
    assert identity_of(case, repo.root).environment["torch"].startswith("2.")


def test_what_changed_in_an_environment_is_listed() -> None:
    """Entries that decide bits come first, packages once, and other lock files with the same packages are told."""

    def header(key: str, torch: str, *packages: str) -> Header:
        subject = {"environment": {"key": key, "packages": [f"torch=={torch}", *packages]}} if key else {}
        return Header({}, "", subject, {"environment": {"torch": torch}, "host": {"cpu": key}}, 1)

    first, second = header("k", "2.8", "a==1", "b==1"), header("l", "2.9", "a==2", "c==1")
    told = ["torch: 2.8 -> 2.9", "a: 1 -> 2", "b: 1 -> (absent)", "c: (absent) -> 1"]
    assert [str(d) for d in environment_changes(first, second)] == [f"environment {text}" for text in told]
    assert [str(d) for d in environment_changes(first, header("m", "2.8", "a==1", "b==1"))] == [
        "environment lock files: k -> m"
    ]
    assert environment_changes(first, first) == environment_changes(header("", "2.8"), header("", "2.8")) == []


def test_a_build_that_takes_too_long_is_ended_with_all_it_started(repo: Repo) -> None:
    """A timeout ends the setup's own children too."""
    case = toy("sleep 1000 & echo $! > {root}/made; wait; touch {out}/x", timeout=1.0)
    with pytest.raises(ChildFailure) as failure, using(case, Place(repo.root)):
        pass
    assert failure.value.stage == "timeout"
    child = int((repo.root / "made").read_text())
    for _ in range(100):
        if not running(child):
            break
        time.sleep(0.05)
    assert not running(child)


def running(process: int) -> bool:
    """Whether a process is there and not a zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


BUILDER = """\
import sys
from pathlib import Path
from repro_golden.case.file import Case
from repro_golden.replay.children import Place
from repro_golden.subjects.environments.builds import held
case = Case.model_validate_json(sys.argv[1])
with held(case, case.subject, Place(Path(sys.argv[2]))):
    pass
"""


def test_a_half_built_one_is_rebuilt(repo: Repo) -> None:
    """What a killed process left is built anew, and not while that process's own children still write there."""
    slow = "test -e {root}/made-quick || { touch {out}/half; echo $$ > {root}/made; exec sleep 1000; }; touch {out}/x"
    case = toy(slow)
    process = subprocess.Popen([sys.executable, "-c", BUILDER, case.model_dump_json(), str(repo.root)])
    while not (repo.root / "made").exists() or not (repo.root / "made").read_text():
        time.sleep(0.05)
    process.kill()
    process.wait()
    (repo.root / "made-quick").touch()
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(CancelledError), using(case, Place(repo.root), cancel):
        pass
    os.killpg(int((repo.root / "made").read_text()), signal.SIGKILL)
    with using(case, Place(repo.root)) as environment:
        assert [path.name for path in environment.folder.iterdir()] == ["x"]


def test_those_not_used_for_long_are_swept(repo: Repo) -> None:
    """Beyond the number that is kept the least recently used goes, but never one in use; leftovers go too."""
    case = toy("cp lock {out}/lock", environments=2)
    environments = repo.root / ".git" / "repro" / "environments"
    left = environments / "leftover"
    left.mkdir(parents=True)

    def use(text: str) -> str:
        (repo.root / "lock").write_text(text)
        with using(case, Place(repo.root)) as environment:
            return environment.key

    def kept() -> set[str]:
        folders = {path.name for path in environments.iterdir() if path.is_dir()}
        assert folders == set(built(repo))
        return folders

    a, b = use("a"), use("b")
    assert kept() == {a, b}
    age(environments, b)
    assert use("a") == a
    c = use("c")
    assert kept() == {a, c}
    (repo.root / "lock").write_text("a")
    with using(case, Place(repo.root)) as place:
        age(environments, a)
        age(environments, c)
        d = use("d")
        assert place.folder.is_dir()
    assert kept() == {a, d}
    assert use("a") == a


def age(environments: Path, key: str) -> None:
    """Make an environment one that was last used long ago, and longer than those aged after it."""
    long_ago = time.time() - 10_000 + len(list(environments.iterdir()))
    os.utime(environments / f"{key}.built", (long_ago, long_ago))


# -- what a case may say


def test_a_case_says_how_its_environment_is_built() -> None:
    """Keys that do not fit together are refused with the cure; a case without a lock file is what it was."""
    for raw, message in (
        ({"setup": "", "lock": ["x"]}, "lock needs setup"),
        ({"setup": "make env", "lock": ["x"]}, r"must name \{out\}"),
        ({"setup": "pip", "lock": ["../x"]}, "inside the repository"),
        ({"setup": "pip", "lock": [""]}, "empty name"),
        ({"setup": "pip", "lock": ["golden/x"]}, "no part of a commit's code"),
        ({"setup": "uv", "lock": ["requirements.txt"]}, "must begin with its uv.lock"),
    ):
        with pytest.raises(ValueError, match=message):
            toy(**raw)  # type: ignore[arg-type]
    assert toy("pip", lock=[]).subject.locks == ("requirements.txt",)  # type: ignore[union-attr]
    assert toy("uv", lock=["train/uv.lock"], path="train").paths() == ["train"]
    plain = toy("make", lock=[])
    assert plain.subject.locks == ()  # type: ignore[union-attr]
    assert "lock" not in plain.canonical()["subject"]
    assert toy("pip", environments=3).digest == toy("pip").digest != toy("pip", lock=["a", "b"]).digest


def test_every_lock_file_is_given_to_pip_once(tmp_path: Path) -> None:
    """What another of them includes comes with it; folders of packages, archives and settings are no requirements."""
    lock = tmp_path / "requirements.txt"
    lock.write_text("-r deep/base.txt\ntorch==2.9.0 \\\n  --hash=sha256:00\n--find-links wheels\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "wheels").mkdir()
    (tmp_path / "deep" / "base.txt").write_text("-c '../constraints.txt'\n")
    (tmp_path / "constraints.txt").write_text("# ./not\nnumpy==2.0\n")
    names = ["requirements.txt", "deep/base.txt", "constraints.txt", "wheels", "a-1-py3-none-any.whl", "pip.conf"]
    assert pip_options(tmp_path, names) == ["-r", "requirements.txt"]
    lock.write_text("numpy\nhttps://example.invalid/a.whl\nx @ https://example.invalid/b.whl\n")
    assert pip_options(tmp_path, [names[0], names[2]]) == ["-r", "requirements.txt", "-c", "constraints.txt"]


UV = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
"""Where the code finds it: beside the Python that trains, or on PATH."""

UV_LOCK = """\
version = 1
revision = 1
requires-python = ">=3.10"

[[package]]
name = "mine"
version = "0.1"
source = { editable = "." }
"""


def test_uv_leaves_the_code_out(tmp_path: Path) -> None:
    """The packages that a uv.lock takes from the repository are not installed: one that were would be one commit's."""
    (tmp_path / "uv.lock").write_text(UV_LOCK)
    assert uv_command(tmp_path, "uv.lock", "/p")[-2:] == ["--no-install-package", "mine"]
    (tmp_path / "uv.lock").write_text("version =")
    with pytest.raises(ValueError, match="is not TOML"):
        uv_command(tmp_path, "uv.lock", "/p")


@pytest.mark.skipif(UV is None, reason="uv is not installed")
def test_uv_builds_the_environment(repo: Repo, tmp_path: Path) -> None:
    """The environment that uv makes has a Python and not the project, and nothing is written in the worktree."""
    project = '[project]\nname = "mine"\nversion = "0.1"\nrequires-python = ">=3.10"\n'
    (repo.root / "pyproject.toml").write_text(project)
    (repo.root / "uv.lock").write_text(UV_LOCK)
    repo.commit("Lock")
    case = toy("uv", lock=[], command="{python} -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'")
    with using(case, Place(repo.root)) as environment:
        assert environment.python is not None
        assert not any(package.startswith("mine") for package in environment.packages)
    assert exit_code(case, Place(repo.root), tmp_path / "log") == 0
    assert repo.git("status", "--porcelain", "--ignored") == ""


@pytest.mark.skipif(UV is not None, reason="uv is installed")
def test_no_uv_is_said(repo: Repo) -> None:
    """Without uv, a case that asks for it is an error with the cure, and says nothing of a commit."""
    (repo.root / "uv.lock").write_text(UV_LOCK)
    with pytest.raises(ReproError, match="finds no uv on PATH"), using(toy("uv", lock=[]), Place(repo.root)):
        pass
