"""The figures of docs/benchmarks/cpu.md: ``make bench`` measures them and writes the page.

Ratios are taken side by side: both sides of one run alternate in one process order, and medians are compared.
"""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from subprocess import PIPE

from fingerprint import avalanche, collisions, speed

from repro_golden.case.file import Case, read_case
from repro_golden.case.identity import collect
from repro_golden.compare.traces import compare
from repro_golden.replay.children import Run
from repro_golden.repository.checkout import Place, find_checkout
from repro_golden.store.rollouts import RolloutSet
from repro_golden.subjects import launch
from repro_golden.trace import Trace, seal

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "cpu.md"
ROUNDS = 5
TURNS = 12
"""Of two processes, one that is recorded and one that is not; the first turn warms up."""


def main() -> None:
    """Measure everything and write the page."""
    case = read_case(ROOT / "golden" / "cases" / "tiny-grpo.toml")
    rows, began = list[list[str]](), time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in (
            help_time,
            partial(recorder_overhead, case, folder),
            *(partial(attach_overhead, folder, program) for program in PROGRAMS),
            observe_cost,
            reward_curve,
            partial(demo_time, folder),
            speed,
            avalanche,
            collisions,
        ):
            for row in part():
                rows.append(row)
                print(f"{time.perf_counter() - began:4.0f} s  {row[0]}: {row[1]}", file=sys.stderr, flush=True)
    text = page(rows, time.perf_counter() - began)
    PAGE.write_text(text)
    print(text)


def help_time() -> list[list[str]]:
    """Wall time of `repro --help`, beside `python -c pass` and `import torch`."""

    def once(*command: str) -> float:
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - began

    script = str(Path(sys.executable).parent / "repro")
    commands = [(script, "--help"), (sys.executable, "-c", "pass"), (sys.executable, "-c", "import torch")]
    times = [[once(*c) for c in commands] for _ in range(ROUNDS)]
    shown, empty, torch = (statistics.median(t[i] for t in times) for i in range(3))
    how = f"`python -c pass` {empty:.3f} s, `import torch` {torch:.2f} s"
    return [["`repro --help`", f"{shown:.3f} s", how, "under 0.2 s"]]


def recorder_overhead(case: Case, folder: Path) -> list[list[str]]:
    """Step time with the recorder over step time without it, and reading and comparing over training."""
    place, steps = Place(ROOT), case.steps
    rollouts = folder / "rollouts"
    launch(case, place, [Run(steps, save_rollouts=str(rollouts))], folder / "log")
    RolloutSet.write_index(rollouts)
    ratios, with_it, without = [], [], []
    for k in range(ROUNDS):
        # both kinds alternate within one process, so that they share its luck with memory and clock
        runs = []
        for j in range(3):
            runs.append(Run(steps, str(rollouts)))
            runs.append(Run(steps, str(rollouts), trace=str(folder / f"t{k}-{j}")))
        results = launch(case, place, runs, folder / "log")
        bare = [s for r in results[2::2] for s in r.seconds[2:]]  # the first pair and the first steps warm up
        seen = [s for r in results[3::2] for s in r.seconds[2:]]
        ratios.append(statistics.median(seen) / statistics.median(bare))
        with_it.append(statistics.median(seen))
        without.append(statistics.median(bare))
    a, b = folder / "t0-0", folder / "t1-0"
    seal(a)
    seal(b)
    compared = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        left, right = Trace(a), Trace(b)
        assert compare(left, right).equal
        for index in range(steps):  # read every row too, which an equal comparison does not need
            left.rows(index)
        compared.append((time.perf_counter() - began) / steps)
    size = sum(p.stat().st_size for p in a.rglob("*") if p.is_file()) / steps
    train, read = statistics.median(without), statistics.median(compared)
    spread = f"{min(ratios):.3f}-{max(ratios):.3f} over {ROUNDS} processes"
    recorded = statistics.median(with_it)
    return [
        ["recorder overhead per step, `tiny-grpo`", f"{statistics.median(ratios) - 1:+.1%}",
         f"{train * 1e3:.1f} ms bare, {recorded * 1e3:.1f} ms recorded; ratio {spread}", "under 10 %"],
        ["reading and comparing a step, `tiny-grpo`", f"{read / train:.2f}x of training it",
         f"{read * 1e3:.1f} ms against {train * 1e3:.1f} ms; {size / 1024:.0f} KiB a step", "under 1x"],
    ]  # fmt: skip


STEPS = """
import statistics, sys, time, torch
torch.manual_seed(0)
torch.set_num_threads(1)
{model}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for steps in sys.stdin:
    seconds = []
    for _ in range(int(steps)):
        began = time.perf_counter()
        loss = model(torch.randn({shape})).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    print(statistics.median(seconds), flush=True)
"""


PROGRAMS = {
    "4 layers of 128": (
        """layer = torch.nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.0)
model = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.nn.Linear(128, 64))
""", 5, "16, 64, 128", "under 5 %",
    ),
    "15 layers of 16, 150 tensors": (
        "model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(15)))", 50, "8, 16", "under 10 %",
    ),
}  # fmt: skip
"""Programs: the model, steps in a turn, the shape of a batch, and what its recording is to cost."""


def attach_overhead(folder: Path, name: str) -> list[list[str]]:
    """Step time of a program under `repro trace` over that without it: two processes that take turns."""
    model, steps, shape, goal = PROGRAMS[name]
    folder = folder / name.replace(" ", "-")
    folder.mkdir()
    program = folder / "steps.py"
    program.write_text(STEPS.format(model=model, shape=shape))
    plain = [sys.executable, str(program)]
    recorded = [sys.executable, "-m", "repro", "trace", "--out", str(folder / "trace"), "--", *plain]
    turns: list[dict[bool, float]] = []
    with contextlib.ExitStack() as stack:
        sides = {
            traced: stack.enter_context(subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, cwd=folder))
            for traced, command in ((False, plain), (True, recorded))
        }
        for number in range(1 + TURNS):
            turns.append({})
            for traced in (False, True) if number % 2 else (True, False):
                asked, told = sides[traced].stdin, sides[traced].stdout
                assert asked
                assert told
                print(steps, file=asked, flush=True)
                turns[-1][traced] = float(told.readline())
        for process in sides.values():
            process.communicate()
            assert process.returncode == 0
    assert len(Trace(folder / "trace").steps) == steps * len(turns)
    bare, seen = ([turn[traced] for turn in turns[1:]] for traced in (False, True))
    ratios = [t / b for t, b in zip(seen, bare, strict=True)]
    how = f"{statistics.median(bare) * 1e3:.1f} ms bare, {statistics.median(seen) * 1e3:.1f} ms recorded; ratio "
    what = f"`repro trace` overhead per step, {name}, AdamW, one thread"
    return [[what, f"{statistics.median(ratios) - 1:+.1%}",
             f"{how}{min(ratios):.3f}-{max(ratios):.3f} over {TURNS} turns of {steps} steps", goal]]  # fmt: skip


OBSERVE = """
import statistics, timeit, repro_golden
value = object()
seconds = timeit.repeat(lambda: repro_golden.observe("name", value), number=200_000, repeat=9)
empty = timeit.repeat(lambda: None, number=200_000, repeat=9)
print((statistics.median(seconds) - statistics.median(empty)) / 200_000 * 1e9)
"""


def observe_cost() -> list[list[str]]:
    """What `repro_golden.observe` costs where nobody records."""
    times = [float(subprocess.run([sys.executable, "-c", OBSERVE], check=True, capture_output=True, text=True).stdout)
             for _ in range(ROUNDS)]  # fmt: skip
    how = f"a call less an empty one; {min(times):.0f}-{max(times):.0f} ns over {ROUNDS} processes"
    return [["`repro_golden.observe` where nobody records", f"{statistics.median(times):.0f} ns", how, "under 100 ns"]]


def reward_curve() -> list[list[str]]:
    """Mean reward of the first and the last ten of 300 rollouts of the built-in trainer at its defaults."""
    command = [sys.executable, "-m", "repro_core.train", "--num-rollout", "300"]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tempfile.gettempdir())
    lines = [line for line in done.stdout.splitlines() if line.startswith("rollout ")]
    rewards = [json.loads(line.split(": ", 1)[1].replace("'", '"'))["rollout/rewards"] for line in lines]
    assert len(rewards) == 300
    first, last = statistics.mean(rewards[:10]), statistics.mean(rewards[-10:])
    how = f"first ten -> last ten rollouts, defaults, {time.perf_counter() - began:.0f} s"
    return [["mean reward, built-in trainer, 300 rollouts", f"{first:.3f} -> {last:.3f}", how, "rises clearly"]]


def demo_time(folder: Path) -> list[list[str]]:
    """Wall time of the whole demo, from making the history to the verdict."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "repro", "demo", "--seed", "7", "--out", str(folder / "demo")]
    subprocess.run(command, check=True, capture_output=True)  # it exits 0 only if the planted commit was named
    seconds = time.perf_counter() - began
    return [["`repro demo`, the planted commit named", f"{seconds:.0f} s", "once, seed 7", "under 3 minutes"]]


def page(rows: list[list[str]], seconds: float) -> str:
    """The benchmark page."""
    checkout = find_checkout(ROOT)
    git = ["git", "-C", str(checkout.root)]
    commit = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
    dirty = subprocess.run([*git, "status", "--porcelain", "core", "golden/repro_golden", "bisect", "repro"],
                           capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    identity = collect({}, threads=1)
    facts = [
        f"machine: {identity.host['cpu']}, {identity.host['instructions']}, {platform.system()} {platform.machine()}",
        ", ".join(f"{k} {identity.environment[k]}" for k in ("python", "torch", "numpy")),
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit.stdout.strip()}{' with changes' if dirty else ''}",
    ]
    head = ["what", "result", "how", "goal"]
    table = ["| " + " | ".join(r) + " |" for r in [head, ["---"] * 4, *rows]]
    intro = "Written by `make bench` (benchmarks/cpu.py). Medians; ratios side by side in one run."
    intro += f" It took {seconds:.0f} s."
    return "\n".join(["# Benchmarks", "", intro, "", *(f"- {f}" for f in facts), "", *table, ""])


if __name__ == "__main__":
    if shutil.which("git") is None:
        sys.exit("benchmark: git is not on PATH")
    main()
