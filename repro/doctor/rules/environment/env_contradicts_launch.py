"""Variables of the machine that say something else than the launch."""

from __future__ import annotations

import re
from collections.abc import Iterable

from repro.doctor.artefacts.kinds import Launch, Machine
from repro.doctor.facts.asked import determinism
from repro.doctor.facts.launches import known_text, seen
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": r"0",
    "CUBLAS_WORKSPACE_CONFIG": r":4096:8|:16:8",
    "NCCL_ALGO": r"Ring|CollnetDirect|CollnetChain|\^NVLS",
    "PYTHONHASHSEED": r"\d+",
}
"""Values that a deterministic run can have. Megatron's own validator allows those of NCCL_ALGO."""


def _check(machine: Machine, launch: Launch) -> Iterable[Found]:
    flag = determinism(launch, sampling=False)
    for name, own in sorted((machine.variables or {}).items()):
        variable = seen(launch, name)
        where = Where(machine.source, item=name, value=own)
        if variable is not None:
            value = known_text(variable)
            if value is None or value == own:
                continue
            if variable.origin == "export" and launch.submitted:
                yield Found(
                    f"{name} is {value!r} in the script and {own!r} on the machine: a submitted job's workers see what "
                    "Ray was started with, not what the script exports",
                    variable.where, "warning", "possible", f'put "{name}": "{value}" into the job\'s env_vars',
                )  # fmt: skip
        elif flag and name in _DETERMINISTIC and not re.fullmatch(_DETERMINISTIC[name], own, re.IGNORECASE):
            yield Found(f"{flag} is given, and the machine's {name}={own} goes against it", where)


RULE = Rule(
    id="env-contradicts-launch",
    title="A variable of the machine that says something else than the launch",
    inputs=(Machine, Launch),
    severity="warning",
    certainty="likely",
    why="processes inherit the machine's value where the launch's does not reach them, so ranks may differ in bits",
    cure="unset it, or set it in the job's env_vars (--runtime-env-json), which reach every worker",
    sources=(
        "slime guide: Reproducibility (docs/en/advanced/reproducibility.md)",
        "areal-project/AReaL#1544",
    ),
    check=_check,
)
