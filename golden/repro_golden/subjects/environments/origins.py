"""Which files a version stands for: what decides where an installer gets them, in variables and in its own files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from repro_golden.base.canonical import digest, parse_toml
from repro_golden.subjects.environments.releases import DECIDING, pip_settings, redacted

__all__ = ["sources", "uv_switches"]

_OF_UV = (
    "UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX",
    "UV_INDEX_STRATEGY", "UV_PRERELEASE", "UV_CONSTRAINT", "UV_CONFIG_FILE",
)  # fmt: skip


def sources(index: str | None, python: str, variables: Mapping[str, str], place: Path) -> list[str]:
    """What decides which files are installed for a version, without credentials.

    Args:
        index: See `index_urls`, as the next two.
        python: See there.
        variables: See there.
        place: Where the installer starts, above which uv looks for settings of a project.
    """
    settings = pip_settings(python, variables) | ({"index-url": index} if index else {})
    deciding = {name: settings[name] for name in DECIDING if settings.get(name)}
    deciding |= {name: variables[name] for name in _OF_UV if variables.get(name)}
    local = [*(word for value in deciding.values() for word in value.split()), *_uv_files(variables, place)]
    return [*(redacted(f"{name}={value}") for name, value in deciding.items()), *filter(None, map(_lies_at, local))]


def uv_switches(root: Path, lock: str) -> dict[str, Any]:
    """What the project beside a lock file tells uv, such as which groups of it are installed; nothing without one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # uv says itself what it cannot read
        return dict(parse_toml((root / lock).with_name("pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"])
    return {}


def _uv_files(variables: Mapping[str, str], place: Path) -> list[str]:
    """Where uv's own settings may lie: of projects, of the user and of the machine."""
    if variables.get("UV_NO_CONFIG"):
        return []
    config_home = variables.get("XDG_CONFIG_HOME") or str(Path(variables.get("HOME", "~"), ".config").expanduser())
    shared = (variables.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)
    projects = [f"{folder}/{name}" for folder in place.parents for name in ("uv.toml", "pyproject.toml")]
    return [*projects, *(f"{folder}/uv/uv.toml" for folder in (config_home, *shared)), "/etc/uv/uv.toml"]


def _lies_at(place: str) -> str:
    """What stands for a file of settings, or for the files in a folder of packages; empty for any other word."""
    path = Path(unquote(place.removeprefix("file://")))
    if os.path.isfile(path):  # noqa: PTH113 - it takes any word for an answer
        text = path.read_bytes()
        if path.name == "pyproject.toml":
            text = repr(uv_switches(path.parent, path.name)).encode()
        return f"{path} {digest('settings', text)}" if text != b"{}" else ""
    if not path.is_absolute() or not os.path.isdir(path):  # noqa: PTH112
        return ""
    files = sorted(file for depth in ("*", "*/*") for file in path.glob(depth) if file.is_file())
    listed = ((file, file.stat()) for file in files)
    return f"{path} {digest('folder', *(f'{file} {about.st_size} {about.st_mtime_ns}' for file, about in listed))}"
