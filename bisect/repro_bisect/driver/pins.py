"""Files that pin packages and differ between two commits, where nothing installs what they pin."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from repro_golden.base.canonical import canonical_json, parse_toml
from repro_golden.case.file import Case
from repro_golden.repository.git import Git, GitFailedError
from repro_golden.repository.linked import in_few_words

__all__ = ["NOT_FOUND", "not_installed"]

NOT_FOUND = re.compile(r"No module named|cannot import name|ImportError|ModuleNotFoundError")
"""What a program says that lacks a package, or has another version of it."""
_PINNING = re.compile(
    r"requirements[^/]*\.txt|(?:uv|poetry|pdm|pixi|Pipfile|conda)[.-]?lock(?:\.ya?ml)?|environment\.ya?ml|pyproject\.toml"
)
_PIN = re.compile(r'^([\w.-]+)==([^\s;#\\,]+)|^name = "([^"]+)"\nversion = "([^"]+)"', re.MULTILINE)
_DEPENDENCIES = ("dependencies", "optional-dependencies", "dependency-groups", "dev-dependencies", "group", "requires")


def not_installed(case: Case, git: Git, good: str, bad: str) -> str:
    """What differs between two commits and was not installed, with the cure, in one line; '' where nothing is.

    Args:
        case: The case; one with `setup` installs what it needs.
        git: In the repository.
        good: The one commit.
        bad: The other.
    """
    program = case.subject.program
    if program is None or program.setup or good == bad:
        return ""
    changed = git.names("diff-tree", "-r", "-z", "--name-only", "--no-renames", good, bad)
    names, moved = list[str](), dict[str, tuple[str, str]]()
    for name in changed:
        path = PurePosixPath(name)
        if not _PINNING.fullmatch(path.name) or path.parts[0] in ("doc", "docs"):
            continue
        before, after = (_text(git, commit, name) for commit in (good, bad))
        if path.name != "pyproject.toml" or _dependencies(before) != _dependencies(after):
            names.append(name)
            old, new = _pins(before), _pins(after)
            pairs = {package: (release, new.get(package, "")) for package, release in old.items()}
            moved |= {package: pair for package, pair in pairs.items() if pair[0] != pair[1]}
    if not names:
        return ""
    alone = next(iter(moved.items())) if len(moved) == 1 else None
    releases = f", or `--package {alone[0]}=={alone[1][0]}..{alone[1][1]}`" if alone and alone[1][1] else ""
    verb = "differ" if len(names) > 1 else "differs"
    return (
        f"{in_few_words(names)} {verb} between the ends, and nothing of it was installed: setup and lock of a case "
        f"build what each commit asks for{releases}"
    )


def _text(git: Git, commit: str, name: str) -> str:
    with contextlib.suppress(GitFailedError):
        return git("cat-file", "blob", f"{commit}:{name}").decode(errors="replace")
    return ""


def _pins(text: str) -> dict[str, str]:
    return {name or other: first or second for name, first, other, second in _PIN.findall(text)}


def _dependencies(text: str) -> str:
    """What of a pyproject.toml says which packages are needed."""
    try:
        raw = parse_toml(text)
    except ValueError:
        return text
    tool = raw.get("tool")
    tables = [raw, raw.get("project"), *(tool.values() if isinstance(tool, Mapping) else ())]
    dependencies: list[Any] = [{k: t[k] for k in _DEPENDENCIES if k in t} for t in tables if isinstance(t, Mapping)]
    return canonical_json(dependencies)
