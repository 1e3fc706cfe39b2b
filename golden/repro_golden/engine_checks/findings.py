"""What checks of a rollout engine found, and what must come out of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from repro_golden.base.errors import ReproError
from repro_golden.case.rollout_checks import CHECKS, Expected, known_name
from repro_golden.engine_checks.difference import Likeness

__all__ = [
    "Finding",
    "Made",
    "NotApplicableError",
    "Outcome",
    "exit_code",
    "expectations",
    "said",
]

Outcome = Literal["equal", "differs", "not applicable", "failed"]


class NotApplicableError(Exception):
    """The engine cannot do what a check needs."""


class Made(NamedTuple):
    """What a check that was made found.

    Attributes:
        likeness: Of what was sampled.
        text: In one line.
        outcome: Where samples alone do not decide it.
    """

    likeness: Likeness
    text: str
    outcome: Outcome | None = None


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: See `CHECKS`.
        outcome: Of comparing bits.
        expected: What must come out.
        text: In one line.
        likeness: What was compared; None where nothing was.
    """

    name: str
    outcome: Outcome
    expected: Expected
    text: str
    likeness: Likeness | None = None

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Finding:
        """The inverse of `to_mapping`."""
        found = {key: value for key, value in raw.items() if key != "fits"}
        likeness = raw["likeness"]
        return cls(**found | {"likeness": Likeness.from_mapping(likeness) if likeness else None})

    @property
    def fits(self) -> bool:
        """Whether it is what must come out; what does not apply never is not."""
        if self.outcome == "not applicable":
            return True
        return self.outcome != "failed" and self.expected in (self.outcome, "any")

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        likeness = self.likeness.to_mapping() if self.likeness else None
        return {k: v for k, v in asdict(self).items() if k != "likeness"} | {"fits": self.fits, "likeness": likeness}


def expectations(changed: Mapping[str, str]) -> dict[str, Expected]:
    """What must come out of each check, where some of it is not the rule.

    Raises:
        ReproError: an unknown check, or something that cannot come out.
    """
    found = dict(CHECKS)
    for name, word in changed.items():
        if word not in ("equal", "differs", "any"):
            raise ReproError(f"{name} cannot be expected to be {word!r}: say equal, differs or any")
        found[known_name(name)] = word  # type: ignore[assignment]
    return found


def exit_code(findings: Sequence[Finding]) -> Literal[0, 1, 2, 3]:
    """2 where a check could not be made; else 1 where one does not fit; else 3 where none applied at all."""
    if any(one.outcome == "failed" for one in findings):
        return 2
    if not all(one.fits for one in findings):
        return 1
    return 0 if any(one.outcome != "not applicable" for one in findings) else 3


def said(found: Likeness, what: str) -> str:
    """How alike two ways of sampling are, in one line; `what` names the ways."""
    if found.equal:
        return f"{what}: {found.values} values of {found.prompts} responses are equal"
    widest = "" if found.widest is None else f", log-probs by at most {found.widest:.3g}"
    return f"{what}: {found.differing} of {found.prompts} responses differ{widest}"
