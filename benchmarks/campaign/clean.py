"""Clean replays: nothing of the program changed, and everything around it did. Each is compared with a golden run.

Of three kinds:

- started: a fresh interpreter for the whole of it, `repro trace -- python train.py` as a user types it, or the replay
  child of the built-in trainer. Its hash seed, allocator, language, variables, folder, HOME, TMPDIR, TZ, niceness and
  address layout (with and without randomisation) are its own.
- forked: a fork of an interpreter that was started so, with those of its own, and for each fork another folder, HOME,
  TMPDIR, TZ, niceness and user, another state of the heap (holes, ballast), C's locale set by the program or not, and
  torch already imported.
- ranks: the same, of the trainer on Megatron with two ranks.

A part of them runs while both cores are kept busy. Comparison is `compare` over two traces; where it names a
difference, the line says whether the raw bytes differ too: then it is no false alarm, but the program moved.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import planted_core
import planted_programs
from clean_around import drawn, locales, made, start_variables, variables
from planted import Server
from promise import Asked, Promise

from repro_golden.compare.traces import compare
from repro_golden.trace import Trace

__all__ = ["promises"]

STARTED = {"loop": 140, "core": 60, "hf": 20, "lightning": 20}
FORKED = {"loop": 480, "core": 300, "hf": 100, "lightning": 100}
RANKS = {"tp2": 30, "pp2": 10}
_TITLES = {"loop": "a plain loop", "core": "the built-in trainer", "hf": "HF Trainer", "lightning": "Lightning",
    "tp2": "Megatron, TP2", "pp2": "Megatron, PP2"}  # fmt: skip
_EACH = 10
"""Forks of one interpreter."""

BUSY = "while True: pass"
CORE = Path(__file__).parents[2] / "core"


def promises(asked: Asked) -> Iterator[Promise]:
    """No alarm in any of them."""
    asked.work.chmod(0o711)  # another user goes in
    os.environ |= locales(asked.work / "locales")
    for program, whole in STARTED.items():
        yield _started(asked, program, asked.count(whole, 2))
    for program, whole in (FORKED | RANKS).items():
        yield _forked(asked, program, asked.count(whole, 2))


# -- started


def _started(asked: Asked, program: str, count: int) -> Promise:
    kept = Promise(f"fresh processes of {_TITLES[program]} in other surroundings: equal")
    folder, began = asked.work / f"started-{program}", time.monotonic()
    folder.mkdir()
    _start(program, folder / "golden", {}, [])
    golden = Trace(folder / "golden" / "trace")

    def replay(number: int) -> tuple[bool, str]:
        draw = asked.random("started", program, number)
        around, place = drawn(draw, root=False), folder / str(number)
        before = ["setarch", "-R"] if draw.random() < 0.5 else []
        if around["nice"]:
            before += ["nice", "-n", str(around["nice"])]
        place.mkdir()
        with _busy(draw.random() < 0.2, around["nice"]):
            more = start_variables(draw) | variables(around, place)
            failed = _start(program, place, more, before, made(around, place))
        where = f"{_TITLES[program]}, started {number}, {json.dumps(around)}"
        if failed:
            return False, f"{where}: {failed}"
        comparison = compare(golden, Trace(place / "trace"))
        shutil.rmtree(place)
        return comparison.equal, f"{where}: {comparison.divergence or comparison.ended}"

    with ThreadPoolExecutor(max(1, asked.jobs)) as pool:
        for equal, line in pool.map(replay, range(count)):
            kept.judge(equal, line)
    kept.figures = {"each": f"{(time.monotonic() - began) / count:.1f} s"}
    return kept


def _start(program: str, place: Path, more: dict[str, str], before: Sequence[str], work: Path | None = None) -> str:
    """Record once; what went wrong, or ''."""
    work = work or place
    work.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | more
    if program in planted_core.PROGRAMS:
        command = [sys.executable, "-m", "repro_golden.replay.child", str(_job(program, place))]
        environment["PYTHONPATH"] = str(CORE)
    else:
        (work / "my train.py").write_text(planted_programs.path(program).read_text())
        command = [sys.executable, "-m", "repro", "trace", "--out", str(place / "trace"), "--", sys.executable]
        command.append("my train.py")
    done = subprocess.run([*before, *command], cwd=work, env=environment, capture_output=True, check=False)
    if done.returncode or not (place / "trace" / "header.json").exists():
        return f"exit code {done.returncode}: {done.stderr.decode(errors='replace')[-500:]}"
    return ""


def _job(program: str, place: Path) -> Path:
    """A job of the replay child, as `subjects.core` writes it."""
    run = planted_core.run_of(place / "trace") | {"rollouts": None, "train": True, "load": None, "first_step": 0,
        "operations": None}  # fmt: skip
    subject = {"module": "repro_core", "path": "", "config": planted_core.PROGRAMS[program]}
    case = {"subject": subject, "resources": {"cpus": 1, "ranks": 1}}
    job = {"case": case, "root": str(place), "subject": {"kind": "core"}, "raw": None, "runs": [run],
        "result": str(place / "result.json")}  # fmt: skip
    (place / "job.json").write_text(json.dumps(job))
    return place / "job.json"


@contextlib.contextmanager
def _busy(wanted: bool, nice: int) -> Iterator[None]:
    """Keep both cores busy in the block, without starving a process of that niceness."""
    command = ["nice", "-n", str(max(5, nice)), sys.executable, "-c", BUSY]
    processes = [subprocess.Popen(command) for _ in range(2 if wanted else 0)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


# -- forked


def _forked(asked: Asked, program: str, count: int) -> Promise:
    what = "the ranks of" if program in RANKS else "forks of"
    kept = Promise(f"{what} {_TITLES[program]} in other surroundings: equal")
    folder, began = asked.work / f"forked-{program}", time.monotonic()
    folder.mkdir()
    (folder / "golden").mkdir()
    with Server(program, folder / "golden") as server:
        server.ask(None)
    interpreters = -(-count // _EACH)
    root = os.geteuid() == 0

    def several(number: int) -> list[tuple[bool, str]]:
        draw, place = asked.random("forked", program, number), folder / str(number)
        place.mkdir()
        before, judged = ["setarch", "-R"] if draw.random() < 0.5 else [], []
        busy = _busy(draw.random() < 0.2, 19)  # its forks are as nice as they are drawn
        with busy, Server(program, place, folder / "golden" / "0", start_variables(draw), before) as server:
            for _ in range(min(_EACH, count - number * _EACH)):
                around = drawn(draw, root=root)
                judged.append(_judged(server.ask({"around": around}), f"{_TITLES[program]}: {json.dumps(around)}"))
        shutil.rmtree(place)
        return judged

    with ThreadPoolExecutor(max(1, asked.jobs)) as pool:
        for judged in pool.map(several, range(interpreters)):
            for equal, line in judged:
                kept.judge(equal, line)
    kept.figures = {"interpreters": str(interpreters), "each": f"{(time.monotonic() - began) / count:.1f} s"}
    return kept


def _judged(answer: dict[str, Any], where: str) -> tuple[bool, str]:
    if "equal" not in answer:
        return False, f"{where}: did not run: {answer}"
    moved = "the raw bytes differ too" if answer["expected"] else "the raw bytes are equal"
    return bool(answer["equal"]), f"{where}: named {answer['found']} {answer['ended']}; {moved}"
