"""Lists of packages: what pip, uv and conda print, requirements with pins, lock files."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from repro.doctor.artefacts.kinds import Machine
from repro_golden.base.errors import ReproError
from repro_golden.base.files import open_regular

__all__ = ["fits", "read_packages"]

_LARGEST = 64 << 20
_HEAD = 1 << 16
_MANY = 30
"""Pins of a list that is taken for all that is installed, whatever its name."""

_LOCKS = ("uv.lock", "poetry.lock", "pdm.lock")
_SUFFIXES = ("", ".txt", ".list", ".freeze", ".lock", ".json", ".in")
_TABLE = re.compile(r"\s*Package\s+Version\b")
_CONDA = re.compile(r"# packages in environment at |# Name\s+Version\s+Build")
_ROW = re.compile(r"([A-Za-z0-9][\w.-]*)\s+v?(\d\S*)(?:\s+.*)?$")
_EDITABLE = re.compile(r"# Editable .*\(([A-Za-z0-9][\w.-]*)==([^\s()]+)\)")
_EGG = re.compile(r"[#&]egg=([A-Za-z0-9][\w.-]*)")
_NAMED = re.compile(r"freeze|(?:pip|conda|uv)[_-]?list|packages|environment|env[_.-]", re.IGNORECASE)
_WANTED = re.compile(r"requirements|constraints", re.IGNORECASE)


def fits(path: Path) -> bool:
    """Whether a file is a list of packages, by its beginning."""
    if path.name in _LOCKS:
        return path.is_file()
    if path.suffix not in _SUFFIXES or not path.is_file():
        return False
    try:
        with open_regular(path) as file:
            head = file.read(_HEAD)
    except ReproError:
        return False
    whole = len(head) < _HEAD
    text = head.decode("utf-8", "replace")
    text = text if whole else text.rpartition("\n")[0]
    if path.suffix == ".json":
        return text.lstrip().startswith("[") and re.match(r'\s*\[\s*\{[^{}]*"version"', text) is not None
    if _TABLE.match(text) or _CONDA.match(text.lstrip()):
        return True
    lines = [line for line in map(_bare, text.splitlines()) if line]
    known = [line for line in lines if _entry(line) is not None or line.startswith("-")]
    pins = sum(_entry(line) is not None for line in lines)
    named = _NAMED.search(path.name) or _WANTED.search(path.name)
    return pins >= (1 if named else 3) and len(known) * 10 >= len(lines) * 6


def read_packages(path: Path) -> Machine:
    """What a list of packages says of a machine; a package that is installed from a place without a version has ''.

    Raises:
        ReproError: it cannot be read, is too large, or is a damaged lock file.
    """
    try:
        with open_regular(path) as file:
            raw = file.read(_LARGEST + 1)
    except OSError as error:
        raise ReproError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(raw) > _LARGEST:
        raise ReproError(f"{path} is larger than {_LARGEST >> 20} MiB: no list of packages is")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ReproError(f"{path} is no text (byte {error.start} is no UTF-8): write it again") from None
    if path.name in _LOCKS or path.suffix == ".lock":
        return _locked(path, text)
    if path.suffix == ".json":
        return _json(path, text)
    return _listed(path, text)


def _locked(path: Path, text: str) -> Machine:
    """A lock file: what is in it need not be installed, because extras and platforms choose."""
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise ReproError(f"{path} is no lock file ({' '.join(str(error)[:120].split())}): lock again") from None
    entries = raw.get("package")
    return Machine(str(path), _unambiguous(entries if isinstance(entries, list) else []), complete=False)


def _json(path: Path, text: str) -> Machine:
    """What `pip list --format json` and `conda list --json` print."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        raise ReproError(f"{path} is no JSON: list the packages again") from None
    if not isinstance(raw, list):
        raise ReproError(f"{path} holds no list of packages: list them again")
    versions = _unambiguous(raw)
    return Machine(str(path), versions, python=versions.get("python", ""))


def _unambiguous(entries: list[object]) -> dict[str, str]:
    """Versions by name, without packages that have several: a marker chooses among those."""
    versions: dict[str, set[str]] = {}
    for entry in entries:
        if isinstance(entry, Mapping) and isinstance(entry.get("name"), str):
            version = entry.get("version")
            versions.setdefault(_key(entry["name"]), set()).add(version if isinstance(version, str) else "")
    return {name: next(iter(candidates)) for name, candidates in versions.items() if len(candidates) == 1}


def _listed(path: Path, text: str) -> Machine:
    table, conda = _TABLE.match(text), _CONDA.search(text[:4096])
    parse: Callable[[str], tuple[str, str] | None] = _row if table or conda else _entry
    pins: dict[str, str] = {}
    whole = re.sub(r"\\\r?\n", " ", text)  # pip-compile writes hashes in lines that go on behind a backslash
    lines = [line for line in map(_bare, whole.splitlines()) if line]
    for line in lines:
        if pin := parse(line):
            pins.setdefault(_key(pin[0]), pin[1])
    for edited in _EDITABLE.finditer(text):  # pip freeze says so in a comment above `-e /path`
        pins.setdefault(_key(edited[1]), edited[2])
    pins.pop("package", None)
    pinned = not _WANTED.search(path.name) and all(_entry(line) is not None for line in lines) and len(pins) >= _MANY
    complete = bool(table or conda or (_NAMED.search(path.name) and not _WANTED.search(path.name)) or pinned)
    return Machine(str(path), pins, python=pins.get("python", "") if conda else "", complete=complete)


def _bare(line: str) -> str:
    """A line without its comment and pip's own options."""
    line = line.strip()
    if line.startswith("#"):
        return ""
    return re.split(r"\s+(?:#|--hash\b|--config)", line)[0].rstrip("\\ ").strip()


def _row(line: str) -> tuple[str, str] | None:
    match = _ROW.match(line)
    return (match[1], match[2]) if match else None


def _entry(line: str) -> tuple[str, str] | None:
    """The name and version that a line of a requirements file pins, or None."""
    if line.startswith("-"):
        egg = _EGG.search(line) if line.startswith(("-e ", "--editable")) else None
        return (egg[1], "") if egg else None
    if len(line) > 2000:
        return None
    try:
        need = Requirement(line)
    except (InvalidRequirement, RecursionError):
        return None
    if need.url:
        return need.name, _version_of(need.url)
    pins = [spec.version for spec in need.specifier if spec.operator in ("==", "===") and "*" not in spec.version]
    return (need.name, pins[0]) if pins else None


def _version_of(url: str) -> str:
    """The version in a wheel's name; '' for another place."""
    name = url.partition("#")[0].rpartition("/")[2].replace("%2B", "+").replace("%2b", "+")
    try:
        return str(parse_wheel_filename(name)[1])
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        match = re.search(r"@v?(\d[\w.]*)$", url)
    try:
        return str(Version(match[1])) if match else ""
    except InvalidVersion:
        return ""


def _key(name: str) -> str:
    return str(canonicalize_name(name))
