"""Hostile input: whatever a file, a name, a text or a repository holds, repro runs nothing of it and ends in time."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from attempts import ROOM, Attempt, attempt, warm, watched
from conftest import environment
from hostile_input import bombs, paths, pickled, programs, repositories, texts
from hostile_input.place import Input, Place
from promise import Asked, Promise

__all__ = ["promises"]


def promises(asked: Asked) -> Iterator[Promise]:
    """A promise for each family of inputs."""
    warm()
    families = {
        "No pickle runs code": list(pickled.inputs(_place(asked.work / "listing"))),
        "No small file takes memory or time without bounds": list(bombs.inputs()),
        "No name leads out of its folder": list(paths.inputs()),
        "No text reaches a terminal or a job's log as a command": list(texts.terminal()),
        "No text becomes markup, script, link or mention": list(texts.markup()),
        "No case, log, script or template runs, or runs for ever": list(programs.inputs()),
        "No file or setting of a repository runs in repro": list(repositories.inputs()),
    }
    for what, inputs in families.items():
        yield _tried(asked, what, inputs)


def _tried(asked: Asked, what: str, inputs: Sequence[Input]) -> Promise:
    promise = Promise(what)
    chosen = asked.random(what).sample(inputs, asked.count(len(inputs), least=min(3, len(inputs))))
    commands, slowest, largest = 0, 0.0, 0
    for given in chosen:
        place = _place(asked.work / "place")
        given_commands = given.make(place)
        with watched(place.outside) as changed:
            attempts = [_attempt(command, place) for command in given_commands]
            faults = [
                f"`repro {' '.join(a.command)}` {why}" for a in attempts if (why := a.fault(given.codes, given.most))
            ]
            if place.canary.exists():
                faults.append("its code ran")
            faults += [f"{name} was written" for name in changed()]
        if why := given.also(place, attempts):
            faults.append(why)
        promise.judge(not faults, f"{given.name}: {'; '.join(faults)[:600]}")
        commands += len(attempts)
        slowest = max([slowest, *(a.seconds for a in attempts)])
        largest = max([largest, *(a.grown for a in attempts)])
    promise.figures = {"commands": f"{commands:,}"}
    if commands:
        promise.figures |= {"slowest": f"{slowest:.1f} s", "most memory": f"{largest >> 20} MiB"}
    return promise


def _attempt(command: Sequence[str], place: Place) -> Attempt:
    """A command in the folder that ``@FOLDER`` before it names; ``!FOLDER``: as a user starts it there."""
    how, folder = command[0][:1], Path(command[0][1:])
    if not folder.is_absolute() or how not in "@!":
        room = None if "publish" in command else ROOM  # charts are drawn by V8, which reserves far more than it takes
        return attempt(command, place.folder, room=room)
    if how == "@":
        return attempt(command[1:], folder)
    script = str(Path(sys.executable).with_name("repro"))
    words = [script, *command[1:]]
    start = functools.partial(os.execve, script, words, environment())
    return attempt(command[1:], folder, room=None, inside=start)


def _place(folder: Path) -> Place:
    """A new place; the earlier one is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    place = Place(folder / "in", folder / "canary", folder / "outside")
    for each in (place.folder, place.outside):
        each.mkdir(parents=True)
    (place.outside / "kept").write_text("kept")
    return place
