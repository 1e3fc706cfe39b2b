"""Attention of the engines, where deterministic inference is asked of them."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import HfConfig, Launch
from repro.doctor.facts.determinism import ENGINES, asked_of_engines
from repro.doctor.facts.launches import multi_latent_attention, tempered
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_NAME = "--sglang-attention-backend"
_ALWAYS = ("fa3", "flashinfer", "triton")
_SINCE = ("ascend", "fa4", "intel_xpu")
"""Taken by newer versions alone."""
_SPARSE = ("nsa", "dsa")
"""Refused by SGLang, taken by the build that slime patches for sparse attention."""
_LATENT = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM")


def _latent(launch: Launch, config: HfConfig | None) -> bool:
    named = config.values.get("architectures") if config else None
    return multi_latent_attention(launch) or (isinstance(named, list) and any(name in _LATENT for name in named))


@tempered("error")
def _check(launch: Launch, config: HfConfig | None) -> Iterator[Found]:
    backend = launch.value(_NAME)
    if asked_of_engines(launch) is None or backend is None:
        return
    where, allowed = launch.where(_NAME), ", ".join(_ALWAYS)
    if backend in _SINCE:
        yield Found(f"{_NAME} {backend} is deterministic in newer versions of SGLang alone", where, "note", "possible")
    elif backend in _SPARSE:
        message = f"{_NAME} {backend}: only SGLang as slime patches it for GLM-5 is deterministic with it"
        yield Found(message, where, "warning", "possible")
    elif backend not in _ALWAYS:
        message = f"{_NAME} {backend[:40]} is not deterministic: SGLang stops at {ENGINES}, and takes {allowed}"
        yield Found(message, where, certainty="likely")
    elif backend == "flashinfer" and _latent(launch, config):
        message = f"{_NAME} flashinfer is not deterministic with latent attention: SGLang takes fa3 and triton there"
        yield Found(message, where, "warning", "likely", f"{_NAME} fa3, or triton")
    elif backend == "flashinfer" and not launch.has("--sglang-disable-radix-cache"):
        message = f"{_NAME} flashinfer: SGLang switches its radix cache off for determinism, shared prompts cost again"
        yield Found(message, where, "note", cure=f"{_NAME} fa3 keeps the cache (Hopper)")


RULE = Rule(
    id="engine-determinism",
    title="Deterministic inference with an attention backend that cannot",
    inputs=(Launch,),
    uses=(HfConfig,),
    severity="error",
    certainty="certain",
    why="SGLang refuses to start, or the engine's prefix cache is lost without a word in the launch",
    cure="--sglang-attention-backend fa3, flashinfer or triton",
    sources=(
        "sgl-project/sglang python/sglang/srt/server_args.py (_handle_deterministic_inference)",
        "THUDM/slime@624b824a8 docs/en/advanced/reproducibility.md",
        "THUDM/slime@624b824a8 docker/patch/latest/sglang-deterministic.patch",
    ),
    check=_check,
)
