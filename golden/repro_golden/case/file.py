"""Cases: one experiment worth guarding, as `golden/cases/NAME.toml` in the repository that is guarded."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from repro_golden.base.canonical import canonical_json, digest
from repro_golden.base.errors import ReproError
from repro_golden.base.observed import ALL_SIGNALS, SIGNALS
from repro_golden.case.subject_tables import (
    TABLES,
    Bytes,
    CommandSubject,
    CoreSubject,
    Inside,
    Subject,
    TrainerSubject,
)
from repro_golden.case.tables import Layout, MismatchTable, NightlyTable, OfLayouts, Table, read_tables, unknown_key

__all__ = [
    "NAME",
    "NO_CASE",
    "Bound",
    "Case",
    "CommandSubject",
    "CoreSubject",
    "Observe",
    "TrainerSubject",
    "find_case",
    "list_cases",
    "pattern_problem",
    "read_case",
    "unknown_case",
]

CASES = Path("golden/cases")
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""What a case may be called: it is a file's name, and a word on a command line."""
NO_CASE = "`repro golden record NAME -- YOUR COMMAND` writes a first one"
"""What to do then."""


class Experiment(Table):
    """`[case]`."""

    name: str = Field(pattern=NAME)
    """The file's name without `.toml`."""
    steps: int = Field(ge=1)
    """Optimizer updates to record."""
    proof_steps: int | None = Field(default=None, ge=1)
    """How many steps the reproduction proof repeats; all by default."""
    rollouts: Inside | None = Field(default=None, min_length=1)
    """Folder of the recorded rollouts, relative to the repository's root. A command may have none."""
    states: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(), strict=False)
    """Steps before which the training state is kept with the golden run, so that a bisect can start there."""
    states_budget: Bytes = Field(default=1 << 30, ge=0)
    """Bytes that these states may take together, or a string such as "2GiB"; beyond it every other one goes."""

    @field_validator("name", "rollouts")
    @classmethod
    def _no_file_of_dvcs(cls, name: str | None) -> str | None:
        if name is not None and (name.endswith(".dvc") or PurePosixPath(name).name == "dvc.yaml"):
            raise ValueError("DVC takes what is called *.dvc or dvc.yaml for a file of its own: choose another name")
        return name


class Observe(Table):
    """`[observe]`: what is recorded of a program beside gradients, parameters and optimizer state."""

    activations: tuple[str, ...] = Field(default=(), strict=False)
    """Globs of module names whose outputs, and their gradients, are recorded."""
    metrics: tuple[str, ...] = Field(default=(), strict=False)
    """Regular expressions over lines of the program's output; named groups are metrics."""
    ignore: tuple[str, ...] = Field(default=(), strict=False)
    """Globs of metrics to leave out; those that measure time, speed or memory are left out anyway."""
    signals: str = Field(default=ALL_SIGNALS, pattern=rf"^({SIGNALS})$")
    """``full``; or ``light:N``: optimizer state after each N-th step alone (``light``: each 16th)."""

    def to_mapping(self) -> dict[str, Any]:
        """JSON types; what is as in every case from before there was a choice is left out."""
        fields = self.model_dump(mode="json")
        return fields if self.signals != ALL_SIGNALS else {k: v for k, v in fields.items() if k != "signals"}

    @field_validator("metrics")
    @classmethod
    def _patterns(cls, metrics: tuple[str, ...]) -> tuple[str, ...]:
        for text in metrics:
            if problem := pattern_problem(text):
                raise ValueError(problem)
        return metrics


def pattern_problem(text: str) -> str | None:
    """Why a text does not serve as a pattern for metrics; None where it does."""
    try:
        pattern = re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        return f"{text[:200]!r} is no regular expression: {error}"
    return None if pattern.groupindex else f"{text!r} has no named group: write loss=(?P<loss>\\S+)"


class Bound(Table):
    """How far a metric may be from the baseline's: |b - a| <= atol + rtol * |a|. NaN is outside every bound."""

    rtol: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    atol: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class Compare(Table):
    """`[compare]`."""

    mode: Literal["bitwise", "bounds"] = "bitwise"
    """`bitwise`: every signal of every step has the same bits. `bounds`: every metric named here stays in its bound."""
    bounds: dict[str, Bound] = Field(default_factory=dict)
    names: Literal["matched", "strict"] = "matched"
    """`matched`: a signal that has another name and the same bits in every step was renamed, which is no difference.
    `strict`: it is one."""

    @property
    def strict(self) -> bool:
        """Whether another name is a difference."""
        return self.names == "strict"

    @model_validator(mode="after")
    def _something_is_compared(self) -> Compare:
        if (self.mode == "bounds") != bool(self.bounds):
            raise ValueError('mode = "bounds" needs [compare.bounds.METRIC] tables, and only that mode has them')
        return self


class FirstStep(Table):
    """`[first_step]`: the checks that every debugging guide begins with."""

    check: bool = True
    """Whether the first step is on-policy, so that log-probs equal the reference's and KL is exactly 0."""
    grad_norm_max: float = Field(default=100.0, gt=0, strict=False)


class Resources(Table):
    """`[resources]` of one run."""

    cpus: int = Field(default=1, ge=1)
    """Threads of the trainer: their number decides bits."""
    gpus: int = Field(default=0, ge=0)
    ranks: int = Field(default=1, ge=1)
    """Processes that train. One that leaves no trace is an error."""
    other_ranks: int = Field(default=0, ge=0)
    """Processes of other, smaller trainings beside it, such as a critic's. They are waited for, and not looked at."""

    @property
    def processes(self) -> int:
        """All that train."""
        return self.ranks + self.other_ranks


class Case(Table):
    """A whole case file."""

    case: Experiment
    subject: Subject = CoreSubject()
    observe: Observe = Observe()
    compare: Compare = Compare()
    first_step: FirstStep = FirstStep()
    resources: Resources = Resources()
    layouts: dict[str, Layout] = Field(default_factory=dict)
    nightly: OfLayouts = NightlyTable()
    mismatch: MismatchTable = MismatchTable()

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Case:
        subject = self.subject
        if self.case.states and not subject.saves_between:
            raise ValueError("case.states is for kind core; of a command a bisect makes the state with subject.save")
        if self.case.rollouts is None:
            if subject.samples or subject.system:
                why = f"; kind {subject.kind} replays recorded rollouts" if subject.system else ""
                raise ValueError(f"case.rollouts: Field required{why}")
            if any("{rollouts}" in text for text in subject.templates):
                raise ValueError("case.rollouts is not set, but {rollouts} is asked for")
        if subject.tells and self.resources.other_ranks:
            raise ValueError("resources.other_ranks: a trainer of kind core trains alone")
        if subject.tells and self.observe != Observe():
            raise ValueError("observe is for kind command: a trainer of kind core says itself what it observes")
        return self

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

    def paths(self, code_paths: Sequence[str] = ()) -> list[str]:
        """All of the repository that decides numbers: the subject's code, and lock files that lie outside of it.

        Args:
            code_paths: What holds the code, in place of `subject.path`.
        """
        code = list(code_paths) or [self.subject.path]
        locks = self.subject.locks
        return code + [name for name in locks if not any(PurePosixPath(name).is_relative_to(path) for path in code)]

    @property
    def named(self) -> list[str]:
        """What may be files of the repository among the words of its commands, or of its configuration."""
        texts = {text for word in self.subject.texts for text in re.split(r"[=,:]", word)}
        paths = [PurePosixPath(text) for text in texts if ("/" in text or "." in text) and "\0" not in text]
        return sorted(str(path) for path in paths if path.parts and path.parts[0] != "/" and ".." not in path.parts)

    def canonical(self) -> dict[str, Any]:
        """What decides the numbers of a run, as JSON types: the subject, its resources and the number of steps."""
        apart = {"timeout", "check", "save", "resume", "environments", "link"} | self.subject.unset
        subject = self.subject.model_dump(mode="json", exclude=apart)
        resources = self.resources.model_dump(exclude=None if self.resources.other_ranks else {"other_ranks"})
        fields = {"name": self.name, "steps": self.steps, "subject": subject, "resources": resources}
        if not self.subject.tells:
            fields["observe"] = self.observe.to_mapping()
        return fields

    @property
    def digest(self) -> str:
        """32 hex digits of `canonical`, without the number of steps unless the program is told it.

        So runs of different lengths share their prefix.
        """
        fields = self.canonical()
        knows_steps = self.subject.told_steps
        return digest("case", canonical_json({k: v for k, v in fields.items() if k != "steps" or knows_steps}))


def read_case(path: Path) -> Case:
    """Read one case file.

    Raises:
        ReproError: missing, no TOML, a misspelt key (the nearest real one is named) or a value that does not serve.
    """
    case = read_tables(path, Case, f"no case file {path}: {NO_CASE}", first_problem)
    if case.name != path.stem:
        raise ReproError(f"{path}: case.name is {case.name!r} but the file is {path.name}: make them the same")
    return case


def first_problem(error: ValidationError) -> str:
    """What is wrong with a case, in one line."""
    problem = error.errors()[0]
    # the tag of a subject's kind stands behind "subject"
    parts = [p for i, p in enumerate(problem["loc"]) if i != 1 or problem["loc"][0] != "subject"]
    parts += ["kind"] if problem["type"] == "kind" else []
    where = ".".join(str(part) for part in parts)
    if problem["type"] != "extra_forbidden":
        return f"{where or 'case'}: {problem['msg'].removeprefix('Value error, ')}"
    table: Any = Case
    for part in problem["loc"][:-1]:
        if (table, part) in ((Compare, "bounds"), (Case, "layouts")):
            table = Bound if part == "bounds" else Layout
        elif table not in (Bound, Layout) and part != "subject":
            table = TABLES.get(str(part)) or table.model_fields[str(part)].annotation
    return unknown_key(where, str(problem["loc"][-1]), table.model_fields)


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
            choose = f"name one of {names}" if paths else NO_CASE
            raise ReproError(f"{len(paths)} cases in {root / CASES}: {choose}")
        return read_case(paths[0])
    path = root / CASES / f"{name}.toml"
    if path not in paths:
        raise unknown_case(root, name)
    return read_case(path)


def unknown_case(root: Path, name: str) -> ReproError:
    """What is said of a name that no case has: the nearest one, else those that there are."""
    known = [path.stem for path in list_cases(root)]
    near = difflib.get_close_matches(name, known, 1)
    fix = f": did you mean {near[0]}?" if near else f"; known: {', '.join(known)}" if known else f"; {NO_CASE}"
    return ReproError(f"no case {name!r} in {root / CASES}{fix}")
