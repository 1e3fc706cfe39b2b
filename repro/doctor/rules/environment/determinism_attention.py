"""Attention of the trainer in a deterministic run."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.determinism import NVTE, asked_of_trainer
from repro.doctor.facts.launches import fsdp, known_text, multi_latent_attention, open_ended, seen
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_NAME = "--attention-backend"


def _check(launch: Launch) -> Iterator[Found]:
    asking = asked_of_trainer(launch)
    if asking is None or fsdp(launch) or launch.value("--transformer-impl") == "local":
        return
    backend, variable = launch.value(_NAME), seen(launch, NVTE)
    deterministic = known_text(variable) == "0" or (variable is not None and known_text(variable) is None)
    if backend == "fused" and not deterministic:
        yield Found(f"{_NAME} fused without {NVTE}=0 adds gradients atomically", launch.where(_NAME))
    elif backend in ("fused", "auto"):
        message = (
            f"{_NAME} {backend} in a deterministic run: which kernel that is depends on the versions and the shapes"
        )
        yield Found(message, launch.where(_NAME), "note", "possible")
    elif not launch.has(_NAME) and not multi_latent_attention(launch) and not open_ended(launch):
        message = f"--deterministic-mode without {_NAME} flash: Transformer Engine picks the kernel"
        yield Found(message, asking, "note", "possible")


RULE = Rule(
    id="determinism-attention",
    title="The trainer's attention may be fused in a deterministic run",
    inputs=(Launch,),
    severity="warning",
    certainty="likely",
    why="fused attention is not deterministic in its backward pass in all versions of cuDNN and Transformer Engine",
    cure="--attention-backend flash, without flash-attn 3 installed",
    sources=(
        "THUDM/slime@624b824a8 scripts/run-qwen2.5-0.5B-reproducibility.sh",
        "THUDM/slime@624b824a8 docs/en/advanced/reproducibility.md",
        "radixark/miles@31f1ca961 examples/experimental/reproducibility/run-qwen2.5-0.5B-gsm8k.sh",
    ),
    check=_check,
)
