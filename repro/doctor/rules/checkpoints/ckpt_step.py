"""``--ckpt-step`` and ``--ref-ckpt-step``: the iteration is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from repro.doctor.artefacts.kinds import Launch, MegatronCheckpoint
from repro.doctor.artefacts.megatron import RELEASE, TRACKER, iteration_of
from repro.doctor.facts.checkpoints.launches import exists, flag_of, named
from repro.doctor.facts.checkpoints.names import ranges
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


def _check(launch: Launch, checkpoint: MegatronCheckpoint | None) -> Iterator[Found]:
    # Without a tracker in --load the trainers load from --ref-load, and --ref-ckpt-step replaces --ckpt-step there.
    for flag, folders in (("--ckpt-step", ("--load", "--ref-load")), ("--ref-ckpt-step", ("--ref-load",))):
        if not launch.has(flag) or launch.value(flag) is None:
            continue
        step = launch.number(flag)
        where = launch.where(flag)
        if step is None or step != int(step) or not 0 <= step < 10**15:
            yield Found(f"{flag} {launch.value(flag)} is no iteration", where)
            continue
        if step == 0 and flag == "--ckpt-step":
            yield Found(
                "--ckpt-step 0 counts as not given: the tracker decides", where, "warning", "likely",
                "write 0 into a tracker of its own folder to load iteration 0",
            )  # fmt: skip
            continue
        there = _iterations(launch, checkpoint, folders)
        if there is not None and int(step) not in there[1]:
            source, found = there
            has = f"it has {ranges(found)}" if found else "it has none"
            choice = f"{'one of ' if len(found) > 1 else ''}{ranges(found)}"
            yield Found(
                f"{flag} {int(step)}: {source} has no iter_{int(step):07d} ({has})", where,
                cure=f"give {choice}, or drop {flag} to load the newest" if found else "",
            )  # fmt: skip


def _iterations(
    launch: Launch, checkpoint: MegatronCheckpoint | None, flags: tuple[str, ...]
) -> tuple[str, set[int]] | None:
    """What the folder that would be loaded has: its name and its iterations; None where it is not at hand."""
    if checkpoint is not None and flag_of(launch, checkpoint.path, flags):
        return str(checkpoint.path), {i for i in checkpoint.iterations if i != RELEASE}
    for flag in flags:
        folder = named(launch, flag)
        if folder is None:
            if launch.has(flag):
                return None  # only a shell knows it
            continue
        if exists(folder / TRACKER):
            return str(folder), _listed(folder)
    return None


def _listed(folder: Path) -> set[int]:
    try:
        numbers = {iteration_of(child.name) for child in folder.iterdir()}
    except OSError:
        return set()
    return {number for number in numbers if number is not None and number != RELEASE}


RULE = Rule(
    "ckpt-step", "--ckpt-step names an iteration that the checkpoint does not have", (Launch,), "error", "certain",
    "Megatron asserts or fails on the missing folder when it loads",
    "give an iteration whose folder iter_NNNNNNN is there, or drop the flag to load the newest",
    ("Miles FAQ", "slime guide: Troubleshooting", "THUDM/slime@624b824a8 slime/backends/megatron_utils/model.py:120"),
    _check, uses=(MegatronCheckpoint,),
)  # fmt: skip
