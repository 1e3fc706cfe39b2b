"""Sixty trainers in pairs and more: every pair that differs in anything saved or logged is caught, and no other one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from once_kit import once
from zoo_kit import (
    ALONE,
    PAIRS,
    ZOO,
    Difference,
    Pair,
    Recording,
    Verdict,
    digest,
    first_difference,
    observe,
)


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every program of the zoo saves and logs, the programs before the change twice."""
    texts = {digest(text): text for pair in PAIRS.values() for text in (pair.before, pair.after)}
    again = {f"{digest(pair.before)}-again": pair.before for pair in PAIRS.values()}
    return once(tmp_path_factory, "zoo-observed", lambda folder: observe(folder, texts | again))


def truth(observed: Path, pair: Pair, *, names: bool = True) -> Difference | None:
    """Where the pair's sides first differ."""
    sides = [json.loads((observed / f"{digest(text)}.json").read_text()) for text in (pair.before, pair.after)]
    return first_difference(*sides, names=names)


class Recordings:
    """Recordings of programs, which pairs of the same program share."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory

    def get(self, text: str, *, cold: bool) -> Recording:
        """A program's recording, by processes that begin cold or warm."""
        name = f"zoo-{digest(text)}{'-cold' * cold}"
        return Recording(once(self._factory, name, lambda folder: Recording.make(folder, text, cold=cold)))


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    """What was recorded so far."""
    return Recordings(tmp_path_factory)


def test_the_zoo_is_large() -> None:
    """At least 60 pairs, 40 that differ and 20 that do not; every program is in one."""
    verdicts = [pair.verdict for pair in PAIRS.values()]
    assert len(verdicts) >= 60
    assert sum("agrees" not in verdict for verdict in verdicts) >= 40
    assert sum("agrees" in verdict for verdict in verdicts) >= 20
    assert {path.stem for path in ZOO.glob("*.py")} == {pair.program for pair in PAIRS.values()}


@pytest.mark.whole
@pytest.mark.parametrize("name", sorted({pair.program for pair in PAIRS.values()}))
def test_a_program_repeats_itself(observed: Path, name: str) -> None:
    """Two runs of a program save and log the same, so no pair differs by chance."""
    text = (ZOO / f"{name}.py").read_text()
    first, second = (json.loads((observed / f"{digest(text)}{end}.json").read_text()) for end in ("", "-again"))
    assert first == second


@pytest.mark.whole
@pytest.mark.parametrize("name", PAIRS)
def test_what_a_pair_says_is_true(observed: Path, name: str) -> None:
    """What the sides save and log, observed without the recorder, differs where the pair's file says, or nowhere."""
    pair = PAIRS[name]
    difference, contents = (truth(observed, pair, names=names) for names in (True, False))
    if pair.rounds and contents is None:
        return  # as it is on this machine
    assert (difference is not None) == (pair.renamed or "agrees" not in pair.verdict)
    assert (contents is not None) == ("agrees" not in pair.verdict and not pair.moved)
    first = contents if pair.renamed else difference
    assert first is None or first.step == pair.step, first


QUICK = set(sorted(PAIRS)[::12])
"""Pairs of the fast tier."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.whole) for name in PAIRS]
)
def test_the_verdict(recordings: Recordings, request: pytest.FixtureRequest, name: str) -> None:
    """Two recorded sides are judged as the pair's file says: the verdict, the place, and what must be mentioned."""
    pair = PAIRS[name]
    before, after = (recordings.get(text, cold=pair.program in ALONE) for text in (pair.before, pair.after))
    verdict = Verdict.of(before, after)
    if (
        pair.rounds
        and verdict.kind == "agrees"
        and truth(request.getfixturevalue("observed"), pair, names=False) is None
    ):
        return
    problems = verdict.problems(pair)
    assert not problems, "; ".join(problems)


@pytest.mark.whole
def test_a_fork_is_recorded_as_a_process_of_its_own(recordings: Recordings) -> None:
    """Forks of a process that has imported torch, which save time here, give the trace that a fresh process gives."""
    text = PAIRS["comments"].before
    verdict = Verdict.of(*(recordings.get(text, cold=cold) for cold in (False, True)))
    assert verdict.kind == "agrees", verdict.text
