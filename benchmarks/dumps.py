"""What reading foreign dumps costs, beside torch's own ways, and what a bisect of a fork costs in launches.

``python benchmarks/dumps.py [--out docs/benchmarks/dumps.md]``. Ways of one task are timed in turn, round after
round, so that what the machine does meanwhile befalls all of them; medians, and the median of each round's ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import _kits  # noqa: F401
import numpy as np
import torch
from foreign_kit import make_fork

from repro_golden.dumps.archive.pickling import write_archive
from repro_golden.dumps.archive.reading import read_archive
from repro_golden.dumps.rollout.checks import check_dump
from repro_golden.dumps.rollout.files import read_rollout_dump
from repro_golden.store.dump_conversion import from_rollout, to_rollout

ROUNDS = 5
SAMPLES, TOKENS = 256, 2000
REGRESSIONS = ("bf16-rollout-log-probs", "per-token-loss-scaled-twice", "temperature-ignored")
COMMITS = 8


def payload() -> dict[str, object]:
    """A rollout as slime dumps it: lists of Python numbers."""
    draw = np.random.default_rng(0)
    samples = [
        {
            "group_index": k // 8, "index": k, "prompt": "p", "response": "r", "label": "1", "reward": float(k % 2),
            "tokens": draw.integers(0, 150_000, TOKENS + 100).tolist(), "response_length": TOKENS,
            "loss_mask": [1] * TOKENS, "weight_versions": ["1"], "status": "completed", "metadata": {},
            "rollout_log_probs": (-draw.random(TOKENS, np.float32)).astype(float).tolist(),
        }
        for k in range(SAMPLES)
    ]  # fmt: skip
    return {"rollout_id": 0, "samples": samples}


def in_turn(ways: dict[str, Callable[[], object]]) -> dict[str, tuple[float, float]]:
    """The median seconds of each way, and the median of its ratio to the first."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    first = next(iter(seconds.values()))
    ratio = {
        name: statistics.median(a / b for a, b in zip(second, first, strict=True)) for name, second in seconds.items()
    }
    return {name: (statistics.median(times), ratio[name]) for name, times in seconds.items()}


def reading(folder: Path) -> tuple[int, list[str]]:
    """The dump's bytes, and the rows of the table."""
    value = payload()
    torch.save(value, folder / "0.pt")
    dump = read_rollout_dump(folder / "0.pt", system="slime")
    rollout = to_rollout(dump)
    tables = [
        in_turn(
            {
                "read it": lambda: read_archive(folder / "0.pt"),
                "`torch.load(weights_only=True)`": lambda: torch.load(folder / "0.pt", weights_only=True),
                "`torch.load(weights_only=False)`, which runs what the file says": lambda: torch.load(
                    folder / "0.pt", weights_only=False
                ),
                "check it": lambda: check_dump(dump),
                "to recorded rollouts": lambda: to_rollout(dump),
                "and back": lambda: from_rollout(rollout, "slime"),
            }
        ),
        in_turn(
            {
                "write it": lambda: write_archive(folder / "ours.pt", value),
                "`torch.save`": lambda: torch.save(value, folder / "theirs.pt"),
            }
        ),
    ]
    rows = [
        f"| {name} | {seconds * 1000:.0f} ms | {ratio:.2f}x |"
        for table in tables for name, (seconds, ratio) in table.items()
    ]  # fmt: skip
    return (folder / "0.pt").stat().st_size, rows


def bisecting(folder: Path) -> list[str]:
    """A row for each regression: launches and wall time of a bisect, and the time of one launch."""
    rows = []
    for name in REGRESSIONS:
        fork = make_fork(folder / name, name, commits=COMMITS)
        began = time.perf_counter()
        done = fork.repo.repro(
            "bisect", "--no-explain", f"{fork.good}..{fork.bad}", "--case", fork.case, "--json", "-j", "1"
        )
        seconds = time.perf_counter() - began
        result = json.loads(done.stdout)
        assert result["culprit"]["commit"] == fork.culprit, done.stderr
        cost = result["cost"]
        rows.append(f"| {name} | {cost['probes']} | {cost['steps']} | {seconds:.0f} s |")
    return rows


def output(*command: str) -> str:
    """What a command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/dumps.md"))
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as scratch:
        size, rows = reading(Path(scratch))
        bisects = bisecting(Path(scratch))
    here = str(Path(__file__).parent)
    commit = output("git", "-C", here, "describe", "--always", "--dirty", "--abbrev=10")
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, NumPy {np.__version__}"
    lines = [
        "# Foreign dumps and forks",
        "",
        f"Written by `python benchmarks/dumps.py`: {ROUNDS} rounds in turn, medians; x: the median ratio to the",
        "first line of its task. Noisy machines: compare ratios.",
        "",
        f"- {platform.processor() or platform.machine()}, {os.cpu_count()} cores; {versions}; "
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}",
        f"- load of the machine while measuring (1 minute): {os.getloadavg()[0]:.1f}",
        "",
        f"A rollout dump of {SAMPLES} samples with {TOKENS:,} response tokens each as slime writes it, lists of Python "
        f"numbers, {size / 1e6:.1f} MB:",
        "",
        "| | time | |",
        "|---|---|---|",
        *rows,
        "",
        f"`repro bisect` over {COMMITS} commits of a small trainer in slime's shape, without a recorder, one probe at",
        "a time. Each probe is one launch; a real one takes as long as it takes to load its model and train.",
        "",
        "| regression | probes | trained steps | wall time |",
        "|---|---|---|---|",
        *bisects,
        "",
    ]
    out.write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
