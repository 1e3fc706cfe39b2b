"""Routers that the INT4 ignore list does not keep from being packed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import HfCheckpoint, Launch
from repro.doctor.facts.checkpoints.ignoring import decides, ignoring_of
from repro.doctor.facts.checkpoints.names import is_router
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(checkpoint: HfCheckpoint, launch: Launch | None) -> Iterator[Found]:
    ignoring = ignoring_of(checkpoint.config)
    if ignoring is None or checkpoint.config is None:
        return
    routers = [n for n in ignoring.packed(checkpoint.tensors) if is_router(n, checkpoint.tensors[n].shape)]
    if not routers:
        return
    parts = sorted({".".join(name.split(".")[-3:-1]) for name in routers})
    patterns = ", ".join(json.dumps(f"re:.*{re.escape(part)}\\..*") for part in parts)
    shape = " x ".join(map(str, checkpoint.tensors[routers[0]].shape))
    where = Where(str(checkpoint.config.path), item="quantization_config.ignore", value=routers[0])
    said = f"{len(routers)} router weights would be packed to INT4 in the weight sync, first {routers[0]} ({shape})"
    sure = decides(launch, checkpoint)
    yield Found(
        said, where, None if sure else "warning", None if sure else "likely",
        f"add {patterns} to quantization_config.ignore of config.json",
    )  # fmt: skip


RULE = Rule(
    "int4-router", "Router weights that the INT4 ignore list leaves to be packed", (HfCheckpoint,), "error", "certain",
    "SGLang knows no packed router and skips it without a word: all gate weights are zeros after the first sync",
    'add "re:.*mlp\\\\.gate\\\\..*" to quantization_config.ignore of config.json',
    ("slime guide: Debugging", "THUDM/slime@624b824a8 slime/backends/megatron_utils/megatron_to_hf/processors/"
     "quantizer_compressed_tensors.py"),
    _check, uses=(Launch,),
)  # fmt: skip
