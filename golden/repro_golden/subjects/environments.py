"""Environments that a commit's own lock files ask for: built once for each content, kept for later probes.

One is built in the folder that it stays in, because its scripts hold that path, and counts only once a mark beside it
was written. Who builds one holds its lock alone, who runs in one shares it, and only what nobody holds is swept. The
processes that build hold the lock too: if ours is killed, nobody builds where they still write.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from repro_golden.canonical import canonical_json, digest
from repro_golden.case import Case, CommandSubject
from repro_golden.checkout import find_checkout
from repro_golden.children import (
    CancelledError,
    Child,
    ChildFailure,
    Place,
    blame_the_machine,
    blame_the_network,
    last_line,
)
from repro_golden.errors import MachineFailureError, ReproError
from repro_golden.identity import Difference, Identity
from repro_golden.subjects.recipes import pip_options, uv_command
from repro_golden.subjects.words import interpreter, replaced, variables_of, words
from repro_golden.trace import Header

__all__ = ["Environment", "environment_changes", "held"]

_PACKAGES = "from importlib import metadata; print(*{f'{d.name}=={d.version}' for d in metadata.distributions()})"


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
        found = {"VIRTUAL_ENV": str(self.folder)} if (self.folder / "pyvenv.cfg").is_file() else {}
        if subject.setup == "uv":
            found |= {"UV_PROJECT_ENVIRONMENT": str(self.folder), "UV_NO_SYNC": "1"}
        return found

    def to_mapping(self) -> dict[str, object]:
        """What a trace's header says of it."""
        return {"key": self.key, "packages": list(self.packages)}


def environment_changes(a: Header, b: Header) -> list[Difference]:
    """What differs between the environments of two traces: bits-deciding entries first, then packages.

    Where environments were built from other lock files and hold the same packages, that alone is said.
    """
    identities = [Identity.from_mapping(header.identity) for header in (a, b)]
    found = [d for d in identities[0].differences(identities[1]) if d.part == "environment"]
    built = [header.subject.get("environment") or {} for header in (a, b)]
    before, after = (dict(p.split("==", 1) for p in one.get("packages", ())) for one in built)
    if all(built):
        known = {d.key.lower() for d in found}
        found += [
            Difference("environment", name, before.get(name, ""), after.get(name, ""))
            for name in sorted({*before, *after}, key=str.lower)
            if before.get(name) != after.get(name) and name.lower() not in known
        ]
    keys = [str(one.get("key", "")) for one in built]
    if not found and keys[0] != keys[1]:
        found.append(Difference("environment", "lock files", *keys))
    return found


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
    base = find_checkout(place.root).state / "environments"
    base.mkdir(parents=True, exist_ok=True)
    recipe = _Recipe(case, subject, place, base)
    with recipe.path("lock").open("a") as lock:
        began = time.time()
        while True:
            _wait(lock, fcntl.LOCK_SH, cancel)
            if (found := recipe.whole()) is not None:
                break
            fcntl.flock(lock, fcntl.LOCK_UN)
            _wait(lock, fcntl.LOCK_EX, cancel)
            try:
                if recipe.whole() is None:
                    recipe.build(lock, began, cancel)
                    _sweep(base, subject.environments, recipe.key)
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # also for a process of the build that escaped us
        try:
            yield found
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


def _wait(lock: IO[str], how: int, cancel: threading.Event | None) -> None:
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(lock, how | fcntl.LOCK_NB)
        if cancel and cancel.is_set():
            raise CancelledError
        time.sleep(0.1)


class _Recipe:
    """What an environment is built from, and how."""

    def __init__(self, case: Case, subject: CommandSubject, place: Place, base: Path) -> None:
        self._case, self._subject, self._root = case, subject, place.root
        self._python = interpreter(subject, place.root)
        self._tokens = {"root": str(place.home or place.root), "python": self._python}
        binary, real = Path(self._python).stat(), str(Path(self._python).resolve())
        own = self._python.replace(str(place.root), ".")
        about = {
            "setup": replaced(subject.setup, self._tokens), "shell": subject.shell, "env": subject.env,
            "python": [own, real, binary.st_size, binary.st_mtime_ns], "machine": platform.machine(),
            "locks": {name: self._content(name) for name in subject.locks},
        }  # fmt: skip
        self.key = digest("environment", canonical_json(about))[:16]  # short: kernels bound the path in a "#!" line
        self._base, self._folder = base, base / self.key

    def path(self, kind: str) -> Path:
        """A file beside the folder."""
        return self._base / f"{self.key}.{kind}"

    def _content(self, name: str) -> str:
        try:
            return digest("lock", (self._root / name).read_bytes())
        except OSError:
            raise ChildFailure("build", -1, f"there is no {name}", "the commit's files") from None

    def whole(self) -> Environment | None:
        """The environment, if it is there."""
        try:
            packages = json.loads(self.path("built").read_text(encoding="utf-8"))["packages"]
            os.utime(self.path("built"))  # the time of its last use
        except (FileNotFoundError, ValueError, KeyError):
            return None
        return Environment(self._folder, self.key, packages) if self._folder.is_dir() else None

    def build(self, lock: IO[str], began: float, cancel: threading.Event | None) -> None:
        """Build it anew; a failure that came while this caller waited since `began` is shared."""
        failed = self.path("failed")
        if failed.exists() and failed.stat().st_mtime > began:
            stage, message = json.loads(failed.read_text(encoding="utf-8"))
            raise ChildFailure(stage, -1, message, str(self.path("log")))
        done = False
        try:
            try:
                commands = self._commands()
            except ValueError as error:
                self._fail(str(error))
            _remove(self._folder)
            self._folder.mkdir()
            self.path("log").write_bytes(b"")
            for name, command, variables in commands:
                limit, kept = self._subject.timeout, [lock.fileno()]
                child = Child(command, self._root, variables, self.path("log"), limit, kept, bound=False)
                self._run(name, child, cancel)
            self._mark()
            done = True
        except ChildFailure as failure:
            failed.write_text(json.dumps([failure.stage, failure.message]), encoding="utf-8")
            raise
        except OSError as error:
            raise MachineFailureError(f"cannot build an environment in {self._base}: {error.strerror}") from error
        finally:
            if not done:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, name: str, child: Child, cancel: threading.Event | None) -> None:
        try:
            code = child.run(cancel)
        except (FileNotFoundError, PermissionError):
            self._fail(f"{name}: {child.command[0]} is not found, or not executable")
        if code:
            blame_the_machine(code, child.log)
            blame_the_network(f"building the environment for {', '.join(self._subject.locks)}", child.log)
            self._fail(f"{name} exited with {code}: {last_line(child.log)}")

    def _fail(self, message: str) -> NoReturn:
        # equal causes give equal text: no folder in it that differs from commit to commit
        message = message.replace(str(self._folder), "{out}").replace(str(self._root), ".")
        raise ChildFailure("build", -1, message, str(self.path("log")))

    def _commands(self) -> list[tuple[str, list[str], dict[str, str]]]:
        """What is run, by name, with its variables: none of them leads to the code, which no environment holds."""
        subject, out = self._subject, str(self._folder)
        variables = variables_of(self._case, subject, self._python, self._tokens | {"out": out})
        for name in ("PYTHONPATH", "VIRTUAL_ENV"):
            variables.pop(name, None)
        if subject.setup == "uv":
            if shutil.which("uv", path=variables["PATH"]) is None:
                raise ReproError('subject.setup = "uv" finds no uv on PATH: install it')
            command = uv_command(self._root, subject.locks[0], self._python)
            return [("uv sync", command, variables | {"UV_PROJECT_ENVIRONMENT": out})]
        if subject.setup == "pip":
            pip = [f"{out}/bin/python", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
            pip += pip_options(self._root, subject.locks)
            venv = [self._python, "-m", "venv", out]
            return [("python -m venv", venv, variables), ("pip install", pip, variables)]
        return [(subject.setup, words(subject.setup, self._tokens | {"out": out}, subject.shell), variables)]

    def _mark(self) -> None:
        """Say that it is whole, and what it holds."""
        found: list[str] = []
        if python := Environment(self._folder, self.key, ()).python:
            done = subprocess.run([python, "-I", "-c", _PACKAGES], capture_output=True, text=True, check=False)
            if done.returncode:
                self._fail(f"its Python does not start: {(done.stderr.splitlines() or ['no output'])[-1][:300]}")
            found = sorted(done.stdout.split(), key=str.lower)
        part = self.path("part")
        locks: Mapping[str, object] = {"setup": self._subject.setup, "locks": list(self._subject.locks)}
        part.write_text(json.dumps({**locks, "packages": found}), encoding="utf-8")
        part.replace(self.path("built"))
        self.path("failed").unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _sweep(base: Path, most: int, own: str) -> None:
    """Remove what killed processes left half built, and the least recently used beyond `most`; never one in use."""
    used = {path.stem: path.stat().st_mtime for path in base.glob("*.built")}
    half = [path.name for path in base.iterdir() if path.is_dir() and path.name not in used]
    excess = len(used) - most
    for key in [*half, *sorted(used.keys() - {own}, key=lambda key: used[key])]:
        if key in used and excess <= 0:
            return
        with contextlib.suppress(OSError), (base / f"{key}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if key in half and (base / f"{key}.built").exists():
                continue
            for kind in ("built", "failed", "log"):  # the mark first: without it the folder is nothing
                (base / f"{key}.{kind}").unlink(missing_ok=True)
            excess -= key in used
            _remove(base / key)
