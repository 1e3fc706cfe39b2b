"""What DVC's files (``X.dvc``, ``dvc.lock``) say of data: which content belongs at a path, in a checkout or a commit.

They are read without DVC. What is in another form names something all the same: its own text.
"""

from __future__ import annotations

import configparser
import contextlib
import functools
import hashlib
import json
import os
import posixpath
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from repro_golden.repository.git import Git

__all__ = [
    "POINTERS",
    "Names",
    "beside",
    "content_of",
    "file_md5",
    "is_little",
    "md5_at",
    "named",
    "outputs",
    "overlap",
    "place_of",
    "same",
]

Names = dict[str, str]
"""By path, relative to the root: the md5 of the content that belongs there, as DVC 3 has it, or else other text."""

LITTLE = 1 << 26
_MD5 = re.compile(r"[0-9a-f]{32}(?:\.dir)?")
_SUFFIX = ".dir"
_TORN = re.compile(r"^<<<<<<< ", re.MULTILINE)
_OLD = "by DVC 2 "
"""Before an md5 for which line ends of a text did not count."""
_LOCK = "dvc.lock"
POINTERS = (":(top,glob)**/*.dvc", f":(top,glob)**/{_LOCK}")
"""Pathspecs of all such files."""
_SAY_NOTHING = ("size", "nfiles", "desc", "labels", "meta", "type", "remote", "push", "cache", "persist", "isexec")
"""Keys of an output that do not tell contents apart."""


def beside(paths: Sequence[str]) -> list[str]:
    """Where commits name the content of some paths: the path, for what lies below it, and DVC's files around it."""
    names = []
    for path in map(PurePosixPath, paths):
        folders = [path.parent, *path.parent.parents][: len(path.parts)]
        names += [str(path), *(f"{part}.dvc" for part in (path, *folders) if part.parts)]
        names += [str(folder / _LOCK) for folder in folders]
    return list(dict.fromkeys(names))


def is_torn(file: Path) -> bool:
    """Whether a merge has left both sides in a file of DVC's."""
    try:
        return _TORN.search(file.read_text(encoding="utf-8", errors="replace")) is not None
    except OSError:
        return False


def conflicts(file: str) -> str:
    """What to do where a merge has left both sides in a file of DVC's."""
    return (
        f"{file} has merge conflicts: take one side (`git checkout --ours {file}`, or --theirs), then `dvc checkout "
        f"{file}` and `git add {file}`"
    )


def same(fact: str | None, other: str | None) -> bool:
    """Whether two facts, of which one may be of DVC 2, name the same content."""
    return (fact and fact.removeprefix(_OLD)) == (other and other.removeprefix(_OLD))


def overlap(path: str, other: str) -> bool:
    """Whether a path is another, lies below it, or holds it."""
    a, b = PurePosixPath(path), PurePosixPath(other)
    return a.is_relative_to(b) or b.is_relative_to(a)


def named(git: Git, paths: Sequence[str]) -> Names:
    """What a tree's DVC files name at, above and below some paths.

    Args:
        git: In the root of a checkout, or of a worktree.
        paths: Relative to it.
    """
    if not paths:
        return {}
    listed = git.names("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *POINTERS)
    pairs = [pair for name in dict.fromkeys(listed) for pair in outputs(git.folder, PurePosixPath(name))]
    # of what is not known where it lies, nothing is known
    return {name: fact for name, fact in pairs if ":" in name or any(overlap(name, path) for path in paths)}


def outputs(root: Path, file: PurePosixPath) -> Iterator[tuple[str, str]]:
    """What one of DVC's files names, as in `Names`; a name with ``:`` where it cannot be told what, or where.

    Args:
        root: Of the tree.
        file: Relative to it.
    """
    try:
        content = (root / file).read_bytes()
    except OSError:  # a folder's name, or removed in the checkout
        return
    described = None
    if file.name == _LOCK:
        with contextlib.suppress(OSError):
            described = (root / file.parent / "dvc.yaml").read_bytes()
    stages = _stages(content, described, lock=file.name == _LOCK)
    if not stages:
        yield f"{file}:", _text(content)
    for stage, below in stages:
        for out in stage.get("outs") or []:
            entry = {str(key): value for key, value in out.items() if key not in _SAY_NOTHING}
            path = str(entry.pop("path", ""))
            fact, md5 = _text(repr(sorted(entry.items())).encode()), str(entry.get("md5", ""))
            if _MD5.fullmatch(md5):
                fact = md5 if entry.get("hash") == "md5" else _OLD + md5 if entry.keys() == {"md5"} else fact
            where = posixpath.normpath(file.parent / below / path)
            yield (f"{file}: {path}" if "${" in below or not path or where.startswith(("..", "/")) else where), fact


@functools.lru_cache(maxsize=1 << 14)  # a worktree has nearly all of another's
def _stages(content: bytes, described: bytes | None, *, lock: bool) -> Sequence[tuple[Mapping[str, Any], str]]:
    """The stages of a file of DVC's, with the folder that each works in, relative to the file's.

    None of one in another form, or with both sides of a merge.

    Args:
        content: The file's.
        described: The dvc.yaml beside a dvc.lock, which alone says in which folder a stage works; None without one.
        lock: Whether it is a dvc.lock.
    """
    from ruamel.yaml import YAML  # late: most repositories have no such file
    from ruamel.yaml.error import YAMLError

    try:
        whole = YAML(typ="safe").load(content)
        if not lock:
            stages = [(whole, str(whole.get("wdir") or ""))]
        else:
            known = ((YAML(typ="safe").load(described) if described else None) or {}).get("stages") or {}
            stages = [(stage, _folder(known, name)) for name, stage in (whole.get("stages") or {}).items()]
        if all(isinstance(out, dict) for stage, _ in stages for out in stage.get("outs") or []):
            return stages
    except (YAMLError, ValueError, TypeError, AttributeError):
        pass
    return []


def _folder(described: Mapping[str, Any], name: str) -> str:
    """Where a stage of a dvc.yaml works; of one that stands for several, ``${`` may be in it."""
    stage = described.get(name) or described.get(name.partition("@")[0]) or {}
    return str(stage.get("do", stage).get("wdir") or "")


def _text(content: bytes) -> str:
    return f"text {hashlib.sha256(content).hexdigest()}"


# -- content, by DVC's names for it


def file_md5(path: Path) -> str:
    """The md5 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def md5_at(path: Path) -> str:
    """DVC's md5 of a file, or of a folder: that of its list of files, which is made anew here."""
    if not path.is_dir():
        return file_md5(path)
    names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    listing = json.dumps([{"md5": file_md5(path / name), "relpath": name} for name in names])
    return hashlib.md5(listing.encode(), usedforsecurity=False).hexdigest() + _SUFFIX


def is_little(path: Path) -> bool:
    """Whether a file, or all of a folder, is so little that reading it takes less than starting DVC."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file()) <= LITTLE


def content_of(root: Path, name: str, fact: str) -> dict[str, Path] | None:
    """The files of a named content in DVC's cache, by where they belong; None where one of them is not whole there.

    Args:
        root: The user's checkout.
        name: Where the content belongs, relative to the root of a tree.
        fact: What is named there.
    """
    if not _MD5.fullmatch(fact):
        return None
    cache, files = _cache(root, PurePosixPath(name)), {name: fact}
    if fact.endswith(_SUFFIX):
        listing = place_of(cache, fact)
        try:
            if file_md5(listing) != fact.removesuffix(_SUFFIX):
                return None
            files = {f"{name}/{entry['relpath']}": entry["md5"] for entry in json.loads(listing.read_bytes())}
        except (OSError, ValueError, KeyError, TypeError):
            return None
    cached = {path: place_of(cache, md5) for path, md5 in files.items()}
    inside = all(PurePosixPath(posixpath.normpath(path)).is_relative_to(name) for path in cached)
    return cached if inside and all(_is_whole(cached[path], md5) for path, md5 in files.items()) else None


def place_of(cache: Path, md5: str) -> Path:
    """Where DVC keeps the content of an md5."""
    return cache / "files" / "md5" / md5[:2] / md5[2:]


def _is_whole(path: Path, md5: str) -> bool:
    """Whether a cache has a content; as DVC does, what nobody may write is taken for what it was."""
    try:
        protected = not stat.S_IMODE(path.stat().st_mode) & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)
        return path.is_file() and (protected or file_md5(path) == md5)
    except OSError:
        return False


def _cache(root: Path, name: PurePosixPath) -> Path:
    """DVC's cache for what lies at a path, as its settings have it."""
    top = next((root / folder for folder in name.parents if (root / folder / ".dvc").is_dir()), root)
    home = os.environ.get("DVC_GLOBAL_CONFIG_DIR") or (
        Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "dvc"
    )
    for file in (top / ".dvc" / "config.local", top / ".dvc" / "config", Path(home) / "config"):
        settings = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            settings.read_string(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, configparser.Error):
            continue
        if folder := settings.get("cache", "dir", fallback=""):
            return file.parent / folder
    return top / ".dvc" / "cache"
