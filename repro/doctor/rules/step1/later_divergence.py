"""A run whose first rollout was in order, and whose later ones are not."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Rollout
from repro.doctor.facts.rewards import began
from repro.doctor.facts.texts import CLEAN, Garble, judged
from repro.doctor.rule import Found, Rule, Where
from repro_golden.dumps.archive.bounds import shown
from repro_golden.dumps.rollout.files import RolloutDump

__all__ = ["RULE"]

_MANY = 0.3
_LEAST = 4


def _garbled(dump: RolloutDump) -> Garble | None:
    found = judged(dump)
    return found if found.judged >= _LEAST and found.share > _MANY else None


def _check(rollout: Rollout) -> Iterator[Found]:
    if rollout.first is None:
        return
    found = began(rollout, _garbled)
    if found is None:
        return
    before = judged(rollout.first)
    if before.share > CLEAN:
        return  # it began so: `garbled-first-rollout`
    place, reason = found.garbled[0]
    text = rollout.dump.samples[place].get("response")
    yield Found(
        f"{len(found.garbled)} of {found.judged} responses of rollout {rollout.dump.rollout_id} are garbled "
        f"({reason}), and {len(before.garbled)} of {before.judged} of rollout {rollout.first.rollout_id} were",
        Where(
            str(rollout.path), item=f"sample {place} response", value=shown(text[:80]) if isinstance(text, str) else ""
        ),
    )


RULE = Rule(
    id="later-divergence",
    title="Responses in order in the first rollout and no text in later ones",
    inputs=(Rollout,),
    severity="warning",
    certainty="likely",
    why="the weights were right at first, so training has diverged",
    cure="go through each step's rewards, gradient norms and clip fractions before it; lower --lr, raise "
    "--kl-loss-coef; where an older commit did not do this, `repro bisect` finds the one that began it",
    sources=("Relax guide: Debugging", "Miles guide: Debugging"),
    check=_check,
)  # fmt: skip
