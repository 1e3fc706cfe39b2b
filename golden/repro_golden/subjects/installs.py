"""What a case's `setup` installs into an interpreter that is not the worktree's own: nothing, or it is refused.

What one commit installs there every other probe runs, at once or later, and the user after them: an editable
installation of a worktree that is gone is one of nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PathDistribution
from pathlib import Path

from repro_golden.base.errors import ReproError
from repro_golden.recording.attach.identify import marked
from repro_golden.replay.children import ChildFailure
from repro_golden.subjects.environments.releases import asked
from repro_golden.subjects.inside import SITES

__all__ = ["left_alone"]

_MOST = 1 << 27
"""Bytes of packages that were installed from folders, and of files that lead to them, which can be put back."""
_harmless = set[tuple[str, str]]()
_first = threading.Lock()


@contextlib.contextmanager
def left_alone(python: str, setup: str, root: Path, variables: Mapping[str, str]) -> Iterator[None]:
    """Run a setup in the block; the first that leaves the interpreter's packages alone speaks for all of its text.

    Args:
        python: The interpreter that it is given.
        setup: Its text.
        root: The worktree, which may have an interpreter of its own.
        variables: Its environment.

    Raises:
        ReproError: packages came, went or changed there.
    """
    if Path(python).is_relative_to(root) or (python, setup) in _harmless:
        yield
        return
    with _first:  # another one at the same time could not be told from it
        sites = [Path(site) for site in asked(python, SITES, variables=variables)]
        before, kept = _state(sites), _kept(sites)
        try:
            yield
        except ChildFailure:
            _refuse_changes(python, setup, sites, before, kept)
            raise
        except BaseException:  # it was cancelled, which says nothing of it
            with contextlib.suppress(ReproError):
                _refuse_changes(python, setup, sites, before, kept)
            raise
        _refuse_changes(python, setup, sites, before, kept)
        _harmless.add((python, setup))


def _state(sites: Sequence[Path]) -> dict[str, str]:
    """What moves when a package comes, goes or is exchanged."""
    patterns = ("*.pth", "*.egg-link", "*.dist-info/RECORD")
    return marked(map(str, [*sites, *(path for site in sites for pattern in patterns for path in site.glob(pattern))]))


def _kept(sites: Sequence[Path]) -> dict[Path, tuple[bytes, int]]:
    """Content and mode of what an installer may exchange for a worktree's: what it was given as a folder before."""
    notes = [note for site in sites for note in site.glob("*.dist-info/direct_url.json")]
    folders = [note for note in notes if '"dir_info"' in note.read_text(encoding="utf-8", errors="replace")]
    parts = [[path] for site in sites for pattern in ("*.pth", "*.egg-link") for path in site.glob(pattern)]
    parts += [[path for path in _files(note.parent) if path.is_file()] for note in folders]
    left, kept = _MOST, dict[Path, tuple[bytes, int]]()
    for part in parts:
        if (size := sum(path.stat().st_size for path in part)) <= left:
            left -= size
            kept |= {path: (path.read_bytes(), path.stat().st_mode) for path in part}
    return kept


def _files(info: Path) -> list[Path]:
    """The files of a package by its list of them."""
    return [Path(os.path.normpath(info.parent / str(path))) for path in PathDistribution(info).files or ()]


def _refuse_changes(
    python: str, setup: str, sites: Sequence[Path], before: Mapping[str, str], kept: Mapping[Path, tuple[bytes, int]]
) -> None:
    """Refuse what is not as it was, and put back what can be.

    Raises:
        ReproError: naming it.
    """
    now = _state(sites)
    changed = sorted(Path(place) for place, _ in now.items() ^ before.items() if Path(place) not in sites)
    if not changed and now == before:
        return
    infos = {path.parent for path in changed if path.name == "RECORD"}
    others = {Path(place).parent for place in before if place.endswith(".dist-info/RECORD")} - {p.parent for p in kept}
    stays = sorted(info.stem for info in infos if _name(info) in map(_name, others))
    for info in infos:
        if info.stem not in stays:
            _remove(info)
    for path in changed:
        if path.name != "RECORD" and str(path) not in before:
            path.unlink(missing_ok=True)
    for path, (content, mode) in kept.items():
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.write_bytes(content)
            path.chmod(mode)
    names = sorted({info.stem for info in infos} or {path.name for path in changed}) or ["a file"]
    left = f" ({', '.join(stays)} could not be put back: install it again)" if stays else ""
    raise ReproError(
        f"subject.setup ({setup}) changes {', '.join(names)} in {python}, which every probe and you share{left}: let "
        "it build in the worktree ({python} setup.py build_ext --inplace) and PYTHONPATH in subject.env name the code, "
        "or install into an environment of its own ({out}, with what that is made of in subject.lock)"
    )


def _name(info: Path) -> str:
    return info.stem.rpartition("-")[0]


def _remove(info: Path) -> None:
    """Take a package away that was installed, with the folders that only it had."""
    files = _files(info) if info.is_dir() else []
    for path in files:
        path.unlink(missing_ok=True)
    for folder in sorted({path.parent for path in files}, key=lambda path: -len(path.parts)):
        with contextlib.suppress(OSError):  # others have files there too
            folder.rmdir()
    shutil.rmtree(info, ignore_errors=True)
