"""The subject's own environment with single packages replaced: those of `pins`, and what these cannot do without.

It is a virtual environment of the base's interpreter that holds the moved packages alone, and behind them on the search
path everything of the base. So that as little as possible varies, pip installs the pinned versions without their
dependencies. Then each requirement that they declare and the environment does not meet is installed likewise, in the
newest release that it and the packages that stay allow, and so on for what that one declares, up to a fixed depth. Each
torch for CUDA pins its own triton and its own packages of libraries: they come along, and the trace's header names
them. What does not fit in the end is told, and is no verdict on the version.

A package of libraries alone, such as nvidia-cublas, is found by torch beside itself and not on the search path. Those
that come along are installed beside it; those that the base has in the right version are linked there. Pinned by
itself, one would be found by nobody, and is refused. How an environment is kept, locked and swept is in `kept`.
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
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, canonicalize_version
from packaging.version import InvalidVersion, Version

from repro_golden.base.canonical import canonical_json, digest
from repro_golden.base.credentials import withheld
from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.case.file import Case, CommandSubject, CoreSubject
from repro_golden.case.subject_tables import checked_pins
from repro_golden.replay.children import ChildFailure, base_environment
from repro_golden.repository.checkout import Place, find_checkout
from repro_golden.subjects.argv import interpreter, replaced
from repro_golden.subjects.environments.cache import Slot, environments_of, kept
from repro_golden.subjects.environments.inside import ABOUT, BEHIND, COMMON, EDITED, MODULES, OUTSHONE, PIP, SEEN
from repro_golden.subjects.environments.needs import Packages, declared, lacking, unmet
from repro_golden.subjects.environments.origins import sources
from repro_golden.subjects.environments.releases import asked, index_urls, pip_settings, readable

__all__ = ["Overlay", "held_overlay", "sources_of"]

_DEPTH = 8
"""How often what is needed is looked for anew."""
_FORMAT = 1
"""Counted up when what is built changes, so that an older one does not serve."""


@dataclass(frozen=True)
class Overlay:
    """One that is whole, or the base itself where that has the pinned versions already.

    Attributes:
        folder: Where it lies; the base's own folder where that serves.
        key: What it was built from, in 16 digits.
        python: Its interpreter.
        packages: ``name==version`` of all that it can import, by name.
        scripts: Folders of its programs, to come first on PATH.
        moved: Names of the packages that were asked for, and of those that came along.
    """

    folder: Path
    key: str
    python: str
    packages: Sequence[str]
    scripts: Sequence[str]
    moved: Sequence[str]

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """What tells tools that they run in it, in place of what `environment` says."""
        env = {"PATH": os.pathsep.join([*self.scripts, environment.get("PATH", os.defpath)])}
        if (self.folder / "pyvenv.cfg").is_file():
            env |= {"VIRTUAL_ENV": str(self.folder), "UV_PROJECT_ENVIRONMENT": str(self.folder), "UV_NO_SYNC": "1"}
        if self.folder.name == self.key and {"numba", "llvmlite"} & set(self.moved):
            env["NUMBA_CACHE_DIR"] = str(self.folder / "numba")  # else what one compiled would be overwritten by others
        return env

    def notice(self, variables: Mapping[str, str], root: Path, log: Path) -> None:
        """Look for other copies of the packages that moved, which PYTHONPATH would have found first.

        What lies beside a program is refused when it is imported: see `inside.BEHIND`.

        Raises:
            ChildFailure: there is one.
        """
        path = [str(root / entry) for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry]
        if not path:
            return
        for name, version, where in asked(self.python, OUTSHONE, json.dumps(path), *self.moved, variables=variables):
            relative = where.replace(f"{root}{os.sep}", "")
            message = f"{name} {version} is hidden by {relative}: take its folder off PYTHONPATH in subject.env"
            raise ChildFailure("build", -1, message, str(log))

    def to_mapping(self) -> dict[str, object]:
        """What a trace's header says of it."""
        return {"key": self.key, "packages": list(self.packages)}


@contextlib.contextmanager
def held_overlay(
    case: Case,
    subject: CommandSubject | CoreSubject,
    place: Place,
    base_python: str,
    pins: Mapping[str, str],
    cancel: threading.Event | None = None,
    *,
    index: str | None = None,
) -> Iterator[Overlay]:
    """The environment of `base_python` with the versions of `pins`, kept on the disk for the block.

    Args:
        case: Whose variables it is built with.
        subject: The case's.
        place: Where the code lies, in whose repository it is kept.
        base_python: The interpreter of the subject's own environment, which itself is held by the caller.
        pins: Versions by the names of packages, all of which the base has.
        cancel: Ends a build, or the wait for one.
        index: The index that they come from, in place of pip's own settings.

    Raises:
        CancelledError: `cancel` was set.
        ChildFailure: a version or what it needs does not install, does not fit the rest, or is hidden by the base's.
        MachineFailureError: the disk, the network or an index failed.
        ReproError: a pin is none, the base has no such package, or there is neither pip nor uv.
    """
    base_python = os.path.abspath(base_python)  # noqa: PTH100 - never resolved: an environment's python is a link
    variables = _variables(case, subject, place, base_python)
    base = _Base(base_python, asked(base_python, ABOUT, variables=variables))
    checked = _checked(pins)
    there = [name for name, version in checked.items() if base.has(name, version)]
    changed = edited(base_python, tuple(there)) if there else ()
    wanted = {name: version for name, version in checked.items() if name not in there or name in changed}
    if not wanted:
        prefix, base_scripts = Path(base.report["prefix"]), [str(Path(base_python).parent)]
        yield Overlay(prefix, base.key({}, ()), base_python, _listed(base.packages), base_scripts, sorted(checked))
        return
    fetching = _fetching() | variables
    folder = environments_of(find_checkout(place.root).state)
    key = base.key(wanted, sources(index, base_python, fetching, folder))
    recipe = _Recipe(base, wanted, variables, fetching, subject.timeout, index)
    with kept(folder, key, subject.most_environments, recipe.build, {str(place.root): "."}, cancel) as about:
        scripts = [str(folder / key / "bin"), str(Path(base_python).parent)]
        moved = sorted({*about["moved"], *checked})
        yield Overlay(folder / key, key, str(folder / key / "bin" / "python"), about["packages"], scripts, moved)


def sources_of(case: Case, root: Path) -> list[str]:
    """What decides which files the versions are that a case asks for (`origins.sources`); nothing without any.

    Args:
        case: The case.
        root: The user's checkout.
    """
    subject = case.subject
    if not subject.packages:
        return []
    python = interpreter(subject, root)
    folder = environments_of(find_checkout(root).state)
    return sources(None, python, _fetching() | _variables(case, subject, Place(root), python), folder)


@functools.cache  # all of a package's files are read
def edited(python: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of an interpreter's packages that are not what their lists of files say."""
    return tuple(asked(python, EDITED, *names))


def _variables(case: Case, subject: CommandSubject | CoreSubject, place: Place, python: str) -> dict[str, str]:
    """Those of the case, of which none leads to the code: no environment holds it."""
    tokens = {"root": str(place.home or place.root), "python": python}
    variables = base_environment(case) | {name: replaced(value, tokens) for name, value in subject.env.items()}
    variables["PATH"] = os.pathsep.join([str(Path(python).parent), variables.get("PATH", os.defpath)])
    return {name: value for name, value in variables.items() if name not in _NOT_OURS}


def _fetching() -> dict[str, str]:
    """What an installer of releases needs to reach an index and looks like a secret; nothing else gets it."""
    secret = {name: name.upper() for name in withheld(os.environ)}
    names = [name for name, upper in secret.items() if upper.startswith(("PIP_", "UV_")) or upper in _WAYS]
    return {name: os.environ[name] for name in names if name not in _NOT_OURS}


_WAYS = ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "NETRC")

_NOT_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT")
"""Variables that lead to the code, or an installer to another place."""


def _checked(pins: Mapping[str, str]) -> dict[str, str]:
    """The pins by normalised names."""
    try:
        return checked_pins(pins)
    except ValueError as error:
        raise ReproError(str(error)) from None


def _serves(wanted: str, version: str) -> bool:
    """Whether a version is the wanted one; without a local label any build of it is."""
    try:
        return SpecifierSet(f"=={wanted}").contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


# -- the base


@dataclass(frozen=True)
class _Base:
    """The subject's own environment, as it says itself."""

    python: str
    report: Mapping[str, Any]

    def has(self, name: str, version: str) -> bool:
        """Whether it has a release already.

        Raises:
            ReproError: it has no version of it, so that there is nothing to replace.
        """
        if (package := self.packages.get(name)) is None:
            raise ReproError(f"{self.python} has no {name}: install it there, or correct its name")
        return not package[2] and _serves(version, package[1])

    @property
    def packages(self) -> Packages:
        """All that it has, by normalised names."""
        return cast("Packages", self.report["packages"])

    @property
    def marks(self) -> Mapping[str, str]:
        """Values for the markers of requirements."""
        return cast("Mapping[str, str]", self.report["marks"])

    def key(self, pins: Mapping[str, str], index: Sequence[str]) -> str:
        """What an overlay is built from."""
        binary = Path(self.python).stat()
        about = {
            "python": [self.python, str(Path(self.python).resolve()), binary.st_size, binary.st_mtime_ns],
            "base": [self.report["prefix"], self.report["folders"], self.marks["python_full_version"]],
            "packages": _listed(self.packages), "machine": platform.machine(), "index": list(index), "recipe": _FORMAT,
            "pins": {name: canonicalize_version(version) for name, version in pins.items()},
        }  # fmt: skip
        return digest("overlay", canonical_json(about))[:16]


def _listed(packages: Packages) -> list[str]:
    return sorted((f"{name}=={version}" for name, version, *_ in packages.values()), key=str.lower)


# -- building one

_LINK = "zz-repro-base.pth"
"""Last by name, so that the `.pth` files of the pinned packages come before those of the base."""

_HIDE = "_repro_overlay"
"""The module that puts the base behind the overlay."""


@dataclass(frozen=True)
class _Recipe:
    """How one is built."""

    base: _Base
    pins: Mapping[str, str]
    variables: Mapping[str, str]
    fetching: Mapping[str, str]
    limit: float
    index: str | None

    def build(self, slot: Slot) -> dict[str, object]:
        """Fill the folder; what its mark says."""
        python = str(slot.folder / "bin" / "python")
        venv = [self.base.python, "-m", "venv", "--without-pip", str(slot.folder)]
        slot.run("python -m venv", venv, slot.base, self.variables, self.limit, "making an environment")
        pins = [f"{name}=={version}" for name, version in sorted(self.pins.items())]
        self._install(slot, python, pins, " ".join(pins))
        moved = self._moved(slot, python, " ".join(pins))
        new = self._asked(python, MODULES, *moved)
        old = self._asked(self.base.python, MODULES, *(name for name in moved if name in self.base.packages))
        for name in self.pins:
            if new[name]["bare"]:
                raise ReproError(
                    f"{name} holds libraries alone, which others load from beside themselves: vary it with what needs"
                    " it, or with subject.lock, in environments of their own"
                )
        self._link_libraries(moved, Path(next(package["pure"] for package in new.values())))
        self._put_behind(new, old)
        self._copy_scripts(slot, {script for package in old.values() for script in package["scripts"]})
        self._see(slot, python, new)
        packages = self._asked(python, ABOUT)["packages"]
        if left := unmet(self.base.packages, packages, moved, self.base.marks):
            with slot.path("log").open("a", encoding="utf-8") as log:
                log.writelines(f"{line}\n" for line in left)
            slot.fail(left[0] + (f" (and {len(left) - 1} more)" if left[1:] else ""))
        return {"pins": dict(self.pins), "moved": sorted(moved), "packages": _listed(packages)}

    def _asked(self, python: str, script: str, *arguments: str) -> Any:
        return asked(python, script, *arguments, variables=self.variables)

    def _moved(self, slot: Slot, python: str, pins: str) -> Packages:
        """What the overlay holds by itself, once all that its packages need and the base has not came along."""
        for _ in range(_DEPTH):
            installed: Packages = self._asked(python, ABOUT)["packages"]
            after = {**self.base.packages, **installed}
            needs, wishes = lacking(installed, self.pins, self.base.packages, after, self.base.marks)
            if not needs:
                return installed
            try:
                self._install(slot, python, [*needs, *wishes], f"what {pins} needs")
            except ChildFailure:
                if not wishes:
                    raise
                self._install(slot, python, needs, f"what {pins} needs")  # whose wish is not heeded is told in the end
        return cast("Packages", self._asked(python, ABOUT)["packages"])

    def _install(self, slot: Slot, python: str, needs: Sequence[str], what: str) -> None:
        """Install it, before the overlay knows the base: no installer then sees or removes the base's copies.

        Raises:
            ChildFailure: it cannot be had.
            MachineFailureError: the network or an index failed it, which pip may pass over in silence.
        """
        name, command, variables = self._installer(python)
        try:
            slot.run(f"{name} of {what}", [*command, *needs], slot.base, variables, self.limit, f"installing {what}")
        except ChildFailure as failure:
            if failure.stage == "timeout":
                raise MachineFailureError(f"installing {what} found {failure.message}, or run again") from None
            try:
                urls = index_urls(self.index, self.base.python, variables)
            except ReproError:
                raise failure from None  # it has all that it may have
            readable({canonicalize_name(Requirement(need).name) for need in needs}, urls)
            raise

    def _installer(self, python: str) -> tuple[str, list[str], dict[str, str]]:
        has = [self.base.python, "-c", PIP]
        if not subprocess.run(has, env=dict(self.variables), capture_output=True, check=False).returncode:
            pip = [self.base.python, "-m", "pip", "--python", python, "install", "--no-input"]
            # a credential has no business in a list of processes
            env = {"PIP_INDEX_URL": self.index} if self.index else {}
            if pip_settings(self.base.python, self.fetching).get("retries") == "0":
                env["PIP_RETRIES"] = "1"  # without any it says nothing of a network that fails it
            return "pip install", [*pip, "--disable-pip-version-check", "--no-deps"], {**self.fetching, **env}
        folders = os.pathsep.join([self.variables["PATH"], str(Path(sys.executable).parent)])
        if (uv := shutil.which("uv", path=folders)) is None:
            raise ReproError(f"{self.base.python} has no pip of 22.3 or later, and there is no uv on PATH: install one")
        env = {"UV_DEFAULT_INDEX": self.index} if self.index else {}
        return "uv pip install", [uv, "pip", "install", "--python", python, "--no-deps"], {**self.fetching, **env}

    def _link_libraries(self, moved: Packages, pure: Path) -> None:
        """Put the base's packages of libraries alone that the moved ones need beside those, which look for them there.

        Otherwise the loader would find none, or the system's.
        """
        after = {**self.base.packages, **moved}
        reached: dict[str, Any] = {}
        ring = set(moved)
        while ring:  # through packages that offer nothing to import, such as cuda-toolkit
            needed = {canonicalize_name(need.name) for _, need in declared(ring, after, self.base.marks)}
            names = sorted((needed & self.base.packages.keys()) - moved.keys() - reached.keys())
            asked_ = self._asked(self.base.python, MODULES, *names) if names else {}
            reached |= asked_
            ring = {name for name, package in asked_.items() if not package["code"]}
        for package in reached.values():
            for path in package["libraries"] if package["bare"] else ():
                target = pure / path
                if not path.startswith((".", "/")) and not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.symlink_to(Path(package["home"]) / path)

    def _put_behind(self, new: Mapping[str, Any], old: Mapping[str, Any]) -> None:
        """Make the base importable, but for what its copies of the moved packages alone had."""
        ours = {root for package in new.values() for root in package["roots"]}
        hidden = {
            root: package["home"].rstrip("/")
            for package in old.values()
            for root in package["roots"]
            if not any(root == our_root or _within(root, our_root) or _within(our_root, root) for our_root in ours)
        }
        versions = {root: f"{name} {package['version']}" for name, package in new.items() for root in package["roots"]}
        for root in [root for root in versions if root.split(".")[0] in COMMON]:
            del versions[root]
        text = BEHIND.format(hidden=hidden, ours=versions, folders=self.base.report["folders"])
        pure = Path(next(package["pure"] for package in new.values()))
        (pure / f"{_HIDE}.py").write_text(text, encoding="utf-8")
        (pure / _LINK).write_text(f"import {_HIDE}\n", encoding="utf-8")

    def _copy_scripts(self, slot: Slot, gone: set[str]) -> None:
        """The base's Python programs, such as torchrun, started by the overlay's Python: else they would leave it."""
        base_bin = Path(self.base.python).parent
        ours = slot.folder / "bin"
        start = re.compile(
            rb"\A(?:#!|#!/bin/sh\n'''exec' [\"']?)"
            + re.escape(os.fsencode(base_bin))
            + rb"/python[\d.]*\b[^\n]*\n(?:' '''\n)?"
        )
        # a path in a "#!" line may be too long, or hold a blank
        head = b"#!/bin/sh\n'''exec' \"" + os.fsencode(ours / "python") + b'" "$0" "$@"\n\' \'\'\'\n'
        for path in base_bin.iterdir():
            if path.name in gone or (ours / path.name).exists() or not path.is_file() or not os.access(path, os.R_OK):
                continue
            with path.open("rb") as file:
                if match := start.match(file.read(1024)):
                    file.seek(match.end())
                    (ours / path.name).write_bytes(head + file.read())
                    (ours / path.name).chmod(0o755)

    def _see(self, slot: Slot, python: str, new: Mapping[str, Any]) -> None:
        """Whether a process in it gets the versions that it holds, and those the pinned ones."""
        wanted = canonical_json({name: package["roots"] for name, package in new.items()})
        for name, (version, origins) in self._asked(python, SEEN, wanted).items():
            ours = self.pins.get(name, new[name]["version"])
            if not _serves(ours, version) or version != new[name]["version"]:
                slot.fail(f"{name} {ours} was asked for, and {version} is found")
            for root, origin in origins.items():
                if origin is None or not Path(origin).is_relative_to(slot.folder):
                    slot.fail(f"{name} {ours} is hidden: import {root} finds {origin or 'nothing'}")


def _within(inner: str, outer: str) -> bool:
    return inner.startswith(f"{outer}.")
