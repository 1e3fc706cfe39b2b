"""Cases: one experiment worth guarding, as `golden/cases/NAME.toml` in the repository that is guarded."""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from repro_golden.canonical import canonical_json, digest
from repro_golden.errors import ReproError

__all__ = ["Bound", "Case", "find_case", "list_cases", "read_case"]

CASES = Path("golden/cases")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def _seconds(value: object) -> object:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", value) if isinstance(value, str) else None
    return float(match[1]) * _UNITS[match[2]] if match else value


def _inside(path: str) -> str:
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ValueError("must be a path inside the repository, relative to its root")
    return path


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Experiment(_Table):
    """`[case]`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The file's name without `.toml`."""
    steps: int = Field(ge=1)
    """Optimizer updates to record."""
    proof_steps: int | None = Field(default=None, ge=1)
    """How many steps the reproduction proof repeats; all by default."""
    rollouts: Annotated[str, AfterValidator(_inside)] = Field(min_length=1)
    """Folder of the recorded rollouts, relative to the repository's root."""
    states: tuple[int, ...] = Field(default=(), strict=False)
    """Steps before which the training state is kept with the golden run."""


class SubjectTable(_Table):
    """`[subject]`."""

    kind: Literal["core"] = "core"
    """`core`: a Python module that offers `CONTRACT` and `build(case)` (see `repro_core/__init__.py`)."""
    module: str = "repro_core"
    """The module that is the door to the trainer."""
    path: Annotated[str, AfterValidator(_inside)] = "core"
    """Folder of the repository that is put on PYTHONPATH for it; commits that leave it alone share one probe. An empty
    path means the installed module, which no commit can change."""
    timeout: Annotated[float, BeforeValidator(_seconds)] = Field(default=1800.0, gt=0)
    """Longest one run may take: seconds, or a string such as "30m"."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the trainer, set before it starts."""
    config: dict[str, Any] = Field(default_factory=dict)
    """What the trainer itself reads; its keys are the trainer's own, its values are JSON types."""

    @field_validator("config")
    @classmethod
    def _json_types(cls, config: dict[str, Any]) -> dict[str, Any]:
        try:
            canonical_json(config)
        except (TypeError, ValueError, RecursionError):
            raise ValueError("holds a date, nan or inf, which JSON lacks: write it as text") from None
        return config


class Bound(_Table):
    """How far a metric may be from the baseline's: |b - a| <= atol + rtol * |a|. NaN is outside every bound."""

    rtol: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    atol: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class Compare(_Table):
    """`[compare]`."""

    mode: Literal["bitwise", "bounds"] = "bitwise"
    """`bitwise`: every signal of every step has the same bits. `bounds`: every metric named here stays in its bound."""
    bounds: dict[str, Bound] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _something_is_compared(self) -> Compare:
        if (self.mode == "bounds") != bool(self.bounds):
            raise ValueError('mode = "bounds" needs [compare.bounds.METRIC] tables, and only that mode has them')
        return self


class FirstStep(_Table):
    """`[first_step]`: the checks that every debugging guide begins with."""

    check: bool = True
    """Whether the first step is on-policy, so that log-probs equal the reference's and KL is exactly 0."""
    grad_norm_max: float = Field(default=100.0, gt=0, strict=False)


class Resources(_Table):
    """`[resources]` of one run."""

    cpus: int = Field(default=1, ge=1)
    """Threads of the trainer: their number decides bits."""
    gpus: int = Field(default=0, ge=0)
    ranks: Literal[1] = 1


class Case(_Table):
    """A whole case file."""

    case: Experiment
    subject: SubjectTable = SubjectTable()
    compare: Compare = Compare()
    first_step: FirstStep = FirstStep()
    resources: Resources = Resources()

    @property
    def name(self) -> str:
        """The case's name."""
        return self.case.name

    @property
    def steps(self) -> int:
        """Optimizer updates it records."""
        return self.case.steps

    @property
    def proof_steps(self) -> int:
        """Steps that the proofs repeat."""
        return min(self.case.proof_steps or self.steps, self.steps)

    def canonical(self) -> dict[str, Any]:
        """What decides the numbers of a run, as JSON types: the subject, its resources and the number of steps."""
        subject = self.subject.model_dump(mode="json", exclude={"timeout"})
        return {"name": self.name, "steps": self.steps, "subject": subject, "resources": self.resources.model_dump()}

    @property
    def digest(self) -> str:
        """32 hex digits of `canonical` without the number of steps: runs of different lengths share their prefix."""
        return digest("case", canonical_json({k: v for k, v in self.canonical().items() if k != "steps"}))


def read_case(path: Path) -> Case:
    """Read one case file.

    Raises:
        ReproError: missing, no TOML, a misspelt key (the nearest real one is named) or a value that does not serve.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ReproError(f"no case file {path}: `repro init` writes a first one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ReproError(f"cannot read the case {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ReproError(f"{path} is not TOML: {error}") from None
    try:
        case = Case.model_validate(raw)
    except ValidationError as error:
        raise ReproError(f"{path}: {_first_problem(error)}") from None
    if case.name != path.stem:
        raise ReproError(f"{path}: case.name is {case.name!r} but the file is {path.name}: make them the same")
    return case


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] != "extra_forbidden":
        return f"{where or 'case'}: {problem['msg'].removeprefix('Value error, ')}"
    table: Any = Case
    for part in problem["loc"][:-1]:
        table = Bound if table is Compare and part == "bounds" else table
        table = table if table is Bound else table.model_fields[str(part)].annotation
    key, known = str(problem["loc"][-1]), list(table.model_fields)
    near = difflib.get_close_matches(key, known, 1)
    return f"unknown key {where}" + (f": did you mean {near[0]}?" if near else f"; known: {', '.join(known)}")


def list_cases(root: Path) -> list[Path]:
    """Case files of a repository, by name."""
    return sorted((root / CASES).glob("*.toml"))


def find_case(root: Path, name: str | None) -> Case:
    """The case called `name`; without a name, the only one there is.

    Raises:
        ReproError: none, several, or no such case, with those that exist.
    """
    paths = list_cases(root)
    names = ", ".join(p.stem for p in paths)
    if name is None:
        if len(paths) != 1:
            choose = f"name one of {names}" if paths else "`repro init` writes a first one"
            raise ReproError(f"{len(paths)} cases in {root / CASES}: {choose}")
        return read_case(paths[0])
    path = root / CASES / f"{name}.toml"
    if path not in paths:
        raise ReproError(f"no case {name!r} in {root / CASES}; " + (f"known: {names}" if names else "run `repro init`"))
    return read_case(path)
