"""`repro rollout`: record rollouts, and show what was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from repro.output import emit, json_option, progress

__all__ = ["engine_options", "rollout"]


@click.group()
def rollout() -> None:
    """Record rollouts, and show what was recorded."""


def engine_options(function: Any) -> Any:
    """``--engine``, ``--sglang-url`` and ``--set``: what samples, where that is not what the case says."""
    for option in (
        click.option(
            "--set", "words", multiple=True, metavar="KEY=VALUE", help="Another value of a key of [subject.config]."
        ),
        click.option("--sglang-url", metavar="URL", help="A running SGLang server or router."),
        click.option("--engine", type=click.Choice(["policy", "sglang"]), help="What samples; the case's by default."),
    ):
        function = option(function)
    return function


@rollout.command(short_help="Capture a case's rollouts.")
@click.argument("case", required=False)
@engine_options
@click.option("--debug-rollout-only", is_flag=True, help="Train nothing: sample all with the starting weights.")
@click.option("--out", type=click.Path(path_type=Path), help="A folder to write to, in place of the case's own.")
@click.option("--replace", is_flag=True, help="Rollouts that are there already may go.")
@json_option
def record(
    case: str | None,
    engine: str | None,
    sglang_url: str | None,
    words: tuple[str, ...],
    debug_rollout_only: bool,
    out: Path | None,
    replace: bool,
    as_json: bool,
) -> int:
    """Capture the rollouts of CASE, sampled as it trains, and keep them where the case says."""
    from repro_golden.capture import Capture, record_rollouts, settings_of
    from repro_golden.case import find_case
    from repro_golden.checkout import find_checkout

    checkout = find_checkout(Path.cwd())
    found = find_case(checkout.root, case)
    how = Capture(settings_of(engine, sglang_url, words), only=debug_rollout_only)
    with progress("capturing") as say:
        kept = record_rollouts(checkout, found, how, say, out=out and out.absolute(), replace=replace)
    shown = _facts(kept)
    data = {"rollouts": str(kept.directory), "digest": kept.digest, **shown}
    then = "" if out else f"next: git add golden && git commit; `repro golden record {found.name}` trains on them\n"
    text = f"{len(kept)} rollouts at {kept.directory}\n{_text(shown)}\n{then}look at them with: repro rollout show "
    emit(as_json, data, text + (str(out) if out else found.name))
    return 0


@rollout.command(short_help="What recorded rollouts hold.")
@click.argument("rollouts")
@json_option
def show(rollouts: str, as_json: bool) -> int:
    """Show recorded rollouts: ROLLOUTS is a folder, or the name of a case."""
    from repro.text import number, table
    from repro_golden.rollouts import RolloutSet

    kept = RolloutSet(Path(rollouts)) if Path(rollouts).is_dir() else _of_case(rollouts)
    every = [kept.read(k) for k in range(len(kept))]
    rows = [_row(k, one) for k, one in enumerate(every)]
    names = list(rows[0]) if rows else []
    shown = _facts(kept)
    lines = [f"{len(kept)} rollouts at {kept.directory}", f"digest {kept.digest}", _text(shown), ""]
    cells = [[number(row[n]) if isinstance(row[n], float) else str(row[n]) for n in names] for row in rows]
    emit(as_json, {"digest": kept.digest, **shown, "each": rows}, "\n".join([*lines, table(names, cells)]))
    return 0


def _of_case(name: str) -> Any:
    from repro_golden.case import find_case
    from repro_golden.checkout import find_checkout
    from repro_golden.errors import ReproError
    from repro_golden.rollouts import RolloutSet
    from repro_golden.store import Store

    checkout = find_checkout(Path.cwd())
    found = Store(checkout.root).rollouts(find_case(checkout.root, name))
    if not isinstance(found, RolloutSet):
        raise ReproError(f"the rollouts of {name} are its command's own files: `repro rollout show` reads ours")
    return found


def _facts(kept: Any) -> dict[str, Any]:
    """How the first rollout was sampled."""
    meta = kept.read(0).meta if len(kept) else {}
    return {key: meta.get(key) for key in ("engine", "sampling", "weights")}


def _text(facts: dict[str, Any]) -> str:
    engine, sampling = facts["engine"], facts["sampling"]
    lines = ["engine: the trained policy itself"]
    if engine:
        flags = " ".join(f"{key}={value}" for key, value in engine["flags"].items())
        lines = [f"engine: {engine['name']} {engine['version']} on {engine['device']}", f"flags: {flags}"]
        lines += [f"rests on a stand-in: {text}" for text in engine["stand_ins"]]
        lines.append(f"weights of the first rollout: {facts['weights'] or 'not known'}")
    if sampling:
        lines.append("sampling: " + " ".join(f"{key}={value}" for key, value in sampling.items()))
    return "\n".join(lines)


def _row(number: int, one: Any) -> dict[str, Any]:
    meta, t = one.meta, one.tensors
    samples = len(t["rewards"])
    statuses = meta.get("statuses", [])
    return {
        "rollout": number,
        "samples": samples,
        "tokens": len(t["tokens"]),
        "response tokens": int(t["response_lengths"].sum()),
        "truncated": sum(status == "truncated" for status in statuses),
        "mean reward": float(t["rewards"].double().mean()),
        "weight version": meta.get("weight_version", ""),
        "digest": one.digest[:12],
    }
