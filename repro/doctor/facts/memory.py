"""GPU memory that ran out where trainer and engines share GPUs."""

from __future__ import annotations

from repro.doctor.artefacts.kinds import Launch, Log
from repro.doctor.artefacts.log_lines import OutOfMemory, argument, goes_on, speaker
from repro.doctor.rule import Found

__all__ = ["ran_out"]


def ran_out(log: Log, launch: Launch | None, error: OutOfMemory, when: str) -> Found:
    """That it did: whose, when in the cycle of sampling and training, and what the engines keep."""
    side = "an inference engine" if error.engine else "the trainer"
    who = f", {speaker(error.hit)}" if speaker(error.hit) else ""
    kept = argument("sglang_mem_fraction_static", launch, log)
    now = f"; --sglang-mem-fraction-static is {kept}" if kept else ""
    message = f"GPU memory ran out in {side}{who}, {when}{now}"
    return Found(message, log.where(error.hit), severity="warning" if goes_on(log, error.hit) else None)
