"""Context parallelism with an attention that Transformer Engine chooses by itself."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import absent, fsdp, multi_latent_attention, size, trains
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_NAME = "--attention-backend"


def _check(launch: Launch) -> Iterator[Found]:
    context_parallel = size(launch, "--context-parallel-size")
    # with latent attention the launch scripts leave the choice to Transformer Engine: flash does not take its heads
    if context_parallel in (None, 1) or fsdp(launch) or not trains(launch) or multi_latent_attention(launch):
        return
    if not launch.has(_NAME):
        message = f"--context-parallel-size {context_parallel} without {_NAME} flash: Transformer Engine may fuse"
        yield Found(message, launch.where("--context-parallel-size"), *absent(launch, "warning", "possible"))
    elif launch.value(_NAME) in ("fused", "auto"):
        message = f"--context-parallel-size {context_parallel} with {_NAME} {launch.value(_NAME)}"
        yield Found(message, launch.where(_NAME))


RULE = Rule(
    id="attention-backend",
    title="Context parallelism without --attention-backend flash",
    inputs=(Launch,),
    severity="warning",
    certainty="possible",
    why="fused attention under context parallelism is not stable in some versions: KL is not 0 at step 1",
    cure="add --attention-backend flash (leave it out for models with MLA)",
    sources=("Miles guide: Debugging", "slime guide: Debugging", "Relax guide: Debugging"),
    check=_check,
)
