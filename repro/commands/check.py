"""`repro check`: questions put to one part of a run, without a golden run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from repro.commands.again import again
from repro.commands.rollout.group import engine_options
from repro.lazy_group import LazyGroup
from repro.output import emit, json_option, progress

if TYPE_CHECKING:
    from repro_golden.engine_checks.command import RolloutChecks
    from repro_golden.engine_checks.findings import EngineCheck

__all__ = ["check"]


@click.group(cls=LazyGroup)
def check() -> None:
    """Check one part of a run."""


@check.command(short_help="Does a rollout engine repeat its bits?")
@click.argument("case", required=False)
@engine_options
@click.option("--only", multiple=True, metavar="CHECK", help="Make this check alone; may be given again.")
@click.option(
    "--expect", multiple=True, metavar="CHECK=equal|differs|any", help="What must come out of a check instead."
)
@json_option
def rollout(
    case: str | None,
    engine: str | None,
    sglang_url: str | None,
    pairs: tuple[str, ...],
    only: tuple[str, ...],
    expect: tuple[str, ...],
    as_json: bool,
) -> int:
    """Start the rollout engine of CASE with the weights that its training starts from, and compare what it samples.

    Run to run, alone and in batches of 2, 8 and 32 and shuffled, with a cold and a warm prefix cache, with seeds at
    temperature 1, before and after its memory is released, and after a weight update and its reversal. All bits of
    tokens, log-probs and the prompts' log-probs count.

    Exit codes: 0 all as wanted; 1 a check comes out otherwise; 2 one could not be made; 3 none applies.
    """
    from repro_golden.case.file import find_case
    from repro_golden.case.tables import known_name
    from repro_golden.engine_checks.command import check_rollouts
    from repro_golden.engine_checks.findings import expectations
    from repro_golden.repository.checkout import find_checkout
    from repro_golden.runs.capture import Capture, settings_of

    chosen = [known_name(name) for name in only]
    expected = expectations(dict(_pair(text) for text in expect))
    checkout = find_checkout(Path.cwd())
    this_case = find_case(checkout.root, case)
    asked = Capture(settings_of(engine, sglang_url, pairs)).case(this_case)
    with progress("checking") as say:
        say(f"checking the rollout engine of {this_case.name}")
        result = check_rollouts(asked, checkout.place(asked), only=chosen, expected=expected)
    command = again(case=this_case.name)
    emit(as_json, result.to_mapping() | {"reproduce": command}, f"{_text(result)}\nreproduce with: {command}")
    return result.exit_code


def _pair(text: str) -> tuple[str, str]:
    from repro_golden.base.errors import ReproError

    name, equals, word = text.partition("=")
    if not equals:
        raise ReproError(f"--expect {text} is not CHECK=WORD: write --expect batch-of-8=differs")
    return name, word


def _text(result: RolloutChecks) -> str:
    from repro.report.pieces import clean
    from repro.text import table

    rows = [[finding.name, _word(finding), *_place(finding), clean(finding.detail)] for finding in result.findings]
    return "\n".join([
        f"{result.case}: {_verdict(result)}",
        f"engine: {clean(result.engine)}",
        table(("check", "result", "where first", "size", "what was compared"), rows),
    ])  # fmt: skip


def _verdict(result: RolloutChecks) -> str:
    """The answer in one line, what is wrong first."""
    from repro.text import count

    applied = [finding for finding in result.findings if finding.outcome != "not applicable"]
    failed = [finding.name for finding in applied if finding.outcome == "failed"]
    wrong = [finding.name for finding in applied if not finding.passed and finding.outcome != "failed"]
    parts = [f"not as wanted: {', '.join(wrong)}"] if wrong else []
    parts += [f"could not be made: {', '.join(failed)}"] if failed else []
    right = len(applied) - len(wrong) - len(failed)
    parts += [f"{count(right, 'check')} {'is' if right == 1 else 'are'} as wanted" if applied else "no check applies"]
    return "; ".join(parts)


def _word(finding: EngineCheck) -> str:
    """The outcome, and whether it is what must come out."""
    if finding.outcome == "differs" and finding.expected == "differs":
        return "differs, as it must"
    if finding.outcome == "equal" and finding.expected == "differs":
        return "no effect"
    return f"{finding.outcome}, either will do" if finding.expected == "any" and finding.likeness else finding.outcome


def _place(finding: EngineCheck) -> tuple[str, str]:
    """Where it differs first, and by how much there."""
    first = finding.likeness.first if finding.likeness and finding.outcome == "differs" else None
    return (first.where, first.size) if first else ("", "")
