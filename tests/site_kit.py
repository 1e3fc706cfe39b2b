"""Results of nights to make pages of, from a seed: the same every time, in the shapes that the real ones have."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from repro.nightly.records import Baseline, Check, NightlyRun, Status, Summary
from repro.pulls.pair import Compared, PairResult
from repro.report.plot_data import Cell, PlotData, Tokens
from repro_bisect.axes.axis import PointInfo
from repro_bisect.driver.drift import Drift, Gap, Moved
from repro_bisect.driver.result import Culprit
from repro_bisect.explain.result import Explained, Explanation, Version
from repro_bisect.explain.source import Place
from repro_golden.base.canonical import digest
from repro_golden.base.machine.usage import Usage
from repro_golden.compare.traces import Divergence
from repro_golden.trace.tensor_difference import TensorDifference

__all__ = ["EVIL", "METRICS", "compared", "culprit", "nightly_run", "nightly_runs", "point", "pull", "write"]

EVIL = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=2>&\u2028'\"|${7*7}{{7*7}}"
"""A name that is a program where anything forgets to escape it."""

METRICS = (
    "grad_norm", "kl_loss", "loss", "train_rollout_logprob_abs_diff", "entropy", "lr", "pg_clipfrac", "pg_loss",
    "ppo_kl", "raw_reward", "response_length", "advantages_mean", "advantages_std", "log_probs", "ref_log_probs",
    "rollout_log_probs", "returns_mean", "truncated_ratio", "update_norm", "weight_norm",
)  # fmt: skip
MACHINES = ("epyc-26-2-1-b4621019-torch2.13.0-4cf9d7f5", "h100-sxm-580-torch2.13.0-9d41c07a")
SUBJECTS = (
    "Cheaper softmax: round what it reads to bf16",
    "Sum the gradients of a micro-batch in fp32",
    "Fuse the optimizer's step",
    "Changelog: the new metrics",
    "Straighten out the decoder",
    "Clip by the global norm before the cast",
    "Upgrade torch to 2.13.0",
)
AUTHORS = ("Joao Prado <joao@example.org>", "Tomasz Wrona <tomasz@example.org>", "Ines Ako <ines@example.org>")


def point(number: int) -> PointInfo:
    """A commit."""
    at = datetime(2025, 11, 1, 9, 30, tzinfo=UTC) + timedelta(hours=7 * number)
    ids = [f"{digest(str(n))}{n:08x}" for n in (number, number - 1)]
    subject = SUBJECTS[number % len(SUBJECTS)]
    return PointInfo(ids[0], AUTHORS[number % len(AUTHORS)], at.isoformat(), subject, (ids[1],), " loss.py | 2 +-\n")


def compared(seed: int, *, steps: int = 12, signals: int = 26, odd: bool = False) -> Compared:
    """Numbers that diverge, one signal after the other, each farther with every step; `odd` adds what is not finite."""
    rng = random.Random(seed)
    names = [f"forward layers.{n}.mlp" for n in range(signals // 3)] + [
        "forward log_probs",
        "loss loss",
        "loss kl_loss",
    ]
    names += [f"grad layers.{n}.attention.qkv.weight" for n in range(signals - len(names))]
    cells = []
    for index in range(len(names)):
        for step in range(min(index // 8, steps - 1), steps):
            if rng.random() < 0.06:
                cells.append(Cell(step, index, None, None, False, rng.choice(["differs, size not measured", "shape"])))
            else:
                size = 10 ** (-7 + 4 * step / steps + rng.random())
                cells.append(Cell(step, index, size, int(2 ** (24 + math.log2(size))) + 1, rng.random() < 0.6))
    histogram = [(2**n, int(40000 * math.exp(-((n - 6) ** 2) / 6)) + 3) for n in range(14)]
    pairs = [(a := -rng.expovariate(0.7), a + rng.gauss(0, 0.02 + 0.03 * abs(a))) for _ in range(400)]
    if odd:
        pairs[3:6] = [(-math.inf, -2.0), (-1.0, math.nan), (-math.inf, -math.inf)]
        cells[0] = Cell(0, 0, None, None, True, "3 not finite")
    tokens = Tokens(steps - 1, 4321, pairs)
    of = {"step": 0, "phase": "forward", "signal": "log_probs", "dtype": "float32", "exact": True}
    plot_data = PlotData(range(steps), names, 7, cells, histogram, of, tokens)
    metrics = {}
    for number, name in enumerate(METRICS):
        value = rng.uniform(0.1, 3)
        gaps = [Gap(s, value, value * (1 + (s - 1) * 1e-4 * rng.random()) if s > 1 else value) for s in range(steps)]
        if odd and number == 0:
            gaps[-1] = Gap(steps - 1, value, math.nan)
        moved = number % 3 != 2
        metrics[name] = Moved(
            gaps[2] if moved else None, gaps[-1] if moved else gaps[0], gaps[-1] if moved else gaps[0]
        )
    magnitude = TensorDifference(48433, 48433, 48363, 8070, 0.00385, 0.000849, 0)
    first = Divergence(0, "forward", "log_probs", "value", "aa11… and bb22…", magnitude, {"forward": 9, "grad": 14})
    kl = {"k1": {"worst": (7, -2.1e-5), "last": (11, 1e-6), "first": (1, 3e-9)}}
    kl["k3"] = {"worst": (7, 3.4e-6), "last": (11, 2e-6), "first": (1, 1.1e-9)}
    return Compared("moved", Drift(steps, first, metrics, kl), (), plot_data)


def culprit(number: int, *, text: str = "") -> Culprit:
    """A commit with the operation and the line that did it."""
    hunk = "@@ -87 +87 @@ def token_log_probs(\n-    log_p = torch.log_softmax(rows.float() / temperature, dim=-1)\n"
    hunk += "+    log_p = torch.log_softmax((rows.float() / temperature).bfloat16().float(), dim=-1)"
    versions = []
    for side, line in ((number - 1, hunk.splitlines()[1]), (number, hunk.splitlines()[2])):
        place = Place("core/repro_core/rl/loss.py", 87, "token_log_probs", line[1:].strip(), True, hunk)
        stack = [place, Place("core/repro_core/engines/torch_engine.py", 119, "TorchEngine._score")]
        explained = Explained(
            "aten._log_softmax.default", "forward", "", "", "T0, -1, False", ["float32 [187, 259]"],
            ["float32 [187, 259]"], place, stack,
        )  # fmt: skip
        versions.append(Version(point(side).commit, point(side).subject, 812, explained))
    message = (
        text or "aten._to_copy.default at core/repro_core/rl/loss.py:87 stands where aten._log_softmax.default stood"
    )
    divergence = compared(1).drift.divergence
    explanation = Explanation("structure", "tiny", message, divergence, *versions, mentions=())
    return Culprit(point(number), divergence, None, ["torch 2.12.0 became 2.13.0"], explanation)


def nightly_run(
    case: str = "demo", *, number: int = 0, machine: str = MACHINES[0], at: str = "", **given: Any
) -> NightlyRun:
    """One green night; `given` changes any of its fields."""
    commit = asdict(point(number)) | {"parents": list(point(number).parents)}
    summary = Summary(0.5, 0.75, 0.25, 1.0, 0.6)
    made = NightlyRun(
        case=case, machine=machine, at=at or f"2026-11-{1 + number:02d}T03:12:45Z", commit=commit,
        tree=point(number).commit[::-1], key="k" * 32, rollouts="r" * 32,
        identity={"host": {}, "environment": {}, "layout": {}}, status="green", steps=12,
        chain=digest("chain"), checks=[Check("run-to-run", "green", "two runs agree bit for bit")],
        baseline=Baseline("golden", point(0).commit, digest("chain")),
        metrics={"grad_norm": summary, "loss": summary}, kl={"k1": 0.0, "k3": 0.0},
        spent=Usage([900_000, 410_000, 405_000], 900 * 2**20, 0).to_mapping(), seconds=41.5,
        reproduce=f"repro report nightly {case} --at {commit['commit'][:10]}", version="0.7.0",
    )  # fmt: skip
    return replace(made, **given)


def nightly_runs(
    seed: int = 0, *, cases: int = 3, machines: int = 2, days: int = 60, metrics: int = 20, sizes: int = 60
) -> Iterator[NightlyRun]:
    """A history of every case on every machine: changes, flaky nights, failures, and nights without a run.

    Args:
        seed: Decides everything.
        cases: How many.
        machines: On which each runs.
        days: Nights up to 2026-11-22.
        metrics: Of each night; every value differs from the night before, so that none is cheap to write.
        sizes: Signals of a comparison's picture.
    """
    rng = random.Random(seed)
    names = ["tiny-grpo", "qwen-0.5b-replay", "megatron-tp2", *[f"case-{n:02d}" for n in range(cases)]][:cases]
    first = datetime(2026, 11, 22, 3, 12, 45, tzinfo=UTC) - timedelta(days=days - 1)
    for case_index, case in enumerate(names):
        levels = [10 ** rng.uniform(-3, 1) for _ in range(metrics)]
        moves = {day for day in range(4, days) if rng.random() < 0.035} | ({days - 2} if case_index == 0 else set())
        generation = 0
        for day in range(days):
            at = f"{first + timedelta(days=day, minutes=3 * case_index):%Y-%m-%dT%H:%M:%SZ}"
            if day in moves:
                generation += 1
                levels = [level * rng.choice([1, 1, 1.004, 0.99, 1.3]) for level in levels]
            for machine in MACHINES[:machines]:
                chance = rng.random()
                if chance < 0.02:
                    continue  # no run
                status: Status = "changed" if day in moves else "green"
                status = (
                    "flaky"
                    if 0.02 <= chance < 0.035
                    else "error"
                    if chance < 0.05
                    else "not judged"
                    if chance < 0.06
                    else status
                )
                broken = status == "error"
                values = {
                    name: Summary(*(level * (1 + 0.002 * rng.random()) for _ in range(5)))
                    for name, level in zip(_names(metrics), levels, strict=True)
                }
                if rng.random() < 0.01 and not broken:
                    values["grad_norm"] = replace(values["grad_norm"], last=rng.choice([math.nan, math.inf, -math.inf]))
                comparison = compared(seed + day, signals=sizes).to_mapping() if status == "changed" else None
                commit = day + 100 * case_index
                chain = digest(case, machine, str(generation), str(day) if status == "flaky" else "")
                searched = {"range": "aa11bb22cc..dd33ee44ff", "outcome": "found"}
                searched["reproduce"] = f"repro bisect aa11bb22cc..dd33ee44ff --case {case}"
                spent = Usage([900_000, int(4e5 * (1 + rng.random() / 9))], int(9e8 + 1e7 * rng.random()), 0)
                yield nightly_run(
                    case, number=commit, machine=machine, at=at, status=status,
                    chain="" if broken else chain, metrics={} if broken else values,
                    kl={} if broken else {"k1": 0.0, "k3": 4e-7 * rng.random() * (generation % 2)},
                    checks=_checks(status), compared=comparison,
                    baseline=Baseline("last green", point(max(0, commit - 1)).commit, digest("before")),
                    culprits=[culprit(commit).to_mapping()] if comparison and generation % 2 else [],
                    bisect=searched if comparison else None, spent=None if broken else spent.to_mapping(),
                )  # fmt: skip


def _names(count: int) -> list[str]:
    return [*METRICS, *(f"metric_{n}" for n in range(count))][:count]


def _checks(status: Status) -> Sequence[Check]:
    text = {
        "green": "bit for bit",
        "changed": "grad_norm moved by 0.4 % at step 7",
        "flaky": "two runs differ from step 3 on",
        "error": "the trainer exited with 1: CUDA out of memory",
        "not judged": "no baseline on this machine yet",
    }[status]
    return [
        Check("run-to-run", "flaky" if status == "flaky" else "green", "two runs agree" if status != "flaky" else text),
        Check("baseline", "green" if status == "flaky" else status, text),
    ]


def pull(number: int = 5, *, case: str = "tiny-grpo", verdict: str = "moved", odd: bool = False) -> PairResult:
    """A pair of a pull request."""
    comparison = compared(number, odd=odd) if verdict == "moved" else None
    spent = {side: Usage([900_000, 410_000 + k], 900 * 2**20 + k, 2**31) for k, side in enumerate(("base", "head"))}
    return PairResult(
        case, point(number - 1), point(number), verdict, "" if comparison else "it changes nothing in core",
        comparison, {},  # type: ignore[arg-type]
        spent, 4, [culprit(number)] if comparison else [],
        None, "", ["a note"], MACHINES[0], "2026-11-21T15:00:00Z", 71.5,
    )  # fmt: skip


def write(
    folder: Path,
    made: Iterator[NightlyRun] | Sequence[NightlyRun],
    pulls: Mapping[Path, Sequence[PairResult]] | None = None,
) -> Path:
    """Write results where `repro report publish` reads them."""
    for run in made:
        path = folder / run.machine / run.case / run.name  # as Nights.write does, but for the wait for the disk
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(run.to_mapping()))
    for path, pairs in (pulls or {}).items():
        path.write_text(json.dumps({"format": 1, "results": [pair.to_mapping() for pair in pairs]}))
    return folder
