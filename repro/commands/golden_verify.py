"""`repro golden verify`: replay golden runs; also as a DVC stage that keeps metrics and plots."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from repro.output import emit, json_option, progress, vary_option

__all__ = ["step_records", "verify"]

_SHOWN = 5
"""Broken bounds that a terminal shows."""


@click.command(short_help="Replay a case and compare, signal by signal.")
@click.argument("case", required=False)
@click.option("--all", "every", is_flag=True, help="Every case of the repository.")
@click.option("--metrics", type=click.Path(path_type=Path), help="Also write a small JSON file for `dvc metrics diff`.")
@click.option("--plots", type=click.Path(path_type=Path), help="Also write every step as JSON for `dvc plots diff`.")
@click.option(
    "--exit-zero", is_flag=True, help="Exit 0 also where numbers differ, so that a DVC stage keeps what it measured."
)
@vary_option
@json_option
def verify(
    case: str | None,
    every: bool,
    metrics: Path | None,
    plots: Path | None,
    exit_zero: bool,
    vary: tuple[str, ...],
    as_json: bool,
) -> int:
    """Replay CASE on the working tree and compare it with its golden run, signal by signal."""
    from repro_golden.base.canonical import write_atomic
    from repro_golden.base.errors import MachineFailureError, NotVerifiableError, ReproError
    from repro_golden.case.file import find_case
    from repro_golden.repository.checkout import find_checkout
    from repro_golden.runs.verify import verify as run_verify
    from repro_golden.store.golden import CASE_LOST, Store
    from repro_golden.store.rollouts import engine_text

    if every and case:
        raise ReproError(f"--all verifies every case, {case} too: give one of them")
    checkout = find_checkout(Path.cwd())
    guarded = Store(checkout.root).guarded() if every else {}
    names = list(guarded) or [find_case(checkout.root, case).name]
    results: dict[str, Any] = {}
    small: dict[str, Any] = {}
    steps: dict[str, Any] = {}
    texts, codes = [], []

    def unanswered(name: str, error: ReproError) -> None:
        key, label = (
            ("not_verifiable", "not verifiable") if isinstance(error, NotVerifiableError) else ("error", "error")
        )
        results[name] = {"agrees": None, key: str(error)}
        texts.append(f"{name}: {label}: {error}")
        codes.append(error.exit_code)

    for n, name in enumerate(names, start=1):
        of = f"case {n} of {len(names)}: " if len(names) > 1 else ""
        try:
            if every and guarded[name] is None:
                raise NotVerifiableError(CASE_LOST.format(name))
            this_case = find_case(checkout.root, name)
            with progress("replaying") as say:
                result = run_verify(checkout, this_case, _counted(say, of), vary)
        except MachineFailureError:
            raise
        except ReproError as error:
            if not every:
                raise
            unanswered(name, error)
            continue
        results[name] = result.to_mapping()
        small[name] = _small(result)
        steps[name] = step_records(name, result)
        texts.append(f"{name}: {_text(result)}")
        if engine := result.golden.record.get("engine"):
            texts.append(f"its rollouts are by {engine_text(engine)}")
        codes.append(0 if result.agrees else 1)
    for path, data in ((metrics, small), (plots, steps)):
        if path:
            write_atomic(path, json.dumps(data, indent=2, allow_nan=False) + "\n")
    options = "".join(f" --vary {part}" for part in vary)
    texts.append(f"reproduce with: repro golden verify {'--all' if every else names[0]}{options}")
    emit(as_json, results, "\n".join(texts))
    # where nothing could be judged there is nothing to keep, and silence is no agreement; nor is an error
    if exit_zero and small and ReproError.exit_code not in codes:
        return 0
    return next((code for code in (1, 2, 3) if code in codes), 0)


def _counted(say: Callable[[str], None], of: str) -> Callable[[str], None]:
    return lambda line: say(f"{of}{line}")


def _text(result: Any) -> str:
    """What a replay found: a broken bound of the mismatch first, for that may be all that differs."""
    from repro.report.mismatch import mismatch_text
    from repro.text import comparison_text

    lines = [f"differs: train/rollout mismatch out of bounds at {breach}" for breach in result.broken[:_SHOWN]]
    lines += [f"and {len(result.broken) - _SHOWN} more: see --json"] if len(result.broken) > _SHOWN else []
    lines.append(comparison_text(result.comparison) if not lines else f"bits: {comparison_text(result.comparison)}")
    table = mismatch_text(result.mismatch.to_mapping()) if result.mismatch else ""
    across = [f"across {difference}" for difference in result.varied]
    across += [f"note: the golden run was recorded with other {result.since}, which may be why"] if result.since else []
    return "\n".join([*lines, *across]) + (f"\n\n{table}" if table else "")


def _small(result: Any) -> dict[str, float]:
    """What `dvc metrics diff` can show: plain finite numbers."""
    d = result.comparison.divergence
    comparison = result.comparison
    step = result.golden.trace.steps[comparison.steps - 1].step  # where it ends with NaN, no older number stands for it
    last = {m.metric: m.b for m in comparison.metrics if m.step == step and m.b is not None and math.isfinite(m.b)}
    return dict(sorted(last.items())) | {
        "agrees": int(result.agrees),
        "steps": result.comparison.steps,
        "divergent_step": d.step if d else -1,
    }


def step_records(case: str, result: Any) -> list[dict[str, float | None]]:
    """One record a step for `dvc plots`, in the shape that it merges into one table for all cases.

    DVC lays the lists of a JSON file side by side, so names begin with the case's and `step` alone is shared. It drops
    a list in which a record lacks a key: what is absent, or is NaN or infinite and has no place in JSON, is null.
    """
    comparison, golden = result.comparison, result.golden.trace
    numbers = [record.step for record in golden.steps[: comparison.steps]]
    replayed: dict[int, dict[str, float | None]] = {step: {} for step in numbers}
    for change in comparison.metrics:
        replayed[change.step][change.metric] = change.b
    names = sorted({c.metric for c in comparison.metrics if c.b is not None})
    first = min((step for step, same in result.agreeing.items() if not same), default=math.inf)
    # equal bits are an equal policy, whose KL is 0 without being computed; a run without log-probs has none
    same = (0.0, 0.0) if comparison.kl or golden.row(len(numbers) - 1, "forward", "log_probs") else (None, None)
    records = []
    for step in numbers:
        k1, k3 = comparison.kl.get(step, same if step < first else (None, None))
        builtin_metrics: dict[str, float | None] = {
            "golden_kl_k1": k1,
            "golden_kl_k3": k3,
            "bits_agree": int(result.agreeing[step]),  # last, which is what DVC draws where a plot names no column
        }
        metrics = {n if n not in (*builtin_metrics, "finite") else f"metric/{n}": replayed[step].get(n) for n in names}
        values = metrics | builtin_metrics
        finite = all(v is None or math.isfinite(v) for v in values.values())
        clean = {n: v if v is None or math.isfinite(v) else None for n, v in values.items()}
        records.append({"step": step} | {f"{case}/{n}": v for n, v in ({"finite": int(finite)} | clean).items()})
    return records
