"""Determinism that Python code switches on when what should obey it is built already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from repro.doctor.artefacts.kinds import PythonCode
from repro.doctor.artefacts.launch_kinds import Step
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_READ = {
    "NCCL_ALGO": "NCCL reads it when a group makes its communicator",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "Transformer Engine reads it when its attention is built",
    "CUBLAS_WORKSPACE_CONFIG": "cuBLAS reads it at its first product",
}
_COPIED = "Megatron's embedding and Transformer Engine's attention copy the setting when they are built"


def _check(code: PythonCode) -> Iterator[Found]:
    for function, steps in code.functions.items():
        told: set[str] = set()
        for at, step in enumerate(steps):
            late = _late(steps, at) if step.kind == "switch" or step.name in _READ else None
            name = step.name if step.kind == "variable" else "switch"
            if late and name not in told:
                told.add(name)
                yield _found(code, function, step, late)


def _late(steps: Sequence[Step], at: int) -> Step | None:
    """What was built before a switch, without the same switch before that."""
    step = steps[at]
    awaited = ("groups",) if step.name == "NCCL_ALGO" else ("megatron", "model")
    for number, built in enumerate(steps[:at]):
        if built.kind in awaited and built.leads_to(step):
            before = (s for s in steps[:number] if s.leads_to(step))
            same = any(s.kind == "switch" if step.kind == "switch" else s.name == step.name for s in before)
            return None if same else built
    return None


def _found(code: PythonCode, function: str, step: Step, built: Step) -> Found:
    whose = function if function.startswith("<") else f"{function}()"
    message = f"{whose} switches {step.name} on after {built.name}() in line {built.line}"
    if step.kind == "variable":
        message = f"{whose} sets {step.name} after {built.name}() in line {built.line}: {_READ[step.name]}"
    where = Where(str(code.path), step.line, step.name)
    if built.kind == "model":  # modules of plain torch ask when they run
        return Found(message, where, "note", "possible")
    return Found(message if step.kind == "variable" else f"{message}: {_COPIED}", where)


RULE = Rule(
    id="determinism-after-model",
    title="Determinism that Python code switches on after the model is built",
    inputs=(PythonCode,),
    severity="warning",
    certainty="likely",
    why="what was built before keeps its kernels: the run says that it is deterministic, and grad_norm still differs",
    cure="switch it on, and set the variables, before model and process groups are built; best in the environment of "
    "the launch",
    sources=("areal-project/AReaL#1544",),
    check=_check,
)
