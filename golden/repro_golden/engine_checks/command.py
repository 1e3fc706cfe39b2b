"""Checking the rollout engine of a case, in a process of its own with the environment that its trainer has."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from repro_golden.base.canonical import canonical_json
from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.case.file import Case
from repro_golden.case.tables import CHECKS, Expected
from repro_golden.engine_checks.findings import EngineCheck, Plan, exit_code
from repro_golden.replay.children import Child, ChildFailure, blame_the_machine
from repro_golden.replay.output import last_line
from repro_golden.repository.checkout import Place
from repro_golden.store.rollouts import engine_text
from repro_golden.subjects.argv import beside_case
from repro_golden.subjects.environments.overlays import held_overlay
from repro_golden.subjects.kinds.core import environment, require_torch

__all__ = ["RolloutChecks", "check_rollouts"]


@dataclass(frozen=True)
class RolloutChecks:
    """What the checks of a rollout engine found.

    Attributes:
        case: The case's name.
        identity: What the engine says may decide its numbers: see `repro_core.rollout.engine.RolloutEngine`.
        findings: One for each check, in the order of `CHECKS`.
        plan: What was sampled.
    """

    case: str
    identity: Mapping[str, Any]
    findings: Sequence[EngineCheck]
    plan: Plan = field(default_factory=Plan)

    @property
    def exit_code(self) -> int:
        """See `findings.exit_code`."""
        return exit_code(self.findings)

    @property
    def engine(self) -> str:
        """The engine in a few words, and what of it is a stand-in."""
        return engine_text(self.identity)

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "case": self.case,
            "engine": dict(self.identity),
            "findings": [finding.to_mapping() for finding in self.findings],
            "plan": asdict(self.plan),
            "exit_code": self.exit_code,
        }


def check_rollouts(
    case: Case,
    place: Place,
    *,
    only: Sequence[str] = (),
    expected: Mapping[str, Expected] = CHECKS,
    plan: Plan | None = None,
) -> RolloutChecks:
    """Start the rollout engine that a case asks for, and make the checks.

    Args:
        case: Of kind core.
        place: The subject's code.
        only: Names of the checks to make; all where there are none.
        expected: What must come out of each.
        plan: What is sampled.

    Raises:
        MachineFailureError: the child was killed from outside, or the disk is full.
        ReproError: the engine did not start, or the case has none; the line names a file with its output.
    """
    subject, plan = case.subject, plan or Plan()
    if not subject.samples:
        raise ReproError(f"{case.name} is a command, whose rollout engine cannot be asked: check a case of kind core")
    handle, name = tempfile.mkstemp(prefix="repro-rollout-", suffix=".log")
    os.close(handle)
    log = Path(name)
    with contextlib.ExitStack() as exits:
        scratch = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="repro-child-")))
        variables, python = environment(case, place.root) | dict(place.variables), sys.executable
        if not subject.packages:
            require_torch(case)
        else:
            overlay = exits.enter_context(held_overlay(case, subject, place, python, subject.packages))
            python = overlay.python
            variables |= beside_case(overlay.variables(variables), subject)
            overlay.notice(variables, place.root, log)
        result = scratch / "result.json"
        job = {
            "case": case.canonical(), "root": str(place.root), "result": str(result), "plan": asdict(plan),
            "only": list(only), "expected": dict(expected),
        }  # fmt: skip
        (scratch / "job.json").write_text(canonical_json(job), encoding="utf-8")
        command = [python, "-m", "repro_golden.engine_checks.child", str(scratch / "job.json")]
        try:
            code = Child(command, scratch, variables, log, subject.timeout).run()
        except ChildFailure as failure:
            raise ReproError(f"the rollout engine of {case.name} failed: {failure}") from None
        checks = _read(result, case, plan, code, log)
    if checks.exit_code != 2:
        log.unlink()
        return checks
    failed = next((finding for finding in checks.findings if finding.outcome == "failed"), None)
    told_where = [
        replace(finding, detail=f"{finding.detail} (output in {log})") if finding is failed else finding
        for finding in checks.findings
    ]
    return replace(checks, findings=told_where)


def _read(path: Path, case: Case, plan: Plan, code: int, log: Path) -> RolloutChecks:
    raw = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if refused := raw.get("refused"):
        raise (MachineFailureError if raw.get("machine") else ReproError)(refused)
    if "findings" not in raw:
        try:
            blame_the_machine(code, log, "the rollout engine")
        except MachineFailureError as error:
            raise MachineFailureError(f"{error} (output in {log})") from None
        why = raw.get("failure") or f"exited with {code}: {last_line(log)}"
        raise ReproError(f"the rollout engine of {case.name} failed: {why} (output in {log})")
    findings = [EngineCheck.from_mapping(finding) for finding in raw["findings"]]
    return RolloutChecks(case.name, raw["identity"], findings, plan)
