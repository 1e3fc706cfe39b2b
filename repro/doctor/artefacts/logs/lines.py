"""What rules ask of a log's lines: which hold a message, who printed them, what stands around, and what came later."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from repro.doctor.artefacts.kinds import Hit, Launch, Log
from repro.doctor.artefacts.logs.asides import aside
from repro_golden.base.checks import Certainty, Found

__all__ = [
    "MEMORY", "SYNC", "OutOfMemory", "above", "argument", "below", "by", "colocated", "fails", "goes_on",
    "memory_errors", "rank", "rank_of", "rollouts_before", "said", "speaker", "steps_before", "times", "told",
]  # fmt: skip

_RAY = re.compile(r"^\((\w[^()]*?(?:\([^()]*\))?) pid=(\d+)(?:, ip=([^\s)]+))?\)")
_RANK = re.compile(r"\[[Rr]ank ?(\d{1,6})\]|(?:^|[ _])rank(\d{1,6})\]")

_SUCCEEDED = re.compile(r"\bJob '[^']{1,200}' succeeded")
"""How `ray job submit` ends."""

_FAILS = re.compile(
    r"Traceback \(most recent call last\)|\w(?:Error|Exception)\b|terminate called|Fatal |[Oo]ut of memory|core dumped"
    r"|Watchdog caught|Timed out waiting|wait timeout after|Timeout at NCCL work|NCCL error|Segmentation fault"
    r"|Not enough memory|hit an exception|exit(?:ed with)? code [1-9]|\bJob '[^']{1,200}' failed|(?:^|\s)Killed$"
)

_FAULT = re.compile(
    rf"{_FAILS.pattern}|illegal memory access|ILLEGAL_ADDRESS|IllegalAddress|No space left|quota exceeded"
    r"|SIG(?:SEGV|ABRT)"
)
"""Phrases that tell a fault, which a line of level INFO only mentions. Others are told at any level."""

MEMORY = (
    "CUDA out of memory", "torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError", "CUDA error: out of memory",
    "HIP out of memory", "NPU out of memory",
)  # fmt: skip
"""How torch says that a device's memory is used up."""

SYNC = "Timer update_weights start"
"""What slime and Miles print between two rollouts."""

_ENGINE = ("SGLangEngine", "sglang/srt", "sglang::", "Scheduler hit an exception", "Capture cuda graph failed")
_TRAINER = (
    "MegatronTrain", "FSDPTrain", "backends/megatron", "backends/fsdp", "train_one_step", "torch/autograd",
    "loss.backward",
)  # fmt: skip
_STARTS = ("Traceback (most recent call last)", "RayTaskError")
_IGNORED = ("Exception ignored in", "Exception ignored on")
_ASKED = 20
"""Lines that hold a phrase aside whose surroundings are looked at."""
_BACKWARD = ("loss.backward", "run_backward", "torch/autograd", "backward_step", ".backward(")


class OutOfMemory(NamedTuple):
    """A device's memory used up.

    Attributes:
        hit: The line.
        engine: Whether an inference engine says so, and not the trainer.
        backward: Whether it happened in a backward pass.
        steps: Optimizer steps that the log shows before it.
        rollouts: Rollouts whose training ended before it: cycles of offload and reload that are over.
    """

    hit: Hit
    engine: bool
    backward: bool
    steps: int
    rollouts: int


def said(log: Log, *phrases: str) -> list[Hit]:
    """The lines that say one of the phrases, in order, each once: not those that only quote it or advise on it."""
    hits = {hit.line: hit for phrase in reversed(phrases) for hit in _signs(log, phrase)}
    return [hits[n] for n in sorted(hits)]


def _signs(log: Log, phrase: str) -> list[Hit]:
    """The lines that hold a phrase as a sign, or aside in what is borne out by the lines around it."""
    hits, fault, asked = log.hits.get(phrase, ()), bool(_FAULT.search(phrase)), 0
    signs = []
    for hit in hits:
        if hit.aside == "shown":
            continue
        if hit.aside == "quoted" or (hit.aside == "level" and fault):
            asked += 1
            if asked > _ASKED or not _borne_out(log, hit):
                continue
        signs.append(hit)
    return signs


def _borne_out(log: Log, hit: Hit) -> bool:
    """Whether the process that printed a line was telling an exception there, or fails right behind it."""
    source = _source(hit.text)
    before = [text for text in _heeded(above(log, hit, 12)[:-1]) if _source(text) == source][-3:]
    after = [text for text in below(log, hit, 40)[1:] if _source(text) == source]
    return _any(before, (*_STARTS, 'File "')) or any(fails(text) for text in _heeded(after))


def _heeded(lines: Sequence[str]) -> list[str]:
    """Lines without the exceptions that Python ignores, as in `__del__`: no process fails by one."""
    heeded: list[str] = []
    ignored = ""
    for text in lines:
        message = text.removeprefix(_source(text)).removeprefix(" ")
        if message.startswith(_IGNORED):
            ignored = _source(text) or "it"
        elif ignored == (_source(text) or "it"):
            if not message.startswith((" ", "\t", _STARTS[0])):
                ignored = ""  # this is the exception's own line
        else:
            heeded.append(text)
    return heeded


def times(log: Log, *phrases: str) -> str:
    """`` (on 12 lines)``, by the commonest of the phrases; '' for one line."""
    count = max((_count(log, phrase) for phrase in phrases), default=0)
    return f" (on {count} lines)" if count > 1 else ""


def _count(log: Log, phrase: str) -> int:
    """How many lines hold a phrase, without those that are known to hold it aside."""
    return log.counts.get(phrase, 0) - (len(log.hits.get(phrase, ())) - len(_signs(log, phrase)))


def above(log: Log, hit: Hit, lines: int = 60) -> list[str]:
    """The lines before a hit, and it."""
    return log.around(max(hit.line - lines, 1), hit.line)


def below(log: Log, hit: Hit, lines: int = 20) -> list[str]:
    """A hit's line, and those behind it."""
    return log.around(hit.line, min(hit.line + lines, log.lines))


def speaker(hit: Hit) -> str:
    """Who printed a line: ``MegatronTrainRayActor (pid 123)``, ``rank 0``; '' where the line does not say."""
    ray = _RAY.match(hit.text)
    who = f"{ray[1]} (pid {ray[2]}{', ip ' + ray[3] if ray[3] else ''})" if ray else ""
    number = f"rank {rank(hit)}" if rank(hit) else ""
    return ", ".join(part for part in (who, number) if part)


def by(hit: Hit, before: str = " ") -> str:
    """Who printed a line, behind what is said before it; '' where the line does not say."""
    return f"{before}{who}" if (who := speaker(hit)) else ""


def rank(hit: Hit) -> str:
    """The rank that a line says it is from; '' where it does not say."""
    match = _RANK.search(hit.text)
    return (match[1] or match[2]) if match else ""


def rank_of(log: Log, pid: str, ip: str = "") -> str:
    """The rank of a process by other lines of it that rules look for; '' where none says it, or they differ."""
    ranks = {
        rank(hit)
        for hits in log.hits.values()
        for hit in hits
        if f" pid={pid}" in hit.text and (ray := _RAY.match(hit.text)) and ray[2] == pid and ip in ("", ray[3] or ip)
    } - {""}
    return ranks.pop() if len(ranks) == 1 else ""


def steps_before(log: Log, line: int) -> int:
    """How many optimizer steps the log shows before a line."""
    return sum(1 for (kind, _), at in log.series.lines.items() if kind == "step" and at < line)


def goes_on(log: Log, hit: Hit) -> bool:
    """Whether a run outlived a line.

    Steps or rollouts follow it, or Ray says later that the job succeeded, or it stands behind the last step and neither
    the lines before it since that step nor those behind it say that anything failed.
    """
    lines = [(kind, at) for (kind, _), at in log.series.lines.items() if kind in ("step", "rollout")]
    if any(at > hit.line for _, at in lines):
        return True
    later = [*below(log, hit, 900)[1:], *log.around(max(hit.line + 901, log.lines - 200), log.lines)]
    if any((match := _SUCCEEDED.search(text)) and not _quotes(text, match) for text in later):
        return True
    if not any(kind == "step" for kind, _ in lines):
        return False
    last = max(at for _, at in lines)
    before = log.around(max(last + 1, hit.line - 60), hit.line)
    return not any(fails(text) for text in (hit.text, *_heeded(before), *_heeded(later)))


def told(log: Log, hit: Hit, message: str, *, certainty: Certainty | None = None, fix: str = "") -> Found:
    """What a line tells: a warning where the run outlived it."""
    return Found(message, log.where(hit), "warning" if goes_on(log, hit) else None, certainty, fix)


def fails(text: str) -> bool:
    """Whether a line tells an exception, a crash, a timeout or a job that failed."""
    match = _FAILS.search(text)
    return match is not None and "NCCL INFO" not in text and not _quotes(text, match)


def _quotes(text: str, match: re.Match[str]) -> bool:
    """Whether a line only quotes or shows what matches in it."""
    return aside(text[: match.start()], match[0], text[match.end() :]) in ("quoted", "shown")


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


def _any(texts: Iterable[str], phrases: Sequence[str]) -> bool:
    return any(phrase in text for text in texts for phrase in phrases)


def rollouts_before(log: Log, line: int, launch: Launch | None) -> int:
    """How many rollouts the trainer was done with before a line, however many optimizer steps each took.

    A rollout is over where the numbers of the next one or a weight update follow its steps, or where it has had all its
    steps, as far as arguments tell how many those are. A log that shows steps alone is taken to have one per rollout.
    """
    events = [(at, kind) for (kind, _), at in log.series.lines.items() if kind in ("step", "rollout") and at < line]
    seen = sum(1 for _, kind in events if kind == "rollout")
    events += [(hit.line, "sync") for hit in said(log, SYNC) if hit.line < line]
    over = steps = 0
    for _, kind in sorted(events):
        if kind == "step":
            steps += 1
        elif steps:
            over, steps = over + 1, 0
    marked = any(kind != "step" for _, kind in events)
    per_rollout = _steps_per_rollout(launch, log) or (0 if marked else 1)
    return max(over + (steps >= per_rollout if marked else steps // per_rollout) if per_rollout else over, seen - 1)


def _steps_per_rollout(launch: Launch | None, log: Log) -> int:
    """Optimizer steps of one rollout by the arguments; 0 where they do not tell."""

    def number(name: str) -> int:
        value = argument(name, launch, log) or ""
        return int(value) if value.isascii() and value.isdecimal() and len(value) < 10 else 0

    if number("num_steps_per_rollout"):
        return number("num_steps_per_rollout")
    samples, batch = number("rollout_batch_size") * number("n_samples_per_prompt"), number("global_batch_size")
    return samples // batch if batch else 0


def _source(text: str) -> str:
    """What Ray puts before the lines of one process; '' for lines without."""
    ray = _RAY.match(text)
    return ray[0] if ray else ""


def _stretch(log: Log, hit: Hit) -> list[str]:
    """The traceback that a line ends, without what other processes print in between."""
    source = _source(hit.text)
    lines = [text for text in above(log, hit, 250)[:-1] if _source(text) == source]
    start = max((n for n, text in enumerate(lines) if _any([text], _STARTS)), default=len(lines))
    return [*lines[start:], hit.text]


def _is_engine(hit: Hit, stretch: Sequence[str]) -> bool:
    """Whether an engine's memory was used up: by who says so, then by the frames; trainers call SGLang's code too."""
    source = _source(hit.text)
    if "SGLang" in source or "sglang::" in source:
        return True
    return "Train" not in source and not _any(stretch, _TRAINER) and _any(stretch, _ENGINE)


def memory_errors(log: Log, launch: Launch | None = None) -> list[OutOfMemory]:
    """Each time that a device's memory was used up: the first line of each group of lines that say so."""
    errors: list[OutOfMemory] = []
    last = -1000
    for hit in said(log, *MEMORY):
        if hit.line - last > 200:
            stretch = _stretch(log, hit)
            steps, rollouts = steps_before(log, hit.line), rollouts_before(log, hit.line, launch)
            errors.append(OutOfMemory(hit, _is_engine(hit, stretch), _any(stretch, _BACKWARD), steps, rollouts))
        last = hit.line
    return errors
