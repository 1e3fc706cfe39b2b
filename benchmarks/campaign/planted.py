"""Planted changes: small ones, at every operation and every step of short runs, and what the recorder says of them.

What a change did is read without the recorder, as raw bytes (`planted_truth`). So each change is one that must be seen,
at its step and with its first signal, or one that must not be.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any

from planted_faults import HOW, WHERE
from planted_judge import STATE, UNSHOWN
from promise import Asked, Promise, Unfinished

__all__ = ["PROGRAMS", "Server", "promises"]

PROGRAMS = {
    "loop": ("plain loop", 1100),
    "core": ("built-in trainer", 6800),
    "hf": ("HF Trainer", 1300),
    "lightning": ("Lightning", 620),
    "tp2": ("Megatron, TP2", 400),
    "pp2": ("Megatron, PP2", 400),
}
"""What changes are planted in, what it is called, and the number that a share is a share of; the whole campaign plants
as many, and then at each operation where it has not yet."""

_WEIGHTS = {"operation": 60, "weight": 9, "gradient": 7, "state": 6, "buffer": 4, "input": 6, "generator": 2,
    "number": 5, "nothing": 1}  # fmt: skip
_LACKING = dict.fromkeys(("core", "tp2", "pp2"), ("buffer", "generator"))
"""What a program does not have: the built-in trainer has no buffers, and its rollouts are sampled before."""
_HOW_WEIGHTS = {"ulp": 4, "bit": 2, "order": 2, "dtype": 2}

Change = dict[str, Any]


def promises(asked: Asked) -> Iterator[Promise]:
    """Four of each program: seen, at the step, by the signal, and no alarm."""
    for program, (title, whole) in PROGRAMS.items():
        if not asked.wants(title):
            continue
        yield from _rows(title, *planted(asked, program, asked.count(whole)))


def planted(asked: Asked, program: str, count: int) -> tuple[dict[str, Any], list[tuple[Change, dict[str, Any]]]]:
    """The answer of the clean run; each change that was planted in a program, and the answer of its run.

    Raises:
        Unfinished: The time was up.
    """
    folders = [asked.work / f"{program}-{number}" for number in range(max(1, asked.jobs))]
    for folder in folders:
        folder.mkdir()
    with Server(program, folders[0]) as first:
        clean = first.ask(None)
        draw, lacking = asked.random("planted", program), _LACKING.get(program, ())
        changes = drawn(draw, clean, count, lacking, every=asked.share >= 1)
        with Answers(asked.kept / f"{program}.jsonl" if asked.kept else None) as answers:
            left = iter([change for change in changes if answers.of(change) is None])

            def serve(server: Server) -> None:
                while time.monotonic() < asked.until and (change := next(left, None)) is not None:
                    began = time.monotonic()
                    answer = server.ask(change)
                    answers.add(change, answer | {"seconds": time.monotonic() - began})

            def beside(folder: Path) -> None:
                with Server(program, folder, folders[0] / "0") as server:
                    serve(server)

            with ThreadPoolExecutor(len(folders)) as pool:
                list(pool.map(lambda work: work(), [partial(serve, first), *(partial(beside, f) for f in folders[1:])]))
            pairs = [(change, answer) for change in changes if (answer := answers.of(change)) is not None]
    if len(pairs) < len(changes):
        raise Unfinished(f"{PROGRAMS[program][0]}: {len(pairs):,} of {len(changes):,} changes")
    return clean, pairs


class Answers:
    """The answers to changes, each written as it comes.

    Args:
        file: Where they are kept, one JSON line each, and found again; None for nowhere.
    """

    def __init__(self, file: Path | None) -> None:
        lines = file.read_text().splitlines(keepends=True) if file and file.exists() else []
        self._known = dict(json.loads(line) for line in lines if line.endswith("\n"))
        self._lock = Lock()
        self._file = file.open("w") if file else None
        for key, answer in self._known.items():
            self._write(key, answer)

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()

    def of(self, change: Change) -> dict[str, Any] | None:
        """The answer to a change, if there is one."""
        return self._known.get(json.dumps(change))

    def add(self, change: Change, answer: dict[str, Any]) -> None:
        """Keep an answer."""
        key = json.dumps(change)
        with self._lock:
            self._known[key] = answer
            self._write(key, answer)

    def _write(self, key: str, answer: Mapping[str, Any]) -> None:
        if self._file:
            print(json.dumps([key, answer]), file=self._file, flush=True)


class Server:
    """A warm process in which a program runs again and again, each time in a fork.

    Args:
        program: Which.
        folder: An empty one.
        clean: The folder of a clean run; None to make it first.
        variables: More for its environment.
        before: Words before its command.
    """

    def __init__(
        self,
        program: str,
        folder: Path,
        clean: Path | None = None,
        variables: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"} | dict(variables or {})
        script = Path(__file__).with_name("planted_run.py")
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [*before, sys.executable, str(script), program, str(folder), *([str(clean)] if clean else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment, text=True,
        )  # fmt: skip

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._log.close()

    def ask(self, change: Change | None) -> dict[str, Any]:
        """Run it once."""
        assert self._process.stdin and self._process.stdout  # noqa: PT018 - for the type checker
        print(json.dumps(change), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline() or '{"error": "the server ended"}')
        if change is None and ("error" in answer or answer["code"]):
            raise RuntimeError(f"the clean run failed: {answer}; see {self._log.name}")
        return answer


def drawn(
    draw: random.Random, clean: dict[str, Any], count: int, lacking: Sequence[str] = (), *, every: bool = False
) -> list[Change]:
    """Changes: operations in even steps through the run, the rest where it matters, but in nothing that is lacking.

    Args:
        draw: What they are drawn by.
        clean: The answer of the clean run.
        count: How many.
        lacking: Kinds of `WHERE` that the program does not have.
        every: Add as many as it takes to change every operation whose result can be changed.
    """
    weights = {where: weight for where, weight in _WEIGHTS.items() if where not in lacking}
    wheres = draw.choices(list(weights), list(weights.values()), k=count)
    wheres[0] = "nothing"
    places = places_of(clean)
    wheres += ["operation"] * (len(places) - wheres.count("operation") if every else 0)
    operations, number, first = wheres.count("operation"), 0, draw.random()
    changes = []
    for where in wheres:
        rank = draw.randrange(len(clean.get("ranks", "1")))
        counts = clean["ranks"][rank] if "ranks" in clean else clean
        marks = counts["marks"]
        begin, end = marks["forward"][0], counts["count"]
        at = draw.randrange(begin, end)
        if where == "operation":
            rank, at = places[int((number + first) * len(places) / operations)]
            number += 1
        elif where == "gradient":
            at = draw.choice(marks["step"])
        elif where == "input" or (where == "weight" and draw.random() < 0.3):  # weights at load
            at = draw.choice([mark for mark in marks["forward"] if mark < end]) if where == "input" else begin
        how = draw.choices(HOW, [_HOW_WEIGHTS[how] for how in HOW])[0]
        changes.append({"at": at, "where": where, "how": how, "seed": draw.randrange(1 << 30), "rank": rank})
    assert set(wheres) <= set(WHERE)
    return changes


def _rows(title: str, clean: dict[str, Any], judged: Sequence[tuple[Change, dict[str, Any]]]) -> list[Promise]:
    seen = Promise(f"{title}: what changes a parameter, a buffer, optimizer state or a logged number is seen")
    step = Promise(f"{title}: at the step at which it first does")
    signal = Promise(f"{title}: with the first phase and signal that differ")
    equal = Promise(f"{title}: what changes none of them is no difference")
    lost = [name for name in clean["unseen"] if STATE not in name and UNSHOWN not in name]
    if lost:
        seen.judge(False, f"{title}: the recorder has no row of {lost[:5]}")
    ended = unshown = 0
    unmoved = Counter[str]()
    for change, answer in judged:
        if answer.get("code"):  # the change broke the program: there are no two runs to compare
            ended += 1
            continue
        where = f"{title}: {json.dumps(change)} ({answer.get('done')})"
        if "expected" not in answer:
            seen.judge(False, f"{where}: {answer.get('error')}")
            continue
        expected, named = answer["expected"], answer["found"]
        if expected is None and answer["unshown"]:
            unshown += 1
        elif expected is None:
            equal.judge(answer["equal"], f"{where}: named {named} {answer['ended']}")
            if change["where"] == "number" and answer.get("done"):
                unmoved[answer["done"].split()[1]] += 1
        if expected is None:
            continue
        truth = [expected[0], expected[1], answer["first"] or expected[2][0]]
        seen.judge(named is not None, f"{where}: not seen, but {truth} differs")
        if named is not None:
            step.judge(named[0] == truth[0], f"{where}: named {named}, and not {truth}")
            signal.judge(
                named[:2] == truth[:2] and _bare(named[2]) == _bare(truth[2]),
                f"{where}: named {named}, and not {truth}",
            )
    kinds = Counter(change["where"] for change, _ in judged)
    made = sum(answer.get("done", "") not in ("", "nothing") for _, answer in judged)
    seen.figures = {
        "runs": f"{len(judged):,}",
        "changes planted": f"{made:,}",
        **{kind: f"{n:,}" for kind, n in sorted(kinds.items())},
    }
    typical = median(answer["seconds"] for _, answer in judged)
    seen.figures |= {"broke the program": f"{ended:,}", "median of a run": f"{typical:.2f} s"}
    if unshown:
        seen.figures["changed only a reference or padding, which are shown to nobody"] = str(unshown)
    done = [(change, answer["done"]) for change, answer in judged if answer.get("done")]
    hit = [(change, text) for change, text in done if change["where"] == "operation"]
    hows = Counter(how for _, text in done for how in (*HOW, "mask") if how in text.split())
    signal.figures = {
        "operations": f"{len(places_of(clean)):,}",
        "hit": f"{len({(change['rank'], change['at']) for change, _ in hit}):,}",
        "kinds of them": str(len({text.partition(" ")[0] for _, text in hit})),
        **{how: f"{n:,}" for how, n in sorted(hows.items())},
    }
    equal.figures = {f"{name} moved": str(n) for name, n in sorted(unmoved.items())}
    return [seen, step, signal, equal]


def places_of(clean: dict[str, Any]) -> list[tuple[int, int]]:
    """The operations whose result can be changed, from the first forward pass on: rank and number."""
    ranks = clean.get("ranks", [clean])
    return [(rank, at) for rank, counts in enumerate(ranks) for at in counts["places"]
            if at >= counts["marks"]["forward"][0]]  # fmt: skip


def _bare(name: str) -> str:
    """A signal's name without the rank that holds it."""
    return name.partition("@")[0]
