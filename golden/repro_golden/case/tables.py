"""Tables of a case file beside its subject: other layouts, nightly runs, bounds of the mismatch, rollout checks."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from repro_golden.base.canonical import canonical_json, parse_toml
from repro_golden.base.errors import ReproError

__all__ = [
    "CHECKS",
    "ROUNDINGS",
    "Absolute",
    "Expected",
    "JsonTypes",
    "Layout",
    "MismatchTable",
    "NightlyTable",
    "OfLayouts",
    "Relative",
    "Table",
    "Tolerance",
    "joined",
    "known_name",
    "read_tables",
    "unknown_key",
]

# -- any table that a user writes


class Table(BaseModel):
    """A table of a user's file: unknown keys are errors, values have their own types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Tables = TypeVar("Tables", bound=Table)


def read_tables(path: Path, tables: type[Tables], absent: str, problem: Callable[[ValidationError], str]) -> Tables:
    """Read a TOML file.

    Args:
        path: Where it lies.
        tables: What it holds.
        absent: What is said where there is none.
        problem: One line on what pydantic found.

    Raises:
        ReproError: missing, no TOML, or not such tables.
    """
    try:
        return tables.model_validate(parse_toml(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ReproError(absent) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ReproError(f"cannot read {path}: {error}") from None
    except ValidationError as error:  # which is a ValueError too
        raise ReproError(f"{path}: {problem(error)}") from None
    except ValueError as error:
        raise ReproError(f"{path} is not TOML: {error}") from None


def unknown_key(where: str, key: str, known: Iterable[str]) -> str:
    """What is said of a key that a table has not: the nearest that it has, or all."""
    names = list(known)
    near = difflib.get_close_matches(key, names, 1)
    return f"unknown key {where}" + (f": did you mean {near[0]}?" if near else f"; known: {', '.join(names)}")


def _json_types(config: dict[str, Any]) -> dict[str, Any]:
    try:
        canonical_json(config)
    except (TypeError, ValueError, RecursionError):
        raise ValueError("holds a date, nan or inf, which JSON lacks: write it as text") from None
    return config


JsonTypes = Annotated[dict[str, Any], AfterValidator(_json_types)]
"""Keys of a trainer's own, and their values."""


# -- other layouts of a case, as tables of its file: they are no part of the case, and of no golden run

Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)]
"""Units of epsilon that another order of sums may make; 0 where every bit must be equal."""
Absolute = dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)]]
"""By signal, as a glob: how far apart layouts may be in its own unit, for what is no more than roundings itself."""
Relative = dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)]]
"""By signal, as a glob: how far apart layouts may be as a share of the larger side."""

ROUNDINGS: Absolute = {"rollout/*": 1e-6, "*abs_diff": 1e-6, "*loss": 1e-6, "*kl": 1e-6}
"""`absolute` of slime, Miles and Relax where a case says nothing: on-policy these are 0 but for roundings, in nats.

With normalised advantages so are their means, and the loss: -7e-9 in the logs that slime's own code writes.
"""


class Layout(Table):
    """`[layouts.NAME]`: what `repro bisect --layout` puts in place of the case's own."""

    command: str | None = Field(default=None, min_length=1)
    """What trains, of kind command."""
    flags: tuple[str, ...] = Field(default=(), strict=False)
    """More flags, of kind slime, miles and relax: after those of `subject.flags`, so that they win."""
    ranks: int | None = Field(default=None, ge=1)
    """Processes that train."""
    cpus: int | None = Field(default=None, ge=1)
    """Threads of each."""
    gpus: int | None = Field(default=None, ge=0)
    """GPUs of all."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables beside those of `subject.env`, or in place of them."""
    config: JsonTypes = Field(default_factory=dict)
    """Keys of the trainer's own, of kind core, likewise; tables are joined level by level."""
    tolerance: Tolerance | None = None
    """How far this table alone may be from the case, in place of `[nightly] tolerance`."""
    absolute: Absolute | None = None
    """Likewise, in place of the whole of `[nightly] absolute`."""
    relative: Relative | None = None
    """Likewise, in place of the whole of `[nightly] relative`."""


def joined(config: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Two tables of a trainer's keys, level by level; the second wins."""
    both = {
        key: joined(config[key], value)
        for key, value in more.items()
        if isinstance(value, Mapping) and isinstance(config.get(key), Mapping)
    }
    return {**config, **more, **both}


# -- how far trainer and rollout engine may be apart, as a table of a case: no part of its key, and of no golden run

_Most = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)] | None


class MismatchTable(Table):
    """`[mismatch]`: bounds of the numbers that `measured.Mismatch` has, of each step. Nothing is judged without one."""

    steps: int | None = Field(default=None, ge=1)
    """How many steps are judged, the first; all by default. Rollouts that all were sampled from the starting weights
    are off-policy from the second one on."""
    mean: _Most = None
    """Largest mean gap, nats."""
    max: _Most = None
    """Largest gap of any token, nats."""
    p50: _Most = None
    """Largest percentile of the gaps, nats; as p90, p99 and p999, which is 99.9."""
    p90: _Most = None
    p99: _Most = None
    p999: _Most = None
    k1: _Most = None
    """Largest |KL(rollout || trainer)| by k1, nats."""
    k3: _Most = None
    """Largest KL(rollout || trainer) by k3, nats."""
    ratio_max: _Most = None
    """Largest importance ratio."""
    ratio_min: _Most = None
    """Least importance ratio."""
    above_2: _Most = None
    """Largest share of tokens whose ratio is above 2."""
    below_half: _Most = None
    """Largest share of tokens whose ratio is below 1/2."""
    ess: _Most = None
    """Least effective sample size, as a share of the tokens."""

    @property
    def bounds(self) -> dict[str, float]:
        """Those that were set, by name."""
        values = self.model_dump(exclude={"steps"}, exclude_none=True)
        return {name: float(value) for name, value in values.items()}

    @model_validator(mode="after")
    def _bounds_something(self) -> MismatchTable:
        if self.steps is not None and not self.bounds:
            raise ValueError("steps alone bounds nothing: set mean, max, p99, k3, ratio_max or another number")
        return self


# -- the checks of a rollout engine that a case may name; `engine_checks` makes them

Expected = Literal["equal", "differs", "any"]

CHECKS: Mapping[str, Expected] = {
    "run-to-run": "equal",
    "batch-of-2": "equal",
    "batch-of-8": "equal",
    "batch-of-32": "equal",
    "shuffled": "equal",
    "prefix-cache": "equal",
    "seeded-run-to-run": "equal",
    "seeded-batch": "equal",
    "seed": "differs",
    "unseeded": "any",
    "memory": "equal",
    "weight-update": "differs",
    "weight-reversal": "equal",
}
"""Names, in the order in which they are made, with what must come out."""


def known_name(name: str) -> str:
    """The name of a check.

    Raises:
        ReproError: it is none.
    """
    if name not in CHECKS:
        raise ReproError(f"no rollout check {name!r}; known: {', '.join(CHECKS)}")
    return name


# -- what a night asks of a case beside its numbers, as a table of its file: no part of the case, and of no golden run


def _checks(value: bool | tuple[str, ...]) -> bool | tuple[str, ...]:
    """Refuse names that are no rollout check."""
    try:
        for name in value if isinstance(value, tuple) else ():
            known_name(name)
    except ReproError as error:
        raise ValueError(str(error)) from None
    return value


_KEY = re.compile(r"(?:threads|ranks)=[1-9]\d{0,5}")


class NightlyTable(Table):
    """`[nightly]`: what `repro report nightly` asks, and by what it judges."""

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
            names = [text] if key == "batches" else [name.strip() for name in text.split(",")]
            wrong = [name for name in names if name not in named and (key == "batches" or not _KEY.fullmatch(name))]
            if wrong:
                known = ", ".join(named) or "none"
                also = "" if key == "batches" else ", or write threads=N or ranks=N"
                raise ValueError(f"{key}: {wrong[0]!r} is no [layouts.NAME] table (there is: {known}){also}")
    subject = info.data.get("subject")
    if table.rollout and subject is not None and not subject.samples:
        raise ValueError("rollout: a command's rollout engine cannot be asked: leave it out")
    if table.least > table.history:
        raise ValueError(f"least = {table.least} nights of history = {table.history} never come: make it no larger")
    return table


OfLayouts = Annotated[NightlyTable, AfterValidator(_known)]
"""The table in a model that has the case's ``layouts`` before it."""
