"""Environments with one package replaced: nothing else varies, the base's copy is hidden, and each is built once."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import psutil
import pytest
from conftest import Repo
from index_kit import Index, Wheel, serving, wheel

from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.case.file import Case
from repro_golden.replay.children import CancelledError, ChildFailure
from repro_golden.repository.checkout import Place
from repro_golden.subjects.environments import overlays
from repro_golden.subjects.environments.overlays import Overlay, held_overlay, sources_of


def tiny(folder: Path, version: str, **more: object) -> Wheel:
    """A package whose import name is not its own, with a part in a namespace that it shares with another."""
    files = {
        "scale/__init__.py": f"VERSION = {version!r}\n",
        "shared/tiny/__init__.py": f"VERSION = {version!r}\n",
        "scale/tool.py": "import scale, helper, sys\ndef main():\n    print(scale.VERSION, helper.NAME, sys.prefix)\n",
    }
    if version == "1.0":
        files |= {"relic.py": "", "scale/old.py": "", "shared/relic.py": ""}
    return wheel(folder, "tiny_scale", version, files, scripts="tiny = scale.tool:main", **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    """An index of a package in several versions, and of what lives beside it."""
    folder, made = tmp_path_factory.mktemp("wheels"), Index()
    made.add(
        "tiny-scale",
        tiny(folder, "1.0"),
        tiny(folder, "2.0", needs=["helper>=1", "absent; extra == 'more'", "absent; python_version < '3'"]),
        tiny(folder, "2.1", needs=["helper>=2", "absent>=3"]),
        tiny(folder, "2.2"),
        tiny(folder, "2.3", python="<3"),
        tiny(folder, "2.4", tag="cp311-cp311-win_arm64"),
        tiny(folder, "2.5", yanked="broken"),
        tiny(folder, "2.6+cpu"),
        wheel(folder, "tiny_scale", "2.7", {"scale/x/__init__.py": ""}),
        wheel(folder, "tiny_scale", "2.8", {"lib/libtiny.so.1": "", "scale/__init__.py": ""}),
    )
    helper = {"helper.py": "NAME = 'helper'\n", "shared/helper.py": ""}
    made.add(
        "helper",
        wheel(folder, "helper", "1.5", helper, needs=["tiny-scale!=2.2", "absent"], scripts="help = scale.tool:main"),
        wheel(folder, "helper", "2.5", helper),
    )
    for name, version, needs in (
        ("moving", "1", []),
        ("moving", "2", ["bundle[more]==3", "deeper", "loaded", "stays"]),
        ("moving", "3", ["deeper>=2"]),
        ("bundle", "1", []),
        ("bundle", "3", ["part==3; extra == 'more'", "absent; extra == 'other'"]),
        ("part", "1", []),
        ("part", "3", ["free", "deeper>=1.5"]),
        ("deeper", "1", []),
        ("deeper", "1.5", []),
        ("deeper", "2", []),
        ("free", "1", []),
        ("stays", "1", ["deeper<2"]),
    ):
        files = {} if name == "bundle" else {f"{name}.py": f"VERSION = {version}\n"}
        made.add(name, wheel(folder, name, version, files, needs=needs))
    made.add("loaded", wheel(folder, "loaded", "1", {"vendor/lib/libloaded.so.1": "one"}))
    with serving(made):
        yield made


BASE = ["bundle==1", "deeper==1", "helper==1.5", "loaded==1", "moving==1", "part==1", "stays==1", "tiny_scale==1.0"]


@pytest.fixture(scope="module")
def base(index: Index, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of a subject's own environment: the package, another, and a folder by a `.pth`."""
    folder = tmp_path_factory.mktemp("base") / "v"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    install = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--no-deps", "--quiet"]
    subprocess.run([*install, "--index-url", index.url, *BASE], check=True, env=plain())
    (pure,) = folder.glob("lib/python*/site-packages")
    (folder / "linked").mkdir()
    (folder / "linked" / "linked.py").write_text("import helper\n")
    (pure / "linked.pth").write_text(f"{folder / 'linked'}\nimport helper; helper.SEEN = True\n")
    (pure / "pip").symlink_to(Path(str(distribution("pip").locate_file("pip"))))
    return str(folder / "bin" / "python")


def plain() -> dict[str, str]:
    """The environment without settings of pip's."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_", "GIT_", "PYTHON"))}
    return keep | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "UV_NO_CACHE": "1"}


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a test sets says where packages come from."""
    for name in set(os.environ) - set(plain()):
        monkeypatch.delenv(name)
    for name, value in plain().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    """A repository without a trainer."""
    made = Repo(tmp_path / "repo")
    made.root.mkdir()
    made.git("init", "--quiet", "--initial-branch=main")
    return made


def toy(**subject: object) -> Case:
    """A case whose command is never run."""
    raw = {"kind": "command", "command": "true", "timeout": "2m"}
    return Case.model_validate({"case": {"name": "toy", "steps": 1}, "subject": raw | subject})


@contextlib.contextmanager
def using(
    repo: Repo, base: str, pins: dict[str, str], url: str, cancel: threading.Event | None = None, **subject: object
) -> Iterator[Overlay]:
    """An overlay of a repository's."""
    case = toy(**subject)
    with held_overlay(case, case.subject, Place(repo.root), base, pins, cancel, index=url) as overlay:
        yield overlay


def refusal(repo: Repo, base: str, version: str, url: str) -> str:
    """Why a version cannot be tested."""
    with pytest.raises(ChildFailure) as failure, using(repo, base, {"tiny-scale": version}, url):
        pass
    assert failure.value.stage == "build"
    return failure.value.message


def said(python: str, code: str, **variables: str) -> str:
    """What a line of Python prints."""
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=False, env=plain() | variables, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def kept(repo: Repo) -> set[str]:
    """The overlays that are there, of which each is whole."""
    folder = repo.root / ".git" / "repro" / "environments"
    folders = {path.name for path in folder.glob("*") if path.is_dir()}
    assert folders == {path.stem for path in folder.glob("*.built")}
    return folders


LOOK = """\
import importlib.util, scale, shared.tiny, shared.helper, linked, helper
from importlib import metadata
def there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
print(scale.VERSION, shared.tiny.VERSION, metadata.version("tiny-scale"), helper.SEEN,
      *map(there, ("relic", "scale.old", "shared.relic")))
"""


@pytest.mark.whole
def test_one_package_is_replaced_and_nothing_else(repo: Repo, index: Index, base: str, tmp_path: Path) -> None:
    """Imports, metadata, namespaces and programs are those of the version; all else is the base's, which stays so.

    What only the base's copy had is out of sight, but not what has the same name elsewhere.
    """
    before = said(base, LOOK)
    assert before == "1.0 1.0 1.0 True True True True"
    with using(repo, base, {"Tiny_Scale": "2.0"}, index.url) as environment:
        assert said(environment.python, LOOK) == "2.0 2.0 2.0 True False False False"
        assert said(base, LOOK) == before
        assert [p for p in environment.packages if "tiny" in p] == ["tiny_scale==2.0"]
        assert "helper==1.5" in environment.packages
        (tmp_path / "relic.py").touch()
        assert said(environment.python, "import relic; print(relic.__file__)", PYTHONPATH=str(tmp_path)).startswith(
            str(tmp_path)
        )
        variables = environment.variables(plain())
        assert variables["VIRTUAL_ENV"] == str(environment.folder)
        for program in ("tiny", "help"):  # the version's own, and one of the base
            done = subprocess.run(
                [program],
                capture_output=True,
                text=True,
                check=True,
                env=variables,
                executable=shutil.which(program, path=variables["PATH"]),
            )
            assert done.stdout.split() == ["2.0", "helper", str(environment.folder)]
        fetched = index.downloads("tiny_scale")
    with using(repo, base, {"tiny-scale": "2.0.0"}, index.url) as again:
        assert again == environment
    assert index.downloads("tiny_scale") == fetched
    assert kept(repo) == {environment.key}
    assert environment.to_mapping() == {"key": environment.key, "packages": list(environment.packages)}


def test_the_version_that_is_there_is_used_as_it_is(repo: Repo, index: Index, base: str, tmp_path: Path) -> None:
    """Nothing is built for it. Any build of a public version is that version; a checkout is none, nor an edited one."""
    for pins in ({"tiny-scale": "1.0"}, {"TINY.scale": "1.0.0", "helper": "1.5"}):
        with using(repo, base, pins, index.url) as environment:
            assert environment.python == base
            assert environment.folder == Path(base).parent.parent
    other = tmp_path / "v" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    pip = [sys.executable, "-m", "pip", "--python", other]
    install = [*pip, "install", "--no-deps", "--quiet", "--index-url", index.url]
    subprocess.run([*install, "tiny-scale==2.6+cpu"], check=True, env=plain())
    for version in ("2.6", "2.6+cpu"):
        with using(repo, str(other), {"tiny-scale": version}, index.url) as environment:
            assert environment.python == str(other)
    assert kept(repo) == set()
    (about,) = tmp_path.glob("v/lib/python*/site-packages/*.dist-info")
    (about.parent / "pip").symlink_to(Path(str(distribution("pip").locate_file("pip"))))
    module = about.parent / "scale" / "__init__.py"
    told, times = module.read_text(), (module.stat().st_atime_ns, module.stat().st_mtime_ns)
    module.write_text(told.replace("2.6", "2.7"))
    os.utime(module, ns=times)
    overlays.edited.cache_clear()
    with using(repo, str(other), {"tiny-scale": "2.6"}, index.url) as environment:
        assert environment.python != str(other), "its file was edited, whatever its time says"
    module.write_text(told)
    overlays.edited.cache_clear()
    (about.parent / "scale" / "tool.py").unlink()
    with using(repo, str(other), {"tiny-scale": "2.6"}, index.url) as environment:
        assert environment.python != str(other), "it lacks a file"
    (about / "direct_url.json").write_text('{"url": "file:///x", "dir_info": {"editable": true}}')
    with using(repo, str(other), {"tiny-scale": "2.6"}, index.url) as environment:
        assert environment.python != str(other)
        assert "tiny_scale==2.6+cpu" in environment.packages


def test_where_versions_come_from_is_told(repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip's and uv's own files say, and the files that lie there, part two probes; without pins nothing does."""
    settings, folder, uv = tmp_path / "pip.conf", tmp_path / "wheels", tmp_path / "config" / "uv" / "uv.toml"
    folder.mkdir()
    uv.parent.mkdir(parents=True)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    told = []
    for path, text in (
        (settings, "[global]\nindex-url = https://one.example/simple\n"),
        (settings, "[global]\nindex-url = https://two.example/simple\n"),
        (settings, f"[global]\nindex-url = https://two.example/simple\nfind-links = {folder}\n"),
        (folder / "a-1-py3-none-any.whl", "1"),
        (uv, "prerelease = 'allow'\n"),
        (repo.root / "pyproject.toml", "[tool.uv]\nindex-url = 'https://three.example/simple'\n"),
    ):
        path.write_text(text)
        told.append(tuple(sources_of(toy(packages={"tiny-scale": "1.0"}), repo.root)))
    assert len(set(told)) == len(told)
    assert sources_of(toy(), repo.root) == []
    (repo.root / "pyproject.toml").write_text("[tool.uv]\nindex-url = 'https://three.example/simple'\n[tool.other]\n")
    assert tuple(sources_of(toy(packages={"tiny-scale": "1.0"}), repo.root)) == told[-1]
    monkeypatch.setenv("PIP_NO_BINARY", ",".join(f"package-{n}" for n in range(99)))
    assert tuple(sources_of(toy(packages={"tiny-scale": "1.0"}), repo.root)) not in told


@pytest.mark.whole
def test_what_does_not_fit_is_told_in_one_line(repo: Repo, index: Index, base: str) -> None:
    """What cannot be had for a version, and who it breaks; what was unmet before is no fault.

    So is a version that does not install, or that the base's copy hides. Nothing of it stays.
    """
    absent = "pip install of what tiny-scale==2.1 needs exited with 1: ERROR: No matching distribution found for absent"
    assert refusal(repo, base, "2.1", index.url) == f"{absent}>=3"
    assert refusal(repo, base, "2.2", index.url) == "helper 1.5 needs tiny-scale!=2.2, the environment has 2.2"
    for version in ("2.3", "2.4"):
        missing = f"ERROR: No matching distribution found for tiny-scale=={version}"
        assert refusal(repo, base, version, index.url) == (
            f"pip install of tiny-scale=={version} exited with 1: {missing}"
        )
    assert refusal(repo, base, "2.7", index.url) == "tiny-scale 2.7 is hidden: import scale.x finds nothing"
    assert kept(repo) == set()


@pytest.mark.whole
def test_what_a_version_needs_comes_with_it(repo: Repo, index: Index, base: str) -> None:
    """As far as it reaches and no further: the newest release that those allow which stay where they are.

    What is met is left alone; who asks for an extra gets what that needs; libraries lie beside those who need them.
    """
    with using(repo, base, {"moving": "2"}, index.url) as environment:
        moved = {"moving==2", "bundle==3", "part==3", "deeper==1.5", "free==1"}
        assert set(environment.packages) - set(BASE) == moved
        assert set(BASE) - set(environment.packages) == {"moving==1", "bundle==1", "part==1", "deeper==1"}
        assert set(environment.moved) == {pin.partition("==")[0] for pin in moved}
        (library,) = environment.folder.glob("lib/python*/site-packages/vendor/lib/libloaded.so.1")
        assert library.is_symlink() and library.read_text() == "one"
        code = "import moving, part, stays; print(moving.VERSION, part.VERSION, stays.VERSION)"
        assert said(environment.python, code) == "2 3 1"


@pytest.mark.whole
def test_a_wish_that_cannot_be_heeded_is_told(repo: Repo, index: Index, base: str) -> None:
    """Where a version needs what others cannot bear it is installed all the same, so that they can be named."""
    with pytest.raises(ChildFailure) as failure, using(repo, base, {"moving": "3"}, index.url):
        pass
    assert failure.value.message == "stays 1 needs deeper<2, the environment has 2"
    with pytest.raises(ChildFailure) as failure, using(repo, base, {"moving": "3", "deeper": "1.5"}, index.url):
        pass
    assert failure.value.message == "moving 3 needs deeper>=2, the environment has 1.5"


@pytest.mark.whole
def test_two_packages_may_be_pinned(repo: Repo, index: Index, base: str) -> None:
    """They are checked against each other, not against the base's copies."""
    left = r"No matching distribution found for absent>=3 \(at build"
    pins = {"tiny-scale": "2.1", "helper": "2.5"}
    with pytest.raises(ChildFailure, match=left), using(repo, base, pins, index.url):
        pass
    with using(repo, base, {"tiny-scale": "2.2", "helper": "2.5"}, index.url) as environment:
        assert {"tiny_scale==2.2", "helper==2.5"} <= set(environment.packages)


@pytest.mark.whole
@pytest.mark.parametrize("retries", ["0", "1"])
def test_a_network_that_fails_is_no_verdict(repo: Repo, index: Index, base: str, retries: str) -> None:
    """Neither an index that is gone nor one that is busy, whatever pip is told of trying again and says of it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = f"http://127.0.0.1:{taken.getsockname()[1]}/simple"
    pins, told = {"tiny-scale": "2.0"}, {"PIP_RETRIES": retries}
    away = r"installing tiny-scale==2\.0 failed for want of a network"
    with pytest.raises(MachineFailureError, match=away), using(repo, base, pins, closed, env=told):
        pass
    index.status = 503
    try:
        with pytest.raises(MachineFailureError, match="503"), using(repo, base, pins, index.url, env=told):
            pass
    finally:
        index.status = 0
    assert kept(repo) == set()


def test_what_no_version_can_cure_is_an_error(repo: Repo, index: Index, base: str) -> None:
    """A wrong pin, a package of libraries alone or an index that knows us not say nothing of a version."""
    for pins, fix in (
        ({"tiny-scale": "new"}, "'new' is no version of tiny-scale: write one"),
        ({"absent": "1.0"}, "has no absent: install it there, or correct its name"),
        ({"tiny-scale": "2.8"}, "tiny-scale holds libraries alone.* vary it with what needs it, or with subject.lock"),
    ):
        with pytest.raises(ReproError, match=fix), using(repo, base, pins, index.url):
            pass
    index.login = "me:s3cret"
    try:
        with pytest.raises(ReproError, match="refuses us"), using(repo, base, {"tiny-scale": "2.0"}, index.url):
            pass
    finally:
        index.login = ""
    assert kept(repo) == set()


def test_credentials_are_used_and_not_kept(repo: Repo, index: Index, base: str) -> None:
    """Those in the index's URL serve the installer, and stand in no file of ours."""
    index.login = "me:s3cret"
    try:
        with using(repo, base, {"tiny-scale": "2.0"}, index.url.replace("://", "://me:s3cret@")) as environment:
            assert "tiny_scale==2.0" in environment.packages
    finally:
        index.login = ""
    files = [path for path in (repo.root / ".git" / "repro").rglob("*") if path.is_file()]
    assert files and not any(b"s3cret" in path.read_bytes() for path in files)


BUILDER = """\
import sys
from pathlib import Path
from repro_golden.case.file import Case
from repro_golden.replay.children import Place
from repro_golden.subjects.environments.overlays import held_overlay
case = Case.model_validate_json(sys.argv[1])
place, pins = Place(Path(sys.argv[2])), {"tiny-scale": "2.0"}
with held_overlay(case, case.subject, place, sys.argv[3], pins, index=sys.argv[4]) as it:
    print(it.key)
"""


def builder(repo: Repo, base: str, url: str) -> subprocess.Popen[str]:
    """A process of its own that wants an overlay."""
    command = [sys.executable, "-c", BUILDER, toy().model_dump_json(), str(repo.root), base, url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_that_want_the_same_build_it_once(repo: Repo, index: Index, base: str) -> None:
    """One of two builds, and both get it."""
    fetched = index.downloads("tiny_scale")
    both = [builder(repo, base, index.url) for _ in range(2)]
    keys = {process.communicate()[0].strip() for process in both}
    assert keys == kept(repo) and len(keys) == 1
    assert index.downloads("tiny_scale") == fetched + 1


def test_a_killed_build_leaves_nothing_that_counts(repo: Repo, index: Index, base: str) -> None:
    """Nobody builds while the installer of a killed process may still write; then it is built anew, whole."""
    index.gate.clear()
    fetched = index.downloads("tiny_scale")
    process = builder(repo, base, index.url)
    try:
        while index.downloads("tiny_scale") == fetched:
            time.sleep(0.05)
        installers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate()
        cancel = threading.Event()
        cancel.set()
        with pytest.raises(CancelledError), using(repo, base, {"tiny-scale": "2.0"}, index.url, cancel):
            pass
        for installer in installers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(installer.pid, signal.SIGKILL)
    finally:
        index.gate.set()
    with using(repo, base, {"tiny-scale": "2.0"}, index.url) as environment:
        assert said(environment.python, LOOK).startswith("2.0 2.0 2.0")
    assert kept(repo) == {environment.key}


@pytest.mark.whole
def test_those_not_used_for_long_are_swept(repo: Repo, index: Index, base: str) -> None:
    """As many are kept as the case says, and never is one removed that is in use."""
    other = {"tiny-scale": "2.2", "helper": "2.5"}
    with (
        using(repo, base, {"tiny-scale": "2.0"}, index.url, environments=1) as first,
        using(repo, base, other, index.url, environments=1) as second,
    ):
        assert kept(repo) == {first.key, second.key}
    with using(repo, base, {"tiny-scale": "2.5"}, index.url, environments=1) as third:
        pass
    assert kept(repo) == {third.key}


def test_our_own_environment_serves_as_a_base(repo: Repo, index: Index, tmp_path: Path) -> None:
    """A replay child starts in an overlay of the interpreter that runs this, however this is installed there."""
    index.add("iniconfig", wheel(tmp_path, "iniconfig", "99.0", {"iniconfig/__init__.py": "NEW = True\n"}))
    case = Case.model_validate({"case": {"name": "toy", "steps": 1, "rollouts": "golden/rollouts/toy"}})
    with held_overlay(
        case, case.subject, Place(repo.root), sys.executable, {"iniconfig": "99.0"}, index=index.url
    ) as overlay:
        code = "import iniconfig, repro_golden.replay.child; print(iniconfig.NEW, repro_golden.replay.child.__file__)"
        new, file = said(overlay.python, code, PYTHONSAFEPATH="1").split()
        assert (new, Path(file).name) == ("True", "child.py")
        assert (overlay.folder / "bin" / "dvc").exists()


UV = shutil.which("uv", path=os.pathsep.join([os.environ["PATH"], str(Path(sys.executable).parent)]))


@pytest.mark.skipif(UV is None, reason="uv is not installed")
def test_uv_installs_where_there_is_no_pip(repo: Repo, index: Index, tmp_path: Path) -> None:
    """A base that uv made has no pip: uv replaces the package there."""
    base = tmp_path / "v" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        base,
        "install",
        "--no-deps",
        "--quiet",
        "--index-url",
        index.url,
    ]
    subprocess.run([*install, "tiny-scale==1.0"], check=True, env=plain())
    with using(repo, str(base), {"tiny-scale": "2.5"}, index.url) as environment:
        assert said(environment.python, "import scale; print(scale.VERSION)") == "2.5"
