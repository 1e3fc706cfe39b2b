"""`--check-weight-update-equal` found tensors that differ after a sync."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Log
from repro.doctor.artefacts.log_lines import below, said, speaker
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_SEEN = "check tensor equality failed"
_NAME = re.compile(r"\bname=(\S{1,200}) max_abs_err=(\S{1,40})")


def _check(log: Log) -> Iterator[Found]:
    for hit in said(log, _SEEN)[:3]:
        names: dict[str, str] = {}
        for line in below(log, hit, 900)[1:]:
            match = _NAME.search(line)
            if match:
                names.setdefault(match[1], match[2])
            elif names:
                break
        named = ", ".join(f"{name} (off by {error})" for name, error in list(names.items())[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        who = f" of {speaker(hit)}" if speaker(hit) else ""
        count = f"{len(names)} tensors{who} differ" if names else f"tensors{who} differ"
        yield Found(
            f"{count} between the first sync and the engine's own checkpoint{': ' + named + more if named else ''}",
            log.where(hit),
        )


RULE = Rule(
    id="weight-update-unequal",
    title="Tensors that differ from the engine's checkpoint after the first weight sync",
    inputs=(Log,),
    severity="error",
    certainty="certain",
    why="the engine samples from another model than the one that is trained",
    cure="a tensor that is zero was quantized by mistake or is missing from the checkpoint: check `quantization_config."
    "ignore` and the shards; others are mapped or split wrongly on the way",
    sources=(
        "slime guide: Debugging",
        "sgl-project/sglang python/sglang/srt/utils/weight_checker.py",
        "THUDM/slime@624b824a8 slime/backends/sglang_utils/sglang_engine.py:341",
    ),
    check=_check,
    phrases=(_SEEN,),
)
