"""What commands that replay have in common: the case that is meant, and the options that all of them take."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from repro_golden.base.clean import one_line

if TYPE_CHECKING:
    from repro_golden.case.file import Case
    from repro_golden.repository.checkout import Checkout

__all__ = ["case_of", "command_options", "say_python"]

F = TypeVar("F", bound=Callable[..., Any])

OPEN_END = 1_000_000
"""Steps of a command that is to be replayed to its own end."""


def command_options(function: F) -> F:
    """``[-- CMD...]`` and what a case would say of it: ``--steps``, ``--ranks``, ``--gpus``, ``--metric`` and so on."""
    number = click.IntRange(min=1)
    for option in reversed((
        click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD...]"),
        click.option("--steps", type=number, help="With CMD: steps to replay; by default all it makes."),
        click.option("--ranks", type=number, default=1, show_default=True, help="With CMD: processes."),
        click.option(
            "--gpus", type=click.IntRange(min=0), default=0, show_default=True, help="With CMD: GPUs of a probe."
        ),
        click.option(
            "--metric", "metrics", multiple=True, help="With CMD: pattern of output whose named groups are metrics."
        ),
        click.option(
            "--pass-env", multiple=True, metavar="NAME", help="With CMD: a variable it gets though it looks secret."
        ),
    )):  # fmt: skip
        function = option(function)
    return function


def case_of(
    checkout: Checkout,
    name: str | None,
    command: tuple[str, ...],
    steps: int | None,
    resources: dict[str, int],
    metrics: tuple[str, ...],
    pass_env: tuple[str, ...] = (),
) -> Case:
    """The case called `name`, the only one, or one made of a command.

    Raises:
        ReproError: both are given, or what belongs to a command without one.
    """
    from repro_golden.base.errors import ReproError
    from repro_golden.case.file import command_case, find_case

    if command and name:
        raise ReproError("--case and a command after -- exclude each other: give one of them")
    if not command and (steps or metrics or pass_env or resources != {"ranks": 1, "gpus": 0}):
        raise ReproError(
            "--steps, --ranks, --gpus, --metric and --pass-env are for a command after --: a case says them itself"
        )
    if command:
        case = command_case(checkout.root, "command", command, steps or OPEN_END, resources, metrics, pass_env)
        say_python(case)
        return case
    return find_case(checkout.root, name)


def say_python(case: Case) -> None:
    """Say which Python a command's program runs in: where there are several, it decides what is compared."""
    python = case.subject.program.python if case.subject.program else None
    print(one_line(f"repro: the program runs in {python or sys.executable}"), file=sys.stderr)
