"""What checks are and say, whoever makes them: rules with their findings, and proofs that were tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

__all__ = ["Certainty", "Finding", "Found", "Proof", "Rule", "Severity", "Where", "rule"]

Severity = Literal["error", "warning", "note"]
"""error: it fails, or trains on something wrong; warning: likely a mistake, or it will cost; note: worth knowing."""

Certainty = Literal["certain", "likely", "possible"]
"""certain: what is said follows from what was read; likely: the usual cause of it; possible: one cause among others."""


@dataclass(frozen=True)
class Where:
    """The evidence: where it was seen, and what stood there.

    Attributes:
        path: The file or folder, as the user named it or below that; '' where it is no file.
        line: Its line, counted from 1.
        item: What in it: a flag, a variable, a tensor, a metric, a field with its sample.
        value: What was there, short.
        sample: Position of the sample in a dump that the item is of.
    """

    path: str = ""
    line: int | None = None
    item: str = ""
    value: str = ""
    sample: int | None = None

    def __str__(self) -> str:
        place = self.path + (f":{self.line}" if self.line is not None else "")
        what = self.item + (f" = {self.value}" if self.item and self.value else self.value)
        return " ".join(part for part in (place, what) if part)


class Found(NamedTuple):
    """What a rule's function says, once for each thing that it saw.

    Attributes:
        message: What is wrong, in one line, with the numbers.
        where: The evidence.
        severity: Where it is not the rule's own.
        certainty: Where it is not the rule's own.
        fix: Where this case wants another one than the rule's, or one with its numbers.
    """

    message: str
    where: Where = Where()
    severity: Severity | None = None
    certainty: Certainty | None = None
    fix: str = ""


@dataclass(frozen=True)
class Rule:
    """One check.

    Attributes:
        id: Its name: words joined by dashes.
        title: What it looks for, in one line.
        inputs: Kinds of artefact that it needs, as classes. It is tried on each combination of those at hand.
        severity: Of what it finds, unless the finding says otherwise.
        certainty: How sure a finding is, unless it says otherwise.
        why: What goes wrong if it is left.
        fix: What to do.
        sources: Where it comes from: guides by name, files of the trainers with their commit.
        check: The function: takes one artefact for each of `inputs`, then one or None for each of `uses`.
        uses: Kinds that help where there is one. None is passed where there is none, or several that could be meant.
        phrases: For rules that read logs: what to look for. `Log.hits` has the lines that hold one.
        any_program: Whether it is true of whatever is launched, and not of slime, Miles and Relax alone.
    """

    id: str
    title: str
    inputs: tuple[type, ...]
    severity: Severity
    certainty: Certainty
    why: str
    fix: str
    sources: tuple[str, ...]
    check: Callable[..., Iterable[Found]]
    uses: tuple[type, ...] = ()
    phrases: tuple[str, ...] = ()
    any_program: bool = False


def rule(**facts: Any) -> Callable[[Callable[..., Iterable[Found]]], Rule]:
    """A function as a rule: the kinds that it needs and that help it are those of its parameters (``X``, ``X | None``).

    Args:
        facts: All of `Rule` but ``check``, ``inputs`` and ``uses``; ``id`` where it is not the function's name.
    """

    def made(check: Callable[..., Iterable[Found]]) -> Rule:
        kinds = [kind for name, kind in get_type_hints(check).items() if name != "return"]
        uses = [next(k for k in get_args(kind) if k is not NoneType) for kind in kinds if get_args(kind)]
        name = {"id": check.__name__.strip("_").replace("_", "-")}
        return Rule(check=check, inputs=tuple(k for k in kinds if not get_args(k)), uses=tuple(uses), **name | facts)

    return made


@dataclass(frozen=True)
class Finding:
    """One finding, whole.

    Attributes:
        rule: The rule's id.
        severity: How bad it is.
        certainty: How sure it is.
        message: What is wrong.
        where: The evidence.
        why: Why it matters.
        fix: What to do.
    """

    rule: str
    severity: Severity
    certainty: Certainty
    message: str
    where: Where
    why: str
    fix: str

    @classmethod
    def of(cls, rule: Rule, hit: Found) -> Finding:
        """What a rule found, with what the rule says of it."""
        severity, certainty = hit.severity or rule.severity, hit.certainty or rule.certainty
        return cls(rule.id, severity, certainty, hit.message, hit.where, rule.why, hit.fix or rule.fix)

    def to_mapping(self) -> dict[str, Any]:
        """JSON types; a sample where there is one. The fix has stood under ``cure`` since the first format."""
        where = {k: v for k, v in asdict(self.where).items() if k != "sample" or v is not None}
        mapping = asdict(self) | {"where": where, "cure": self.fix}
        del mapping["fix"]
        return mapping


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
