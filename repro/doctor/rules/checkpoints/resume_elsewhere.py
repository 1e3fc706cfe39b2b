"""``--save`` already has checkpoints, and ``--load`` reads another folder."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, MegatronCheckpoint
from repro.doctor.facts.checkpoints.launches import calculated, exists, flag_of, has_checkpoints, named, same
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


def _check(launch: Launch, checkpoint: MegatronCheckpoint | None) -> Iterator[Found]:
    save, load = named(launch, "--save"), named(launch, "--load")
    if save is None or calculated(launch, "--load") or (load is not None and same(save, load)):
        return
    held = has_checkpoints(save)
    if not held and checkpoint is not None and not exists(save):
        held = flag_of(launch, checkpoint.path, ("--save",)) is not None
    if held:
        reads = f"--load {load}" if load is not None else "no --load"
        yield Found(
            f"--save {save} already has checkpoints, and the launch has {reads}: it will not resume from them, and "
            "overwrites them", launch.where("--save"),
            cure=f"to resume: --load {save}; to start over: a new folder for --save",
        )  # fmt: skip


RULE = Rule(
    "resume-elsewhere", "--save has checkpoints already, and --load reads another folder", (Launch,), "warning",
    "likely", "the run starts again from another model and overwrites what was saved",
    "set --load to the folder that --save wrote to",
    ("Miles FAQ",), _check, uses=(MegatronCheckpoint,),
)  # fmt: skip
