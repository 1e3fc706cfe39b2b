"""Whether content is what a DVC pointer stands for: DVC itself takes what a remote or a cache gives it on trust.

What a cache holds under a name that is not its own is of no use to anybody: it is removed, so that it is fetched again.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from repro_golden.base.canonical import parse_json
from repro_golden.base.errors import ReproError
from repro_golden.repository.dvc_files import conflicts, file_md5, is_torn, md5_at, outputs, place_of

__all__ = [
    "CODE",
    "Noted",
    "check_pulled",
    "drop_damaged",
    "elsewhere",
    "fault",
    "is_small",
    "is_whole",
    "lacking",
    "note",
    "noted",
    "object_of",
    "pointed_md5",
    "pointer_of",
    "relabelled",
    "without_a_part",
]

_OUT = re.compile(r"^\s*-?\s*md5:\s*([0-9a-f]{32}(?:\.dir)?)\s*$", re.MULTILINE)
_HASH = re.compile(r"^\s*hash:\s*md5\s*$", re.MULTILINE)
"""Pointers of DVC 2 have none: there text files were hashed with other line ends."""
_REMOTE = re.compile(r"^\s*-?\s*remote:\s*\S", re.MULTILINE)
_FILES = re.compile(r"^\s*-?\s*nfiles:\s*(\d+)\s*$", re.MULTILINE)
_NOTED = re.compile(r"^  (\w+): (\w+)$", re.MULTILINE)
_UNTRACKED = re.compile(r"^  untracked: \[([\w, ]*)\]$", re.MULTILINE)
_MADE_FOR = re.compile(r"^  content: ([0-9a-f]{32}(?:\.dir)?)$", re.MULTILINE)
_SIZE = re.compile(r"^\s*-?\s*size:\s*(\d+)\s*$", re.MULTILINE)
_SMALL = 1 << 26
_SUFFIX = ".dir"


def pointer_of(path: Path) -> Path:
    """The ``.dvc`` file that stands for a file or folder."""
    return path.with_name(f"{path.name}.dvc")


def pointed_md5(pointer: Path) -> str | None:
    """The md5 that a pointer gives its content, of a folder with ``.dir``; None without one, or in another form."""
    try:
        return _md5_in(pointer.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _md5_in(text: str) -> str | None:
    matches = _OUT.findall(text)
    return matches[0] if len(matches) == 1 and _HASH.search(text) else None


CODE = ("commit", "tree", "untracked")
"""What a pointer says of the code that a golden run was recorded of; see `Noted`."""


@dataclass(frozen=True)
class Noted:
    """What is said of the code that a golden run was recorded of.

    Attributes:
        commit: The commit that it was; empty where no commit was.
        tree: The key of what git tracked of it; empty where that is not known.
        untracked: What stands for each file that lay beside it untracked; not of all.
    """

    commit: str = ""
    tree: str = ""
    untracked: frozenset[str] = frozenset()


def note(pointer: Path, record: Mapping[str, Any]) -> None:
    """Put what a golden run's record says of its code into the pointer that DVC has just written for it.

    DVC leaves what is another's. With it goes the content that it is of: `dvc add`, `dvc commit` and `dvc repro` of a
    stage of the user's put whatever lies there in its place.
    """
    facts = {"content": pointed_md5(pointer)} | {key: record.get(key) for key in CODE}
    texts = {key: f"[{', '.join(fact)}]" if isinstance(fact, list) else fact for key, fact in facts.items() if fact}
    lines = [f"  {key}: {text}\n" for key, text in texts.items()]
    with pointer.open("a", encoding="utf-8") as file:
        file.write("".join(["meta:\n", *lines]) if lines else "")


def noted(text: str) -> Noted | None:
    """What the text of a pointer says; None of one that DVC alone or an old version wrote, or with another's `meta`.

    A pointer that says which content it is of, and nothing of the code, is of code that no commit was.
    """
    meta = _meta(text)
    facts, beside = dict(_NOTED.findall(meta)), _UNTRACKED.search(meta)
    if relabelled(text) or ("tree" not in facts and not _MADE_FOR.search(meta)):
        return None
    untracked = frozenset(beside[1].split(", ")) if beside else frozenset[str]()
    return Noted(facts.get("commit", ""), facts.get("tree", ""), untracked)


def relabelled(text: str) -> bool:
    """Whether a pointer names other content than it was written for; older ones, and DVC's other forms, do not say."""
    content, named = _MADE_FOR.search(_meta(text)), _md5_in(text)
    return content is not None and named is not None and content[1] != named


def _meta(text: str) -> str:
    return text.partition("\nmeta:\n")[2]


def fault(root: Path, pointer: Path) -> str:
    """Why a pointer cannot be taken at its word, with the cure; empty where it can, or is not there.

    Args:
        root: Of the repository.
        pointer: The ``.dvc`` file of a folder or file of that name beside it.
    """
    try:
        text = pointer.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    name = PurePosixPath(pointer.relative_to(root) if pointer.is_absolute() else pointer)
    here = posixpath.normpath(name.with_suffix(""))
    if is_torn(pointer):
        return conflicts(str(name))
    named = [out for out, _ in outputs(root, name)]
    if not named or any(out.startswith(f"{name}:") for out in named):
        return f"{name} names no output, as DVC writes it: `git checkout {name}` brings it back"
    if here not in named:
        return (
            f"{name} was renamed without its content, which is at {named[0]}: `git mv {name} {named[0]}.dvc` takes "
            f"that back, `git rm {name}` lets it be recorded anew"
        )
    if relabelled(text):
        return (
            f"{name} names other content than that of the golden run it was written for, as `dvc add`, `dvc commit` or "
            f"`dvc repro` leave it: `git checkout {name}` and `dvc checkout {name}` bring that back (from an older "
            "commit, where this one has it so)"
        )
    return ""


def elsewhere(pointer: Path) -> bool:
    """Whether a pointer names the remote that its content goes to."""
    try:
        return bool(_REMOTE.search(pointer.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False


def without_a_part(pointer: Path) -> str:
    """How many of a folder's files a pointer that was just written does not stand for; empty where it has all."""
    there = sum(path.is_file() for path in pointer.with_suffix("").rglob("*"))
    match = _FILES.search(pointer.read_text(encoding="utf-8"))
    return f"{there - int(match[1])} of the {there} files" if match and int(match[1]) < there else ""


def is_small(pointer: Path) -> bool:
    """Whether a pointer stands for so few bytes that reading them takes less than starting DVC."""
    size = _SIZE.search(pointer.read_text(encoding="utf-8", errors="replace"))
    return size is not None and int(size[1]) <= _SMALL


def is_whole(pointer: Path) -> bool:
    """Whether what lies beside a pointer is its content, file by file, whatever DVC's cache holds."""
    expected, target = pointed_md5(pointer), pointer.with_suffix("")
    return expected is not None and target.exists() and md5_at(target) == expected


def lacking(pointer: Path, store: Path, listed: Path | None = None) -> list[Path]:
    """Where a store lacks a part of a pointer's content, or has something else.

    Args:
        pointer: The ``.dvc`` file.
        store: DVC's cache, or the folder of a remote.
        listed: A cache that may have its list of files, which else is looked for in the store itself.

    Returns:
        The places of these objects, the list first. Nothing of a pointer of another form.
    """
    expected = pointed_md5(pointer)
    if expected is None:
        return []
    md5s = [expected]
    listings = [place_of(folder, expected) for folder in (listed, store) if folder is not None]
    listing = next((path for path in listings if _is(path, expected)), None)
    if expected.endswith(_SUFFIX) and listing is not None:
        md5s += sorted({entry["md5"] for entry in parse_json(listing.read_bytes())})
    return [place_of(store, md5) for md5 in md5s if not _is(place_of(store, md5), md5)]


def object_of(pointer: Path, store: Path) -> Path:
    """Where a store keeps what a pointer names: its content, or the list of its files."""
    md5 = pointed_md5(pointer)
    assert md5 is not None, "who asks has seen that it names one"
    return place_of(store, md5)


def _is(blob: Path, md5: str) -> bool:
    return blob.is_file() and file_md5(blob) == md5.removesuffix(_SUFFIX)


def check_pulled(root: Path, pointer: Path, cache: Path) -> None:
    """Compare what lies beside a pointer with it, by content.

    Args:
        root: Of the repository.
        pointer: The ``.dvc`` file.
        cache: DVC's cache, which has the list of a folder's files.

    Raises:
        ReproError: a file is missing or has another content; the line names it.
    """
    expected = pointed_md5(pointer)
    if expected is None:
        return
    target = pointer.with_suffix("")
    if not expected.endswith(_SUFFIX):
        files = {target: expected}
    else:
        listing = place_of(cache, expected)
        if not listing.is_file():
            return  # nothing was fetched, or another version of DVC keeps it elsewhere
        if file_md5(listing) != expected.removesuffix(_SUFFIX):
            raise _corrupt(root, listing, target)
        entries: list[dict[str, Any]] = parse_json(listing.read_bytes())
        files = {target / entry["relpath"]: entry["md5"] for entry in entries}
    for path, md5 in files.items():
        try:
            same = file_md5(path) == md5
        except OSError:
            same = False
        if not same:
            raise _corrupt(root, path, target)


def drop_damaged(pointer: Path, cache: Path, *, in_place: bool = True) -> None:
    """Remove what is damaged in DVC's cache of a pointer's content, and the same bytes where DVC put them in place.

    Args:
        pointer: The ``.dvc`` file.
        cache: DVC's cache.
        in_place: Whether DVC has just put them there; else they may be the user's own, of which a link is in the cache.
    """
    expected = pointed_md5(pointer)
    files = {} if expected is None else {pointer.with_suffix(""): expected}
    if expected is not None and expected.endswith(_SUFFIX):
        listing = place_of(cache, expected)
        if not _differs(listing, expected.removesuffix(_SUFFIX)):
            entries = parse_json(listing.read_bytes()) if listing.is_file() else []
            files = {pointer.with_suffix("") / entry["relpath"]: entry["md5"] for entry in entries}
        else:
            listing.unlink()
            files = {}
    for path, md5 in files.items():
        blob = place_of(cache, md5)
        if _differs(blob, md5):
            inside = path.resolve().is_relative_to(pointer.with_suffix("").resolve())  # a list may name any place
            if in_place and inside and path.is_file() and file_md5(path) == file_md5(blob):
                path.unlink()
            blob.unlink()


def _differs(blob: Path, md5: str) -> bool:
    """Whether something lies in the cache that has another content than its name says."""
    return blob.is_file() and file_md5(blob) != md5


def _corrupt(root: Path, path: Path, target: Path) -> ReproError:
    name, folder = (str(p.relative_to(root)) if p.is_relative_to(root) else str(p) for p in (path, target))
    return ReproError(
        f"{name} is not what its pointer stands for: it was damaged in DVC's cache, its remote, or here. "
        f"`rm -r {folder}` and `repro golden pull` fetch it anew; where the remote has no better one, "
        "`repro golden push` from where it was recorded mends a remote that is a folder; of another one, remove the "
        "object of its md5 and the list that names it first"
    )
