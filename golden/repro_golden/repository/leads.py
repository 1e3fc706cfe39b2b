"""What leads from an interpreter's packages to worktrees of a repository: noted before a run, taken away after it.

A run that installs its worktree (`pip install -e .`) leaves the user a package of a folder that is soon gone. The note
lies with the rest of our state: of a process that was killed the next one takes away what it left.
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
from urllib.parse import unquote

from repro_golden.base.canonical import digest, write_atomic
from repro_golden.base.errors import MachineFailureError

__all__ = ["leading", "noted", "settle"]

_LEADS = ("*.pth", "*.egg-link", "__editable__*.py", "*.dist-info/direct_url.json")
"""Files by which an installation leads to the folder that it is of."""
_WORKTREE = re.compile(r"/repro/(?:trust/[^/\n]+/)?worktrees/[^\n]*?/at-[^/\n]+/")
"""What they hold where that is a worktree, of whichever repository."""
_LARGE, _WHOLE = 1 << 20, 1 << 24
"""Bytes of such a file that is read, and of the project's own package that is kept."""


class _Note(NamedTuple):
    """What a folder of packages held, as JSON has it.

    Attributes:
        site: The folder.
        ours: The folder of the repository's worktrees.
        names: Of the packages that stood there.
        led: What led to such worktrees already, by the paths of the files.
        kept: The worktree's own project: of each name its files by their paths, with their modes and in base64.
    """

    site: str
    ours: str
    names: list[str]
    led: dict[str, str]
    kept: dict[str, dict[str, tuple[int, str]]]


@contextlib.contextmanager
def noted(state: Path, site: Path, root: Path) -> Iterator[list[str]]:
    """Hold a note of a folder of packages for the block; the last who does takes away what leads to worktrees since.

    Args:
        state: Where the note lies.
        site: The folder.
        root: The worktree, whose project may be installed there. All of the repository lie beside it.

    Yields:
        An empty list, which holds behind the block what runs have installed there since it was noted.

    Raises:
        MachineFailureError: the note cannot be written, or what runs installed not be taken back.
    """
    base, found = state / "installs", list[str]()
    base.mkdir(parents=True, exist_ok=True)
    path = base / f"{digest('site', str(site))}.json"
    with path.with_suffix(".lock").open("a") as lock:
        with _turn(base):
            if _is_last(lock):
                _settle(path)
                write_atomic(path, json.dumps(_look(site, root)))
            fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            yield found
        finally:
            with _turn(base):
                if path.exists():  # who clears our state away meanwhile has the packages as they are
                    found += sorted({_called(file) for file in _new(_read(path))})
                if _is_last(lock):
                    _settle(path)


def settle(state: Path) -> None:
    """Take back what runs of processes that were killed have installed.

    Raises:
        MachineFailureError: it cannot be taken back.
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
    own, kept = _projects(root), dict[str, dict[str, tuple[int, str]]]()
    abouts, leads = sorted(site.glob("*.dist-info")), leading(site)
    led = _led(site, ours := str(root.parents[2]))
    others = {path.parent for path in leads if _WORKTREE.search(_text(path)) and str(path) not in led}
    for name in own:
        paths = [path for path in site.glob("*.egg-link") if _canonical(path.stem) == name]
        paths += [path for about in abouts if _name(about) == name for path in _listed(about) if _readable(path)]
        away = any(_WORKTREE.search(_text(path)) for path in {*paths} & {*leads})
        if paths and not away and sum(path.stat().st_size for path in paths) < _WHOLE:
            kept[name] = {str(path): (path.stat().st_mode & 0o777, _packed(path)) for path in paths}
    return _Note(str(site), ours, [_name(about) for about in abouts if about not in others], led, kept)


def _read(path: Path) -> _Note:
    return _Note(*json.loads(path.read_bytes()))


def _led(site: Path, ours: str) -> dict[str, str]:
    """What leads to worktrees of ours now, by the paths of the files."""
    texts = {str(path): _text(path) for path in leading(site)}
    return {path: text for path, text in texts.items() if _is_ours(text, ours)}


def _is_ours(text: str, ours: str) -> bool:
    return any(f"{ours}/" in form for form in (text, unquote(text)))  # a URL or a path


def leading(site: Path) -> list[Path]:
    """The files of a folder of packages by which these lead elsewhere."""
    paths = [path for pattern in _LEADS for path in site.glob(pattern)]
    return [path for path in paths if _readable(path) and path.stat().st_size < _LARGE]


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="surrogateescape")


def _packed(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


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
    return _canonical(about.name.partition("-")[0])


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _projects(root: Path) -> set[str]:
    """What a worktree may be installed as: a release of it would be exchanged."""
    files = [file for name in ("pyproject.toml", "setup.cfg", "setup.py") if (file := root / name).is_file()]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    named = [name for text in texts for name in re.findall(r"\bname\s*=\s*[\"']?([\w.-]+)", text)]
    return set(map(_canonical, named))


# -- back


def _new(note: _Note) -> list[Path]:
    """What leads to a worktree of ours now and did not."""
    return [Path(path) for path, _ in sorted(_led(Path(note.site), note.ours).items() - note.led.items())]


def _called(file: Path) -> str:
    """How what a file leads from is called: by its package, or itself."""
    return file.parent.stem if file.suffix == ".json" else file.name


def _settle(path: Path) -> None:
    """Take away what leads to a worktree since, for soon that leads nowhere, and put back what it took the place of.

    Where nothing does, nothing is touched: what changed meanwhile is the user's.
    """
    if not path.exists():
        return
    try:
        note = _read(path)
        if new := _new(note):
            _take_away(note, new)
            _put_back(note)
        path.unlink()
    except OSError as error:
        what = f"{error.strerror} {error.filename or ''}".strip()
        raise MachineFailureError(
            f"what a run installed cannot be taken back ({what}): cure that and run the same command again"
        ) from None


def _take_away(note: _Note, new: list[Path]) -> None:
    site, stood = Path(note.site), set(note.names) - note.kept.keys()  # of what stood there and is not kept
    ours = {file.parent for file in new if file.suffix == ".json" and _name(file.parent) not in stood}
    shared = {file for about in site.glob("*.dist-info") if about not in ours for file in _listed(about)}
    for file in {file for about in ours for file in _listed(about)} - shared:
        file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it holds something else
            for folder in itertools.takewhile(lambda above: above != site, file.parents):
                folder.rmdir()
    for file in new:
        if file.suffix != ".json" and file.exists():
            lines = _text(file).splitlines(keepends=True) if file.suffix == ".pth" else []
            if others := "".join(line for line in lines if not _is_ours(line, note.ours)):
                file.write_bytes(others.encode(errors="surrogateescape"))
            else:
                file.unlink()


def _put_back(note: _Note) -> None:
    site = Path(note.site)
    now = {*map(_name, site.glob("*.dist-info")), *(_canonical(path.stem) for path in site.glob("*.egg-link"))}
    for name in note.kept.keys() - now:
        for path, (mode, content) in note.kept[name].items():
            file = Path(path)
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(base64.b64decode(content))
                file.chmod(mode)
            if file.suffix == ".egg-link":  # what it leads to stood in the file that all such share, too
                line, listed = _text(file).partition("\n")[0] + "\n", site / "easy-install.pth"
                with listed.open("a+", encoding="utf-8", errors="surrogateescape") as lines:
                    lines.seek(0)
                    if line not in lines.readlines():
                        lines.write(line)
            if file.parent.suffix == ".dist-info":  # of a pip that was ended
                shutil.rmtree(site / f"~{file.parent.name[1:]}", ignore_errors=True)
