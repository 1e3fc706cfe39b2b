"""`repro rollout`: record rollouts, show what was recorded, and turn it into another form."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from repro.commands.rollout.convert import convert, write_dumps
from repro.commands.rollout.show import facts, facts_text, show
from repro.lazy_group import LazyGroup
from repro.output import emit, json_option, parameters, progress
from repro_golden.base.systems import SYSTEMS

if TYPE_CHECKING:
    from repro_golden.store.rollouts import Rollouts

__all__ = ["engine_options", "rollout"]


@click.group(cls=LazyGroup)
def rollout() -> None:
    """Record rollouts, show what was recorded, and turn it into another form."""


engine_options = parameters(
    click.option("--engine", type=click.Choice(["policy", "sglang"]), help="What samples; the case's by default."),
    click.option("--sglang-url", metavar="URL", help="A running SGLang server or router."),
    click.option(
        "--set", "pairs", multiple=True, metavar="KEY=VALUE", help="Another value of a key of [subject.config]."
    ),
)
"""``--engine``, ``--sglang-url`` and ``--set``: what samples, where that is not what the case says."""


@rollout.command(short_help="Capture a case's rollouts.")
@click.argument("case", required=False)
@engine_options
@click.option("--debug-rollout-only", is_flag=True, help="Train nothing: sample all with the starting weights.")
@click.option("--out", type=click.Path(path_type=Path), help="A folder to write to, in place of the case's own.")
@click.option("--format", "form", type=click.Choice(SYSTEMS), help="Write dumps for this trainer too, into --out.")
@click.option("--replace", is_flag=True, help="Rollouts that are there already may go.")
@json_option
def record(
    case: str | None,
    engine: str | None,
    sglang_url: str | None,
    pairs: tuple[str, ...],
    debug_rollout_only: bool,
    out: Path | None,
    form: str | None,
    replace: bool,
    as_json: bool,
) -> int:
    """Capture the rollouts of CASE, sampled as it trains, and keep them where the case says."""
    from repro_golden.base.errors import ReproError
    from repro_golden.case.file import find_case
    from repro_golden.repository.checkout import find_checkout
    from repro_golden.runs.capture import Capture, record_rollouts, settings_of

    checkout = find_checkout(Path.cwd())
    this_case = find_case(checkout.root, case)
    if form is not None and out is None:
        raise ReproError(f"--format {form} writes {{rollout_id}}.pt into the folder of --out: add --out FOLDER")
    if form is not None and not this_case.subject.samples:
        raise ReproError(
            f"{this_case.name} is of kind {this_case.subject.kind}, whose rollouts are its own files: leave --format "
            f"out, and `repro rollout convert FOLDER --format {form} --out OTHER` afterwards"
        )
    how = Capture(settings_of(engine, sglang_url, pairs), only=debug_rollout_only)
    with progress("capturing") as say:
        rollouts = record_rollouts(checkout, this_case, how, say, out=out and out.absolute(), replace=replace)
    details, summary = _recorded(rollouts, form, out)
    data = {"rollouts": str(rollouts.directory), "digest": rollouts.digest, **details}
    golden = "--sparse " * checkout.is_sparse + os.path.relpath(checkout.root / "golden")
    then = f"next: git add {golden} && git commit; `repro golden record {this_case.name}` trains on them\n"
    then = "" if out else then
    text = f"{len(rollouts)} rollouts at {rollouts.directory}\n{summary}\n{then}look at them with: repro rollout show "
    emit(as_json, data, text + (str(out) if out else this_case.name))
    return 0


def _recorded(rollouts: Rollouts, system: str | None, out: Path | None) -> tuple[dict[str, Any], str]:
    """What is said of the rollouts, as data and as text; writes dumps beside them where a form was asked for."""
    from repro_golden.store.rollouts import RolloutSet

    if not isinstance(rollouts, RolloutSet):
        count = len(rollouts)
        return {"dumps": count}, f"{count} rollout dump{'s' * (count != 1)}, as the trainer wrote them"
    sampling_facts = facts(rollouts)
    text = facts_text(sampling_facts)
    if system is None or out is None:
        return sampling_facts, text
    lost = write_dumps(rollouts, system, out)
    without = f" (without {', '.join(lost)}, which its form has no place for)" if lost else ""
    return sampling_facts | {"format": system, "lost": lost}, f"{text}\ndumps for {system} beside them{without}"


rollout.add_command(show)
rollout.add_command(convert)
