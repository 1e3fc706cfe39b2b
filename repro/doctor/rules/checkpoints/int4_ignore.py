"""Matrices besides routers that are no Linear and that the INT4 ignore list leaves to be packed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import HfCheckpoint, Launch
from repro.doctor.facts.checkpoints.ignoring import RECOMMENDED, decides, ignoring_of, is_linear, packed_names
from repro.doctor.facts.checkpoints.names import is_router, kind_of
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_ITEM = "quantization_config.ignore"
_LIST = json.dumps(list(RECOMMENDED))


def _check(checkpoint: HfCheckpoint, launch: Launch | None) -> Iterator[Found]:
    ignoring = ignoring_of(checkpoint.config)
    if ignoring is None or checkpoint.config is None:
        return
    path = str(checkpoint.config.path)
    sure = decides(launch, checkpoint)
    tensors = checkpoint.tensors
    packed = [n for n in ignoring.packed(tensors) if not is_router(n, tensors[n].shape)]
    stored = packed_names(tensors)
    for names, what in (
        ([n for n in packed if not is_linear(n)], "no Linear"),
        ([n for n in packed if is_linear(n)] if stored else [], "stored unpacked here"),
    ):
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(kind_of(name), []).append(name)
        for kind, members in groups.items():
            shape = " x ".join(map(str, tensors[members[0]].shape))
            more = f" and {len(members) - 1} of its kind" if len(members) > 1 else ""
            said = f"{members[0]} ({shape}){more} would be packed to INT4 in the weight sync, and is {what}"
            rule = json.dumps(
                members[0] if len(members) == 1 else f"re:{re.escape(kind).replace(re.escape('*'), '[0-9]+')}"
            )
            grave = sure and what == "no Linear" and not members[0].endswith("lm_head.weight")
            yield Found(
                said, Where(path, item=_ITEM, value=members[0]), None if grave else "warning",
                None if grave else "likely", f"add {rule} to {_ITEM} of config.json; for MoE models like GLM: {_LIST}",
            )  # fmt: skip
    kept = sorted(name for name in stored if ignoring.ignores(name))
    if kept:
        said = f"{len(kept)} weights are stored packed although the list ignores them, first {kept[0]}"
        yield Found(
            said, Where(path, item=_ITEM, value=kept[0]), "warning", "likely",
            "the sync will send them unpacked, which the engine does not expect: take the rule out that matches them",
        )  # fmt: skip


RULE = Rule(
    "int4-ignore", "Matrices that are no Linear and that the INT4 ignore list leaves to be packed", (HfCheckpoint,),
    "error", "certain", "the engine does not know the packed names and keeps what it had, without an error",
    f"put every matrix that is no Linear into quantization_config.ignore; for MoE models like GLM: {_LIST}",
    ("slime guide: Debugging", "THUDM/slime@624b824a8 slime/backends/megatron_utils/megatron_to_hf/processors/"
     "quantizer_compressed_tensors.py"),
    _check, uses=(Launch,),
)  # fmt: skip
