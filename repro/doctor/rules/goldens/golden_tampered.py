"""Golden runs whose files are not those that were proved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from repro.doctor.artefacts.kinds import Golden
from repro.doctor.facts.goldens import changed_keys, damage, pointer_md5, recorded_md5
from repro.doctor.rule import Found, Rule, Where
from repro_golden.case.identity import Identity

__all__ = ["RULE"]


def _check(golden: Golden) -> Iterator[Found]:
    run, trace = str(golden.path / "run.json"), str(golden.path / "trace")
    record, header = golden.record, golden.trace.header
    if golden.trace.chain != record["chain"]:
        yield Found(
            f"its step log ends with the chain {golden.trace.chain}, and its record has {str(record['chain'])[:40]}",
            Where(trace, item="chain", value=golden.trace.chain),
        )
    if wrong := damage(golden.trace):
        yield Found(wrong, Where(trace, item="rows"))
    for name, ours in (("case", header.case), ("rollouts", header.rollouts), ("identity", header.identity)):
        if changed := changed_keys(record[name], ours):
            yield Found(
                f"run.json and the trace's header differ in {name}: {', '.join(changed[:4])}", Where(run, item=name)
            )
    known = recorded_md5(golden.path)
    if known is not None and (found := pointer_md5(golden.path)) is not None and found != known:
        yield Found(
            f"its files are not those of {golden.path.name}.dvc",
            Where(f"{golden.path}.dvc", item="md5", value=f"{known}.dir, files have {found}.dir"),
        )
    if golden.root is not None and isinstance(record["identity"], Mapping):
        machine, folder = _machine(record["identity"]), golden.path.resolve().parent.name
        if machine and machine != folder:
            yield Found(
                f"it lies under {folder}, and was recorded on {machine}",
                Where(run, item="identity", value=machine),
                severity="warning",
                cure="move it back: a run is compared with the golden run of its own machine alone",
            )


def _machine(raw: Mapping[str, object]) -> str:
    parts = [raw.get(part) for part in ("host", "environment", "layout")]
    if not all(isinstance(part, Mapping) and all(isinstance(v, str) for v in part.values()) for part in parts):
        return ""
    return Identity.from_mapping(raw).machine


RULE = Rule(
    id="golden-tampered",
    title="Golden runs whose files were changed since they were proved",
    inputs=(Golden,),
    severity="error",
    certainty="certain",
    why="it says something else than what was recorded: whoever trusts it trusts an edit",
    cure="`dvc checkout golden/runs/MACHINE/CASE.dvc` brings the recorded files back",
    sources=("docs/formats.md (roots, chain, golden runs)",),
    check=_check,
)
