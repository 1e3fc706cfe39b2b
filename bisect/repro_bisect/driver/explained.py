"""What a bisect found, with why: each culprit is explained against the point before it."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from repro_bisect.driver.result import BisectResult, Culprit
from repro_bisect.explain.driver import explain
from repro_bisect.probe.scheduler import Scheduler
from repro_golden.base.errors import NotVerifiableError, ReproError
from repro_golden.repository.checkout import Checkout
from repro_golden.store.golden import GoldenRun

__all__ = ["with_explanations"]

R = TypeVar("R", bound=BisectResult)


def with_explanations(scheduler: Scheduler, checkout: Checkout, result: R, golden: GoldenRun | None) -> R:
    """The result of a bisect whose culprits say why, where their traces tell; what cannot be explained says that."""
    if result.outcome != "found":
        return result
    culprits = [_explained(scheduler, checkout, culprit, golden) for culprit in result.culprits]
    return replace(result, culprits=culprits, cost=scheduler.prober.cost)


def _explained(scheduler: Scheduler, checkout: Checkout, culprit: Culprit, golden: GoldenRun | None) -> Culprit:
    info, divergence = culprit.commit, culprit.divergence
    if divergence is None or culprit.comparison is None:  # an exit code, or verdicts that are noisy
        return culprit
    before = info.parents[0] if info.parents else scheduler.history.good
    kept = golden.states if golden and before == scheduler.history.good else {}
    try:
        found = explain(scheduler, checkout, before, info.commit, golden=kept, until=divergence.step)
    except (NotVerifiableError, ReproError) as error:  # the answer stands without it
        return replace(culprit, unexplained=str(error))
    return replace(culprit, explanation=found)
