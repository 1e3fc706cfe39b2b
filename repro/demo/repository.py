"""Planned commits as a git repository, by plumbing alone: no hooks, no filters, nobody's configuration."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from repro.demo.history import Answer, Planned
from repro_golden.base.canonical import canonical_json, write_atomic
from repro_golden.base.errors import MachineFailureError, ReproError

__all__ = ["checkout", "open_answer", "seal_answer", "write_repository"]


def write_repository(root: Path, commits: Sequence[Planned]) -> list[str]:
    """Make a repository with these commits, the last being ``main``.

    Args:
        root: Its folder, which must not exist.
        commits: Parents before children.

    Returns:
        The commits' ids. Equal commits give equal ids.

    Raises:
        MachineFailureError: git failed.
    """
    root.mkdir(parents=True)
    # An empty template has no hooks to copy.
    _git(root, "init", "--quiet", "--template=", "--object-format=sha1", "--initial-branch=main")
    for key, value in (("core.autocrlf", "false"), ("core.hooksPath", os.devnull), ("gc.auto", "0")):
        _git(root, "config", key, value)
    marks = root / ".git" / "demo-marks"
    stream = b"".join(_commit(number, commit) for number, commit in enumerate(commits, 1)) + b"done\n"
    _git(root, "fast-import", "--quiet", "--done", "--date-format=raw", f"--export-marks={marks}", stdin=stream)
    ids = dict(line.split() for line in marks.read_text(encoding="ascii").splitlines())
    marks.unlink()
    return [ids[f":{number}"] for number in range(1, len(commits) + 1)]


def checkout(root: Path, commit: str, *, detach: bool = False) -> None:
    """Check a commit out; untracked files stay.

    Raises:
        MachineFailureError: git failed.
    """
    _git(root, "checkout", "--quiet", *(["--detach"] if detach else []), commit)


def _commit(number: int, commit: Planned) -> bytes:
    """One commit of a fast-import stream. Its tree is the first parent's with the changes on top."""
    who = f"{commit.author[0]} <{commit.author[1]}> {commit.date} +0000"
    head = [f"commit refs/heads/main\nmark :{number}\nauthor {who}\ncommitter {who}\n".encode()]
    head.append(_data(f"{commit.subject}\n"))
    for word, parent in zip(("from", "merge"), commit.parents, strict=False):
        head.append(f"{word} :{parent + 1}\n".encode())
    for path, text in commit.changes.items():
        head += [f"M {'100755' if path.endswith('.sh') else '100644'} inline {path}\n".encode(), _data(text)]
    return b"".join(head)


def _data(text: str) -> bytes:
    raw = text.encode()
    return b"data %d\n%b\n" % (len(raw), raw)


def _git(root: Path, *arguments: str, stdin: bytes = b"") -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", *arguments], cwd=root, env=environment, input=stdin, capture_output=True, check=False)
    if done.returncode != 0:
        stderr = " ".join(done.stderr.decode(errors="replace").split())[:300]
        raise MachineFailureError(f"`git {arguments[0]}` failed: {stderr}")


# -- the sealed answer: written before the search begins, opened after its verdict


def seal_answer(answer: Answer, path: Path) -> str:
    """Write the answer so that no eye or grep reads it by accident; its SHA-256 is returned."""
    raw = canonical_json(answer.to_mapping()).encode()
    digest = hashlib.sha256(raw).hexdigest()
    sealed = {"sealed": base64.b64encode(zlib.compress(raw, 9)).decode(), "sha256": digest}
    write_atomic(path, canonical_json(sealed) + "\n")
    return digest


def open_answer(path: Path, digest: str) -> dict[str, Any]:
    """The answer's fields.

    Args:
        path: What `seal_answer` wrote.
        digest: What it returned.

    Raises:
        ReproError: the file is not the one that was sealed.
    """
    try:
        raw = zlib.decompress(base64.b64decode(json.loads(path.read_text(encoding="utf-8"))["sealed"]))
    except (OSError, ValueError, KeyError, TypeError, zlib.error):
        raw = b""
    if hashlib.sha256(raw).hexdigest() != digest:
        raise ReproError(f"{path} was changed since it was sealed: run the demo again")
    answer: dict[str, Any] = json.loads(raw)
    return answer
