"""Golden runs that did not prove themselves."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Golden
from repro.doctor.facts.goldens import REPRODUCED, proofs_of
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_WANTED = ("all values finite", "gradients are not all zero")
"""What every golden run is asked, whatever its subject; the other proofs depend on what there is to show."""


def _check(golden: Golden) -> Iterator[Found]:
    proofs = proofs_of(golden)
    for proof in proofs:
        name = str(proof.get("name", ""))
        if proof.get("passed") is True or name.startswith(REPRODUCED):
            continue
        if golden.record.get("noise") and name.startswith(("one ULP", "the recorder", "the replay")):
            continue  # without reproduction no proof over bits can hold
        yield Found(f"{name[:120]}: no: {str(proof.get('detail', ''))[:300]}", _where(golden, name[:120]))
    names = {str(proof.get("name", "")) for proof in proofs}
    if missing := [name for name in _WANTED if name not in names]:
        yield Found(f"its record does not say: {', '.join(missing)}", _where(golden, "proofs"), severity="note")
    if proofs and not any(name.startswith("one ULP") for name in names):
        yield Found("no planted change was looked for, so nothing shows that it sees one", _where(golden, "proofs"),
                    severity="note")  # fmt: skip


def _where(golden: Golden, item: str) -> Where:
    return Where(str(golden.path / "run.json"), item=item)


RULE = Rule(
    id="golden-unproved",
    title="Golden runs with failed or missing proofs",
    inputs=(Golden,),
    severity="warning",
    certainty="certain",
    why="it was kept all the same, and fixes in place what the proof was to refuse",
    cure="repair what the proof names and replace it with `repro golden approve CASE --reason ...`",
    sources=("docs/guard-your-trainer.md",),
    check=_check,
)
