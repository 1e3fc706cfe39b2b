"""What an input is, and the place where it is tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attempts import GIB, Attempt

__all__ = ["Input", "Place", "nothing"]

Commands = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Place:
    """Where an input is tried.

    Attributes:
        folder: An empty folder, in which repro runs.
        canary: No file is here, unless code of the input ran.
        outside: A folder that repro has no business in, with one file in it.
    """

    folder: Path
    canary: Path
    outside: Path

    @property
    def touch(self) -> str:
        """A shell command that the canary tells of."""
        return f"touch {self.canary}"

    def write(self, name: str, content: bytes | str) -> Path:
        """A file in the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        return path


def nothing(_place: Place, _attempts: Sequence[Attempt]) -> str:
    """No more is asked of it."""
    return ""


@dataclass(frozen=True)
class Input:
    """One hostile input.

    Attributes:
        name: Says which.
        make: Writes it, and gives the commands that read it.
        also: What else is wrong with how they ended; "" where nothing is.
        codes: Exit codes that the commands may have.
        most: Bytes of memory that each may take.
    """

    name: str
    make: Callable[[Place], Commands]
    also: Callable[[Place, Sequence[Attempt]], str] = nothing
    codes: Sequence[int] = (0, 1, 2, 3)
    most: int = 2 * GIB
