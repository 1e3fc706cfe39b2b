"""NaN and infinity in weights."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import HfCheckpoint
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_MOST = 8


def _check(checkpoint: HfCheckpoint) -> Iterator[Found]:
    found = 0
    for name in sorted(checkpoint.tensors):
        stats = checkpoint.scan(name)
        if not (stats.nan or stats.inf):
            continue
        found += 1
        if found <= _MOST:
            parts = [f"{count} {what}" for count, what in ((stats.nan, "NaN"), (stats.inf, "inf")) if count]
            info = checkpoint.tensors[name]
            where = Where(str(checkpoint.path / info.file), item=name, value=" and ".join(parts))
            seen = "" if stats.whole else " in the parts that were looked at"
            yield Found(f"{name} ({info.dtype}) has {' and '.join(parts)}{seen}", where)
    if found > _MOST:
        yield Found(f"{found - _MOST} more tensors are not finite", Where(str(checkpoint.path)))


RULE = Rule(
    "hf-not-finite", "NaN or infinity in weights", (HfCheckpoint,), "error", "certain",
    "everything that such a weight touches becomes NaN, and metrics may hide it",
    "go back to the checkpoint before; look for an overflow in FP16 or FP8 or for a block of zeros with scale 0 in the "
    "conversion",
    ("Miles guide: Debugging", "THUDM/slime@dd4851f26 (#2256): a block of zeros becomes NaN in FP8"), _check,
)  # fmt: skip
