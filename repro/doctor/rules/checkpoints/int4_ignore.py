"""Matrices besides routers that are no Linear and that the INT4 ignore list leaves to be packed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import HfCheckpoint, Launch
from repro.doctor.facts.checkpoints.ignoring import (
    RECOMMENDED,
    Taken,
    bridged,
    cure_of,
    decides,
    ignoring_of,
    is_gate,
    is_linear,
    packed_names,
    taken,
)
from repro.doctor.facts.checkpoints.names import TABLES, is_router, kind_of
from repro.doctor.rule import Certainty, Found, Rule, Where

__all__ = ["RULE"]

_ITEM = "quantization_config.ignore"
_LIST = json.dumps(list(RECOMMENDED))
_TABLE = re.compile(r"(?:^|\.)(?:embed_tokens|word_embeddings|wte|lm_head|router)\.weight$")


def _check(checkpoint: HfCheckpoint, launch: Launch | None) -> Iterator[Found]:
    ignoring = ignoring_of(checkpoint.config)
    if ignoring is None or checkpoint.config is None:
        return
    path = str(checkpoint.config.path)
    found = [one for one in taken(ignoring, checkpoint) if not is_router(one.name, one.shape or (0, 0))]
    yield from _no_linear([one for one in found if not is_linear(one.name)], checkpoint, launch, path)
    stored = packed_names(checkpoint.tensors)
    groups: dict[str, list[Taken]] = {}
    for one in found if stored else []:
        if is_linear(one.name):
            groups.setdefault(kind_of(one.name), []).append(one)
    for members in groups.values():
        more = f" and {len(members) - 1} of its kind" if len(members) > 1 else ""
        said = f"{members[0]}{more} would be packed to INT4 in the weight sync, and is stored unpacked here"
        yield Found(said, Where(path, item=_ITEM, value=str(members[0])), "warning", "likely", cure_of(members))
    kept = sorted(name for name in stored if ignoring.ignores(name))
    if kept:
        said = f"{len(kept)} weights are stored packed although the list ignores them, first {kept[0]}"
        yield Found(
            said, Where(path, item=_ITEM, value=kept[0]), "warning", "likely",
            "the sync will send them unpacked, which the engine does not expect: take the rule out that matches them",
        )  # fmt: skip


def _no_linear(found: list[Taken], checkpoint: HfCheckpoint, launch: Launch | None, path: str) -> Iterator[Found]:
    """One finding for each matrix that is no Linear, and one cure for all."""
    cure = cure_of(found)
    sure = decides(launch, checkpoint)
    for one in found:
        grave = _grave(one, checkpoint) and (one.stored or not bridged(launch))
        # whether a gate is quantised differs between engines
        certainty: Certainty = "possible" if is_gate(one.name) else "likely"
        if grave and (sure or one.stored):
            certainty = "certain"
        done = "is stored packed" if one.stored else "would be packed to INT4 in the weight sync"
        what = "a gate" if is_gate(one.name) else "no Linear"
        where = Where(path, item=_ITEM, value=str(one))
        yield Found(f"{one} {done}, and is {what}", where, None if grave else "warning", certainty, cure)


def _grave(one: Taken, checkpoint: HfCheckpoint) -> bool:
    """Whether no engine has this weight packed: a language model's tables, but for a head that may be."""
    if one.name not in TABLES and not _TABLE.search(one.name):
        return False
    tied = checkpoint.config is not None and checkpoint.config.values.get("tie_word_embeddings") is True
    return not (one.name.endswith("lm_head.weight") and (one.stored or tied))


RULE = Rule(
    "int4-ignore", "Matrices that are no Linear and that the INT4 ignore list leaves to be packed", (HfCheckpoint,),
    "error", "certain", "the engine does not know the packed names and keeps what it had, without an error",
    f"put every matrix that is no Linear into quantization_config.ignore; for MoE models like GLM: {_LIST}",
    ("slime guide: Debugging", "THUDM/slime@624b824a8 slime/backends/megatron_utils/megatron_to_hf/processors/"
     "quantizer_compressed_tensors.py"),
    _check, uses=(Launch,),
)  # fmt: skip
