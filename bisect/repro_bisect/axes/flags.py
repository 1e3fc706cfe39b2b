"""A file of changes between two runs: variables, words of a command, keys of a trainer's own configuration.

```toml
order = "set"                                    # or "list": they were made one after the other

[[change]]
name = "determinism off"                         # optional
env = { NVTE_ALLOW_NONDETERMINISTIC_ALGO = "1" }

[[change]]
replace = { old = ["--lr", "1e-6"], new = ["--lr", "2e-6"] }
```
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from repro_golden.base.canonical import canonical_json
from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case
from repro_golden.case.tables import JsonTypes, Table, read_tables, unknown_key

__all__ = ["ALL", "NONE", "FlagChange", "FlagFile", "Replacement", "changed", "check_changes", "read_flags", "set_name"]

NONE, ALL = "none", "all"
"""Names of the two ends: without any change, and with every one."""

_NAMED = 3
"""Of how many changes a set is called by their names."""


class Replacement(Table):
    """`replace`."""

    old: tuple[str, ...] = Field(min_length=1, strict=False)
    """Words of the command that follow each other."""
    new: tuple[str, ...] = Field(strict=False)
    """What stands in their place."""


class FlagChange(Table):
    """`[[change]]`. Its parts are made in the order in which they stand here."""

    name: str = Field(default="", pattern=r"^\S(.*\S)?$|^$")
    """As it is shown; by default what it does."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables that are set."""
    unset: tuple[str, ...] = Field(default=(), strict=False)
    """Variables of the case's `subject.env` that are left out."""
    drop: tuple[str, ...] = Field(default=(), strict=False)
    """Words of the command that follow each other and are taken out."""
    replace: Replacement | None = None
    add: tuple[str, ...] = Field(default=(), strict=False)
    """Words put at the command's end."""
    config: JsonTypes = Field(default_factory=dict)
    """Keys of a core subject's `config`, with dots between levels, and their values."""

    @model_validator(mode="after")
    def _does_something(self) -> FlagChange:
        if not (self.env or self.unset or self.drop or self.replace or self.add or self.config):
            raise ValueError("changes nothing: give env, unset, add, drop, replace or config")
        return self

    @property
    def about(self) -> str:
        """What it does, in one line."""
        parts = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        parts += [f"unset {name}" for name in self.unset]
        parts += [f"drop {shlex.join(self.drop)}"] if self.drop else []
        parts += [f"{shlex.join(self.replace.old)} -> {shlex.join(self.replace.new)}"] if self.replace else []
        parts += [shlex.join(self.add)] if self.add else []
        parts += [f"{key}={canonical_json(value)}" for key, value in self.config.items()]
        return ", ".join(parts)

    @property
    def label(self) -> str:
        """Its name, or what it does."""
        return self.name or self.about


class FlagFile(Table):
    """A whole file."""

    order: Literal["list", "set"] = "set"
    """`set`: any part of them can be made. `list`: they were made one after the other."""
    change: tuple[FlagChange, ...] = Field(min_length=1, strict=False)

    @model_validator(mode="after")
    def _labels_differ(self) -> FlagFile:
        labels = [change.label for change in self.change]
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            raise ValueError(f"change: two are {twice!r}: give each a name of its own")
        if taken := {NONE, ALL}.intersection(labels):
            raise ValueError(f"change: {taken.pop()!r} is what an end is called: give it another name")
        return self


def read_flags(path: Path) -> FlagFile:
    """Read a file of changes.

    Raises:
        ReproError: missing, no TOML, a misspelt key (the nearest real one is named) or a value that does not serve.
    """
    return read_tables(path, FlagFile, f"no file {path}: write the changes there, each in a [[change]] table", _problem)


_TABLES: Mapping[str, type[Table]] = {"change": FlagChange, "replace": Replacement}


def _problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    location = problem["loc"]
    where = ".".join(str(part + 1) if isinstance(part, int) else part for part in location)
    if problem["type"] != "extra_forbidden":
        text = problem["msg"].removeprefix("Value error, ")
        return f"{where}: {text}" if where else text
    inside = next((str(part) for part in reversed(location[:-1]) if part in _TABLES), "")
    return unknown_key(where, str(location[-1]), _TABLES.get(inside, FlagFile).model_fields)


def set_name(changes: Sequence[FlagChange], chosen: Collection[int]) -> str:
    """What a set of changes is called: by its members, or where they are many by their numbers, from 1."""
    if len(chosen) in (0, len(changes)):
        return ALL if chosen else NONE
    numbers = sorted(chosen)
    plain = not any(" + " in change.label or change.label.startswith("changes ") for change in changes)
    if plain and len(numbers) <= _NAMED:
        return " + ".join(changes[k].label for k in numbers)
    runs: list[list[int]] = []
    for k in numbers:
        if runs and runs[-1][-1] == k - 1:
            runs[-1].append(k)
        else:
            runs.append([k])
    spans = [str(run[0] + 1) + (f"-{run[-1] + 1}" if len(run) > 1 else "") for run in runs]
    return f"changes {','.join(spans)} of {len(changes)}"


def check_changes(case: Case, changes: Sequence[FlagChange]) -> None:
    """Show that all changes together can be made to a case.

    Raises:
        ReproError: one of them cannot.
    """
    configured = "config" in type(case.subject).model_fields
    for change in changes:
        if change.config and not configured:
            raise ReproError(f"{change.label}: config is for kind core; of a command say add, drop, replace or env")
        if (change.add or change.drop or change.replace) and configured:
            raise ReproError(f"{change.label}: add, drop and replace are for kind command; {case.name} has config")
    changed(case, changes)


def _places(argv: Sequence[str], part: Sequence[str]) -> list[int]:
    """Where words follow each other on a command line."""
    return [k for k in range(len(argv) - len(part) + 1) if list(argv[k : k + len(part)]) == list(part)]


def changed(case: Case, changes: Sequence[FlagChange]) -> Case:
    """The case with changes made one after the other.

    Raises:
        ReproError: one of them does not fit what those before it left.
    """
    subject = case.subject.model_dump()
    for change in changes:
        _change(subject, change)
    try:
        valid = type(case.subject).model_validate(subject)
    except ValidationError as error:
        text = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ReproError(f"{set_name(changes, range(len(changes)))}: the case no longer serves: {text}") from None
    return case.model_copy(update={"subject": valid})


def _change(subject: dict[str, Any], change: FlagChange) -> None:
    subject["env"] = subject["env"] | change.env
    for name in change.unset:
        if name not in subject["env"]:
            raise ReproError(f"{change.label}: subject.env does not set {name}: name one that it sets")
        subject["env"] = {k: v for k, v in subject["env"].items() if k != name}
    for key, value in change.config.items():
        subject["config"] = _with_key(subject["config"], key.split("."), value, f"{change.label}: {key}")
    if "flags" in subject:  # of a trainer whose launch hands no words on
        subject["flags"] = shlex.split(
            _edited(shlex.join(subject["flags"]), change, shell=False, needed=True, flags=True)
        )
    elif change.add or change.drop or change.replace:
        for line in ("command", "save", "resume"):
            if subject[line]:
                subject[line] = _edited(subject[line], change, shell=subject["shell"], needed=line == "command")


def _edited(text: str, change: FlagChange, *, shell: bool, needed: bool, flags: bool = False) -> str:
    """A command line with its words dropped, replaced and added; what is not in a line that may lack it stays out."""
    if shell:  # a shell's line has no words of its own to look for
        if change.drop or change.replace:
            raise ReproError(f"{change.label}: drop and replace need a command of words: this one is a shell's line")
        return f"{text} {shlex.join(change.add)}"
    argv, where = shlex.split(text), "subject.flags" if flags else "the command"
    for old, new in ((change.drop, ()), *([(change.replace.old, change.replace.new)] if change.replace else [])):
        places = _places(argv, old) if old else []
        if old and not places and needed:
            raise ReproError(f"{change.label}: {shlex.join(old)} is not in {where}: correct it")
        if len(places) > 1:
            raise ReproError(
                f"{change.label}: {shlex.join(old)} stands {len(places)} times in {where}: leave it there once"
            )
        for at in places:
            argv[at : at + len(old)] = new
    return shlex.join([*argv, *change.add])


def _with_key(config: Mapping[str, Any], path: Sequence[str], value: Any, what: str) -> dict[str, Any]:
    """A configuration with the value at a path of keys; levels that are missing are made."""
    first, *rest = path
    if not first:
        raise ReproError(f"{what} has an empty part: write keys with one dot between levels")
    if not rest:
        return {**config, first: value}
    below = config.get(first, {})
    if not isinstance(below, Mapping):
        raise ReproError(f"{what} leads through {first}, which is no table")
    return {**config, first: _with_key(below, rest, value, what)}
