"""The figures of docs/benchmarks/probes.md: ``python benchmarks/probes.py`` measures them and writes the page.

What a probe costs beside the program that it runs. `repro bisect` searches a small history of a program that trains;
before and after each search the program runs by itself, from its start to its end.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from repro_golden.case.identity import collect

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "probes.md"
COMMITS, MOVED, ROUNDS = 16, 11, 3

TRAIN = """\
import time

import torch{more}

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr={rate})
for _ in range({steps}):
    x = torch.randn(32, 64)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep({pause})
# {number}
"""
PROGRAMS = {
    "torch, 3 steps": {"more": "", "steps": 3, "pause": 0},
    "torch, 30 steps of 0.1 s": {"more": "", "steps": 30, "pause": 0.1},
    "torch and transformers' Trainer, 3 steps": {"more": "\nfrom transformers import Trainer", "steps": 3, "pause": 0},
}
"""What the programs import beside torch, how many steps they make, and seconds that each of these waits."""


def main() -> None:
    """Measure and write the page."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, about) in enumerate(PROGRAMS.items()):
            rows.append(row(name, measured(Path(folder, str(number)), about)))
            print(*rows[-1], file=sys.stderr, flush=True)
    PAGE.write_text(page(rows), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


def measured(root: Path, about: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of the program alone, of the search's first probe, which makes all steps, and of its others."""
    command = [sys.executable, "train.py"]
    history(root, about)
    out: dict[str, list[float]] = {"alone": [], "first": [], "others": []}
    for _ in range(ROUNDS):
        known = len(probes(root))
        out["alone"].append(alone(command, root))
        search = [sys.executable, "-m", "repro", "bisect", f"HEAD~{COMMITS}..HEAD", "--quick", "--fresh", "-j", "1"]
        done = subprocess.run([*search, "--", *command], cwd=root, capture_output=True, text=True)
        moved = git(root, "rev-parse", "--short=10", f"HEAD~{COMMITS - MOVED}")
        if done.returncode != 0 or moved not in done.stdout:
            sys.exit(f"probes: the culprit {moved} was not named:\n{done.stdout}{done.stderr}")
        first, *others = probes(root)[known:]
        out["first"].append(first["seconds"])
        out["others"] += [probe["seconds"] for probe in others]
        out["alone"].append(alone(command, root))
    return out


def history(root: Path, about: dict[str, Any]) -> None:
    """Commits of a note each, of which one moves the numbers."""
    root.mkdir()
    git(root, "init", "--quiet", "--initial-branch=main")
    for number in range(COMMITS + 1):
        rate = 1e-3 if number < MOVED else 1.1e-3
        (root / "train.py").write_text(TRAIN.format(rate=rate, number=number, **about))
        git(root, "add", "train.py")
        git(root, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--quiet", "-m", f"commit {number}")


def git(root: Path, *arguments: str) -> str:
    """What git prints."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def alone(command: list[str], root: Path) -> float:
    """Seconds of a run that nobody looks at."""
    began = time.perf_counter()
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    return time.perf_counter() - began


def probes(root: Path) -> list[dict[str, Any]]:
    """All probes in the journal; `seconds` of each go from the checkout of its commit to its trace."""
    journal = root / ".git" / "repro" / "journal.jsonl"
    lines = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
    return [json.loads(line) for line in lines]


def row(name: str, seconds: dict[str, list[float]]) -> list[str]:
    """A row of the page."""
    program, first, others = (statistics.median(seconds[kind]) for kind in ("alone", "first", "others"))
    spread = {kind: f"{min(all_):.2f}-{max(all_):.2f} s, {len(all_)}" for kind, all_ in seconds.items()}
    how = f"{program:.2f} s alone ({spread['alone']} runs); a probe {others:.2f} s ({spread['others']} of them), "
    ratios = [f"{first / program:.2f}x", f"{others / program:.2f}x"]
    return [name, *ratios, f"{how}the first of a search {first:.2f} s", "1.15x"]


def page(rows: list[list[str]]) -> str:
    """The page."""
    identity = collect({}, threads=1)
    facts = [
        f"{identity.host['cpu']}, {identity.host['instructions']}, {platform.system()} {platform.machine()}",
        ", ".join(f"{name} {identity.environment[name]}" for name in ("python", "torch")),
        f"{datetime.now(UTC):%Y-%m-%d}, commit {git(ROOT, 'rev-parse', '--short=10', 'HEAD')}",
    ]
    head = ["program", "first probe, over the program alone", "the others", "how", "goal"]
    return "\n".join(
        [
            "# What a probe costs",
            "",
            "Written by `python benchmarks/probes.py`. A probe is timed from the checkout of its commit to its trace,",
            "the program from its start to its end; both take turns, and medians are compared. A search's first",
            "probe makes all steps of GOOD; the others make those that decide, here one or two, and end then.",
            "",
            *(f"- {fact}" for fact in facts),
            "",
            *("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * 5, *rows]),
            "",
        ]
    )  # fmt: skip


if __name__ == "__main__":
    main()
