"""Routers that the INT4 ignore list does not keep from being packed."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import HfCheckpoint, Launch
from repro.doctor.facts.checkpoints.ignoring import bridged, cure_of, decides, ignoring_of, taken
from repro.doctor.facts.checkpoints.names import is_router
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(checkpoint: HfCheckpoint, launch: Launch | None) -> Iterator[Found]:
    ignoring = ignoring_of(checkpoint.config)
    if ignoring is None or checkpoint.config is None:
        return
    # a packed router may not say its shape: its name must do
    routers = [one for one in taken(ignoring, checkpoint) if is_router(one.name, one.shape or (0, 0))]
    cure = cure_of(routers)
    sure = decides(launch, checkpoint)
    for one in routers:
        where = Where(str(checkpoint.config.path), item="quantization_config.ignore", value=str(one))
        if one.stored:
            said = f"the router {one} is stored packed, and the ignore list has no rule for it"
            yield Found(said, where, cure=cure)
        else:
            said = f"the router {one} would be packed to INT4 in the weight sync"
            idle = bridged(launch)
            yield Found(said, where, "warning" if idle else None, None if sure else "likely", cure)


RULE = Rule(
    "int4-router", "Router weights that the INT4 ignore list leaves to be packed", (HfCheckpoint,), "error", "certain",
    "SGLang knows no packed router and skips it without a word: all gate weights are zeros after the first sync",
    'add "re:.*mlp\\\\.gate\\\\..*" to quantization_config.ignore of config.json',
    ("slime guide: Debugging", "THUDM/slime@624b824a8 slime/backends/megatron_utils/megatron_to_hf/processors/"
     "quantizer_compressed_tensors.py"),
    _check, uses=(Launch,),
)  # fmt: skip
