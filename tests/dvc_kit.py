"""Data as DVC keeps it, without starting DVC: a pointer, the content in the cache, and what git ignores."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping

from conftest import Repo


def _kept(repo: Repo, content: bytes, suffix: str = "") -> str:
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest() + suffix
    place = repo.root / ".dvc" / "cache" / "files" / "md5" / md5[:2] / md5[2:]
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        place.write_bytes(content)
        place.chmod(0o444)
    return md5


def content(repo: Repo, name: str, files: str | Mapping[str, str]) -> str:
    """Put a file, or a folder of files, into the checkout and the cache; its md5."""
    place = repo.root / name
    if isinstance(files, str):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(files)
        return _kept(repo, files.encode())
    shutil.rmtree(place, ignore_errors=True)
    listing = []
    for relpath, text in sorted(files.items()):
        (place / relpath).parent.mkdir(parents=True, exist_ok=True)
        (place / relpath).write_text(text)
        listing.append({"md5": _kept(repo, text.encode()), "relpath": relpath})
    return _kept(repo, json.dumps(listing).encode(), ".dir")


def add(repo: Repo, name: str, files: str | Mapping[str, str]) -> None:
    """What ``dvc add`` leaves."""
    md5, place = content(repo, name, files), repo.root / name
    place.with_name(f"{place.name}.dvc").write_text(f"outs:\n- md5: {md5}\n  hash: md5\n  path: {place.name}\n")
    ignore = place.with_name(".gitignore")
    lines = ignore.read_text().splitlines() if ignore.exists() else []
    ignore.write_text("".join(f"{line}\n" for line in dict.fromkeys([*lines, f"/{place.name}"])))


def start(repo: Repo) -> None:
    """What ``dvc init`` leaves of a repository."""
    (repo.root / ".dvc").mkdir(parents=True, exist_ok=True)
    (repo.root / ".dvc" / "config").touch()
    (repo.root / ".dvc" / ".gitignore").write_text("/config.local\n/tmp\n/cache\n")
