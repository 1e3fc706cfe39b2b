"""Some engines are full while others idle."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import fmean

from repro.doctor.artefacts.kinds import Launch, Log
from repro.doctor.artefacts.log_lines import argument
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_RUNNING = "#running-req: "
_BATCH = re.compile(r"Decode batch.*?#running-req: (\d{1,7})")
_ENGINE = re.compile(r"\((\w+) pid=(\d+)(?:, ip=([^\s)]+))?\)")
_DP = re.compile(r"\bDP(\d{1,5})\b")
_LINES, _FEWEST = 4000, 10
_RATIO = 4.0


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    if log.counts.get(_RUNNING, 0) < 2 * _FEWEST:
        return
    running: dict[str, list[int]] = {}
    middle = max(log.lines // 2 - _LINES // 2, 1)
    for first in range(middle, middle + _LINES, 1000):
        for line in log.around(first, first + 999):
            batch = _BATCH.search(line)
            engine = _name(line[: batch.start()]) if batch else ""
            if batch and engine:
                running.setdefault(engine, []).append(int(batch[1]))
    means = {engine: fmean(counts) for engine, counts in running.items() if len(counts) >= _FEWEST}
    if len(means) < 2:
        return
    full, idle = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
    if means[full] < 8 or means[full] < _RATIO * max(means[idle], 1):
        return
    per_engine = argument("rollout_num_gpus_per_engine", launch, log)
    cure = ""
    if per_engine not in (None, "1"):
        cure = f"more and smaller engines: --rollout-num-gpus-per-engine 1 (now {per_engine}), if the model fits"
    yield Found(
        f"of {len(means)} engines {full} runs {means[full]:.0f} requests at a time, {idle} only {means[idle]:.0f}",
        Where(str(log.path), middle, "#running-req", f"{means[full]:.0f} and {means[idle]:.0f} on average"),
        cure=cure,
    )


def _name(prefix: str) -> str:
    """The engine that prints a line: Ray's prefix, and the data-parallel rank."""
    ray, rank = _ENGINE.search(prefix), _DP.search(prefix)
    return " ".join([f"{ray[1]} pid {ray[2]}" if ray else "", f"DP{rank[1]}" if rank else ""]).strip()


RULE = Rule(
    id="engines-unbalanced",
    title="Some inference engines are full while others idle",
    inputs=(Log,),
    uses=(Launch,),
    severity="warning",
    certainty="possible",
    why="a rollout lasts as long as its fullest engine",
    cure="another --router-policy, and more, smaller engines: --rollout-num-gpus-per-engine 1",
    sources=("slime guide: Troubleshooting", "sgl-project/sglang python/sglang/srt/managers/scheduler.py"),
    check=_check,
    phrases=(_RUNNING,),
)
