"""How uv and pip are told to build what lock files say, and nothing of the code under test.

An environment is shared by all commits with the same lock files, so a commit's own code is never put into it. What
stands in the way of that is a ValueError in one line.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

__all__ = ["pip_options", "uv_command"]

_INCLUDES = re.compile(r"\s*(?:-r|-c|--requirement|--constraint)[\s=]*([^\s=]\S*)")
_LOCAL = re.compile(
    r"""\s*(?: (?:-e|--editable)[\s=]+(?!\S*://)       # an editable folder
              | \.                                    # a folder or archive by its path
              | [\w.-]+/
              | (?:[\w.-]+(?:\[.*\])?\s*@\s*)?file:(?!//)  # the same as a URL
          )""",
    re.VERBOSE,
)
"""A requirement that lies in the repository."""


def uv_command(root: Path, lock: str, python: str) -> list[str]:
    """`uv sync` of a project without the packages that its lock file takes from the repository's own folders.

    Raises:
        ValueError: the lock file is not one.
    """
    try:
        listed = tomllib.loads((root / lock).read_text(encoding="utf-8")).get("package", [])
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{lock} is not TOML: {error}") from None
    local = [one["name"] for one in listed if {"editable", "directory"} & set(one.get("source", {}))]
    project = str((root / lock).parent)
    return ["uv", "sync", "--frozen", "--project", project, "--python", python,
            *(word for name in local for word in ("--no-install-package", name))]  # fmt: skip


def pip_options(root: Path, locks: Sequence[str]) -> list[str]:
    """``-r`` for each lock file, ``-c`` for ``constraints*``; those that another of them includes come with it.

    Raises:
        ValueError: one includes a file that is not named, or installs something of the repository.
    """
    names = [str(PurePosixPath(name)) for name in locks]
    included = set()
    for name in names:
        for line in (root / name).read_text(encoding="utf-8", errors="replace").splitlines():
            if (other := _INCLUDES.match(line)) and "://" not in other[1]:
                path = os.path.normpath(PurePosixPath(name).parent / other[1])
                if path not in names:
                    raise ValueError(f"{name} includes {path}: add it to subject.lock")
                included.add(path)
            elif _LOCAL.match(line):
                raise ValueError(f"{name} installs the commit's own code ({line.strip()}): name it in env PYTHONPATH")
    kept = [name for name in names if name not in included]
    return [word for n in kept for word in ("-c" if PurePosixPath(n).name.startswith("constraints") else "-r", n)]
