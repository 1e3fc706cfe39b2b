"""Versions that are known to be bad, and pairs that do not fit: each with where that is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.determinism import determinism, megatron
from repro.doctor.facts.launches import moe, samples, trains
from repro_golden.base.checks import Certainty, Severity

__all__ = ["KNOWN", "Known", "matches"]


@dataclass(frozen=True)
class Known:
    """Something that is known of versions.

    Attributes:
        packages: Specifiers by normalised name; all of them must be installed and hold.
        what: What happens.
        fix: What to install or set.
        source: Where it is written.
        when: Whether a launch meets it; None: every one does.
        if_: What `when` asks, in words.
        python: A specifier for the interpreter's version.
        severity: Of a finding where a launch meets it, or every one does. Where no launch is at hand it is a note.
        certainty: Likewise.
    """

    packages: Mapping[str, str]
    what: str
    fix: str
    source: str
    when: Callable[[Launch], bool] | None = None
    if_: str = ""
    python: str = ""
    severity: Severity = "warning"
    certainty: Certainty = "likely"


def matches(specifier: str, version: str) -> bool:
    """Whether a version, which may be no version at all, is one of those."""
    try:
        return SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return False


def _multimodal(launch: Launch) -> bool:
    return samples(launch) and launch.has("--multimodal-keys")


def _model(launch: Launch) -> str:
    return (launch.value("--hf-checkpoint") or "").lower().replace("_", ".").replace("-", ".")


def _named(launch: Launch, *names: str) -> bool:
    """Whether the model is one of those, or is not named."""
    model = _model(launch)
    return not model or any(name in model for name in names)


def _experts(launch: Launch) -> bool:
    return samples(launch) and moe(launch)


def _qwen35(launch: Launch) -> bool:
    dense = "qwen3.5" in _model(launch) and ".a" not in _model(launch).partition("qwen3.5")[2]
    return samples(launch) and dense and (launch.number("--rollout-num-gpus-per-engine", 1) or 1) > 1


def _flash(launch: Launch) -> bool:
    return megatron(launch) and launch.value("--attention-backend") == "flash"


KNOWN: tuple[Known, ...] = (
    # -- SGLang
    Known(
        {"sglang": ">=0.5.9,<0.5.18"},
        "seeded sampling takes a token without regard to its probability where the hash of (seed, position, token) is "
        "0xffffffff: its Gumbel noise is +inf, once in about 2^32 candidates",
        "SGLang 0.5.18 or later",
        "sgl-project/sglang#25106 and #33423",
        lambda launch: samples(launch) and launch.has("--sglang-enable-deterministic-inference"),
        "--sglang-enable-deterministic-inference",
    ),
    Known(
        {"sglang": "==0.5.12.*"},
        "rollouts after the first weight sync were garbled with Qwen3.6 MoE, and were not with 0.5.9",
        "SGLang 0.5.15 or later, or check the second rollout: --check-weight-update-equal",
        "THUDM/slime#2091",
        lambda launch: samples(launch) and _named(launch, "qwen3.6"),
        "a Qwen3.6 model",
        certainty="possible",
    ),
    Known(
        {"sglang": ">=0.5.3,<0.5.6"},
        "weights that are updated in small buckets gave garbled answers with DeepSeek-V3 models",
        "SGLang 0.5.6 or later, or a larger --update-weight-buffer-size",
        "sgl-project/sglang#14178",
        samples,
        "an inference engine",
        severity="note",
        certainty="possible",
    ),
    Known(
        {"sglang": ">=0.5.15,<0.5.19"},
        "image tokens of Qwen3.5-VL models are rotated by their temporal position alone: boxes and points are off, "
        "and text is right",
        "SGLang 0.5.19 or later",
        "THUDM/slime#2336, sgl-project/sglang#34446",
        lambda launch: _multimodal(launch) and _named(launch, "qwen3.5", "qwen3.6", "qwen3.8"),
        "a Qwen3.5-VL model and --multimodal-keys",
        certainty="possible",
    ),
    Known(
        {"sglang": "<0.5.10"},
        "dense Qwen3.5 models give garbled or repeated text on an engine of more than one GPU",
        "SGLang 0.5.10 or later, or --rollout-num-gpus-per-engine 1",
        "THUDM/slime#1671, sgl-project/sglang#19411",
        _qwen35,
        "a dense Qwen3.5 model and --rollout-num-gpus-per-engine above 1",
    ),
    # -- kernels of attention and of experts
    Known(
        {"nvidia-cutlass-dsl": ">=4.6.0,<4.6.2", "flash-attn-4": ">=0"},
        "the backward pass of FlashAttention 4 never returns on B300 and GB300",
        "nvidia-cutlass-dsl 4.6.2 and its -libs packages of the same version",
        "Dao-AILab/flash-attention#2797, radixark/miles#2600",
        certainty="possible",
    ),
    Known(
        {"nvidia-cutlass-dsl": ">=4.6.0", "apache-tvm-ffi": "<0.1.10"},
        "FlashInfer's RMSNorm dies while CUDA graphs are captured: make_kwargs_wrapper() got an unexpected keyword "
        "argument 'map_dataclass_to_tuple'",
        "pip install --no-deps apache-tvm-ffi==0.1.11",
        "radixark/miles@31f1ca961 docker/Dockerfile",
        samples,
        "an inference engine",
    ),
    Known(
        {"flashinfer-python": ">=0.6.8,<0.6.15"},
        "kernels of experts that span two thread blocks can hang on Blackwell",
        "flashinfer-python, -cubin and -jit-cache 0.6.15.post1, all three",
        "flashinfer-ai/flashinfer#3279 and #3973",
        _experts,
        "a mixture of experts",
        severity="note",
        certainty="possible",
    ),
    Known(
        {"flashinfer-python": ">=0.6.16rc5,<0.6.18"},
        "NVFP4 experts give NaN on Blackwell",
        "flashinfer-python 0.6.18 or later, or 0.6.15.post1",
        "flashinfer-ai/flashinfer#4486, sgl-project/sglang#34629",
        _experts,
        "a mixture of experts",
        severity="note",
        certainty="possible",
    ),
    Known(
        {"flashinfer-jit-cache": "==0.6.16"},
        "it needs a symbol that apache-tvm-ffi does not have",
        "flashinfer-jit-cache 0.6.16.post1 or later, with flashinfer-python of the same version",
        "sgl-project/sglang#33092",
    ),
    Known(
        {"triton": ">=3.4,<3.7.1", "flash-linear-attention": ">=0"},
        "gradients of gated delta rule layers (Qwen3-Next, Qwen3.5) are wrong on Hopper, for some head sizes",
        "triton 3.7.1 or later; or flash-linear-attention 0.5, which refuses that kernel there",
        "fla-org/flash-linear-attention#640 and #983",
        lambda launch: trains(launch) and _named(launch, "qwen3.next", "qwen3.5", "qwen3.6", "qwen3.8"),
        "such a model",
        severity="note",
        certainty="possible",
    ),
    Known(
        {"torch": ">=2.11,<2.14"},
        "the backward pass of cuDNN's attention gives NaN gradients on H100 and H200, where a mask is given and a "
        "length is 64 above a multiple of 128",
        "--attn-implementation flash_attention_2, or torch.backends.cuda.enable_cudnn_sdp(False)",
        "pytorch/pytorch#196678, huggingface/trl#7181",
        lambda launch: trains(launch) and launch.value("--attn-implementation") == "sdpa",
        "--attn-implementation sdpa",
        certainty="possible",
    ),
    Known(
        {"torch": "==2.9.*", "nvidia-cudnn-cu12": "<9.15"},
        "3-D convolutions in bf16, with which vision models embed patches, are slow and take far more memory; SGLang "
        "refuses to start",
        "pip install nvidia-cudnn-cu12==9.16.0.29",
        "pytorch/pytorch#168167, THUDM/slime@624b824a8 build_conda.sh",
        _multimodal,
        "--multimodal-keys",
    ),
    # -- Transformer Engine, cuDNN, cuBLAS
    Known(
        {"transformer-engine": ">=1.13,<2.2"},
        "gradients are wrong under sequence parallelism",
        "transformer-engine 2.2.0 or later",
        "NVIDIA/TransformerEngine#1528, alibaba/ROLL#145",
        lambda launch: megatron(launch) and launch.has("--sequence-parallel"),
        "--sequence-parallel",
    ),
    Known(
        {"transformer-engine-cu13": ">=2.13", "torch": "==2.11.*"},
        "the wheel is built against a newer cuBLAS than torch 2.11 brings, and fails to import: undefined symbol "
        "cublasLtGroupedMatrixLayoutInit_internal",
        "try `python -c 'import transformer_engine.pytorch'`; if it fails: transformer-engine 2.11.0, a newer "
        "nvidia-cublas, or a build against what is there",
        "NVIDIA/TransformerEngine#2504, THUDM/slime@624b824a8 docker/Dockerfile",
        certainty="possible",
    ),
    Known(
        {"transformer-engine": ">=2.16,<2.17", "flash-attn": "<2.7.4"},
        "Transformer Engine 2.16 takes FlashAttention 2.7.4 to 2.8.3 alone, and then has no attention",
        "flash-attn 2.8.3",
        "THUDM/slime@624b824a8 build_conda.sh",
        _flash,
        "--attention-backend flash",
    ),
    Known(
        {"transformer-engine": ">=2.16,<2.17", "flash-attn": ">2.8.3"},
        "Transformer Engine 2.16 takes FlashAttention 2.7.4 to 2.8.3 alone, and then has no attention",
        "flash-attn 2.8.3",
        "THUDM/slime@624b824a8 build_conda.sh",
        _flash,
        "--attention-backend flash",
        certainty="possible",
    ),
    *(
        Known(
            {cudnn: "<9.18.1", "transformer-engine": ">=0"},
            "on Blackwell, fused attention has no deterministic backward pass before cuDNN 9.18.1",
            f"{cudnn} 9.18.1 or later, or --attention-backend flash",
            "NVIDIA/TransformerEngine#2584",
            lambda launch: megatron(launch) and bool(determinism(launch, sampling=False)),
            "--deterministic-mode",
            severity="note",
            certainty="possible",
        )
        for cudnn in ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
    ),
    *(
        Known(
            {cudnn: ">=9.23.0,<9.23.2", "transformer-engine": ">=0"},
            "attention in MXFP8 gives infinities and NaN",
            f"{cudnn} 9.23.2 or later",
            "NVIDIA/TransformerEngine#3173",
            lambda launch: trains(launch) and launch.value("--fp8-recipe") == "mxfp8",
            "--fp8-recipe mxfp8",
        )
        for cudnn in ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
    ),
    # -- the rest
    Known(
        {"megatron-core": "<0.16.0", "slime": ">=0"},
        "slime calls what Megatron has since 0.16",
        "the Megatron-LM commit that slime's docker/Dockerfile names",
        "THUDM/slime#1411",
        megatron,
        "Megatron",
    ),
    Known(
        {"megatron-core": ">=0.17"},
        "it needs Python 3.12",
        "Python 3.12, or megatron-core 0.16.1",
        "megatron-core's own metadata (requires-python)",
        python="<3.12",
        severity="error",
        certainty="certain",
    ),
    Known(
        {"scipy": ">=1.18", "numpy": "<2"},
        "it needs numpy 2, and fails to import",
        "pip install numpy==1.26.4 scipy==1.17.1",
        "THUDM/slime@624b824a8 docker/Dockerfile",
    ),
    Known(
        {"kernels": ">=0.15", "transformers": ">=4.57.6,<5.9"},
        "transformers fails to import: Either a revision or a version must be specified",
        'pip install "kernels<0.15"',
        "huggingface/transformers#46291, sgl-project/sglang#26704",
    ),
    Known(
        {"flash-linear-attention": "<0.5"},
        "its kernel for Kimi Delta Attention calls a host function that recent Triton refuses to compile",
        "flash-linear-attention 0.5.2",
        "radixark/miles#2790",
        lambda launch: trains(launch) and "kimi.linear" in _model(launch),
        "a model with Kimi Delta Attention",
    ),
)
"""All that is known."""
