"""What a check says, whoever makes it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["Proof"]


@dataclass(frozen=True)
class Proof:
    """One thing that was tried.

    Attributes:
        name: What was to be shown.
        passed: Whether it was.
        detail: What was seen; for a failure also the cure.
    """

    name: str
    passed: bool
    detail: str

    def to_mapping(self) -> dict[str, object]:
        """JSON types."""
        return asdict(self)
