"""What rules ask of a log's lines: which hold a message, who printed them, what stands around, and what came later."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from repro.doctor.artefacts.kinds import Hit, Launch, Log

__all__ = [
    "MEMORY", "OutOfMemory", "above", "argument", "below", "colocated", "goes_on", "memory_errors", "said", "speaker",
    "steps_before", "times",
]  # fmt: skip

_SAMPLES = ("First rollout sample:", "Finish rollout:", "GenerateReqInput(", "text_preview=")
"""Lines that quote prompts and responses, in which any message can stand."""

_RAY = re.compile(r"^\((\w[^()]*?(?:\([^()]*\))?) pid=(\d+)(?:, ip=([^\s)]+))?\)")
_RANK = re.compile(r"\[[Rr]ank ?(\d{1,6})\]|[ _]rank(\d{1,6})\]")

MEMORY = (
    "CUDA out of memory", "torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError", "CUDA error: out of memory",
    "HIP out of memory", "NPU out of memory",
)  # fmt: skip
"""How torch says that a device's memory is used up."""

_ENGINE = ("SGLangEngine", "sglang/srt", "sglang::", "Scheduler hit an exception", "Capture cuda graph failed")
_BACKWARD = ("loss.backward", "run_backward", "torch/autograd", "backward_step", ".backward(")


class OutOfMemory(NamedTuple):
    """A device's memory used up.

    Attributes:
        hit: The line.
        engine: Whether an inference engine says so, and not the trainer.
        backward: Whether it happened in a backward pass.
        steps: Optimizer steps that the log shows before it.
    """

    hit: Hit
    engine: bool
    backward: bool
    steps: int


def said(log: Log, *phrases: str) -> list[Hit]:
    """The lines that hold one of the phrases, in order, each once, without those that quote what a model wrote."""
    hits = {hit.line: hit for phrase in reversed(phrases) for hit in log.hits.get(phrase, ())}
    return [hits[n] for n in sorted(hits) if not any(sample in hits[n].text for sample in _SAMPLES)]


def times(log: Log, *phrases: str) -> str:
    """`` (on 12 lines)``, by the commonest of the phrases; '' for one line."""
    count = max((log.counts.get(phrase, 0) for phrase in phrases), default=0)
    return f" (on {count} lines)" if count > 1 else ""


def above(log: Log, hit: Hit, lines: int = 60) -> list[str]:
    """The lines before a hit, and it."""
    return log.around(max(hit.line - lines, 1), hit.line)


def below(log: Log, hit: Hit, lines: int = 20) -> list[str]:
    """A hit's line, and those behind it."""
    return log.around(hit.line, min(hit.line + lines, log.lines))


def speaker(hit: Hit) -> str:
    """Who printed a line: ``MegatronTrainRayActor (pid 123)``, ``rank 0``; '' where the line does not say."""
    ray, rank = _RAY.match(hit.text), _RANK.search(hit.text)
    who = f"{ray[1]} (pid {ray[2]}{', ip ' + ray[3] if ray[3] else ''})" if ray else ""
    number = f"rank {rank[1] or rank[2]}" if rank else ""
    return ", ".join(part for part in (who, number) if part)


def steps_before(log: Log, line: int) -> int:
    """How many optimizer steps the log shows before a line."""
    return sum(1 for (kind, _), at in log.series.lines.items() if kind == "step" and at < line)


def goes_on(log: Log, hit: Hit) -> bool:
    """Whether optimizer steps or rollouts follow a line."""
    return any(at > hit.line for (kind, _), at in log.series.lines.items() if kind in ("step", "rollout"))


def argument(name: str, launch: Launch | None, log: Log) -> str | None:
    """An argument's value (``sglang_mem_fraction_static``), as launched or as printed; a switch is ``True``."""
    if launch is not None:
        flag = "--" + name.replace("_", "-")
        if launch.has(flag):
            return launch.value(flag) if launch.flags[flag].values else "True"
    return log.series.flags.get(name)


def colocated(launch: Launch | None, log: Log) -> bool:
    """Whether trainer and engines share GPUs."""
    return argument("colocate", launch, log) not in (None, "False", "None")


def _any(texts: Iterable[str], words: Sequence[str]) -> bool:
    return any(word in text for text in texts for word in words)


def memory_errors(log: Log) -> list[OutOfMemory]:
    """Each time that a device's memory was used up: the first line of each group of lines that say so."""
    found: list[OutOfMemory] = []
    last = -1000
    for hit in said(log, *MEMORY):
        if hit.line - last > 200:
            near = above(log, hit, 80)
            engine = _any([hit.text, *near[-40:]], _ENGINE) and "MegatronTrain" not in hit.text
            found.append(OutOfMemory(hit, engine, _any(near, _BACKWARD), steps_before(log, hit.line)))
        last = hit.line
    return found
