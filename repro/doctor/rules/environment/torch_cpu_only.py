"""A torch without CUDA where there are GPUs."""

from __future__ import annotations

from collections.abc import Iterable

from repro.doctor.artefacts.kinds import Launch, Machine
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(machine: Machine, launch: Launch | None) -> Iterable[Found]:
    version = machine.packages.get("torch", "")
    if not version.endswith("+cpu") or not (machine.gpus or launch):
        return
    where = Where(machine.source, item="torch", value=version)
    if machine.gpus:
        yield Found(f"torch {version} knows no CUDA, and the machine has {machine.gpus} GPUs", where)
    else:  # tests of the trainers run so
        yield Found(f"torch {version} knows no CUDA", where, "note")


RULE = Rule(
    id="torch-cpu-only",
    title="A torch that was built without CUDA",
    inputs=(Machine,),
    uses=(Launch,),
    severity="warning",
    certainty="certain",
    why="neither the trainer nor the engine finds a GPU",
    cure="install the build for the driver's CUDA: `pip install torch --index-url "
    "https://download.pytorch.org/whl/cu129`",
    sources=("pytorch: Get started, local installation",),
    check=_check,
)
