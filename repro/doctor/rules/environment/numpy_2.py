"""numpy 2 where the trainer asserts numpy 1."""

from __future__ import annotations

from collections.abc import Iterable

from repro.doctor.artefacts.kinds import Launch, Machine
from repro.doctor.facts.asked import megatron
from repro.doctor.facts.known_versions import matches
from repro.doctor.facts.launches import absent
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_ASSERTING = ("slime", "relax")


def _check(machine: Machine, launch: Launch | None) -> Iterable[Found]:
    version = machine.packages.get("numpy", "")
    if not matches(">=2", version):
        return
    where = Where(machine.source, item="numpy", value=version)
    if launch is not None:
        if launch.system in _ASSERTING and megatron(launch):
            severity, certainty = absent(launch, "error")
            yield Found(f"{launch.system} asserts numpy 1, and {version} is installed", where, severity, certainty)
        return
    installed = [name for name in _ASSERTING if name in machine.packages or name in machine.modules]
    if installed:
        yield Found(f"{installed[0]} asserts numpy 1, and {version} is installed", where, "warning", "likely")


RULE = Rule(
    id="numpy-2",
    title="NumPy 2 is installed for slime or Relax, which assert NumPy 1",
    inputs=(Machine,),
    uses=(Launch,),
    severity="error",
    certainty="certain",
    why="every training rank fails when Megatron is initialized: Megatron does not support numpy 2.x",
    cure='pip install "numpy==1.26.4" "scipy==1.17.1" (scipy 1.18 and later need numpy 2)',
    sources=(
        "THUDM/slime@624b824a8 slime/backends/megatron_utils/initialize.py:66",
        "THUDM/slime@624b824a8 docker/Dockerfile",
        "NVIDIA/Megatron-LM#1563",
    ),
    check=_check,
)
