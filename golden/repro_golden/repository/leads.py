"""What leads from an interpreter's packages to folders, as the user had it: noted before a run, led back after it.

A run that installs its worktree (`pip install -e .`) leaves the user a package of a folder that is soon gone. The note
lies with the rest of our state: of a process that was killed the next one leads back what it left.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import fcntl
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from repro_golden.base.canonical import digest, write_atomic
from repro_golden.base.errors import MachineFailureError

__all__ = ["leading", "noted", "settle"]

_LEADS = ("*.pth", "*.egg-link", "__editable__*.py", "*.dist-info/direct_url.json")
"""Files by which an installation leads to the folder that it is of."""
_OURS = re.compile(rb"/repro/(?:trust/[^/\n]+/)?worktrees/[^\n]*?/at-[^/\n]+/")
"""What they hold where that is a worktree."""
_LARGE, _WHOLE = 1 << 20, 1 << 24
"""Bytes of such a file that is read, and of a package from a folder that is kept whole."""


class _File(NamedTuple):
    """A file as it was.

    Attributes:
        mode: Who may do what with it.
        content: All of it.
        of: The ``.dist-info`` of its package, where all of that is kept; '' of any other.
    """

    mode: int
    content: bytes
    of: str = ""

    @classmethod
    def at(cls, path: Path, of: str = "") -> _File:
        """One as it is."""
        return cls(path.stat().st_mode & 0o777, path.read_bytes(), of)


class _Note(NamedTuple):
    """What a folder of packages held.

    Attributes:
        site: The folder.
        names: Of all packages in it.
        files: What leads elsewhere, and packages that are from a folder, by their paths.
    """

    site: Path
    names: set[str]
    files: dict[Path, _File]


@contextlib.contextmanager
def noted(state: Path, site: Path, root: Path) -> Iterator[list[str]]:
    """Hold a note of what leads from a folder of packages for the block; the last who does leads all of it back.

    Args:
        state: Where the note lies.
        site: The folder.
        root: The worktree, whose project may be installed there.

    Yields:
        An empty list, which holds behind the block what runs have installed there since it was noted.

    Raises:
        MachineFailureError: the note cannot be written, or what was there not be put back.
    """
    base, found = state / "installs", list[str]()
    base.mkdir(parents=True, exist_ok=True)
    path = base / f"{digest('site', str(site))}.json"
    with path.with_suffix(".lock").open("a") as lock:
        with _turn(base):
            if _is_last(lock):
                _settle(path)
                _write(path, _look(site, root))
            fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            yield found
        finally:
            with _turn(base):
                found += _installed(_read(path))
                if _is_last(lock):
                    _settle(path)


def settle(state: Path) -> None:
    """Lead back what processes that were killed have left.

    Raises:
        MachineFailureError: it cannot be put back.
    """
    base = state / "installs"
    if not any(base.glob("*.json")):
        return
    with _turn(base):
        for path in base.glob("*.json"):
            with path.with_suffix(".lock").open("a") as lock:
                if _is_last(lock):
                    _settle(path)


@contextlib.contextmanager
def _turn(base: Path) -> Iterator[None]:
    with (base / "turn").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_last(lock: IO[str]) -> bool:
    """Whether nobody else holds a note. Asked in one's turn: the kernel may let go of one's own hold to see."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# -- the note


def _look(site: Path, root: Path) -> _Note:
    files = {path: _File.at(path) for path in leading(site)}
    own, abouts = _projects(root), sorted(site.glob("*.dist-info"))
    for about in abouts:
        paths = [path for path in _listed(about) if _readable(path)]
        wanted = about / "direct_url.json" in files or _name(about) in own
        if wanted and sum(path.stat().st_size for path in paths) < _WHOLE:
            files |= {path: _File.at(path, str(about)) for path in paths}
    return _Note(site, set(map(_name, abouts)), files)


def _write(path: Path, note: _Note) -> None:
    kept = {str(p): [file.mode, base64.b64encode(file.content).decode(), file.of] for p, file in note.files.items()}
    write_atomic(path, json.dumps({"site": str(note.site), "names": sorted(note.names), "files": kept}))


def _read(path: Path) -> _Note:
    raw = json.loads(path.read_bytes())
    kept = {Path(p): _File(mode, base64.b64decode(text), of) for p, (mode, text, of) in raw["files"].items()}
    return _Note(Path(raw["site"]), set(raw["names"]), kept)


def leading(site: Path) -> list[Path]:
    """The files of a folder of packages by which these lead elsewhere."""
    paths = [path for pattern in _LEADS for path in site.glob(pattern)]
    return [path for path in paths if _readable(path) and path.stat().st_size < _LARGE]


def _readable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.R_OK)


def _listed(about: Path) -> list[Path]:
    """The files of the package that a ``.dist-info`` is of, as far as they lie in the environment that holds it."""
    site, record = about.parent, about / "RECORD"
    rows = csv.reader(record.read_text(encoding="utf-8", errors="replace").splitlines()) if record.is_file() else ()
    paths = [Path(os.path.normpath(site / row[0])) for row in rows if row and row[0]]
    environment = site.parents[min(2, len(site.parents) - 1)]
    paths += [path for path in sorted(about.rglob("*")) if path.is_file()]
    return [path for path in paths if path.is_relative_to(environment)]


def _name(about: Path) -> str:
    """The name of the package that a ``.dist-info`` is of."""
    return re.sub(r"[-_.]+", "-", about.name.partition("-")[0]).lower()


def _projects(root: Path) -> set[str]:
    """What a worktree may be installed as: a release of it would be exchanged."""
    files = [file for name in ("pyproject.toml", "setup.cfg", "setup.py") if (file := root / name).is_file()]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    named = [name for text in texts for name in re.findall(r"\bname\s*=\s*[\"']?([\w.-]+)", text)]
    return {re.sub(r"[-_.]+", "-", name).lower() for name in named}


# -- back


def _new(note: _Note) -> list[Path]:
    """What leads to a worktree now and did not."""
    now = {path: path.read_bytes() for path in leading(note.site)}
    before = {path: file.content for path, file in note.files.items()}
    return [path for path, content in now.items() if _OURS.search(content) and content != before.get(path)]


def _installed(note: _Note) -> list[str]:
    """What runs have installed, or taken away, by the names of packages or files."""
    gone = [path for path in note.files if path.name == "direct_url.json" and not path.exists()]
    return sorted({path.parent.stem if path.suffix == ".json" else path.name for path in [*_new(note), *gone]})


def _settle(path: Path) -> None:
    """Put back what led elsewhere, and take away what leads to a worktree since: soon that leads nowhere.

    What else was installed stays: who it is of is not known.
    """
    if not path.exists():
        return
    try:
        note = _read(path)
        _take_away(note)
        _put_back(note)
        path.unlink()
    except OSError as error:
        what = f"{error.strerror} {error.filename or ''}".strip()
        raise MachineFailureError(
            f"what a run installed cannot be taken back ({what}): cure that and run the same command again"
        ) from None


def _take_away(note: _Note) -> None:
    whole = {Path(file.of) for file in note.files.values() if file.of}
    for about in whole:
        shutil.rmtree(note.site / f"~{about.name[1:]}", ignore_errors=True)  # of a pip that was ended
    spared = note.names - set(map(_name, whole))  # of what was there before nothing is kept
    for path in _new(note):
        package = path.suffix == ".json"
        if package and _name(path.parent) in spared:
            continue
        for file in _listed(path.parent) if package else [path]:
            file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it holds something else
                for folder in itertools.takewhile(lambda above: above != note.site, file.parents):
                    folder.rmdir()


def _put_back(note: _Note) -> None:
    now = {_name(about): about for about in note.site.glob("*.dist-info")}
    for path, file in note.files.items():
        about = Path(file.of)
        if path.exists() or _OURS.search(file.content) or (file.of and _is_another(now.get(_name(about)), about, note)):
            continue
        if file.of or path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.content)
            path.chmod(file.mode)


def _is_another(now: Path | None, about: Path, note: _Note) -> bool:
    """Whether somebody has installed a package of that name meanwhile, which is theirs."""
    record, kept = about / "RECORD", note.files.get(about / "RECORD")
    changed = kept is not None and record.is_file() and record.read_bytes() != kept.content
    return now is not None and (now != about or changed)
