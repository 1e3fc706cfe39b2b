"""Prompt data without the key that the launch names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Log
from repro.doctor.artefacts.log_lines import above, argument, said
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_KEY = re.compile(r"KeyError: (['\"])(.{1,100}?)\1")
_NEAR = ("utils/data.py", "data_source.py", "rollout/data_buffer", "datasets/", "data/dataset")


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    for hit in said(log, "KeyError: ")[:20]:
        key = _KEY.search(hit.text)
        if not key or not any(word in line for line in above(log, hit, 40) for word in _NEAR):
            continue
        names = ("input_key", "label_key", "tool_key", "metadata_key", "multimodal_keys")
        flags = [f"--{name.replace('_', '-')}" for name in names if argument(name, launch, log) == key[2]]
        which = f", which {' and '.join(flags)} names" if flags else ""
        yield Found(f"a row of the prompt data has no {key[2]!r}{which}", log.where(hit))
        return


RULE = Rule(
    id="data-key-error",
    title="Prompt data without a key that the run reads",
    inputs=(Log,),
    uses=(Launch,),
    severity="error",
    certainty="certain",
    why="the run ends when it reads its data",
    cure="--input-key and --label-key must be keys of every row; `repro doctor` on the data names those without",
    sources=("slime guide: Troubleshooting", "THUDM/slime@624b824a8 slime/utils/data.py:272"),
    check=_check,
    phrases=("KeyError: ",),
)
