"""The folder that the site is written to: an earlier site is replaced as a whole, anything else is left alone."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from repro.nightly.records import NightlyRun
from repro_golden.base.canonical import digest, parse_json
from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.base.files import exchanged

__all__ = ["MARKER", "check", "comparison_name", "nightly_key", "number", "page_name", "replace", "script"]

MARKER = "repro-site.json"
"""Lists the files of a site, so that nothing else is ever removed."""
_FORMAT = 1


def check(out: Path) -> None:
    """Refuse a folder that a site must not replace.

    Raises:
        ReproError: it is a file, or holds what is not of an earlier site.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise ReproError(f"{out} is a file: give --out a folder")
    existing = {path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir() or path.is_symlink()}
    if not existing:
        return
    foreign = sorted(existing - _listed(out / MARKER) - {MARKER})
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise ReproError(
            f"{out} holds {foreign[0]}{more}, not of an earlier site: give --out an empty folder, or move that away"
        )


def _listed(marker: Path) -> set[str]:
    try:
        raw = parse_json(marker.read_text(encoding="utf-8"))
        return set(raw["files"]) if raw["format"] == _FORMAT else set()
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def replace(out: Path, files: Mapping[str, bytes]) -> None:
    """Write a site. Until all of it is written beside `out`, an earlier one stays as it is.

    A process that is killed before that leaves a folder ``.NAME.unfinished-…`` beside it, which the next one removes.
    The new site and the earlier one then change places in one step; where the system cannot, by two renames.

    Raises:
        ReproError: see `check`.
        MachineFailureError: the disk is full or the folder cannot be written.
    """
    check(out)
    out = out.resolve()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _beside(out) as unfinished:
            for name, content in files.items():
                path = unfinished / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            listed = {"format": _FORMAT, "files": sorted(files)}
            (unfinished / MARKER).write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
            _swap(unfinished, out)
    except OSError as error:
        raise MachineFailureError(f"cannot write {out}: {error.strerror}; free space or change permissions") from error


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A folder beside `out`, removed on every exit together with those of processes that were killed.

    A lock on the folder itself tells which those are. Another process may remove this one before it is locked: then
    another is made.
    """
    for earlier in out.parent.glob(f".{out.name}.unfinished-*"):
        with suppress(OSError), _locked(earlier):
            shutil.rmtree(earlier, ignore_errors=True)
    with ExitStack() as stack:
        while True:
            made = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.unfinished-"))
            with suppress(BlockingIOError, FileNotFoundError):
                stack.enter_context(_locked(made))
                if made.exists():
                    break
        stack.callback(shutil.rmtree, made, ignore_errors=True)
        made.chmod(0o755)  # a web server reads it too
        yield made


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder; BlockingIOError where another process holds it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _swap(unfinished: Path, out: Path) -> None:
    """Put the new site in place; the earlier one takes its place. In one step where the system can do so."""
    if not out.exists():
        unfinished.rename(out)
    elif not exchanged(unfinished, out):
        earlier = unfinished.with_name(unfinished.name.replace(".unfinished-", ".unfinished-earlier-"))
        out.rename(earlier)
        try:
            unfinished.rename(out)
        except OSError:
            earlier.rename(out)
            raise
        earlier.rename(unfinished)


# -- names of pages, and data inside of scripts: whatever a case or a branch is called

_PLAIN = re.compile(r"[a-z0-9][a-z0-9._-]{0,79}")
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?")
"""Devices of Windows, whatever follows their dot."""
_UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def page_name(text: str) -> str:
    """A file's name for a case, without its ending.

    Lower-case names are themselves. Every other one is written in lower case, what no file should be called replaced,
    and told apart by a digest behind ``~``, which no case's name holds: so ``Demo`` and ``demo`` stay two files where
    the file system does not tell capitals apart, and no name leads out of the folder.
    """
    if _PLAIN.fullmatch(text) and not _RESERVED.fullmatch(text):
        return text
    plain = re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-")[:40]
    return f"{plain or 'case'}~{digest(text)[:8]}"


def nightly_key(run: NightlyRun) -> str:
    """Ten digits that name a night on its case's page."""
    return digest(*run.place)[:10]


def comparison_name(case: str, machine: str, at: str, before: str, *after: str) -> str:
    """A file's name for a comparison, without its ending: when, of what, and a digest of the rest."""
    when = re.sub(r"[^0-9TZ-]", "", at)
    return f"{when}-{page_name(case)}-{digest(case, machine, at, before, *after)[:10]}"


def script(key: str, value: Any) -> str:
    """A script that keeps a value under a key. No text in it can end the script or the line."""
    texts = [
        json.dumps(part, separators=(",", ":"), ensure_ascii=False, allow_nan=False, sort_keys=True).translate(_UNSAFE)
        for part in (key, value)
    ]
    return f"(window.reproData = window.reproData || {{}})[{texts[0]}] = {texts[1]};\n"


def number(value: float | None) -> float | int | str | None:
    """A number for a chart: nine significant digits, and words where it is not finite, as JavaScript has them."""
    if value is None:
        return None
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    short = float(f"{value:.9g}")
    return int(short) if short.is_integer() and abs(short) < 1e9 else short
