"""What commands that replay have in common: the case that is meant, or the command in its place."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from repro.commands.again import again
from repro.output import parameters
from repro_golden.base.clean import one_line

if TYPE_CHECKING:
    from repro_golden.case.command_line import CommandLine
    from repro_golden.case.file import Case
    from repro_golden.repository.checkout import Checkout

__all__ = ["DashedCommand", "asked", "case_of", "command_options", "say_python"]

F = TypeVar("F", bound=Callable[..., Any])


class DashedCommand(click.Command):
    """A command of `command_options`: what follows the dashes is the program, and never another argument."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what stands before the dashes."""
        at = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(ctx, args[:at])
        if args[at + 1 :]:
            ctx.params["command"] = tuple(args[at + 1 :])
        return rest


def command_options(function: F) -> F:
    """``[-- CMD...]`` and what a case would say of it, given as one `CommandLine` called `line`."""

    @functools.wraps(function)
    def with_line(
        *args: Any,
        command: tuple[str, ...],
        steps: int | None,
        ranks: int,
        gpus: int,
        metrics: tuple[str, ...],
        pass_env: tuple[str, ...],
        link: tuple[Path, ...],
        **more: Any,
    ) -> Any:
        from repro_golden.base.errors import ReproError
        from repro_golden.case.command_line import CommandLine

        line = CommandLine(command, steps, ranks, gpus, metrics, pass_env, link)
        try:
            return function(*args, line=line, **more)
        except ReproError as error:
            if command:
                error.args = (f"{error}{_corrected(str(error), link)}",)
            raise

    number, decorated = click.IntRange(min=1), cast("F", with_line)
    return parameters(
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
        click.option(
            "--link", multiple=True, type=click.Path(path_type=Path),
            help="With CMD: a file or folder that git ignores, for every worktree.",
        ),
    )(decorated)  # fmt: skip


def _corrected(message: str, link: tuple[Path, ...]) -> str:
    """The command that is running with what an error says to link, to be run from the repository's root."""
    from repro_golden.repository.checkout import find_checkout
    from repro_golden.subjects.missing import links_in

    if not (names := links_in(message)):
        return ""
    root = find_checkout(Path.cwd()).root
    return f"; run {again(root, link=(*link, *(root / name for name in names)))}"


def case_of(checkout: Checkout, name: str | None, line: CommandLine) -> Case:
    """The case called `name`, the only one, or one made of a command.

    Raises:
        ReproError: both are given, or what belongs to a command without one.
    """
    from repro_golden.case.file import find_case

    line.check(beside=name)
    if line.argv:
        case = line.case(checkout.root)
        say_python(case, line)
        return case
    return find_case(checkout.root, name)


def asked(root: Path, line: CommandLine, when: str | None = None) -> str:
    """A dash and eight digits for what the name of no case tells: a command, or a predicate; '' where neither is given.

    Args:
        root: The checkout.
        line: The command, if there is one.
        when: The predicate, if one is given.
    """
    from repro_golden.base.canonical import canonical_json, digest

    case = canonical_json(line.case(root).canonical()) if line.argv else ""
    return f"-{digest('asked', case, when or '')[:8]}" if case or when else ""


def say_python(case: Case, line: CommandLine) -> None:
    """Say which Python a command's program runs in: where there are several, it decides what is compared.

    Of a program that starts one by itself (`uv run`, a script) it is said which one PATH has for it.
    """
    python = case.subject.own_python or sys.executable
    text = f"the program runs in {python}" if line.names_python else f"the program finds {python} on PATH"
    print(one_line(f"repro: {text}"), file=sys.stderr)
