"""Golden runs that guard nothing: not finite, all zero, or never moved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from repro.doctor.artefacts.kinds import Golden, GoldenValues
from repro.doctor.facts.goldens import damage, is_gradient, is_loss
from repro.doctor.rule import Found, Rule, Where
from repro_golden.base.errors import ReproError

__all__ = ["RULE"]

_STEPS = 3
"""Steps from which a loss that is always the same is no chance; a single on-policy step may have a loss of 0."""


def _check(values: GoldenValues) -> Iterator[Found]:
    seen = list(_of_metrics(values))
    yield from seen
    if values.golden is not None:
        yield from _of_rows(values.golden, told={one.where.item for one in seen})


def _of_metrics(values: GoldenValues) -> Iterator[Found]:
    moving = any(value > 0 for name, steps in values.metrics.items() if is_gradient(name) for value in steps.values())
    for name, steps in values.metrics.items():
        loss, gradient = is_loss(name), is_gradient(name)
        if not (loss or gradient) or not steps:
            continue
        odd = [(step, value) for step, value in steps.items() if not math.isfinite(value)]
        if odd:
            step, value = odd[0]
            yield Found(
                f"{name} is {value} at step {step}, and not finite in {len(odd)} of {len(steps)} steps",
                _where(values, name, step, value),
            )
        elif len(steps) >= _STEPS and len(set(steps.values())) == 1:
            step, value = next(iter(steps.items()))
            text = f"{name} is {value:g} in all {len(steps)} steps"
            # on-policy losses without KL may be 0 while gradients are not
            excused = loss and value == 0 and moving
            yield Found(
                text + (", though gradients are not 0" if excused else ""),
                _where(values, name, step, value),
                severity="warning" if excused or value != 0 else None,
                certainty="possible" if excused else None,
            )


def _where(values: GoldenValues, name: str, step: int, value: float) -> Where:
    path = values.path if values.golden is None else values.path / "trace" / "steps.jsonl"
    return Where(str(path), item=f"step {step} {name}", value=f"{value:g}")


def _of_rows(golden: Golden, told: set[str]) -> Iterator[Found]:
    """The judgement that a golden run passes when it is recorded, made again."""
    from repro_golden.runs.proofs import not_vacuous

    if damage(golden.trace) or not golden.trace.steps:
        return  # another rule says so
    try:
        proofs = not_vacuous(golden.trace, recorded=_recorded(golden.record))
    except (ReproError, ValueError):
        return
    for proof in proofs:
        if proof.passed or (proof.name == "all values finite" and any(word in proof.detail for word in _names(told))):
            continue
        unseen = proof.detail.startswith("no gradient was observed") or proof.detail.startswith("0 of 0 ")
        yield Found(
            f"{proof.name}: no: {proof.detail}",
            Where(str(golden.path / "trace"), item=proof.name),
            severity="warning" if unseen else None,
        )


def _names(told: set[str]) -> set[str]:
    """Metrics that were told of already: ``step 3 grad_norm`` is one of grad_norm."""
    return {item.split(" ", 2)[-1] for item in told}


def _recorded(record: Mapping[str, object]) -> bool:
    """Whether a recorder looked at gradients and parameters; trainers may do without."""
    case = record.get("case")
    subject = case.get("subject") if isinstance(case, Mapping) else None
    return not isinstance(subject, Mapping) or subject.get("recorder", True) is not False


RULE = Rule(
    id="golden-vacuous",
    title="Golden runs that guard nothing: NaN or inf, all-zero losses or gradients, parameters that never move",
    inputs=(GoldenValues,),
    severity="error",
    certainty="certain",
    why="every regression that leaves it as it is passes: 0 equals 0, and inf is within every tolerance of inf",
    cure="record it again on rollouts whose rewards differ, with gradients on; `repro golden record` refuses such runs",
    sources=(
        "pytorch/torchtitan#3474 (an all-zero loss for 100 steps)",
        "NVIDIA/Megatron-LM#5953 (golden values of inf)",
    ),
    check=_check,
)
