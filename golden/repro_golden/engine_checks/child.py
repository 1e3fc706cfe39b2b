"""The child that checks a rollout engine, ``python -m repro_golden.engine_checks.child JOB``.

It imports the trainer as `replay` does, asks it for the case's rollout engine, and writes what the checks found.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from repro_golden.base.canonical import write_atomic
from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.engine_checks.checks import check
from repro_golden.engine_checks.findings import Plan
from repro_golden.replay.child import import_trainer

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Make the checks of one job file; the result file holds what they found, or why there is nothing."""
    job = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    result: dict[str, Any] = {"failure": "it was ended"}
    try:
        result = _checked(job)
    except ReproError as error:
        result = {"refused": str(error), "machine": isinstance(error, MachineFailureError)}
    except BaseException as error:
        traceback.print_exc()
        result = {"failure": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
        raise
    finally:
        write_atomic(Path(job["result"]), json.dumps(result, allow_nan=False))
    return 0


def _checked(job: dict[str, Any]) -> dict[str, Any]:
    subject = job["case"]["subject"]
    trainer = import_trainer(subject, Path(job["root"]))
    source = trainer.rollouts_only({"config": subject["config"], "root": job["root"]})
    try:
        engine = source.engine
        identity = engine.identity()  # before the checks: one that dies in them is known all the same
        findings = check(engine, Plan(**job["plan"]), job["only"], job["expected"], say=_say)
    finally:
        source.close()
    return {"identity": identity, "findings": [finding.to_mapping() for finding in findings]}


def _say(name: str) -> None:
    print(f"check {name}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
