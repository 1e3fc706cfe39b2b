"""Environments that a commit's own lock files ask for: built once for each content, kept for later probes.

How they are kept, locked and swept is in `kept`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.utils import canonicalize_name

from repro_golden.base.canonical import canonical_json, digest, parse_toml
from repro_golden.base.credentials import handed_on
from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case, CommandSubject
from repro_golden.case.identity import Difference, Identity, versions_of
from repro_golden.recording.attach.code.identify import Built
from repro_golden.recording.attach.gathered.run import PACKAGE
from repro_golden.replay.children import ChildFailure
from repro_golden.repository.checkout import Place, find_checkout
from repro_golden.subjects.argv import argv_of, interpreter, replaced, variables_of
from repro_golden.subjects.environments.cache import Slot, environments_of, kept
from repro_golden.subjects.environments.origins import uv_switches
from repro_golden.subjects.surroundings import variables_digest
from repro_golden.trace import Header

__all__ = [
    "Environment",
    "Who",
    "build_for",
    "environment_changes",
    "held",
    "identity_in",
    "pip_options",
    "put_alone",
    "uv_command",
]


# -- how uv and pip are told to build what lock files say, and nothing of the code under test
# An environment is shared by all commits with the same lock files, so nothing else of a commit may get into it. What
# uv and pip read they say in many ways: they run where nothing else is. What stands in the way is a ValueError.

_INCLUDES = re.compile(r"\s*(?:-r|-c|--requirement|--constraint)[\s=]*[\"']?([^\s=\"'][^\s\"']*)")
_SOURCES = ("PIP_CONSTRAINT", "PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_INDEX")
"""Variables that name packages, or where they are."""
_NO_REQUIREMENTS = (".bz2", ".cfg", ".conf", ".gz", ".ini", ".tgz", ".toml", ".whl", ".xz", ".zip")
"""Endings of packages, and of settings."""


def _refuse_paths(who: str, text: str, tops: Collection[Path]) -> None:
    """Refuse what leads back to a checkout: every commit would get what it has today, whatever it has itself."""
    begins = r"(?:^|[\s\"'=,;@])(?:file:(?://[\w.]*)?)?"  # a host's name, and its paths, are no place here
    if top := next((top for top in tops if re.search(rf"{begins}{re.escape(str(top))}/", text, re.MULTILINE)), None):
        raise ValueError(f"{who} names {top}: write a path that is relative, and add what it names to subject.lock")


def put_alone(root: Path, locks: Sequence[str], alone: Path, *, uv: bool, home: Path | None = None) -> None:
    """Copy lock files into an empty folder; for uv also the projects that its lock file is of, and archives it hashes.

    Args:
        root: The checkout or worktree.
        locks: The lock files, and folders, in it.
        alone: The folder.
        uv: Whether they are uv's.
        home: The user's own checkout, where that is another.

    Raises:
        ValueError: a lock file leads back to the repository by its path.
    """
    tops = {place for place in (root, home) if place}
    for name in locks:
        source, target = root / name, alone / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True, ignore_dangling_symlinks=True)
        else:
            shutil.copy2(source, target)
            text = re.sub(r"(^|\s)#.*", "", source.read_text(encoding="utf-8", errors="replace"), flags=re.MULTILINE)
            _refuse_paths(name, text, tops)
    if not uv:
        return
    folder = PurePosixPath(locks[0]).parent
    beside = ["pyproject.toml"]
    for package in _packages_of(root, locks[0]):
        source = package.get("source", {})
        beside += [f"{source[kind]}/pyproject.toml" for kind in ("editable", "directory", "virtual") if kind in source]
        files = [*package.get("wheels", ()), package.get("sdist", {})]
        beside += [source["path"]] if "path" in source and any("hash" in file for file in files) else []
    for name in (os.path.normpath(folder / path) for path in beside):
        if not name.startswith(("..", "/")) and (root / name).is_file():
            (alone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, alone / name)


def _packages_of(root: Path, lock: str) -> list[dict[str, Any]]:
    try:
        return list(parse_toml((root / lock).read_text(encoding="utf-8")).get("package", []))
    except ValueError as error:
        raise ValueError(f"{lock} is not TOML: {error}") from None


def uv_command(root: Path, lock: str, python: str) -> list[str]:
    """`uv sync` of a project without the packages that its lock file takes from the repository's own folders.

    Raises:
        ValueError: the lock file is not one.
    """
    listed = _packages_of(root, lock)
    local = [package["name"] for package in listed if {"editable", "directory"} & set(package.get("source", {}))]
    project = str((root / lock).parent)
    return ["uv", "sync", "--frozen", "--project", project, "--python", python,
            *(word for name in local for word in ("--no-install-package", name))]  # fmt: skip


def pip_options(root: Path, locks: Sequence[str]) -> list[str]:
    """``-r`` for each lock file, ``-c`` for ``constraints*``; those that another of them includes come with it.

    Folders, archives and settings among them are no files of requirements.
    """
    names = [str(PurePosixPath(name)) for name in locks if not name.endswith(_NO_REQUIREMENTS)]
    files = [name for name in names if not (root / name).is_dir()]
    included = {
        os.path.normpath(PurePosixPath(name).parent / other[1])
        for name in files
        for line in (root / name).read_text(encoding="utf-8", errors="replace").splitlines()
        if (other := _INCLUDES.match(line))
    }
    outermost = [name for name in files if name not in included]
    return [word for n in outermost for word in ("-c" if PurePosixPath(n).name.startswith("constraints") else "-r", n)]


# -- environments that a commit's own lock files ask for: built once for each content, kept for later probes

_PACKAGES = """\
import re
from importlib import metadata
found = {}
for one in metadata.distributions():
    found.setdefault(re.sub("[-_.]+", "-", one.name or "").lower(), f"{one.name}=={one.version}")
print(*found.values())
"""
"""Of two copies of one package the first on the search path is that which is imported."""


@dataclass(frozen=True)
class Environment:
    """One that is whole.

    Attributes:
        folder: Where it lies.
        key: What it was built from, in 16 digits.
        packages: ``name==version`` of all that its Python can import, by name; empty where it has no Python.
    """

    folder: Path
    key: str
    packages: Sequence[str]

    @property
    def python(self) -> str | None:
        """Its own interpreter, if it has one."""
        path = self.folder / "bin" / "python"
        return str(path) if path.is_file() else None

    def variables(self, subject: CommandSubject) -> dict[str, str]:
        """What tells tools that they run in it, and `uv run` to leave it as it is."""
        variables = {"VIRTUAL_ENV": str(self.folder)} if (self.folder / "pyvenv.cfg").is_file() else {}
        if subject.setup == "uv":
            variables |= {"UV_PROJECT_ENVIRONMENT": str(self.folder), "UV_NO_SYNC": "1"}
        return variables

    def to_mapping(self) -> dict[str, object]:
        """What a trace's header says of it."""
        return {"key": self.key, "packages": list(self.packages)}


def environment_changes(a: Header, b: Header) -> list[Difference]:
    """What differs between the environments of two traces: bits-deciding entries first, then packages.

    Where environments were built from other lock files and hold the same packages, that alone is said.
    """
    identities = [Identity.from_mapping(header.identity) for header in (a, b)]
    changes = [d for d in identities[0].differences(identities[1]) if d.part == "environment"]
    built = [header.subject.get("environment") or {} for header in (a, b)]
    before, after = (versions_of(environment.get("packages", ())) for environment in built)
    if all(built):
        known = {canonicalize_name(d.key) for d in changes}
        changes += [
            Difference("environment", name, before.get(name, ""), after.get(name, ""))
            for name in sorted({*before, *after})
            if before.get(name) != after.get(name) and name not in known
        ]
    keys = [str(environment.get("key", "")) for environment in built]
    if not changes and keys[0] != keys[1]:
        changes.append(Difference("environment", "lock files", *keys))
    return changes


@contextlib.contextmanager
def held(
    case: Case, subject: CommandSubject, place: Place, cancel: threading.Event | None = None
) -> Iterator[Environment | None]:
    """The environment that the lock files of a place ask for, kept on the disk for the block; None without lock files.

    Raises:
        CancelledError: `cancel` was set.
        ChildFailure: a lock file is missing, or the environment does not build.
        MachineFailureError: the disk or the network failed.
        ReproError: there is no Python, or no uv, to build it with.
    """
    if not subject.locks:
        yield None
        return
    recipe = _Recipe(case, subject, place)
    base = environments_of(find_checkout(place.root).state)
    with kept(base, recipe.key, subject.environments, recipe.build, {str(place.root): "."}, cancel) as about:
        yield Environment(base / recipe.key, recipe.key, about["packages"])


_OURS = ("pip", "uv")
"""Setups that are ours, and read what lock files say alone."""
_FIX = "; of the repository it had what subject.lock names alone: add what it reads, and name code in env PYTHONPATH"


class _Recipe:
    """What an environment is built from, and how."""

    def __init__(self, case: Case, subject: CommandSubject, place: Place) -> None:
        self._case, self._subject, self._root, self._home = case, subject, place.root, place.home
        self._python = interpreter(subject, place.root, place.home)
        self._tokens = {"root": str(place.home or place.root), "python": self._python}
        binary, real = Path(self._python).stat(), str(Path(self._python).resolve())
        python = self._python.replace(str(place.root), ".")
        about = {
            "setup": replaced(subject.setup, self._tokens), "shell": subject.shell, "env": subject.env,
            "python": [python, real, binary.st_size, binary.st_mtime_ns], "machine": platform.machine(),
            "locks": {name: self._content(name) for name in subject.locks},
            "variables": variables_digest(case),  # compilers, indexes and switches of a build are told by them
        }  # fmt: skip
        if subject.setup in _OURS:
            about["alone"] = True
        if subject.setup == "uv":
            self._refuse_settings()
        if subject.setup == "uv" and (switches := uv_switches(self._root, subject.locks[0])):
            about["uv"] = switches
        self.key = digest("environment", canonical_json(about))[:16]  # short: kernels bound the path in a "#!" line

    def _refuse_settings(self) -> None:
        settings = PurePosixPath(self._subject.locks[0]).with_name("uv.toml")
        if (self._root / settings).exists() and settings not in map(PurePosixPath, self._subject.locks):
            message = f"uv takes settings from {settings}: add it to subject.lock"
            raise ChildFailure("build", -1, message, str(settings))

    def _content(self, name: str) -> str:
        path = self._root / name
        try:
            if path.is_dir():
                files = sorted(file for file in path.rglob("*") if file.is_file())
                return digest("locked", *(part for f in files for part in (str(f.relative_to(path)), f.read_bytes())))
            return digest("lock", path.read_bytes())
        except OSError:
            raise ChildFailure("build", -1, f"there is no {name}", "the commit's files") from None

    def build(self, slot: Slot) -> dict[str, object]:
        """Fill the folder; what its mark says."""
        if self._subject.setup in _OURS:
            with tempfile.TemporaryDirectory(prefix="repro-lock-") as folder:
                alone = Path(folder).resolve()
                self._run(replace(slot, hidden={**slot.hidden, str(alone): "."}), alone)
        else:
            self._run(slot, self._root)
        return {"setup": self._subject.setup, "locks": list(self._subject.locks), "packages": _packages(slot)}

    def _run(self, slot: Slot, place: Path) -> None:
        """What fills it, where the lock files are."""
        try:
            if place != self._root:
                put_alone(self._root, self._subject.locks, place, uv=self._subject.setup == "uv", home=self._home)
            commands = self._commands(str(slot.folder), place)
        except ValueError as error:
            slot.fail(str(error))
        what = f"building the environment for {', '.join(self._subject.locks)}"
        for name, command, variables in commands:
            try:
                slot.run(name, command, place, variables, self._subject.timeout, what)
            except ChildFailure as failure:
                fix = _FIX if place != self._root and failure.stage == "build" else ""
                raise ChildFailure(failure.stage, failure.step, failure.message + fix, failure.log) from None

    def _commands(self, out: str, place: Path) -> list[tuple[str, list[str], dict[str, str]]]:
        """What is run, by name, with its variables: none of them leads to the code, which no environment holds."""
        subject, tokens = self._subject, self._tokens | {"out": out}
        if place != self._root:
            tokens["root"] = str(place)
        variables = variables_of(self._case, subject, self._python, tokens) | {"PWD": str(place)}
        for name in _SOURCES if place != self._root else ():
            _refuse_paths(name, f"{variables.get(name, '')}/", {self._root, self._home or self._root})
        for name in ("PYTHONPATH", "VIRTUAL_ENV"):
            variables.pop(name, None)
        if subject.setup == "uv":
            if shutil.which("uv", path=variables["PATH"]) is None:
                raise ReproError('subject.setup = "uv" finds no uv on PATH: install it')
            command = uv_command(place, subject.locks[0], self._python)
            return [("uv sync", command, variables | {"UV_PROJECT_ENVIRONMENT": out})]
        if subject.setup == "pip":
            pip = [f"{out}/bin/python", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
            pip += pip_options(place, subject.locks)
            venv = [self._python, "-m", "venv", out]
            return [("python -m venv", venv, variables), ("pip install", pip, variables)]
        return [(subject.setup, argv_of(subject.setup, tokens, subject.shell), variables)]


def _packages(slot: Slot) -> list[str]:
    """What it holds."""
    python = Environment(slot.folder, slot.key, ()).python
    if not python:
        return []
    ours = handed_on(os.environ)
    done = subprocess.run([python, "-I", "-c", _PACKAGES], env=ours, capture_output=True, text=True, check=False)
    if done.returncode:
        slot.fail(f"its Python does not start: {(done.stderr.splitlines() or ['no output'])[-1][:300]}")
    return sorted(done.stdout.split(), key=str.lower)


# -- who a process in one is

_ASK = """\
import sys
sys.path[:] = [p for p in sys.path if p]  # not the folder that it starts in, which may hold a json.py
import importlib.util
package, call, *numbers = sys.argv[1:]
spec = importlib.util.spec_from_file_location(
    "repro_golden", package + "/__init__.py", submodule_search_locations=[package])
module = sys.modules["repro_golden"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from repro_golden.recording.attach.code import identify
getattr(identify, call)(*map(int, numbers))
"""
"""`repro_golden` from its own folder and nothing else of our environment, in another Python."""


@dataclass(frozen=True)
class Who:
    """Who a process is.

    Attributes:
        identity: The identity that it would have.
        packages: ``name==version`` of all that it could import.
        modules: Of each top-level module that a package brought, the package's normalised name.
        find_build: Reads what stands for its interpreter and the content of these packages, which takes longer.
    """

    identity: Identity
    packages: list[str]
    modules: Mapping[str, str]
    find_build: Callable[[], Built]

    @property
    def versions(self) -> dict[str, str]:
        """The version of each package, by normalised name."""
        return versions_of(self.packages)


def identity_in(case: Case, python: str, variables: Mapping[str, str], root: Path) -> Who:
    """Who a process of this Python would be.

    Raises:
        ReproError: it does not start, or cannot run what tells who it is; so does what finds its build.
    """
    named, numbers = tuple(sorted(variables.items())), (case.resources.cpus, case.resources.ranks)
    raw = asked(python, named, str(root), "say", numbers)
    return Who(
        Identity.from_mapping(raw["identity"]), raw["packages"], raw["modules"],
        lambda: build_for(python, variables, root),
    )  # fmt: skip


def build_for(python: str, variables: Mapping[str, str], root: Path) -> Built:
    """What stands for a Python and the content of all that it could import; raises as `identity_in` does."""
    return Built(*asked(python, tuple(sorted(variables.items())), str(root), "say_build", ()))


@functools.lru_cache(maxsize=32)
def asked(python: str, variables: tuple[tuple[str, str], ...], root: str, call: str, numbers: tuple[int, ...]) -> Any:
    """What a function of `recording.attach.code.identify` prints in another Python, as JSON; remembered."""
    done = subprocess.run(
        [python, "-c", _ASK, str(PACKAGE), call, *map(str, numbers)],
        env=dict(variables), cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise ReproError(
            f"{python} does not answer ({lines[-1][:200]}): correct subject.python or its lock files"
        ) from None
