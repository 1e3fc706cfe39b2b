"""Safetensors files and indices that are corrupt."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import HfCheckpoint
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(checkpoint: HfCheckpoint) -> Iterator[Found]:
    for name, why in sorted(checkpoint.unreadable.items()):
        yield Found(why, Where(str(checkpoint.path / name)))


RULE = Rule(
    "hf-truncated", "Safetensors files whose header is corrupt or whose data is cut short", (HfCheckpoint,), "error",
    "certain", "loading fails, or reads other bytes than were written",
    "fetch or convert the file again, and compare its size or checksum with the source",
    ("slime guide: Debugging",), _check,
)  # fmt: skip
