"""Variables that reach a trainer by the words in front of it: prefixes, a Ray job's runtime environment, containers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from repro.doctor.artefacts.kinds import Flag, Variable
from repro_golden.base.checks import Where

__all__ = ["ASSIGNED", "Placed", "environment"]

_LARGEST = 1 << 20
ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
"""How ``NAME=value`` begins."""
_JSON, _FILE = "--runtime-env-json", "--runtime-env"
_CAT = re.compile(r"""\$\((?:cat |< ?)["']?([\w./+-]+)["']?\)""")
"""A file that a shell puts in: ``$(cat env.json)``."""
_OPAQUE = ("--env-file", "--export-file")
"""Options of containers and of Slurm with a file of variables."""

Placed = tuple[str, Where]
"""A word and where it was written."""


def environment(
    path: Path, front: Sequence[Placed], flags: Sequence[Flag], sources: Mapping[str, str]
) -> tuple[list[tuple[str, Variable]], bool]:
    """Variables that a command sets for the trainer, and whether it may set others that are not known.

    Args:
        path: The script: a runtime environment's file is looked for beside it.
        front: The words up to the trainer's program.
        flags: The trainer's flags.
        sources: Texts by path, to find lines of a runtime environment in.
    """
    of_job, hidden = _runtime_variables(path, front, flags, sources)
    before = _prefixes(front)
    return before + of_job, hidden or _others(front)


def _others(front: Sequence[Placed]) -> bool:
    """Whether words set variables that only a shell, or another file, knows: ``env $(cat .env)``, ``--env-file``."""
    names = [word for word, _ in front]
    if any(name.partition("=")[0] in _OPAQUE for name in names):
        return True
    at = names.index("env") + 1 if "env" in names else len(names)
    return any(re.match(r"\$|`", name) for name in names[at:]) or any(
        name.startswith("--export=") and "$" in name for name in names
    )


def _prefixes(front: Sequence[Placed]) -> list[tuple[str, Variable]]:
    """``env NAME=value python train.py``, ``docker run --env=NAME=value``, ``srun --export=ALL,NAME=value``."""
    variables = []
    for word, where in front:
        assignments = word.split(",") if word.startswith("--export=") else [word]
        for each in (part.removeprefix("--export=").removeprefix("--env=") for part in assignments):
            if ASSIGNED.match(each):
                name, _, value = each.partition("=")
                variables.append((name, Variable(value, "prefix", Where(where.path, where.line, name, value[:200]))))
    return variables


def _runtime_variables(
    path: Path, front: Sequence[Placed], flags: Sequence[Flag], sources: Mapping[str, str]
) -> tuple[list[tuple[str, Variable]], bool]:
    """Variables of a Ray job's runtime environment, and of ``--train-env-vars``; whether some are not known."""
    held: list[tuple[str, str, Where]] = []
    for number, (word, where) in enumerate(front):
        name, equals, value = word.partition("=")
        if name in (_JSON, _FILE):
            if equals:
                held.append((name, value, where))
            elif number + 1 < len(front):
                held.append((name, *front[number + 1]))
    values: dict[str, str] = {}
    places: dict[str, Where] = {}
    hidden = False
    for name, text, where in held:
        file = text if name == _FILE else match[1] if (match := _CAT.fullmatch(text.strip())) else ""
        beside = _beside(path, file) if file else None
        if beside is not None:
            text, where = beside[0], Where(str(beside[1]), 1)
            sources = {**sources, where.path: text}
        variables, whole = ({}, False) if file and beside is None else _env_vars(text)
        hidden = hidden or not whole
        for key, value in variables.items():
            values[key] = value
            places[key] = _line_of(key, where, sources)
    for flag in flags:
        if flag.name == "--train-env-vars" and flag.values:
            for key, value in _pairs(flag.values[0]).items():
                values[key], places[key] = value, flag.where
            hidden = hidden or flag.values[0].startswith(("$", "`"))
    return [
        (key, Variable(value, "runtime-env", Where(places[key].path, places[key].line, key, value[:200])))
        for key, value in values.items()
    ], hidden


def _beside(path: Path, name: str) -> tuple[str, Path] | None:
    """A file in the script's folder or below it; None where it is not there."""
    try:
        folder = path.parent.resolve()
        file = path.parent / name
        if not (path.is_file() and file.is_file() and file.resolve().is_relative_to(folder)):
            return None
        with file.open("rb") as source:
            return source.read(_LARGEST).decode(errors="replace"), file
    except (OSError, RuntimeError, ValueError):
        return None


_STRING = r'"((?:[^"\\]|\\.)*)"'
_PRINTED = re.compile(r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
"""What a command prints, which may hold quotation marks."""
_LOOSE = re.compile(rf'"([A-Za-z_]\w*)"\s*:\s*(?:{_STRING}|([^\s,{{}}"]+))')


def _env_vars(text: str) -> tuple[dict[str, str], bool]:
    """The variables of a runtime environment in JSON or YAML, and whether those are all."""
    try:
        held = json.loads(text)
    except (ValueError, RecursionError):
        if "$" not in text and "`" not in text:
            held = _yaml(text)
        else:
            # what a shell puts in is no JSON yet
            _, key, rest = text.partition('"env_vars"')
            variables = {m[1]: m[2] if m[2] is not None else m[3] for m in _LOOSE.finditer(rest)} if key else {}
            between = re.sub(_STRING, "", _LOOSE.sub("", _PRINTED.sub("$_", text)))
            return variables, bool(key) and "$" not in between and "`" not in between
    inner = held.get("env_vars", {}) if isinstance(held, dict) else None
    return ({str(k): _text(v) for k, v in inner.items()}, True) if isinstance(inner, dict) else ({}, False)


def _yaml(text: str) -> object:
    from ruamel.yaml import YAML  # late: most launches have none
    from ruamel.yaml.error import YAMLError

    try:
        return YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError):
        return None


def _pairs(text: str) -> dict[str, str]:
    try:
        held = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return {str(k): _text(v) for k, v in held.items()} if isinstance(held, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _line_of(key: str, where: Where, sources: Mapping[str, str]) -> Where:
    """The line of a variable in a runtime environment: mostly a string of several lines, set further up."""
    lines = sources.get(where.path, "").splitlines()
    places = [n for n, line in enumerate(lines, 1) if re.search(rf'\\?"{re.escape(key)}\\?"\s*:', line)]
    near = [n for n in places if where.line is not None and n >= where.line] or places
    return Where(where.path, near[0] if near else where.line)
