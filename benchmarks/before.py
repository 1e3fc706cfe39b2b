"""This checkout beside an earlier commit: ``python benchmarks/before.py COMMIT`` writes docs/benchmarks/before.md.

Both work on the same tensors, the same program and the same history, one after the other in each round; a ratio is
that of two neighbours. What is measured for the other commit is its own code, from a worktree of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import _kits  # noqa: F401
import torch
from conftest import SOURCE, Repo

from repro_golden.case.identity import collect

PAGE = SOURCE / "docs" / "benchmarks" / "before.md"
COMMITS, CULPRIT = 64, 41
COMPONENTS = (".", "core", "golden", "bisect")
Seconds = dict[str, float]

FINGERPRINTS = """\
import json, statistics, time, torch
from repro_golden.fingerprint import Collector

def read(tensors, measure):
    collector = Collector(statistics=measure)
    collector.add(tensors)
    collector.finish().result()

torch.set_num_threads(1)
large = torch.randn(64 << 20, generator=torch.Generator().manual_seed(1))
half = large.view(8192, -1)[:, :4096]
small = list(large[: 300 * 4096].view(300, 4096).clone().unbind())
cases = {
    "256 MiB of fp32": ([large], False),
    "256 MiB of fp32, with statistics": ([large], True),
    "half the columns of it, with statistics": ([half], True),
    "300 tensors of 16 KiB, with statistics": (small, True),
}
found = {}
for name, given in cases.items():
    times = []
    for _ in range(8):
        began = time.perf_counter()
        read(*given)
        times.append(time.perf_counter() - began)
    found[name] = statistics.median(times[1:])
print(json.dumps(found))
"""

PROGRAM = """\
import json, statistics, sys, time, torch
SCALE = 1.0
torch.manual_seed(0)
torch.set_num_threads(1)
steps, width, layers = (int(a) for a in sys.argv[1:4])
blocks = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(layers)]
model = torch.nn.Sequential(*blocks, torch.nn.Linear(width, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
times = []
for step in range(steps):
    began = time.perf_counter()
    x = torch.randn(32, width)
    loss = model(x).square().mean() * SCALE
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {float(loss):.6f}", flush=True)
    times.append(time.perf_counter() - began)
print("seconds", json.dumps(statistics.median(times[5:] or times)))
"""


def main() -> None:
    """Measure both, round by round, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit", help="the earlier commit")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        here = Repo(SOURCE)
        earlier = folder / "earlier"
        here.git("worktree", "add", "--detach", str(earlier), options.commit)
        try:
            sides = {"before": earlier, "now": SOURCE}
            history = grown(folder / "history")
            rounds: list[Mapping[str, Seconds]] = []
            for number in range(options.rounds):
                order = list(sides.items())[:: -1 if number % 2 else 1]  # a drift within a round favours neither
                rounds.append({side: everything(checkout, history, folder) for side, checkout in order})
                print(json.dumps(rounds[-1], indent=1), flush=True)
        finally:
            here.git("worktree", "remove", "--force", str(earlier))
    commits = {
        "before": here.git("rev-parse", "--short", options.commit),
        "now": here.git("describe", "--always", "--dirty"),
    }
    PAGE.write_text(page(rounds, commits), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


def everything(checkout: Path, history: tuple[Repo, str], folder: Path) -> Seconds:
    """Seconds of each work with one checkout's code."""
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(checkout / part) for part in COMPONENTS),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }

    def output(*command: str, cwd: Path = folder) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=cwd, env=variables, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(
                f"before: {' '.join(command[:4])} in {checkout}: exit code {done.returncode}\n{done.stderr[-2000:]}"
            )
        return done.stdout

    home = output("-c", "import repro; print(repro.__file__)").strip()
    assert Path(home).is_relative_to(checkout), home
    seconds = {f"fingerprint: {name}": s for name, s in json.loads(output("-c", FINGERPRINTS)).items()}
    (folder / "train.py").write_text(PROGRAM)
    for shape, arguments in SHAPES.items():
        with tempfile.TemporaryDirectory(dir=folder) as out:
            trace = [*REPRO, "trace", "--out", f"{out}/trace", "--", "python", "train.py", *arguments]
            seconds[f"recorder: a step of {shape}"] = last(output(*trace))
    seconds["bisect: 64 commits, the culprit confirmed, `-j 1`"] = timed(lambda: searched(history, output))
    seconds["`repro --help`"] = statistics.median(timed(lambda: output(*REPRO, "--help")) for _ in range(5))
    return seconds


REPRO = ("-m", "repro")
SHAPES = {
    "52 parameters, 64 wide": ("60", "64", "25"),
    "18 parameters, 1,024 wide": ("40", "1024", "8"),
}


def last(text: str) -> float:
    """Seconds that the program said it took."""
    (line,) = (line for line in text.splitlines() if line.startswith("seconds "))
    return float(line.split()[1])


def timed(call: Callable[[], object]) -> float:
    """Wall seconds of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def searched(history: tuple[Repo, str], output: Callable[..., str]) -> None:
    """Search the history from nothing; exits unless the culprit is named."""
    repo, culprit = history
    command = ["bisect", "good..HEAD", "--no-explain", "--json", "-j", "1", "--", "python", "train.py", "6", "64", "4"]
    named = json.loads(output(*REPRO, *command, cwd=repo.root))["culprit"]["commit"]
    if named != culprit:
        sys.exit(f"before: the search named {named}, not {culprit}")
    repo.git("clean", "-qfdx")
    shutil.rmtree(repo.root / ".git" / "repro")  # nothing is known beforehand


def grown(root: Path) -> tuple[Repo, str]:
    """A history of the program that moves its loss at one commit: the repository and that commit."""
    root.mkdir()
    repo = Repo(root)
    repo.git("init", "--quiet", "--initial-branch=main")
    culprit, text = "", PROGRAM
    for number in range(COMMITS + 1):
        if number == CULPRIT:
            text = text.replace("SCALE = 1.0", "SCALE = 1.0000001")
        (root / "train.py").write_text(f"{text}# {number}\n")
        name = repo.commit(f"commit {number}")
        if number == 0:
            repo.git("tag", "good")
        culprit = name if number == CULPRIT else culprit
    return repo, culprit


def page(rounds: list[Mapping[str, Seconds]], commits: Mapping[str, str]) -> str:
    """The page: a row for each work."""
    rows = []
    for work in rounds[0]["now"]:
        ratios = [r["now"][work] / r["before"][work] for r in rounds]
        before, now = (statistics.median(r[side][work] for r in rounds) for side in ("before", "now"))
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append(f"| {work} | {shown(before)} | {shown(now)} | {statistics.median(ratios):.2f}x | {spread} |")
    cpu = collect(os.environ, threads=1).host["cpu"]
    return "\n".join([
        "# This version beside an earlier one",
        "",
        "Written by `python benchmarks/before.py`. Each round measures both versions one after the other, the first of",
        "one round second in the next; medians of the rounds. 1.00x is as fast as before, less is faster.",
        "",
        f"| what | before, {commits['before']} | now, {commits['now']} | now / before | in single rounds |",
        "|---|---|---|---|---|",
        *rows,
        "",
        f"{len(rounds)} rounds, {datetime.now(UTC):%Y-%m-%d}; {cpu}, {len(os.sched_getaffinity(0))} cores, "
        f"torch {torch.__version__}.",
        "",
    ])  # fmt: skip


def shown(seconds: float) -> str:
    """Seconds in a unit that fits."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


if __name__ == "__main__":
    main()
