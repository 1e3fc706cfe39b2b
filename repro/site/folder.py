"""The folder that the site is written to: an earlier site is replaced as a whole, anything else is left alone."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from repro_golden.base.errors import MachineFailureError, ReproError

__all__ = ["MARKER", "check", "replace"]

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
    found = {path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir() or path.is_symlink()}
    if not found:
        return
    foreign = sorted(found - _listed(out / MARKER) - {MARKER})
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise ReproError(
            f"{out} holds {foreign[0]}{more}, not of an earlier site: give --out an empty folder, or move that away"
        )


def _listed(marker: Path) -> set[str]:
    try:
        raw = json.loads(marker.read_text(encoding="utf-8"))
        return set(raw["files"]) if raw["format"] == _FORMAT else set()
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def replace(out: Path, files: Mapping[str, bytes]) -> None:
    """Write a site. Until all of it is written beside `out`, an earlier one stays as it is.

    A process that is killed before that leaves a folder ``.NAME.unfinished-…`` beside it; two renames then put the new
    site in place, and one that fails puts the earlier one back.

    Raises:
        ReproError: see `check`.
        MachineFailureError: the disk is full or the folder cannot be written.
    """
    check(out)
    out = out.resolve()
    made: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.unfinished-"))
        made.chmod(0o755)  # a web server reads it too
        for name, content in files.items():
            path = made / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        listed = {"format": _FORMAT, "files": sorted(files)}
        (made / MARKER).write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
        _swap(made, out)
    except OSError as error:
        raise MachineFailureError(f"cannot write {out}: {error.strerror}; free space or change permissions") from error
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def _swap(made: Path, out: Path) -> None:
    if not out.exists():
        made.rename(out)
        return
    earlier = made.with_name(made.name.replace(".unfinished-", ".earlier-"))
    out.rename(earlier)
    try:
        made.rename(out)
    except OSError:
        earlier.rename(out)
        raise
    shutil.rmtree(earlier, ignore_errors=True)
