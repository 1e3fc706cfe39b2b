"""Golden runs with fewer steps or states than they should have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from repro.doctor.artefacts.kinds import Golden
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(golden: Golden) -> Iterator[Found]:
    case, made = golden.record["case"], len(golden.trace.steps)
    wanted = case.get("steps") if isinstance(case, Mapping) else None
    if type(wanted) is int and made < wanted:
        yield Found(
            f"it has {made} of the {wanted} steps of its case",
            Where(str(golden.path / "trace" / "steps.jsonl"), item="steps", value=str(made)),
        )
    states = golden.record.get("states")
    lost = (
        [s for s in states if type(s) is int and not (golden.path / "states" / str(s)).is_dir()]
        if isinstance(states, list)
        else []
    )
    if lost:
        yield Found(
            f"the training states before steps {', '.join(map(str, lost[:8]))} are gone",
            Where(str(golden.path / "states"), item="states"),
            severity="warning",
            cure=f"`dvc checkout {golden.path}.dvc` brings them back; a bisect starts from step 0 without them",
        )


RULE = Rule(
    id="golden-incomplete",
    title="Golden runs that lack steps or training states",
    inputs=(Golden,),
    severity="error",
    certainty="certain",
    why="what happens in the steps that are missing is not guarded, and `repro golden verify` never agrees",
    cure="`dvc checkout golden/runs/MACHINE/CASE.dvc`, or record it again",
    sources=("docs/formats.md (golden runs)",),
    check=_check,
)
