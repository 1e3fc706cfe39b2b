"""Files that a killed process leaves and for which the next program would wait; whose they are is seen before the kill.

- Of a Ray cluster that `ray start` began, `ray_current_cluster` names the address, which the next `ray.init()` takes;
  `ray stop` removes it (ray/_private/utils.py, write_ray_address).
- While torch.utils.cpp_extension builds, it holds a file `lock` open; whoever wants the same extension waits until that
  is gone, and has no other way to see that nobody builds (torch/utils/file_baton.py).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Left", "left_by", "remove"]


class Left(NamedTuple):
    """Such a file.

    Attributes:
        path: Where it lies.
        about: What tells it from another of that name: device, number, and nanoseconds of its last change.
    """

    path: Path
    about: tuple[int, int, int]


def left_by(processes: Iterable[int]) -> list[Left]:
    """What these will leave if they are killed now. None where there is no ``/proc``."""
    left = []
    for number in processes:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            folder = Path("/proc") / str(number)
            left += [Left(path, _about(path)) for path in (*_named_clusters(folder), *_builds(folder))]
    return left


def remove(left: Iterable[Left]) -> None:
    """Remove those that are as they were: their processes are gone. Another of the name is somebody else's."""
    for path, about in left:
        with contextlib.suppress(OSError):
            if _about(path) == about:
                path.unlink()


def _about(path: Path) -> tuple[int, int, int]:
    facts = path.stat()
    return facts.st_dev, facts.st_ino, facts.st_mtime_ns


_SESSION = re.compile(r"--session[-_]dir=(.+)")
_PORT = re.compile(r"--gcs[-_]server[-_]port=(\d+)")


def _named_clusters(folder: Path) -> Iterator[Path]:
    """The file that names the cluster whose head this process is."""
    if (folder / "comm").read_bytes().strip() != b"gcs_server":
        return
    words = os.fsdecode((folder / "cmdline").read_bytes()).split("\0")
    session, port = (next(filter(None, map(known.fullmatch, words)), None) for known in (_SESSION, _PORT))
    if session and port:
        path = Path(session[1]).parent / "ray_current_cluster"
        if path.is_file() and path.read_text(errors="replace").strip().endswith(f":{port[1]}"):
            yield path


def _builds(folder: Path) -> Iterator[Path]:
    """The locks that this process holds while it builds."""
    for opened in (folder / "fd").iterdir():
        with contextlib.suppress(OSError):
            path = opened.readlink()
            if path.name == "lock" and ("torch_extensions" in path.parts or (path.parent / "build.ninja").exists()):
                path.stat()
                yield path
