"""The process that reads a trainer's command line: flags are added to it, and what became of them is written down.

A launch script seldom hands flags on, and slime's parser ignores those that it does not know. So they are added where
the trainer starts, and each parser of that process says which flags it has, what it left over and what it made of ours.
This runs inside foreign programs before anything else, with the standard library alone.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["FLAG", "argv_given", "enter", "is_entry", "variables_given"]


FLAG = "--"


def is_entry(names: Sequence[str], argv: Sequence[str], original: Sequence[str]) -> bool:
    """Whether this process runs one of the entry points.

    Args:
        names: Files, by the end of their path, or modules as they stand behind ``-m``.
        argv: ``sys.argv``.
        original: ``sys.orig_argv``.
    """
    if argv and argv[0] == "-m":
        at = original.index("-m") + 1
        return at < len(original) and original[at] in names
    path = (argv[0] if argv else "").replace(os.sep, "/")
    return any(path == name or path.endswith(f"/{name}") for name in names)


def enter(asked: Mapping[str, Any]) -> None:
    """Add the flags to this process's command line, and have its parsers say what they made of it.

    Args:
        asked: ``flags``, added as they are; ``redirect``, values of flags that are added where the command line has
            the flag; and ``out``, the folder that receives what parsers say.
    """
    flags = [word.partition("=")[0] for word in sys.argv[1:] if word.startswith(FLAG)]
    added = [*asked["flags"]]
    for flag, value in asked["redirect"].items():
        if flag in flags:
            added += [flag, value]
    # nodes that share the folder may have a process of this number too
    path = Path(asked["out"]) / f"parsers-{os.getpid()}-{time.time_ns()}.jsonl"
    record: dict[str, Any] = {"own": flags, "variables": {n: os.environ.get(n) for n in asked["variables"]}}
    argv = list(sys.orig_argv)
    if added and sys.argv[-len(added) :] != added:  # else it has started itself anew with what it had
        sys.argv.extend(added)
        argv += added
    with contextlib.suppress(Exception):  # it tells nobody what it was given, and trains as well
        record["given"] = {"argv": argv_given(argv), "variables": variables_given()}
    _append(path, record)
    ours = [word.partition("=")[0] for word in added if word.startswith(FLAG)]
    _listen(path, ours)


def variables_given() -> dict[str, str]:
    """What this process was started with: digests of names, and of what they were set to. Secrets are left out."""
    from repro_golden.base.credentials import looks_secret
    from repro_golden.case.identity import short_digest

    given: Mapping[str, str] = sys.__dict__.get("_repro_environ", {})
    plain = {name: value for name, value in given.items() if not looks_secret(name, value)}
    return {short_digest(name): short_digest(value) for name, value in plain.items()}


_SECRET = 16
"""Characters of the shortest value behind an option that is taken for a secret: a switch is none."""


def argv_given(argv: Sequence[str]) -> list[str]:
    """A command line with a digest in place of each value that looks like a secret, as its option is called."""
    from repro_golden.base.credentials import looks_secret
    from repro_golden.case.identity import short_digest

    def plain(name: str, value: str) -> str:
        secret = len(value) >= _SECRET and looks_secret(name.lstrip("-").replace("-", "_"), value)
        return f"(secret {short_digest(value)})" if secret else value

    texts, option = list[str](), ""
    for word in argv:
        name, mark, value = word.partition("=")
        texts.append(f"{name}={plain(name, value)}" if mark else plain(option, word))
        option = word if word.startswith("-") else ""
    return texts


def _listen(path: Path, ours: Sequence[str]) -> None:
    parse = argparse.ArgumentParser.parse_known_args

    @functools.wraps(parse)
    def parse_known_args(self: Any, *args: Any, **kwargs: Any) -> Any:
        namespace, extras = parse(self, *args, **kwargs)
        _append(path, _said(self, namespace, extras, ours))
        return namespace, extras

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def _said(parser: Any, namespace: Any, extras: Sequence[Any], ours: Sequence[str]) -> dict[str, Any]:
    """What one parser has and made of the command line; values of our flags as text."""
    actions = parser._option_string_actions
    values = {flag: getattr(namespace, actions[flag].dest, None) for flag in ours if flag in actions}
    return {
        "options": sorted(actions),
        "abbreviates": bool(parser.allow_abbrev),
        "rest": [str(word) for word in extras],
        "values": {flag: value if isinstance(value, bool) else str(value) for flag, value in values.items()},
    }


def _append(path: Path, value: Mapping[str, Any]) -> None:
    line = json.dumps(value) + "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(line)
