"""What is wrong with a tensor that did not arrive. Each kind is decided by fingerprints: nothing is guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from repro_golden.fingerprint import fingerprint
from repro_golden.recording.weight_pieces import Whole

__all__ = ["CASTS", "Faults", "differing", "told"]

CASTS = ("bfloat16", "float16")
"""Narrower dtypes that a tensor may have been rounded to on its way."""

_SHOWN = 3


@dataclass(frozen=True)
class Faults:
    """Both sides of one sync, and what is known from before it.

    Attributes:
        given: What the engine should hold, by canonical name: of the trainer, or of a checkpoint on disk.
        held: What it holds.
        start: Whether `given` is the checkpoint that the engine read itself.
        before: The version that the engine held before, and the fingerprints.
        versions: Older versions and the fingerprints that they had in the trainer, the latest last.
        rounded: By dtype, the fingerprints that `given` has once it was cast to that dtype and back.
        value: Makes a held tensor whole.
    """

    given: Mapping[str, Whole]
    held: Mapping[str, Whole]
    start: bool
    before: tuple[str, Mapping[str, str]]
    versions: Sequence[tuple[str, Mapping[str, str]]]
    value: Callable[[str], Tensor | None]
    rounded: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def kind(self, name: str) -> str | None:
        """What is wrong with one tensor, as far as it is known without `rounded`; None where nothing of that fits."""
        given, held = self.given.get(name), self.held.get(name)
        if given is None:
            return (
                "not in the checkpoint, though the engine has it"
                if self.start
                else "never sent: the engine has it, the trainer did not send it"
            )
        if held is None:
            return f"never arrived: {self._given}, and the engine has no such tensor"
        if held.dtype != given.dtype:
            return f"another dtype: {given.dtype} {self._given}, {held.dtype} in the engine"
        if held.shape != given.shape:
            return f"another shape: {list(given.shape)} {self._given}, {list(held.shape)} in the engine"
        stale = self._stale(name, held.fingerprint)
        if stale is not None:
            return stale + (", which is all zero" if held.zero else "")
        if held.zero:
            return "all zero in the engine"
        return self._of_another(given, held) or self._transposed(name, given)

    def last(self, name: str) -> str:
        """What is wrong with one for which `kind` gave None."""
        given, held = self.given[name], self.held[name]
        for dtype, prints in self.rounded.items():
            if prints.get(name) == held.fingerprint:
                return f"rounded to {dtype} on the way: send it as {given.dtype}"
        if held.nonfinite > given.nonfinite:
            return f"{held.nonfinite} NaN or infinite elements in the engine, {given.nonfinite} {self._given}"
        return f"other values: absmax {given.absmax!r} {self._given}, {held.absmax!r} in the engine"

    @property
    def _given(self) -> str:
        return "in the checkpoint" if self.start else "sent"

    def _stale(self, name: str, held: str) -> str | None:
        version, before = self.before
        if before.get(name) == held:
            return f"stale: the engine still holds what it held before, version {version!r}"
        for version, prints in reversed(self.versions):
            if prints.get(name) == held:
                return f"stale: the engine holds that of version {version!r}"
        return None

    def _of_another(self, given: Whole, held: Whole) -> str | None:
        same = [name for name, whole in self.given.items() if whole.fingerprint == held.fingerprint]
        if not same or given.zero:
            return None
        return f"sent to another name: the engine holds {same[0]} in its place" + (
            f" (and {len(same) - 1} more)" if len(same) > 1 else ""
        )

    def _transposed(self, name: str, given: Whole) -> str | None:
        if len(given.shape) != 2:
            return None
        value = self.value(name)
        if value is None or fingerprint(value.reshape(value.shape[::-1]).T) != given.fingerprint:
            return None
        return "transposed, or sent as the memory of a tensor that is not contiguous: send a contiguous copy"


def differing(given: Mapping[str, Whole], held: Mapping[str, Whole]) -> list[str]:
    """The canonical tensors that are not the same on both sides, in order."""
    names = sorted(given.keys() | held.keys())
    return [
        name
        for name in names
        if name not in given or name not in held or given[name].fingerprint != held[name].fingerprint
    ]


def told(kinds: Iterable[tuple[str, str]]) -> str:
    """Names and what is wrong with each, as part of a line: names of one kind together, a few of each."""
    by_kind: dict[str, list[str]] = {}
    for name, kind in kinds:
        by_kind.setdefault(kind, []).append(name)
    parts = []
    for kind, names in list(by_kind.items())[:_SHOWN]:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        parts.append(f"{', '.join(names[:_SHOWN])}{more}: {kind}")
    left = sum(len(names) for names in list(by_kind.values())[_SHOWN:])
    return "; ".join(parts) + (f"; and {left} more tensors" if left else "")
