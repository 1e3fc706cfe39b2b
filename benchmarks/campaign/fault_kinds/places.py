"""Places that refuse: disks that are full at some write, folders that are read-only, and two processes in one place."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from attempts import Attempt
from promise import Asked, Promise

from fault_kinds.scenario import Scenario, leftovers, run, scenarios

__all__ = ["names", "of"]

DISKS, LOCKED, PAIRS = 90, 12, 36
SIZE = 64 << 20


def names(asked: Asked) -> list[str]:
    """The commands that are tried."""
    return asked.some([scenario.name for scenario in scenarios()], "full")


def of(asked: Asked, name: str) -> Iterator[Promise]:
    """A promise for each kind of place, of one command."""
    every = {scenario.name: scenario for scenario in scenarios()}
    made = _made(asked, every[name])
    for tried, count in ((_full, DISKS), (_read_only, LOCKED), (_two, PAIRS)):
        yield tried(asked, every[name], *made, asked.count(count // len(every)))


def _made(asked: Asked, scenario: Scenario) -> tuple[Path, Path]:
    """A place where a command can run, made once, and where copies of it go."""
    folder = asked.work / "places" / scenario.name.replace(" ", "-")
    if not folder.exists():
        scenario.make(folder / "whole")
    return folder / "whole", folder / "place"


@contextlib.contextmanager
def _disk(place: Path, size: int) -> Iterator[None]:
    """A small disk in memory there."""
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
        place.rmdir()


def _undisturbed(scenario: Scenario, whole: Path, place: Path) -> tuple[object, object]:
    """What it says, and what it leaves."""
    attempt = run(scenario, scenario.copied(whole, place))
    result = scenario.answer(attempt, place), scenario.state(place)
    shutil.rmtree(place)
    return result


def _put(scenario: Scenario, whole: Path, place: Path) -> Path:
    """A copy of the whole on the disk at `place`."""
    return scenario.copied(whole, place / "on")


def _one_line(attempt: Attempt) -> str:
    """What is wrong with how a command ended that could not do its work."""
    if why := attempt.fault():
        return why
    lines = attempt.err.decode().strip().splitlines()
    return "" if attempt.code == 2 and lines and lines[-1].startswith("repro: ") else f"{attempt.code}: {lines[-1:]}"


def _needed(scenario: Scenario, whole: Path, place: Path) -> int:
    """Bytes that it takes of a disk at most."""
    with _disk(place, SIZE):
        there = _put(scenario, whole, place)
        free, least, ended = _free(place), _free(place), threading.Event()

        def watch() -> None:
            nonlocal least
            while not ended.wait(0.005):
                least = min(least, _free(place))

        watching = threading.Thread(target=watch)
        watching.start()
        run(scenario, there)
        ended.set()
        watching.join()
        return free - least


def _free(place: Path) -> int:
    facts = os.statvfs(place)
    return facts.f_bavail * facts.f_frsize


def _full(asked: Asked, scenario: Scenario, whole: Path, place: Path, tries: int) -> Promise:
    """Each try in its own part of all that the command writes, the first of them within a page."""
    promise = Promise(f"A disk that is full at any write of `{scenario.name}` costs no answer")
    answer, after = _undisturbed(scenario, whole, place)
    needed = _needed(scenario, whole, place)
    draw, told = asked.random("disk", scenario.name), 0
    for number in range(tries):
        left = int(needed * (number + draw.random()) / tries) if number else draw.randrange(4096)
        with _disk(place, SIZE):
            there = _put(scenario, whole, place)
            before = scenario.state(there)
            filler = place / "filler"
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(1 << 16)):
                    pass
            with filler.open("r+b") as file:
                file.truncate(max(0, filler.stat().st_size - left))
            full = run(scenario, there)
            faults = []
            if scenario.answer(full, there) != answer:
                told += 1
                if why := _one_line(full):
                    faults.append(why)
                if (state := scenario.state(there)) not in (before, after):
                    faults.append(f"left {str(state)[:200]}")
            filler.unlink()
            again = run(scenario, there)
            if (answered := scenario.answer(again, there)) != answer:
                faults.append(f"with space again {again.fault() or 'it ended'}: {str(answered)[-300:]}")
            if extra := leftovers(there):
                faults.append(f"left for ever: {extra[:3]}")
        promise.judge(not faults, f"{left} bytes left: {'; '.join(faults)}")
    promise.figures = {
        "takes": f"{needed >> 10} KiB", "told in one line": str(told), "had room enough": str(tries - told),
    }  # fmt: skip
    return promise


def _read_only(_asked: Asked, scenario: Scenario, whole: Path, place: Path, tries: int) -> Promise:
    promise = Promise(f"`{scenario.name}` in a read-only place says so and heals")
    answer, _ = _undisturbed(scenario, whole, place)
    for _ in range(tries):
        faults = []
        with _disk(place, SIZE):
            there = _put(scenario, whole, place)
            subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
            refused = run(scenario, there)
            if scenario.answer(refused, there) != answer and (why := _one_line(refused)):
                faults.append(why)
            subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
            again = run(scenario, there)
            if (answered := scenario.answer(again, there)) != answer:
                faults.append(f"once it may write it says {str(answered)[:300]}")
        promise.judge(not faults, "; ".join(faults))
    return promise


def _two(_asked: Asked, scenario: Scenario, whole: Path, place: Path, tries: int) -> Promise:
    """Both in threads of ours, each of which waits for a process of its own."""
    promise = Promise(f"Two of `{scenario.name}` at once do not disturb each other")
    answer, _ = _undisturbed(scenario, whole, place)
    for _ in range(tries):
        there = scenario.copied(whole, place)
        ended: list[Attempt] = []
        other = threading.Thread(target=lambda to=there, told=ended: told.append(run(scenario, to)))
        other.start()
        ended.append(run(scenario, there))
        other.join()
        answers = [scenario.answer(attempt, there) for attempt in ended]
        faults = [why for attempt in ended if (why := attempt.fault())]
        faults += [f"one says {str(each)[:300]}" for each in answers if each != answer]
        if extra := leftovers(there):
            faults.append(f"left for ever: {extra[:3]}")
        promise.judge(not faults, "; ".join(faults))
    return promise
