"""`repro doctor`: what the debugging guides tell people to check by hand, checked."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from repro.output import emit, json_option

if TYPE_CHECKING:
    from repro_golden.base.checks import Rule

__all__ = ["doctor"]


class _Words(click.Command):
    """A command whose words after ``--`` are a trainer's command line, also where no path stands before it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Split at ``--`` before click forgets where it stood."""
        own_args, argv = args, list[str]()
        if "--" in args:
            at = args.index("--")
            own_args, argv = args[:at], args[at + 1 :]
        if "" in own_args:
            from repro_golden.base.errors import ReproError

            raise ReproError("an empty PATH names nothing")
        ctx.obj = tuple(argv)
        return super().parse_args(ctx, own_args)


@click.command(cls=_Words, short_help="What is wrong with a launch, a checkpoint, a dump, a log?")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="[PATH]... [-- ARGV...]")
@click.option(
    "--python", metavar="PYTHON", help="The interpreter that trains: its packages and variables are examined."
)
@click.option("--reward", metavar="MODULE:FUNCTION", help="Also call this reward function on the dumps' samples.")
@click.option("--only", multiple=True, metavar="RULE", help="Try this rule alone; may be repeated.")
@click.option("--ignore", multiple=True, metavar="RULE", help="Leave this rule out; may be repeated.")
@click.option("--explain", metavar="RULE", help="Say what a rule looks for, why, and where it comes from.")
@click.option("--list", "listed", is_flag=True, help="List every rule.")
@json_option
@click.pass_context
def doctor(
    ctx: click.Context,
    paths: tuple[Path, ...],
    python: str | None,
    reward: str | None,
    only: tuple[str, ...],
    ignore: tuple[str, ...],
    explain: str | None,
    listed: bool,
    as_json: bool,
) -> int:
    """Examine what there is of a run, and say what is wrong, where, why, and what to do.

    PATH is a launch script, a checkpoint of Megatron or Hugging Face, rollout or train dumps, a trace, a golden run, a
    log, a Ray session folder, a config.json, prompt data, a package list, a case, or a folder of such. ARGV is a
    trainer's command line. Given together, they are checked against each other.

    Exit codes: 0; 1 where an error is found; 2 where nothing can be examined.
    """
    from repro.doctor.show import rule_mapping, rule_text, rules_text
    from repro_golden.base.extras import require

    require("the doctor", "doctor")
    if listed or explain:
        from repro.doctor.examine import every_rule

        rules = list(every_rule().values()) if listed else [_rule(explain or "")]
        emit(as_json, [rule_mapping(rule) for rule in rules], rules_text(rules) if listed else rule_text(rules[0]))
        return 0
    return _examined(paths, ctx.obj, (python, reward), (only, ignore), as_json)


def _examined(
    paths: tuple[Path, ...],
    argv: tuple[str, ...],
    asked: tuple[str | None, str | None],
    rules: tuple[tuple[str, ...], tuple[str, ...]],
    as_json: bool,
) -> int:
    from repro.doctor.examine import examine, look
    from repro.doctor.show import examination_text
    from repro_golden.base.errors import ReproError

    python, reward = asked
    if set(asked_only := rules[0]) & set(rules[1]):
        raise ReproError(f"--only and --ignore both name {next(r for r in asked_only if r in rules[1])}: leave out one")
    only, ignore = ([_rule(name).id for name in names] for names in rules)
    more: list[object] = []
    if argv:
        from repro.doctor.artefacts.launches.scripts import launch_of_argv

        launch = launch_of_argv(argv)
        if not launch.flags and (launch.trainer or not launch.entry):
            raise ReproError(
                f"{argv[0]} ... is no trainer's command line: no word of it begins with --; give the trainer's flags "
                "too, or the script that does"
            )
        more.append(launch)
    if python:
        from repro.doctor.artefacts.machine import machine_of

        more.append(machine_of(python))
    if not paths and not more:
        raise ReproError("nothing to examine: name a PATH, put a command line after --, or give --python")
    seen = look(paths)
    if reward:
        from repro.doctor.artefacts.reward import reward_function

        artefacts = [*more, *(artefact for path in seen for artefact in path.artefacts)]
        more.append(reward_function(reward, python, Path.cwd(), _arguments(artefacts)))
    examination = examine(seen, more, only=only, ignore=ignore)
    if not examination.tried and not examination.of("error"):
        why = [f"{finding.where.path}: {finding.message}" for finding in examination.findings[:1]]
        raise ReproError(f"nothing could be examined{': ' if why else ''}{''.join(why)}")
    data = {
        "seen": [{"path": str(entry.path), "kind": entry.kind, "problem": entry.problem} for entry in examination.seen],
        "findings": [finding.to_mapping() for finding in examination.findings],
        "tried": list(examination.tried),
    }
    text = examination_text(examination)
    colours = sys.stdout is not None and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    emit(as_json, data, text if colours else click.unstyle(text), styled=colours)
    return 1 if examination.of("error") else 0


def _arguments(artefacts: list[object]) -> dict[str, object]:
    """A launch's flags as the trainer's `args` would have them: numbers as such, a flag without a value as True."""
    from repro.doctor.artefacts.kinds import Launch

    arguments: dict[str, object] = {}
    for launch in (artefact for artefact in artefacts if isinstance(artefact, Launch)):
        for name in launch.flags:
            value: object = launch.value(name) if launch.flags[name].values else True
            number = launch.number(name)
            if number is not None:
                value = int(number) if number == int(number) else number
            arguments[name.lstrip("-").replace("-", "_")] = value
    return arguments


def _rule(name: str) -> Rule:
    import difflib

    from repro.doctor.examine import every_rule
    from repro_golden.base.errors import ReproError

    rules = every_rule()
    if name not in rules:
        near = difflib.get_close_matches(name, rules, 1)
        raise ReproError(
            f"no rule is called {name}" + (f": did you mean {near[0]}?" if near else ": `repro doctor --list` has all")
        )
    return rules[name]
