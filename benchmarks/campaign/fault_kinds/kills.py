"""kill -9 at any moment: what is kept is as before or as after, and the next run says what an undisturbed one says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from promise import Asked, Promise

from fault_kinds.scenario import Scenario, finished_probes, leftovers, run, scenarios

__all__ = ["promises"]

KILLS = 300


def promises(asked: Asked) -> Iterator[Promise]:
    """A promise for each command."""
    for scenario in scenarios():
        folder = asked.work / "kills" / scenario.name.replace(" ", "-")
        yield _killed(asked, scenario, folder, asked.count(KILLS * scenario.share // 100))


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
        state, finished, made = scenario.state(place), finished_probes(place), _runs(place)
        again = run(scenario, place)
        faults = []
        if state not in (before, after):
            faults.append(f"left {str(state)[:200]}")
        if why := again.fault():
            faults.append(f"the next run {why}")
        elif again.code not in (scenario.again if state == after else (undisturbed.code,)):
            faults.append(f"the next run ended with {again.code}: {again.text.strip()[-200:]}")
        if (found := scenario.answer(again, place)) != answer:
            faults.append(f"the next run says {str(found)[:200]}, not {str(answer)[:100]}")
        if again.code == 0 and finished and _runs(place) - made > runs - finished:
            faults.append(f"{finished} probes were finished, and {_runs(place) - made} of {runs} were made")
        if left := leftovers(place):
            faults.append(f"left for ever: {left[:3]}")
        promise.judge(not faults, f"killed after {at:.3f} of {undisturbed.seconds:.3f} s: {'; '.join(faults)}")
    promise.figures = {"length": f"{undisturbed.seconds:.1f} s", "had ended before": str(ended)}
    return promise


def _runs(place: Path) -> int:
    """How often the program was run to its end."""
    path = place / "runs"
    return path.read_text().count("run") if path.exists() else 0
