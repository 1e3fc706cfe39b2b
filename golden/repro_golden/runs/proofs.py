"""What a run must show of itself before it becomes a golden run, each as a pure judgement over finished traces."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from repro_golden.base.canonical import encode_float
from repro_golden.base.checks import Proof
from repro_golden.base.errors import ReproError
from repro_golden.base.observed import tellings
from repro_golden.compare.traces import first_difference, on_purpose
from repro_golden.trace import Row, Trace
from repro_golden.trace.checkpoints import checkpoint_content
from repro_golden.trace.families import optimizer_of, plain, skipped
from repro_golden.trace.model import DIGEST
from repro_golden.trace.tensor_difference import decode
from repro_golden.trace.token_columns import column_parts, kept, part_of

__all__ = [
    "first_step_checks",
    "measure_noise",
    "not_vacuous",
    "perturbations",
    "reproduced",
    "seen_perturbation",
    "shows_policies",
    "undisturbed",
]


def reproduced(first: Trace, second: Trace, steps: int, fix: str) -> Proof:
    """A second fresh process gives the same bits, for all of the `steps` that were to be repeated."""
    name = "reproduced by a second process"
    if len(second.steps) < steps or len(first.steps) < steps:
        return Proof(name, False, f"only {len(second.steps)} of {steps} steps were made; {fix}")
    if difference := first_difference(first, second):
        return Proof(name, False, f"differs at {difference.of_itself}; {fix}")
    return Proof(name, True, f"{steps} steps bit-identical")


def undisturbed(
    recorded: Mapping[str, str],
    bare: Mapping[str, str],
    lines: Sequence[str],
    checkpoints: Sequence[Path],
    again: Mapping[str, str] | None = None,
) -> Proof:
    """The recorder changed nothing: final state, the program's own output and its checkpoint agree with a bare run.

    Args:
        recorded: Final-state fingerprints of a recorded run. What it calls ``first generator …`` is as it was before
            the first step.
        again: Those of another recorded run: a generator that differed between both before the first step was never
            seeded, and says nothing.
        bare: Those of a run that observed nothing and hashed once at the end.
        lines: The output of both; none where that says nothing.
        checkpoints: Their checkpoint folders; none where the subject does not save itself.
    """
    name = "the recorder changes nothing"
    if not bare:
        return Proof(name, False, "the subject's state() is empty: nothing can be compared")
    unseeded = {k for k in recorded if "/first " in k and again is not None and recorded[k] != again.get(k)}
    unseeded |= {k.replace("/first ", "/") for k in unseeded}
    differing = sorted(k for k in {*recorded, *bare} - unseeded if recorded.get(k) != bare.get(k))
    if differing:
        return Proof(name, False, f"the final state differs in {differing[0]} ({len(differing)} in all)")
    seen = [f"{len(bare)} parts of its final state"]
    if lines:
        if lines[0] != lines[1]:
            return Proof(name, False, "the program printed other lines with the recorder than without")
        seen.append(f"{len(lines[0].splitlines())} lines")
    if checkpoints:
        a, b = (checkpoint_content(folder) for folder in checkpoints)
        if not a:
            return Proof(name, False, "the subject saved no checkpoint files: nothing can be compared")
        if a != b:
            files = sorted(k for k in {*a, *b} if a.get(k) != b.get(k))
            return Proof(name, False, f"the checkpoint differs in {files[0]}")
        seen.append(f"{len(a)} checkpoint files")
    return Proof(name, True, ", ".join(seen))


# -- negative control

_WANTED = {"input": "rollout_log_probs", "forward": "log_probs"}
_FLOATING = ("float", "bfloat", "complex")
"""What the names of their dtypes begin with."""
_PLANTED = ("input", "forward", "grad", "update")
_CRITIC = ("critic/", "critic-")
"""What the names of a critic's tensors and metrics begin with in the built-in trainer, and slime's metrics."""


def perturbations(trace: Trace, steps: int, needed: Sequence[str] = _PLANTED) -> list[tuple[int, str, str]]:
    """One signal per phase to change by one ULP, in the first step that serves: a column, activation, gradient, weight.

    What is not finite does not serve, nor what a gradient scaler made no step of. Gradient and weight are the policy's,
    from the first step on that it makes.

    Args:
        trace: The golden run's.
        steps: How many a proof makes.
        needed: Phases that must have one; without any, metrics serve too, and one phase is enough.

    Raises:
        ReproError: a needed phase has no floating-point tensor that serves, so that nothing could be shown of it.
    """
    late = _policys_first(trace)
    chosen = []
    for phase in _PLANTED:
        first = late if phase in ("grad", "update") else 0  # where a critic is trained alone first, it has these alone
        indices = range(first, max(first + 1, min(steps, len(trace.steps))))
        # a learning rate is no parameter
        dtypes = _FLOATING if needed or phase == "update" else (*_FLOATING, "metric")
        serving = ((index, name) for index in indices if (name := _to_plant(trace.rows(index), phase, dtypes)))
        signal = next(serving, None)
        if signal is not None:
            chosen.append((trace.steps[signal[0]].step, phase, signal[1]))
        elif phase in needed:
            if not any(_fit(trace.rows(index), phase, dtypes) for index in indices):
                raise ReproError(
                    f"the trainer observes no floating-point tensor in phase {phase!r}: nothing can be proved of it"
                )
            raise ReproError(
                f"nothing in phase {phase!r} is finite in the {len(indices)} steps of a proof, or a gradient scaler "
                "skipped them: raise case.proof_steps, or begin with a smaller scale (init_scale)"
            )
    if not chosen:
        raise ReproError("the first step holds no floating-point signal: nothing can be proved of the run")
    return chosen


def _fit(rows: Sequence[Row], phase: str, dtypes: tuple[str, ...]) -> list[Row]:
    return [row for row in rows if row.phase == phase and row.dtype.startswith(dtypes) and 0 not in row.shape]


def _to_plant(rows: Sequence[Row], phase: str, dtypes: tuple[str, ...]) -> str:
    """What to change in a phase of a step; '' where nothing serves."""
    fit, left_out = _fit(rows, phase, dtypes), set[str]()
    wanted: Collection[str | None] = {_WANTED.get(phase)}
    if phase in ("grad", "update"):
        left_out = skipped(rows)
        # after the update, a parameter rather than optimizer state: parameters are what has a gradient
        wanted = {r.name for r in rows if r.phase == "grad"} & {r.name for r in rows if r.phase == "update"}
    fit = [r for r in fit if not r.nonfinite and optimizer_of(r.name) not in left_out]
    named = [r for r in fit if r.name in wanted] or fit
    common = [r for r in named if "@" not in r.name] or named  # else of one rank
    policys = [r for r in common if not r.name.startswith(_CRITIC)] or common
    return policys[-1].name if policys else ""


def seen_perturbation(golden: Trace, planted: Trace, change: tuple[int, str, str], *, inside: bool = True) -> Proof:
    """A one-ULP change in one signal is seen, with exactly that signal named first.

    Args:
        golden: The golden run's trace.
        planted: That of the run with the change.
        change: Step, phase and name of the signal.
        inside: Whether the change was made in the program, and not in what was read of it.
    """
    step, phase, signal = change
    name = f"one ULP in {phase} is seen"
    first = first_difference(golden, planted, strict=True)  # one program: its names are the same
    if first is None:
        return Proof(name, False, f"planted in {signal} at step {step}, but the traces agree")
    if (first.step, first.phase, first.signal) != change:
        return Proof(name, False, f"planted in {signal} at step {step}, but {first.phase} {first.signal} was named")
    where = "" if inside else ", planted in what the trainer wrote"
    return Proof(name, True, f"{signal} at step {step} named first{where}")


# -- not vacuous


def not_vacuous(trace: Trace, *, recorded: bool = True) -> list[Proof]:
    """All finite, gradients not zero throughout, parameters moved, advantages not all constant.

    A single on-policy step may have a loss of exactly 0: that alone is no fault.

    Args:
        trace: The golden run's.
        recorded: Whether a recorder looked at gradients and parameters. Without one their norm and their hashes are
            judged, where the trainer writes them.
    """
    nonfinite = trace.first_nonfinite()
    bad = "" if nonfinite is None else f"not finite: {nonfinite}{on_purpose(nonfinite)}"
    gradients = 0
    every = [row for index in range(len(trace.steps)) for row in trace.rows(index)]
    # a parameter is what the run starts with, or what has a gradient; its values are that and those after each update
    updated = {r.name for r in every if r.phase == "update"}
    candidates = {r.name for r in every if r.dtype == DIGEST}
    if recorded:
        started = {r.name.removeprefix("start/") for r in every if r.phase == "input" and r.name.startswith("start/")}
        candidates = {name for name in started if not plain(name).startswith("main/")}  # their copies in fp32
        candidates |= {r.name for r in every if r.phase == "grad"}
    parameters: dict[str, set[bytes]] = {name: set() for name in sorted(candidates & updated)}
    levels: set[float] = set()
    observed = {"grad": False, "advantages": False}
    for index in range(len(trace.steps)):
        rows = trace.rows(index)
        masks = column_parts(rows, "loss_mask")
        for part, row in column_parts(rows, "advantages").items():
            counted = kept(part_of(masks, part), row)
            if row.values is not None and counted is not None:
                observed["advantages"] = True
                levels |= set(decode(row.dtype, row.values)[counted].tolist())  # a set holds 0.0 and -0.0 once
        for row in rows:
            if row.phase == "grad" and (row.dtype != "metric" or not recorded):
                observed["grad"] = True
                gradients += row.absmax > 0
            name = row.name.removeprefix("start/")
            if name in parameters and (row.phase == "update" or name != row.name):
                parameters[name].add(row.lanes.to_bytes())
    moved = sum(len(seen) > 1 for seen in parameters.values())
    constant = "advantages are all the same: every group's samples earned one reward"
    proofs = [
        Proof("all values finite", not bad, bad or "in every signal of every step"),
        Proof(
            "advantages are not constant",
            len(levels) > 1 or not observed["advantages"],
            (f"{len(levels)} levels" if len(levels) > 1 else constant) if observed["advantages"] else "not observed",
        ),
        Proof(
            "gradients are not all zero",
            gradients > 0,
            (f"{gradients} non-zero " + ("gradients" if recorded else "norms of them"))
            if observed["grad"]
            else "no gradient was observed" + ("" if recorded else ", nor a grad_norm in the log"),
        ),
    ]
    if recorded or (parameters and len(trace.steps) > 1):  # one step's hashes have nothing to differ from
        proofs.append(Proof("parameters moved", moved > 0, f"{moved} of {len(parameters)} parameters changed"))
    return proofs


# -- the first step

_KL = ("kl_loss", "ppo_kl")
_NO_MASK = "which tokens count is not known: loss_mask was not observed token by token, in one dimension"


def first_step_checks(trace: Trace, grad_norm_max: float) -> list[Proof]:
    """What every debugging guide checks first, on the first update of an on-policy run's policy.

    log_probs equal ref_log_probs bit for bit on unmasked tokens, in every micro-batch and on every rank that shows its
    own (equal NaNs or infinities fail); KL is exactly 0 on both sides, in every metric of it and at every unmasked
    token of its column (NaN fails; -0.0 is 0); grad_norm is finite and within its bound. What was not observed fails.
    """
    index = _policys_first(trace)
    rows, metrics, at = trace.rows(index), trace.steps[index].metrics, f"step {trace.steps[index].step}"
    norms = {name: metrics[name] for name in tellings("grad_norm", metrics)}
    bounded = bool(norms) and all(math.isfinite(norm) and 0.0 <= norm <= grad_norm_max for norm in norms.values())
    shown = ", ".join(f"{norm!r}" + f" ({name})" * (name != "grad_norm") for name, norm in norms.items())
    return [
        _equal_log_probs(f"{at}: log_probs equal ref_log_probs", rows),
        _no_kl(f"{at}: KL is exactly 0", rows, metrics),
        Proof(f"{at}: grad_norm in bounds", bounded, f"{shown or None}, bound {grad_norm_max:g}"),
    ]


def _policys_first(trace: Trace) -> int:
    """The index of the first step that trains the policy: a critic may be trained alone before."""
    for index, step in enumerate(trace.steps):
        critics = any(tellings(f"{critic}grad_norm", step.metrics) for critic in _CRITIC)
        if tellings("grad_norm", step.metrics) or not critics:
            return index
    return 0


def shows_policies(trace: Trace) -> bool:
    """Whether the first step has log-probs of the policy and of the reference, whole or by micro-batch and rank."""
    rows = trace.rows(0)
    return all(column_parts(rows, name) for name in ("log_probs", "ref_log_probs"))


def _equal_log_probs(name: str, rows: Sequence[Row]) -> Proof:
    ours, theirs, masks = (column_parts(rows, n) for n in ("log_probs", "ref_log_probs", "loss_mask"))
    differing = tokens = nonfinite = 0
    no_mask = ""
    pairs = [(part, ours.get(part), theirs.get(part)) for part in sorted({*ours, *theirs})]
    for part, a, b in pairs:
        if a is None or b is None or a.values is None or b.values is None or (a.shape, a.dtype) != (b.shape, b.dtype):
            return Proof(name, False, "the columns were not observed" + f" alike ({part.strip('.')})" * bool(part))
        keep, why = _counted(masks, part, a)
        no_mask = no_mask or why
        if not keep.any():
            continue
        x, y = (np.frombuffer(raw, np.uint8).reshape(len(keep), -1)[keep] for raw in (a.values, b.values))
        tokens += len(x)
        differing += int((x != y).any(axis=1).sum())
        nonfinite += int((~np.isfinite(_floats(a)[keep])).sum())
    if not pairs:
        return Proof(name, False, "the columns were not observed")
    bad = f", {nonfinite} are not finite" if nonfinite else ""
    bad += no_mask if differing or nonfinite else ""
    return Proof(name, not differing and not nonfinite and tokens > 0, f"{differing} of {tokens} tokens differ{bad}")


def _counted(masks: Mapping[str, Row], part: str, row: Row) -> tuple[npt.NDArray[np.bool_], str]:
    """Which tokens of a part count; all of them, and what is to be said then of a proof that fails, if nobody knows."""
    keep = kept(part_of(masks, part), row)
    return (np.ones(math.prod(row.shape), bool), f"; {_NO_MASK}") if keep is None else (keep, "")


def _floats(row: Row) -> npt.NDArray[np.float64]:
    """A column's values; NaN for those of a dtype that has no order."""
    try:
        return decode(row.dtype, row.values or b"")
    except ValueError:
        return np.full(math.prod(row.shape), math.nan)


def _no_kl(name: str, rows: Sequence[Row], metrics: Mapping[str, float]) -> Proof:
    # some trainers log theirs in a folder, as train/kl_loss
    kl_metrics = {
        key: value
        for key, value in sorted(metrics.items())
        if any(tellings(kl, [key.rpartition("/")[2]]) for kl in _KL)
    }
    if not kl_metrics:
        return Proof(name, False, "not observed")
    text = ", ".join(f"{key} {value!r}" for key, value in kl_metrics.items())
    passed = all(value == 0.0 for value in kl_metrics.values())  # not so of NaN
    columns, masks, ours = (column_parts(rows, n) for n in ("kl", "loss_mask", "log_probs"))
    away = tokens = 0
    no_mask = ""
    for part, row in columns.items():
        like = part_of(ours, part)
        if row.values is None or like is None or like.shape != row.shape:
            continue  # no column of tokens, whatever it is called
        keep, why = _counted(masks, part, row)
        no_mask = no_mask or why
        values = _floats(row)[keep]
        tokens += len(values)
        away += int((~(values == 0.0)).sum())
    text += f", {away} of {tokens} tokens are not 0" if tokens else ""
    text += no_mask if away else ""
    return Proof(name, passed and not away, text)


# -- the noise of a subject that does not reproduce itself: how far each metric moves when nothing has changed


def measure_noise(runs: Sequence[Trace]) -> dict[str, Any]:
    """Largest spread of each metric over equal runs, at any step.

    Args:
        runs: Two or more traces of one case on one code and machine.

    Returns:
        ``runs`` and ``spread``: per metric max - min over the runs at its worst step, in fp64; a metric that was ever
        not finite, or absent from a run, has an infinite spread.
    """
    spread: dict[str, float] = {}
    for index in range(min(len(run.steps) for run in runs)):
        for name in dict.fromkeys(name for run in runs for name in run.steps[index].metrics):
            values = [run.steps[index].metrics.get(name, math.nan) for run in runs]
            width = max(values) - min(values) if all(map(math.isfinite, values)) else math.inf
            spread[name] = max(spread.get(name, 0.0), width)
    return {"runs": len(runs), "spread": {name: encode_float(v) for name, v in sorted(spread.items())}}
