"""Names of pages, and data inside of scripts: whatever a case or a branch is called."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from repro_golden.base.canonical import digest

__all__ = ["comparison_name", "night_key", "number", "page_name", "script"]

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


def night_key(case: str, machine: str, at: str, commit: str) -> str:
    """Ten digits that name a night on its case's page."""
    return digest(case, machine, at, commit)[:10]


def comparison_name(case: str, machine: str, at: str, before: str, after: str) -> str:
    """A file's name for a comparison, without its ending: when, of what, and a digest of the rest."""
    when = re.sub(r"[^0-9TZ-]", "", at)
    return f"{when}-{page_name(case)}-{digest(case, machine, at, before, after)[:10]}"


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
