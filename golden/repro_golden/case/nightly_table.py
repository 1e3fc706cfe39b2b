"""What a night asks of a case beside its numbers, as a table of its file: no part of the case, and of no golden run."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

from repro_golden.base.errors import ReproError
from repro_golden.case.layouts import Absolute, Relative, Tolerance
from repro_golden.case.rollout_checks import known_name

__all__ = ["NightlyTable", "OfLayouts"]


def _checks(value: bool | tuple[str, ...]) -> bool | tuple[str, ...]:
    """Refuse names that are no rollout check."""
    try:
        for name in value if isinstance(value, tuple) else ():
            known_name(name)
    except ReproError as error:
        raise ValueError(str(error)) from None
    return value


_KEY = re.compile(r"(?:threads|ranks)=[1-9]\d{0,5}")


class NightlyTable(BaseModel):
    """`[nightly]`: what `repro report nightly` asks, and by what it judges."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    threads: tuple[Annotated[int, Field(ge=1, le=999_999)], ...] = Field(default=(), strict=False)
    """Other numbers of threads."""
    batches: tuple[str, ...] = Field(default=(), strict=False)
    """Names of ``[layouts.NAME]`` tables that cut batches otherwise."""
    layouts: tuple[str, ...] = Field(default=(), strict=False)
    """Names of ``[layouts.NAME]`` tables, or KEY=N as ``repro bisect --layout`` takes them."""
    rollout: Annotated[bool | Annotated[tuple[str, ...], Field(strict=False)], AfterValidator(_checks)] = False
    """Whether its rollout engine is checked as by `repro check rollout`; a list names the checks."""
    tolerance: Tolerance = 64.0
    """How far layouts may be from the case; a layout's own table goes before it."""
    absolute: Absolute = Field(default_factory=dict)
    """Likewise, of signals that are roundings themselves."""
    relative: Relative = Field(default_factory=dict)
    """Likewise, of signals that are judged by a share of their size."""
    history: int = Field(default=14, ge=1)
    """How many trusted nights metrics are judged by, the newest."""
    least: int = Field(default=5, ge=1)
    """With fewer of them metrics are not judged."""
    mads: float = Field(default=6.0, gt=0, allow_inf_nan=False, strict=False)
    """How far a metric may be from the median: in standard deviations, as 1.4826 median absolute deviations are."""


def _known(table: NightlyTable, info: ValidationInfo) -> NightlyTable:
    """Refuse names that are no layout of the case, whose tables are read before this one."""
    named = info.data.get("layouts", {})
    for key, texts in (("batches", table.batches), ("layouts", table.layouts)):
        for text in texts:
            words = [text] if key == "batches" else [word.strip() for word in text.split(",")]
            wrong = [word for word in words if word not in named and (key == "batches" or not _KEY.fullmatch(word))]
            if wrong:
                known = ", ".join(named) or "none"
                also = "" if key == "batches" else ", or write threads=N or ranks=N"
                raise ValueError(f"{key}: {wrong[0]!r} is no [layouts.NAME] table (there is: {known}){also}")
    subject = info.data.get("subject")
    if table.rollout and subject is not None and subject.kind != "core":
        raise ValueError("rollout: a command's rollout engine cannot be asked: leave it out")
    if table.least > table.history:
        raise ValueError(f"least = {table.least} nights of history = {table.history} never come: make it no larger")
    return table


OfLayouts = Annotated[NightlyTable, AfterValidator(_known)]
"""The table in a model that has the case's ``layouts`` before it."""
