"""kill -9 at any moment: what is kept is as before or as after, and the next run says what an undisturbed one says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import ray_kit
from attempts import warm
from fault_kinds.scenario import Scenario, leftovers, over_ray, reports, run, scenarios
from promise import Asked, Promise

__all__ = ["promises"]

KILLS = 300


def promises(asked: Asked) -> Iterator[Promise]:
    """A promise for each command."""
    warm()
    names = [*_known(), *(["bisect --ray"] if ray_kit.INSTALLED else [])]
    # processes and no threads: a try is a fork, and a fork beside other threads may inherit a lock that one holds
    with ProcessPoolExecutor(max(1, asked.jobs), get_context("fork")) as pool:
        yield from pool.map(partial(_tried, asked), filter(asked.wants, asked.some(names, "kills")))


def _known() -> dict[str, Scenario]:
    return {scenario.name: scenario for scenario in (*scenarios(), *reports())}


def _tried(asked: Asked, name: str) -> Promise:
    known, folder = _known(), asked.work / name.replace(" ", "-")
    with contextlib.nullcontext(known[name]) if name in known else over_ray(folder / "place") as scenario:
        return _killed(asked, scenario, folder, asked.count(KILLS * scenario.share // 100))


def _killed(asked: Asked, scenario: Scenario, folder: Path, kills: int) -> Promise:
    promise = Promise(f"kill -9 of `{scenario.name}` loses nothing")
    whole = folder / "whole"
    scenario.make(whole)
    place = scenario.copied(whole, folder / "place")
    before = scenario.state(place)
    run(scenario, scenario.copied(whole, place))  # once for what is compiled or cached by the first
    undisturbed = run(scenario, scenario.copied(whole, place))
    after, answer, runs = scenario.state(place), scenario.answer(undisturbed, place), _runs(place)
    draw = asked.random("kill", scenario.name)
    ended = 0
    for _ in range(kills):
        at = draw.uniform(0, undisturbed.seconds)
        place = scenario.copied(whole, folder / "place")
        killed = run(scenario, place, at)
        ended += killed.code is not None
        state = scenario.state(place)
        again = run(scenario, place)
        faults = []
        if state not in (before, after):
            faults.append(f"left {str(state)[:200]}")
        if why := again.fault():
            faults.append(f"the next run {why}")
        elif again.code not in (scenario.again if state == after else (undisturbed.code,)):
            faults.append(f"the next run ended with {again.code}: {again.text.strip()[-200:]}")
        if (answered := scenario.answer(again, place)) != answer:
            faults.append(f"the next run says {str(answered)[:200]}, not {str(answer)[:100]}")
        if again.code in (undisturbed.code, *scenario.again) and (made := _runs(place)) > runs + scenario.lost:
            faults.append(f"{made} runs were made, and {runs} without the kill")
        if left := leftovers(place) + scenario.elsewhere():
            faults.append(f"left for ever: {left[:3]}")
        promise.judge(not faults, f"killed after {at:.3f} of {undisturbed.seconds:.3f} s: {'; '.join(faults)}")
    promise.figures = {"length": f"{undisturbed.seconds:.1f} s", "had ended before": str(ended)}
    return promise


def _runs(place: Path) -> int:
    """How often the program was run to its end."""
    path = place / "runs"
    return path.read_text().count("run") if path.exists() else 0
