"""What rules about golden runs ask: whether rows are whole, their proofs, what git and DVC have, what metrics mean."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from repro.doctor.artefacts.kinds import Golden
from repro_golden.base.errors import ReproError
from repro_golden.repository.dvc_files import file_md5
from repro_golden.repository.git import Git, GitFailedError
from repro_golden.store.pulled import pointed_md5, pointer_of, relabelled
from repro_golden.trace import Row, Trace

__all__ = [
    "REPRODUCED", "Commits", "changed_keys", "damage", "has_others_pointer", "is_gradient", "is_loss", "is_schedule",
    "nonfinite", "nonfinite_numbers", "pointer_md5", "proofs_of", "recorded_md5", "rows",
]  # fmt: skip

REPRODUCED = "reproduced"
"""How the name of the proof begins that a second process makes the same bits."""

_BROKEN = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, AttributeError, struct.error)
_BYTES = 1 << 30
"""Files of a golden run that are hashed; larger ones are left to `dvc status`."""


def is_loss(metric: str) -> bool:
    """Whether a metric is what is minimised: ``loss``, ``train/loss``, ``lm loss``; not one of its parts."""
    return metric.rpartition("/")[2].lower().replace("_", " ") in ("loss", "lm loss", "train loss", "pg loss")


def is_gradient(metric: str) -> bool:
    """Whether a metric is the norm of all gradients."""
    return metric.rpartition("/")[2].lower().replace("-", " ").replace("_", " ") in ("grad norm", "gradient norm")


def is_schedule(metric: str) -> bool:
    """Whether a metric is set by a schedule, a clock or a count, which are short numbers by nature."""
    parts = set(re.split(r"[^a-z0-9]+", metric.lower()))
    return bool(
        parts & {"lr", "learning", "wd", "decay", "step", "iteration", "time", "epoch", "size", "bytes", "zeros"}
    )


def proofs_of(golden: Golden) -> list[Mapping[str, Any]]:
    """The proofs that a golden run's record holds; none where it holds anything else."""
    proofs = golden.record.get("proofs")
    return [proof for proof in proofs if isinstance(proof, Mapping)] if isinstance(proofs, list) else []


def rows(trace: Trace, index: int) -> list[Row]:
    """The rows of a step, of a trace that may hold anything.

    Raises:
        ReproError: missing, or not what the step's root stands for.
    """
    try:
        return trace.rows(index)
    except _BROKEN as error:
        raise ReproError(f"step {index} of {trace.directory} is damaged ({type(error).__name__})") from None


def nonfinite(trace: Trace, index: int) -> list[Row]:
    """The signals of a step that are NaN or infinite and should not be; see `rows`."""
    return trace.nonfinite(index) if rows(trace, index) else []


def nonfinite_numbers(trace: Trace, index: int) -> list[str]:
    """Likewise its metrics; all of them where its rows cannot be read."""
    try:
        return trace.nonfinite_numbers(index)
    except (ReproError, *_BROKEN):
        return trace.steps[index].nonfinite


@functools.lru_cache(maxsize=64)
def damage(trace: Trace) -> str:
    """Why a step's rows cannot be read or are not those that were recorded; '' where all are."""
    for index in range(len(trace.steps)):
        try:
            rows(trace, index)
        except ReproError as error:
            return str(error)
    return ""


def changed_keys(a: Any, b: Any, prefix: str = "") -> list[str]:
    """Keys in which two JSON objects differ, with dots between levels."""
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return [] if json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True) else [prefix or "(all)"]
    return [
        dotted
        for key in sorted({*a, *b}, key=str)
        for dotted in changed_keys(a.get(key), b.get(key), f"{prefix}.{key}" if prefix else str(key))
    ]


# -- DVC


def recorded_md5(path: Path) -> str | None:
    """The md5 that DVC's pointer beside a folder gives its content; None without one, or in another form."""
    known = pointed_md5(pointer_of(path))
    return known.removesuffix(".dir") if known and known.endswith(".dir") else None


def has_others_pointer(path: Path) -> bool:
    """Whether DVC's pointer beside a folder names other content than it was written for."""
    try:
        return relabelled(pointer_of(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def pointer_md5(path: Path) -> str | None:
    """The md5 that DVC would give a folder's content; None where it is too large or cannot be read."""
    try:
        files = sorted(_files(path))
        if sum(file.stat().st_size for _, file in files) > _BYTES:
            return None
        entries = [{"md5": file_md5(file), "relpath": relative} for relative, file in files]
    except OSError:
        return None
    return hashlib.md5(json.dumps(entries, sort_keys=True).encode(), usedforsecurity=False).hexdigest()


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    for file in path.rglob("*"):
        relative = file.relative_to(path)
        if file.is_file() and "__pycache__" not in relative.parts:
            yield relative.as_posix(), file


# -- git


class Commits:
    """What a repository says of a commit. Nothing is changed or fetched.

    Args:
        root: Of the working tree.
    """

    def __init__(self, root: Path) -> None:
        self._git = Git(root)

    def _ask(self, *arguments: str) -> str | None:
        """The output of a git command; None where it fails."""
        try:
            return self._git.text(*arguments).strip()
        except (GitFailedError, ValueError):  # a record that was edited may name a commit with a NUL in it
            return None

    @property
    def shallow(self) -> bool:
        """Whether older commits were not fetched."""
        return self._ask("rev-parse", "--is-shallow-repository") != "false"

    def has(self, commit: str) -> bool:
        """Whether the commit is there."""
        return self._ask("cat-file", "-e", f"{commit}^{{commit}}") is not None

    def reachable(self, commit: str) -> bool:
        """Whether HEAD comes after the commit."""
        return self._ask("merge-base", "--is-ancestor", commit, "HEAD") is not None

    def since(self, commit: str, *paths: str) -> int:
        """How many commits between a commit and HEAD changed one of the paths."""
        count = self._ask("rev-list", "--count", f"{commit}..HEAD", "--", *paths)
        return int(count) if count and count.isdecimal() else 0
