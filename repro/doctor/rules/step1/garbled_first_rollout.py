"""The first rollout: is what the model writes text at all?"""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Rollout
from repro.doctor.facts.texts import CLEAN, FRESH, Garble, judged
from repro.doctor.rule import Found, Rule, Severity, Where
from repro_golden.dumps.archive.bounds import shown

__all__ = ["CURE", "RULE", "SOURCES", "WHY"]

_MOST = 0.5
_LEAST = 4

CURE = (
    "look for the line that says which checkpoint was loaded (fix --load, --ref-load); compare the engine's weights "
    "with the checkpoint's (--check-weight-update-equal), layer numbers at pipeline stages above all; then the chat "
    "template, buffers that SGLang releases, and the engine alone with --debug-rollout-only"
)
WHY = (
    "weights were not loaded or are mapped to other layers, or the prompts are not in the model's form: rewards of "
    "noise train on noise"
)
SOURCES = ("Miles guide: Debugging", "slime guide: Debugging", "Relax guide: Debugging")


def _check(rollout: Rollout) -> Iterator[Found]:
    if rollout.dump.evaluation or rollout.first is not None:
        return
    found = judged(rollout.dump)
    by_itself = found.judged >= _LEAST and found.share > CLEAN
    by_chance = found.fresh is not None and found.fresh > FRESH and len(rollout.dump.samples) >= _LEAST
    if not by_itself and not by_chance:
        return
    number = rollout.dump.rollout_id
    later = f"; whether rollouts before {number} were in order is not known here" if number else ""
    if not by_itself:
        yield Found(
            f"{found.fresh:.0%} of the tokens of all responses are distinct, as if drawn by chance{later}",
            Where(str(rollout.path), item="tokens"),
            certainty="possible",
        )
        return
    sure = found.by_text > _MOST * found.judged and number == 0
    severity: Severity = "error" if sure else "warning"
    yield Found(_said(found) + later, _where(rollout, found), severity)


def _said(found: Garble) -> str:
    count = len(found.garbled)
    return f"{count} of {found.judged} responses are garbled; of the first one, {found.garbled[0][1]}"


def _where(rollout: Rollout, found: Garble) -> Where:
    place = found.garbled[0][0]
    text = rollout.dump.samples[place].get("response")
    return Where(
        str(rollout.path), item=f"sample {place} response", value=shown(text[:80]) if isinstance(text, str) else ""
    )


RULE = Rule(
    id="garbled-first-rollout",
    title="Responses of the first rollout that are no text: stray characters, loops, scripts mixed, no word twice",
    inputs=(Rollout,),
    severity="warning",
    certainty="likely",
    why=WHY,
    cure=CURE,
    sources=SOURCES,
    check=_check,
)
