"""A run that trains or samples, and whose log has no line of a checkpoint that was loaded, or of another one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Hit, Launch, Log
from repro.doctor.artefacts.log_lines import argument, below, said, speaker
from repro.doctor.rule import Found, Rule, Where

__all__ = ["LOADED", "RULE"]

_DONE = (
    "successfully loaded checkpoint from",
    "Successfully loaded checkpoint from",
    "loaded checkpoint from",
    "Loaded checkpoint from",
    "[FSDP] Loaded model from",
)
_BEGUN = (
    "Load checkpoint from HuggingFace model into Megatron",
    " loading checkpoint from ",
    " loading release checkpoint from ",
    " loading distributed checkpoint from ",
    " loading release distributed checkpoint from ",
)
_SHARDS = "Loading checkpoint shards"
LOADED = (*_DONE, *_BEGUN, _SHARDS)
"""What Megatron, its bridge, slime, Miles and transformers print of a checkpoint, once loaded or before it is."""

_FAILED = ("Traceback (most recent call last)", "Error(s) in loading state_dict", "will not load any checkpoints")
_PATH = re.compile(r"\(path=([^)]+)\)|(?:checkpoint|model) from (.+?)(?: \[ ?t |\s+at iteration |$)")
_NOTHING = (None, "None", "")


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    if not (log.series.steps or log.series.rollouts) or log.rank not in (None, 0):  # rank 0 alone tells what it loads
        return
    if argument("debug_rollout_only", launch, log) not in (None, "False"):
        return
    given = {name: argument(name, launch, log) for name in ("load", "ref_load", "pretrained_checkpoint")}
    loaded = _loaded(log, fsdp=argument("train_backend", launch, log) == "fsdp")
    if loaded:
        yield from _another(log, loaded, given["load"], given["ref_load"], argument("save", launch, log))
        return
    named = {name: value for name, value in given.items() if value not in _NOTHING}
    told = launch is not None or "load" in log.series.flags
    if told and not named:  # a run from scratch
        return
    (kind, number), line = next(iter(log.series.lines.items()), (("", 0), None))
    wanted = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in named.items())
    yield Found(
        "the log shows training or rollouts, but no line of a checkpoint that was loaded"
        + (f" ({wanted})" if wanted else ""),
        Where(str(log.path), line, f"{kind} {number}"),
        severity=None if named else "note",
        certainty="likely" if named and "load" in log.series.flags else None,
    )


def _loaded(log: Log, *, fsdp: bool) -> list[Hit]:
    """The lines of a trainer's checkpoints that were loaded, or begun without a failure behind them."""
    begun = [hit for hit in said(log, *_BEGUN) if not _fails(log, hit)]
    # a progress bar of transformers, which engines and FSDP's trainer show
    bars = [hit for hit in said(log, _SHARDS) if fsdp or "FSDPTrain" in hit.text]
    return [hit for hit in (*said(log, *_DONE), *begun, *bars) if "SGLang" not in speaker(hit)]


def _fails(log: Log, hit: Hit) -> bool:
    """Whether the process that began to load failed before any step, rollout or load that ended."""
    over = min((at for at in log.series.lines.values() if at > hit.line), default=log.lines + 1)
    for text in below(log, hit, min(over - hit.line - 1, 200))[1:]:
        if any(phrase in text for phrase in _DONE):
            return False
        if "SGLang" not in text[:40] and any(phrase in text for phrase in _FAILED):
            return True
    return False


def _another(log: Log, loaded: list[Hit], load: str | None, ref: str | None, save: str | None) -> Iterator[Found]:
    """Where the reference alone was loaded, and not what --load names."""
    if load is None or ref is None or {load, ref} & {"", "None"} or "$" in load + ref or _same(load, ref):
        return
    paths = [(match[1] or match[2]).strip() for hit in loaded if (match := _PATH.search(hit.text))]
    if len(paths) == len(loaded) and all(_same(path, ref) for path in paths):
        first = save is not None and _same(load, save)
        yield Found(
            f"only --ref-load {ref} was loaded, and not --load {load}: training starts from the reference, without "
            "optimizer and random state" + (" (--save is the same folder: fine for a first run)" if first else ""),
            log.where(min(loaded)),
            severity="note" if first else None,
            certainty="likely",
            cure=f"to resume, {load} must hold latest_checkpointed_iteration.txt; leave --load out for a fresh run",
        )


def _same(one: str, other: str) -> bool:
    """Whether two paths are the same, as far as text tells: a relative one may be the other's end."""
    a, b = os.path.normpath(one), os.path.normpath(other)
    return a == b or any(not x.startswith("/") and y.endswith(f"/{x}") for x, y in ((a, b), (b, a)))


RULE = Rule(
    id="checkpoint-never-loaded",
    title="Training without a line of a checkpoint that was loaded",
    inputs=(Log,),
    uses=(Launch,),
    severity="warning",
    certainty="possible",
    why="a model that was never loaded is random: rollouts are gibberish from the first one on",
    cure="name a folder with latest_checkpointed_iteration.txt in --load and --ref-load; the log of rank 0 says "
    "`successfully loaded checkpoint from`",
    sources=(
        "Miles guide: Debugging",
        "slime guide: Debugging",
        "Relax guide: Debugging",
        "NVIDIA/Megatron-LM megatron/training/checkpointing.py",
        "THUDM/slime@624b824a8 slime/backends/megatron_utils/checkpoint.py:128",
        "radixark/miles@31f1ca961 miles/backends/fsdp_utils/checkpoint.py:117",
    ),
    check=_check,
    phrases=LOADED,
)
