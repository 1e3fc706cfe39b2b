"""How long the search thinks, beside git: ``python benchmarks/search.py``.

A decision is what a bisect asks for after each verdict: the search with it, the answer, how many suspects are left, the
bound on the rounds, the next probe and which probes are moot. It is timed over whole searches for a few culprits, each
shape and size in a process of its own, whose peak memory is taken. git decides the same histories (`git rev-list
--bisect`, written by `git fast-import`) in turn with the search, process start included.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import _kits  # noqa: F401
from search_kit import SHAPES
from test_search_git import git, import_history

from repro_bisect.search.first_bad import Dag, Search

SIZES = (10_000, 100_000)
BESIDE_GIT = 10_000
"""git is asked at this size only: its own time grows with merges times commits."""
CULPRITS = 3
SKIPS = 6
"""Where skips are asked for: two of three first probes, until there are so many."""
GOALS = {10_000: 0.05, 100_000: 1.0}


def measure() -> dict[str, Any]:
    """The samples, in seconds and bytes, for each shape and size."""
    cases = [(shape, size, skips) for size in SIZES for shape in sorted(SHAPES) for skips in (0, SKIPS)]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        rows = [pool.submit(measure_one, *case).result() for case in cases]
    return {
        "rows": rows,
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "versions": f"Python {platform.python_version()}, {_output('git', '--version').replace(' version', '')}",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=10"),
    }


def measure_one(shape: str, size: int, skips: int) -> dict[str, Any]:
    """One shape and size: whole searches, git's and ours in turn."""
    parents = SHAPES[shape](size)
    bad, before = max(parents), _peak()
    began = time.perf_counter()
    dag = Dag.between(parents, [0], bad)
    search = Search(dag, bad, [0])
    built = time.perf_counter() - began
    ours, theirs = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        beside = size == BESIDE_GIT and not skips
        names = import_history(Path(folder, "repo"), parents) if beside else {}
        for seed in range(CULPRITS):
            culprit = random.Random(seed).randrange(len(dag))
            ours += decisions(search, culprit, skips, random.Random(seed))
            if beside:
                theirs += git_decisions(Path(folder, "repo"), names, dag, culprit)
    memory = _peak() - before
    merges = sum(len(ps) > 1 for ps in parents.values()) / len(parents)
    return {"shape": shape, "size": size, "skips": skips, "merges": merges, "construction": built,
            "decisions": ours, "git": theirs, "memory": memory}  # fmt: skip


def decisions(search: Search[int], culprit: int, skips: int, rng: random.Random) -> list[float]:
    """Seconds of each decision until the answer."""
    dag, seconds, search = search.dag, list[float](), replace(search)  # a copy has cached nothing yet
    began = time.perf_counter()
    search.bound()
    (probe,) = search.next()
    seconds.append(time.perf_counter() - began)
    while search.answer is None:
        verdict = "BAD" if dag.ancestors[dag.index[probe]] >> culprit & 1 else "GOOD"
        if skips and rng.random() < 2 / 3:
            verdict, skips = "SKIP", skips - 1
        began = time.perf_counter()
        search = search.with_verdict(probe, verdict, "build")
        done, _, _, probes = search.answer, len(search.suspects), search.bound(), search.next()
        search.moot(probes)
        seconds.append(time.perf_counter() - began)
        assert (done is None) == bool(probes)
        probe = probes[0] if probes else -1
    return seconds


def git_decisions(repo: Path, names: dict[int, str], dag: Dag[int], culprit: int) -> list[float]:
    """Seconds of each `git rev-list --bisect` until it names the culprit."""
    numbers, seconds = {name: i for i, name in names.items()}, []
    bad, goods = names[dag.order[-1]], [names[0]]
    while True:
        began = time.perf_counter()
        probe = git(repo, "rev-list", "--bisect", bad, "--not", *goods).strip()
        seconds.append(time.perf_counter() - began)
        if probe == bad:
            assert dag.index[numbers[bad]] == culprit
            return seconds
        if dag.ancestors[dag.index[numbers[probe]]] >> culprit & 1:
            bad = probe
        else:
            goods.append(probe)


def page(samples: dict[str, Any]) -> str:
    """A Markdown table."""
    head = ["shape", "commits", "construction", "decision, median", "decision, worst", "memory", "git, median",
            "git, worst", "goal"]  # fmt: skip
    table = [head, ["---"] * len(head)]
    for row in samples["rows"]:
        shape = f"{row['shape']}, {row['merges']:.0%} merges" if row["merges"] else row["shape"]
        git_times = [f(row["git"]) for f in (statistics.median, max)] if row["git"] else []
        table.append([
            shape + (f", {row['skips']} skips" if row["skips"] else ""),
            f"{row['size']:,}",
            f"{row['construction']:.2f} s",
            *(_ms(f(row["decisions"])) for f in (statistics.median, max)),
            f"{row['memory'] / 1e6:.0f} MB",
            *(map(_ms, git_times) if git_times else ["", ""]),
            "under " + _ms(GOALS[row["size"]]),
        ])  # fmt: skip
    facts = [f"machine: {samples['machine']}", samples["versions"], f"{samples['date']}, commit {samples['commit']}"]
    lines = ["| " + " | ".join(cells) + " |" for cells in table]
    return "\n".join([*(f"- {fact}" for fact in facts), "", *lines, ""])


def _peak() -> int:
    """Most bytes that this process has held. Not `getrusage`, which begins with what the parent held."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    sys.stdout.write(page(measure()) + "\n")
