"""Cases: one experiment worth guarding, as `golden/cases/NAME.toml` in the repository that is guarded."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from repro_golden.canonical import canonical_json, digest
from repro_golden.errors import ReproError
from repro_golden.layout import Layout
from repro_golden.mismatch_table import MismatchTable
from repro_golden.nightly_table import NightlyTable, OfLayouts
from repro_golden.pins import checked_pins

__all__ = [
    "Bound",
    "Case",
    "CommandSubject",
    "CoreSubject",
    "Observe",
    "command_case",
    "find_case",
    "list_cases",
    "new_command_case",
    "pattern_problem",
    "read_case",
]

CASES = Path("golden/cases")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _seconds(value: object) -> object:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", value) if isinstance(value, str) else None
    return float(match[1]) * _UNITS[match[2]] if match else value


def _bytes(value: object) -> object:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)i?B", value) if isinstance(value, str) else None
    return int(float(match[1]) * _SIZES[match[2]]) if match else value


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
    rollouts: Annotated[str, AfterValidator(_inside)] | None = Field(default=None, min_length=1)
    """Folder of the recorded rollouts, relative to the repository's root. A command may have none."""
    states: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(), strict=False)
    """Steps before which the training state is kept with the golden run, so that a bisect can start there."""
    states_budget: Annotated[int, BeforeValidator(_bytes)] = Field(default=1 << 30, ge=0)
    """Bytes that these states may take together, or a string such as "2GiB"; beyond it every other one goes."""


class _Subject(_Table):
    """What every kind of `[subject]` has."""

    timeout: Annotated[float, BeforeValidator(_seconds)] = Field(default=1800.0, gt=0)
    """Longest one run may take: seconds, or a string such as "30m"."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the trainer, set before it starts."""
    packages: Annotated[dict[str, str], AfterValidator(checked_pins)] = Field(default_factory=dict)
    """Released versions of packages that replace the environment's own. What one needs and has not there moves too."""

    @field_validator("env")
    @classmethod
    def _variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"{name!r} cannot be a variable: no '=' in names, no NUL in either")
        return env


class CoreSubject(_Subject):
    """`[subject]` of `kind = "core"`: a Python module that offers `CONTRACT` and `build(case)`."""

    kind: Literal["core"] = "core"
    """See `repro_core/__init__.py`."""
    module: str = "repro_core"
    """The module that is the door to the trainer."""
    path: Annotated[str, AfterValidator(_inside)] = "core"
    """Folder of the repository that is put on PYTHONPATH for it; commits that leave it alone share one probe. An empty
    path means the installed module, which no commit can change."""
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


_BUILT_IN = {"uv": ("uv.lock",), "pip": ("requirements.txt",)}
"""What `setup` knows by itself, with its lock files."""


class CommandSubject(_Subject):
    """`[subject]` of `kind = "command"`: a program that knows nothing of us.

    In `command`, `setup`, `check` and the values of `env`, six tokens are replaced and no other braces: ``{root}``,
    ``{rollouts}``, ``{out}``, ``{checkpoint}``, ``{step}`` and ``{python}`` (see docs/trace.md).
    """

    kind: Literal["command"]
    command: str = Field(min_length=1)
    """What trains; started in the checkout's or worktree's root."""
    shell: bool = False
    """Whether `command`, `setup` and `check` are shell lines; otherwise they are split into words."""
    python: str | None = None
    """The interpreter that the program runs in, or its environment's folder; by default repro's own. Its folder comes
    first on PATH."""
    setup: str = ""
    """Builds what a commit needs. With `lock` it builds an environment at ``{out}``, once for each content of the lock
    files; without, it is run once in each worktree, before anything else. ``uv`` and ``pip`` are built in."""
    lock: tuple[Annotated[str, AfterValidator(_inside)], ...] = Field(default=(), strict=False)
    """The files that decide the environment, relative to the repository's root; ``uv.lock`` and ``requirements.txt``
    for `setup`'s own two."""
    environments: int = Field(default=8, ge=1)
    """How many environments are kept; the least recently used go first."""
    save: str = ""
    """A command that trains and leaves the state before step ``{step}`` at ``{checkpoint}``."""
    resume: str = ""
    """A command that trains on from the state at ``{checkpoint}``, which is that before step ``{step}``."""
    check: str = ""
    """A cheap command that fails where a commit cannot be tested."""
    path: Annotated[str, AfterValidator(_inside)] = Field(default=".", min_length=1)
    """Folder of the repository that holds the program's code; commits that leave it alone share one probe."""

    @model_validator(mode="after")
    def _saves_and_resumes(self) -> CommandSubject:
        if bool(self.save) != bool(self.resume):
            raise ValueError("save and resume go together: one makes the state that the other starts from")
        if self.save and not all("{checkpoint}" in text for text in (self.save, self.resume)):
            raise ValueError("save and resume must name {checkpoint}, the folder of the state")
        return self

    @model_validator(mode="after")
    def _locks_and_builds(self) -> CommandSubject:
        if self.lock and not self.setup:
            raise ValueError("lock needs setup, which builds the environment: a command, uv or pip")
        if self.lock and self.setup not in _BUILT_IN and "{out}" not in self.setup:
            raise ValueError("setup with lock must name {out}, the folder of the environment")
        if self.setup == "uv" and PurePosixPath(self.locks[0]).name != "uv.lock":
            raise ValueError('lock of setup = "uv" must begin with its uv.lock')
        return self

    @property
    def locks(self) -> tuple[str, ...]:
        """The files that decide the environment; none where it is what the case says."""
        return self.lock or _BUILT_IN.get(self.setup, ())

    @field_validator("lock")
    @classmethod
    def _files(cls, lock: tuple[str, ...]) -> tuple[str, ...]:
        if not all(PurePosixPath(name).name for name in lock):
            raise ValueError("holds an empty name")
        if any(PurePosixPath(name).parts[0] in ("golden", ".dvc") for name in lock):
            raise ValueError("must not lie in golden/ or .dvc/, which are no part of a commit's code")
        return tuple(dict.fromkeys(lock))

    @field_validator("command", "setup", "check", "save", "resume")
    @classmethod
    def _words(cls, text: str) -> str:
        try:
            empty = text and not shlex.split(text)
        except ValueError as error:
            raise ValueError(f"cannot be split into words ({error}): check its quotes") from None
        if empty or "\0" in text:
            raise ValueError("holds no word, or a NUL")
        return text


def _kind(raw: object) -> str:
    return str(raw.get("kind", "core")) if isinstance(raw, dict) else str(getattr(raw, "kind", "core"))


Subject = Annotated[
    Annotated[CoreSubject, Tag("core")] | Annotated[CommandSubject, Tag("command")],
    Discriminator(_kind, custom_error_type="kind", custom_error_message="must be core or command"),
]


class Observe(_Table):
    """`[observe]`: what is recorded of a program beside gradients, parameters and optimizer state."""

    activations: tuple[str, ...] = Field(default=(), strict=False)
    """Globs of module names whose outputs, and their gradients, are recorded."""
    metrics: tuple[str, ...] = Field(default=(), strict=False)
    """Regular expressions over lines of the program's output; named groups are metrics."""
    ignore: tuple[str, ...] = Field(default=(), strict=False)
    """Globs of metrics to leave out; those that measure time, speed or memory are left out anyway."""

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
    except re.error as error:
        return f"{text!r} is no regular expression: {error}"
    return None if pattern.groupindex else f"{text!r} has no named group: write loss=(?P<loss>\\S+)"


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
    ranks: int = Field(default=1, ge=1)
    """Processes that train. One that leaves no trace is an error."""


class Case(_Table):
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
        if isinstance(self.subject, CommandSubject):
            if self.case.states:
                raise ValueError(
                    "case.states is for kind core; of a command a bisect makes the state with subject.save"
                )
            subject = self.subject
            told = [subject.command, subject.setup, subject.check, subject.save, subject.resume, *subject.env.values()]
            if self.case.rollouts is None and any("{rollouts}" in text for text in told):
                raise ValueError("case.rollouts is not set, but {rollouts} is asked for")
        elif self.case.rollouts is None:
            raise ValueError("case.rollouts: Field required")
        elif self.observe != Observe():
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

    def paths(self, own: Sequence[str] = ()) -> list[str]:
        """All of the repository that decides numbers: the subject's code, and lock files that lie outside of it.

        Args:
            own: What holds the code, in place of `subject.path`.
        """
        code = list(own) or [self.subject.path]
        locks = self.subject.locks if isinstance(self.subject, CommandSubject) else ()
        return code + [name for name in locks if not any(PurePosixPath(name).is_relative_to(path) for path in code)]

    def canonical(self) -> dict[str, Any]:
        """What decides the numbers of a run, as JSON types: the subject, its resources and the number of steps."""
        subject = self.subject.model_dump(
            mode="json", exclude={"timeout", "check", "save", "resume", "environments"} | _unset(self.subject)
        )
        found = {"name": self.name, "steps": self.steps, "subject": subject, "resources": self.resources.model_dump()}
        if self.subject.kind == "command":
            found["observe"] = self.observe.model_dump(mode="json")
        return found

    @property
    def digest(self) -> str:
        """32 hex digits of `canonical`, without the number of steps unless the program is told it.

        So runs of different lengths share their prefix.
        """
        found = self.canonical()
        told = isinstance(self.subject, CommandSubject) and "{step}" in canonical_json(
            [self.subject.command, self.subject.setup, self.subject.env]
        )
        return digest("case", canonical_json({k: v for k, v in found.items() if k != "steps" or told}))


def _unset(subject: Subject) -> set[str]:
    """Keys that change nothing where they are not set, so that older golden runs and journals still serve."""
    unset = {"lock"} if isinstance(subject, CommandSubject) and not subject.lock else set()
    return unset | (set() if subject.packages else {"packages"})


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
    # the tag of a subject's kind stands behind "subject"
    parts = [p for i, p in enumerate(problem["loc"]) if i != 1 or problem["loc"][0] != "subject"]
    parts += ["kind"] if problem["type"] == "kind" else []
    where = ".".join(str(part) for part in parts)
    if problem["type"] != "extra_forbidden":
        return f"{where or 'case'}: {problem['msg'].removeprefix('Value error, ')}"
    tables: dict[str, type[BaseModel]] = {"core": CoreSubject, "command": CommandSubject}
    table: Any = Case
    for part in problem["loc"][:-1]:
        if (table, part) in ((Compare, "bounds"), (Case, "layouts")):
            table = Bound if part == "bounds" else Layout
        elif table not in (Bound, Layout) and part != "subject":
            table = tables.get(str(part)) or table.model_fields[str(part)].annotation
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


def _search_path(root: Path) -> list[str]:
    """The user's PYTHONPATH, which a case must name; what lies in the repository, relative to its root."""
    found = []
    for entry in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        path = Path(entry).absolute()
        found.append(str(path.relative_to(root)) if path.is_relative_to(root) else str(path))
    return [f"env = {{ PYTHONPATH = {json.dumps(os.pathsep.join(found))} }}"] if found else []


def _command_case(root: Path, name: str, command: Sequence[str], steps: int, ranks: int) -> str:
    """The case file of a command."""
    return "\n".join([
        "[case]", f"name = {json.dumps(name)}", f"steps = {steps}", "",
        "[subject]", 'kind = "command"', f"command = {json.dumps(shlex.join(command))}", *_search_path(root), "",
        "[resources]", f"ranks = {ranks}", "",
    ])  # fmt: skip


def command_case(
    root: Path,
    name: str,
    command: Sequence[str],
    steps: int,
    resources: Mapping[str, int],
    metrics: Sequence[str] = (),
) -> Case:
    """The case of a command, without a file; `resources` and `metrics` are as in ``[resources]`` and ``[observe]``.

    Raises:
        ReproError: a word cannot stand in a case.
    """
    try:
        raw = tomllib.loads(_command_case(root, name, command, steps, 1))
        return Case.model_validate(raw | {"observe": {"metrics": list(metrics)}, "resources": dict(resources)})
    except (ValidationError, tomllib.TOMLDecodeError) as error:
        why = _first_problem(error) if isinstance(error, ValidationError) else error
        raise ReproError(f"the command makes no case ({why})") from None


def new_command_case(root: Path, name: str, command: Sequence[str], steps: int, ranks: int) -> Case:
    """Write the case file of a command, and read it back.

    Raises:
        ReproError: there is a case of that name, or the name or a word cannot stand in a case file.
    """
    path = root / CASES / f"{name}.toml"
    if Path(name).name != name:
        raise ReproError(f"{name!r} is no name for a case: use letters, digits, '.', '_' and '-'")
    if path.exists():
        raise ReproError(f"{path} exists: record it with `repro golden record {name}`, or choose another name")
    text = _command_case(root, name, command, steps, ranks)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    try:
        return read_case(path)
    except ReproError:
        path.unlink()
        raise
