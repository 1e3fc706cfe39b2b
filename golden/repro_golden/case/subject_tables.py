"""`[subject]` of a case file: one table for each kind of subject."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import or_
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from packaging.utils import InvalidName, canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from repro_golden.base.canonical import canonical_json
from repro_golden.base.systems import System
from repro_golden.case.tables import JsonTypes, Table

__all__ = [
    "TABLES",
    "Bytes",
    "CommandSubject",
    "CoreSubject",
    "Inside",
    "Subject",
    "TrainerSubject",
    "checked_pins",
]


# -- versions of packages, by name, as a case asks for them


def checked_pins(packages: Mapping[str, str]) -> dict[str, str]:
    """The same by normalised names (PEP 503), sorted, with versions in their normal form (PEP 440).

    Raises:
        ValueError: a name or version is none, or one package has two versions; in one line.
    """
    pins: dict[str, str] = {}
    for name, version in packages.items():
        try:
            key, asked = str(canonicalize_name(name, validate=True)), str(Version(version))
        except InvalidName:
            raise ValueError(f"{name!r} is no package's name: write one such as torch") from None
        except InvalidVersion:
            raise ValueError(f"{version!r} is no version of {name}: write one such as 2.13.0") from None
        if pins.setdefault(key, asked) != asked:
            raise ValueError(f"asks for two versions of {key}: keep one")
    return dict(sorted(pins.items()))


# -- `[subject]` of a case file: one table for each kind of subject

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


def _linkable(path: str) -> str:
    parts = PurePosixPath(_inside(path)).parts
    if not parts or parts[0] == ".git":
        raise ValueError("must name a folder or file of the checkout, not all of it")
    return path


Seconds = Annotated[float, BeforeValidator(_seconds)]
Bytes = Annotated[int, BeforeValidator(_bytes)]
Inside = Annotated[str, AfterValidator(_inside)]


class _Subject(Table):
    """What every kind of `[subject]` has."""

    timeout: Seconds = Field(default=1800.0, gt=0)
    """Longest one run may take: seconds, or a string such as "30m"."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the trainer, set before it starts."""
    pass_env: tuple[Annotated[str, Field(pattern=r"^[^=\x00]+$")], ...] = Field(default=(), strict=False)
    """Names of the caller's variables that the trainer gets although they look like secrets, such as HF_TOKEN."""
    link: tuple[Annotated[str, AfterValidator(_linkable)], ...] = Field(default=(), strict=False)
    """Folders and files of the user's checkout that git does not track, put into every commit's worktree."""
    packages: Annotated[dict[str, str], AfterValidator(checked_pins)] = Field(default_factory=dict)
    """Released versions of packages that replace the environment's own. What one needs and has not there moves too."""

    @property
    def program(self) -> CommandSubject | None:
        """The program that is started, and may need or take what no case says; None for one that we import."""
        return None

    @property
    def own_python(self) -> str | None:
        """The Python that its case names; None for that of repro."""
        return None

    @property
    def samples(self) -> bool:
        """Whether it has a rollout engine of ours, whose rollouts are kept in our form."""
        return True

    @property
    def system(self) -> System | None:
        """Whose launch it is, which is given recorded dumps of its own form by flags that we add; None for others."""
        return None

    @property
    def left_out(self) -> tuple[str, ...]:
        """Flags that a replay would add to its launch and must not."""
        return ()

    @property
    def tells(self) -> bool:
        """Whether it says itself what it computed, with shards put together; a recorder looks on otherwise."""
        return True

    @property
    def told_steps(self) -> bool:
        """Whether it is told how many steps it makes, on which its schedules may depend."""
        return False

    @property
    def locks(self) -> tuple[str, ...]:
        """The files of a commit that decide its environment; none where it is what the case says."""
        return ()

    @property
    def installed(self) -> str:
        """The installed module that it is, which no commit can change; '' where the repository holds its code."""
        return ""

    @property
    def texts(self) -> list[str]:
        """Every word of its commands, or every text of its configuration: some of them may be paths."""
        return []

    @property
    def templates(self) -> list[str]:
        """The texts in which our tokens are replaced."""
        return []

    @property
    def check_line(self) -> str:
        """What fails where a commit cannot be tested."""
        return ""

    @property
    def state_lines(self) -> list[str]:
        """What saves a state and what goes on from it, where commands do."""
        return []

    @property
    def saves_between(self) -> bool:
        """Whether one run saves several states, and makes another from one of them."""
        return True

    @property
    def most_environments(self) -> int:
        """How many of those that are built for it are kept."""
        return 8

    @property
    def unset(self) -> set[str]:
        """Keys that change nothing where they are not set, so that older golden runs and journals still serve."""
        return {name for name in ("packages", "pass_env") if not getattr(self, name)}

    @property
    def recorded(self) -> bool:
        """Whether a recorder, or the trainer itself, shows gradients and parameters."""
        return True

    @property
    def saves_state(self) -> bool:
        """Whether a run can begin at another step than the first."""
        return True

    @property
    def saves_checkpoint(self) -> bool:
        """Whether a run leaves a checkpoint where it is told to."""
        return True

    @property
    def unpickled(self) -> tuple[str, ...]:
        """Classes whose objects its rollouts may hold."""
        return ()

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
    """The module that is the interface to the trainer."""
    path: Inside = "core"
    """Folder of the repository that is put on PYTHONPATH for it; commits that leave it alone share one probe. An empty
    path means the installed module, which no commit can change."""
    config: JsonTypes = Field(default_factory=dict)
    """What the trainer itself reads; its keys are the trainer's own, its values are JSON types."""

    @property
    def installed(self) -> str:
        """See `_Subject`."""
        return "" if self.path else self.module

    @property
    def texts(self) -> list[str]:
        """See `_Subject`."""
        return list(_texts(self.config))


def _texts(value: object) -> Iterator[str]:
    """Every text in a configuration."""
    if isinstance(value, str):
        yield value
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from _texts(entry)


_BUILT_IN = {"uv": ("uv.lock",), "pip": ("requirements.txt",)}
"""What `setup` knows by itself, with its lock files."""


class CommandSubject(_Subject):
    """`[subject]` of `kind = "command"`: a program that knows nothing of us.

    In `command`, `setup`, `check` and the values of `env`, six tokens are replaced and no other braces: ``{root}``,
    ``{rollouts}``, ``{out}``, ``{checkpoint}``, ``{step}`` and ``{python}`` (see docs/reference/trace.md).
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
    lock: tuple[Inside, ...] = Field(default=(), strict=False)
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
    path: Inside = Field(default=".", min_length=1)
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
    def program(self) -> CommandSubject:
        """See `_Subject`."""
        return self

    @property
    def own_python(self) -> str | None:
        """See `_Subject`."""
        return self.python

    @property
    def samples(self) -> bool:
        """See `_Subject`."""
        return False

    @property
    def tells(self) -> bool:
        """See `_Subject`."""
        return False

    @property
    def told_steps(self) -> bool:
        """See `_Subject`."""
        return "{step}" in canonical_json([self.command, self.setup, self.env])

    @property
    def check_line(self) -> str:
        """See `_Subject`."""
        return self.check

    @property
    def state_lines(self) -> list[str]:
        """See `_Subject`."""
        return [self.save, self.resume]

    @property
    def saves_between(self) -> bool:
        """See `_Subject`."""
        return False

    @property
    def most_environments(self) -> int:
        """See `_Subject`."""
        return self.environments

    @property
    def unset(self) -> set[str]:
        """See `_Subject`."""
        return super().unset | (set() if self.lock else {"lock"})

    @property
    def lines(self) -> list[str]:
        """Its command lines; those that it has none of are empty."""
        return [self.command, self.check, self.setup, self.save, self.resume]

    @property
    def texts(self) -> list[str]:
        """See `_Subject`."""
        return [word for line in self.lines for word in shlex.split(line)]

    @property
    def templates(self) -> list[str]:
        """See `_Subject`."""
        return [self.command, self.setup, self.check, self.save, self.resume, *self.env.values()]

    @property
    def saves_state(self) -> bool:
        """See `_Subject`."""
        return bool(self.save)

    @property
    def saves_checkpoint(self) -> bool:
        """See `_Subject`."""
        return "{checkpoint}" in self.command

    @property
    def locks(self) -> tuple[str, ...]:
        """See `_Subject`."""
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


class TrainerSubject(CommandSubject):
    """`[subject]` of `kind = "slime"`, `"miles"` or `"relax"`: the user's own launch of one of these trainers.

    `command` is the launch script or argv as the user runs it. What a replay needs is added to the trainer's own
    command line, wherever that is started, and it is checked that the trainer took it (`subjects.trainers`).
    """

    kind: System  # type: ignore[assignment]
    recorder: bool = True
    """Whether the recorder runs in its processes too; without it a trace is what the trainer itself writes."""
    entry: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), strict=False)
    """Files or modules whose process gets the flags; the trainer's own entry points by default."""
    flags: tuple[str, ...] = Field(default=(), strict=False)
    """More flags for the trainer, after those that a replay adds."""
    leave: tuple[Annotated[str, Field(pattern=r"^--[^=\s]+$")], ...] = Field(default=(), strict=False)
    """Flags that a replay would add and must not."""
    allow_pickle: tuple[str, ...] = Field(default=(), strict=False)
    """Classes whose objects dumps may hold, read as plain fields; no code of theirs runs here."""
    steps_per_rollout: int = Field(default=1, ge=1)
    """Optimizer updates that the trainer makes of one rollout."""

    @property
    def system(self) -> System:
        """See `_Subject`."""
        return self.kind

    @property
    def left_out(self) -> tuple[str, ...]:
        """See `_Subject`."""
        return self.leave

    @property
    def texts(self) -> list[str]:
        """See `_Subject`."""
        return [*super().texts, *self.flags]

    @property
    def recorded(self) -> bool:
        """See `_Subject`."""
        return self.recorder

    @property
    def unpickled(self) -> tuple[str, ...]:
        """See `_Subject`."""
        return self.allow_pickle

    @model_validator(mode="after")
    def _replays(self) -> TrainerSubject:
        if self.save or self.resume:
            raise ValueError("save and resume are for kind command: a replay of rollouts starts from the beginning")
        return self


def _kind(raw: object) -> str:
    return str(raw.get("kind", "core")) if isinstance(raw, dict) else str(getattr(raw, "kind", "core"))


TABLES: dict[str, type[_Subject]] = {
    name: table
    for table in (CoreSubject, CommandSubject, TrainerSubject)
    for name in get_args(table.model_fields["kind"].annotation)
}
"""The table of each kind: its `kind` says which it is for."""

if TYPE_CHECKING:
    Subject = CoreSubject | CommandSubject | TrainerSubject
else:
    Subject = Annotated[
        reduce(or_, (Annotated[table, Tag(name)] for name, table in TABLES.items())),
        Discriminator(_kind, custom_error_type="kind", custom_error_message=f"must be one of {', '.join(TABLES)}"),
    ]
