"""PYTHONHASHSEED that Python code sets for itself."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import PythonCode
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_NAME = "PYTHONHASHSEED"


def _check(code: PythonCode) -> Iterator[Found]:
    if code.starts_others:  # which inherit it
        return
    step = next((step for steps in code.functions.values() for step in steps if step.name == _NAME), None)
    if step:
        message = f"{_NAME} is set in Python code, and no process is started from there that would inherit it"
        yield Found(message, Where(str(code.path), step.line, _NAME))


RULE = Rule(
    id="hash-seed-in-code",
    title="PYTHONHASHSEED that Python code sets for itself",
    inputs=(PythonCode,),
    severity="note",
    certainty="likely",
    why="the interpreter reads it when it starts: sets of texts keep another order in each run",
    cure="PYTHONHASHSEED=0 in the environment of the launch, or in the job's runtime environment",
    sources=("Python documentation: PYTHONHASHSEED",),
    check=_check,
)
