"""Golden runs that no second process reproduces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from repro.doctor.artefacts.kinds import Golden
from repro.doctor.facts.goldens import REPRODUCED, proofs_of
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(golden: Golden) -> Iterator[Found]:
    proof = next((one for one in proofs_of(golden) if str(one.get("name", "")).startswith(REPRODUCED)), None)
    detail = str(proof.get("detail", ""))[:300] if proof else ""
    if noise := golden.record.get("noise"):
        spread = noise.get("spread") if isinstance(noise, Mapping) else None
        moved = [str(name) for name, width in spread.items() if width != 0] if isinstance(spread, Mapping) else []
        names = f"; {len(moved)} metrics move by themselves: {', '.join(moved[:4])}" if moved else ""
        why = f" ({detail})" if detail else ""
        yield Found(
            f"it was kept with --allow-noise: a second process made other bits{why}{names}", _where(golden, "noise")
        )
    elif proof is None:
        yield Found("its record has no proof that a second process reproduces it", _where(golden, "proofs"))
    elif proof.get("passed") is not True:
        yield Found(f"a second process did not reproduce it: {detail}", _where(golden, "proofs"), severity="error")


def _where(golden: Golden, item: str) -> Where:
    return Where(str(golden.path / "run.json"), item=item)


RULE = Rule(
    id="golden-unreproducible",
    title="Golden runs that do not reproduce themselves",
    inputs=(Golden,),
    severity="warning",
    certainty="certain",
    why="no question about bits can be answered with it: `repro golden verify` and bisect see the noise as a change",
    cure="make the program deterministic and replace it with `repro golden approve CASE --reason ...`; until "
    "then compare "
    'metrics with [compare] mode = "bounds"',
    sources=("docs/determinism.md", "areal-project/AReaL#1544 (flags that had no effect)"),
    check=_check,
)
