"""What SGLang is started with, and what one request asks of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import InvalidVersion, Version

from repro_core.config import ModelConfig, SglangConfig
from repro_core.rollout.engine import EngineError, Sampling

__all__ = [
    "DTYPES",
    "EXPORT",
    "FIRST",
    "FIRST_ON_CPU",
    "SUPPORTED",
    "check_version",
    "command_line",
    "default_device",
    "engine_seeds",
    "environment",
    "installed_version",
    "is_launchers",
    "request",
    "server_arguments",
    "told_flags",
]

EXPORT = "repro_core.rollout.sglang_inside.export"
"""The weight loader through which weights are read back. Every engine started here knows it."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""SGLang's names."""

_OURS = ("custom_weight_loader", "device", "dtype", "model_path", "skip_tokenizer_init")
_LAYOUT = ("dp_size", "ep_size", "pp_size")
_LAUNCHER = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
}
_TOLD = (
    "attention_backend",
    "chunked_prefill_size",
    "cuda_graph_max_bs",
    "disable_cuda_graph",
    "disable_radix_cache",
    "dp_size",
    "dtype",
    "enable_deterministic_inference",
    "enable_memory_saver",
    "enable_return_routed_experts",
    "ep_size",
    "kv_cache_dtype",
    "max_running_requests",
    "max_total_tokens",
    "mem_fraction_static",
    "moe_runner_backend",
    "page_size",
    "pp_size",
    "quantization",
    "random_seed",
    "rl_on_policy_target",
    "sampling_backend",
    "schedule_policy",
    "tp_size",
)


def default_device() -> str:
    """``cuda`` where torch sees a GPU, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def server_arguments(
    config: SglangConfig, model: ModelConfig, checkpoint: str | os.PathLike[str], dtype: str, device: str
) -> dict[str, Any]:
    """SGLang's server arguments by name. `SglangConfig.args` come last and win, except over what is checked here.

    Args:
        config: how it samples.
        model: that the checkpoint holds.
        checkpoint: directory in Hugging Face's form.
        dtype: ``fp32`` or ``bf16``.
        device: ``cpu`` or ``cuda``.

    Raises:
        EngineError: `args` sets what is the engine's own to set, or SGLang would leave a weight of the model unset.
    """
    if model.has_experts and model.tie_word_embeddings:
        raise EngineError(
            "SGLang gives Qwen3-MoE an output matrix of its own and leaves it unset where embeddings are tied: set "
            "tie_word_embeddings to false"
        )
    for name in _OURS:
        if name in config.args:
            raise EngineError(f"sglang.args.{name} is set by the engine itself: take it out")
    if "tp_size" in config.args:
        raise EngineError("sglang.args.tp_size has a key of its own: set sglang.tp_size")
    for name in _LAYOUT:
        if name in config.args:
            raise EngineError(
                f"sglang.args.{name} is refused: an engine started here divides its model by sglang.tp_size alone"
            )
    arguments: dict[str, Any] = {
        "model_path": os.fspath(checkpoint),
        "device": device,
        "dtype": DTYPES[dtype],
        "skip_tokenizer_init": True,
        "custom_weight_loader": [EXPORT],
        "attention_backend": config.attention_backend or ("torch_native" if device == "cpu" else "triton"),
        # Its own sampling keeps to seeds; FlashInfer's does not.
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "mem_fraction_static": config.mem_fraction_static,
        "tp_size": config.tp_size,
        "enable_deterministic_inference": config.enable_deterministic_inference,
        "random_seed": 0,
        "log_level": "warning",
    }
    if config.max_total_tokens is not None:
        arguments["max_total_tokens"] = config.max_total_tokens
    if device == "cpu":
        arguments["disable_cuda_graph"] = True
        arguments["sleep_on_idle"] = True  # its scheduler would keep a core busy while nothing is asked of it
    if model.has_experts:
        arguments["enable_return_routed_experts"] = True
    return {**arguments, **config.args}


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """The same arguments for ``python -m sglang.launch_server``."""
    argv: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            argv.append(flag)
        elif isinstance(value, (list, tuple)):
            argv += [flag, *map(str, value)]
        elif isinstance(value, dict):
            argv += [flag, json.dumps(value)]
        elif value is not None and value is not False:
            argv += [flag, str(value)]
    return argv


def environment(device: str) -> dict[str, str]:
    """Variables that SGLang reads while it is imported, so they must be set before.

    ``OMP_NUM_THREADS`` decides bits on a CPU, and torch reads it when *it* is imported: in a process that imported
    torch already it reaches the engine's own processes, which do the arithmetic, and not this one.
    """
    common = {
        "HF_HUB_OFFLINE": "1",
        # Log-probs are those that were sampled from, at the sampling temperature, and NaN stays NaN.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        "SGLANG_SANITIZE_NAN_LOGITS": "0",
    }
    if device == "cpu":
        return {**common, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    return common


def is_launchers(variable: str) -> bool:
    """Whether torchrun sets a variable: SGLang's own processes would take the trainer's ranks and store for theirs."""
    return variable in _LAUNCHER or variable.startswith("TORCHELASTIC_")


def engine_seeds(seeds: Sequence[int]) -> list[int]:
    """The seeds that SGLang draws from: it holds 63 bits of one.

    Seeds below 2**63, such as those of `repro_core.rollout.sampler.sample_seeds`, are used as they are. Longer ones are
    folded: their 63-bit pieces are combined by exclusive or.

    Raises:
        EngineError: a seed is negative.
    """
    if any(seed < 0 for seed in seeds):
        raise EngineError(f"seed {min(seeds)} is negative: seeds start at 0")
    return [_folded(seed) for seed in seeds]


def _folded(seed: int) -> int:
    folded = 0
    while seed:
        folded ^= seed & (2**63 - 1)
        seed >>= 63
    return folded


def request(
    prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None, deterministic: bool
) -> dict[str, Any]:
    """The body of one ``/generate`` request, which is also what `sglang.Engine.async_generate` takes.

    Raises:
        EngineError: arguments that do not fit together, or seeds for an engine that would ignore them.
    """
    for holds, message in _rules(prompts, sampling, seeds, deterministic):
        if not holds:
            raise EngineError(message)
    common: dict[str, Any] = {
        "max_new_tokens": sampling.max_response_len,
        "temperature": sampling.temperature,
        "ignore_eos": sampling.ignore_eos,
    }
    if not sampling.ignore_eos:
        common["stop_token_ids"] = [sampling.eos_id]
    drawn = [None] * len(prompts) if seeds is None else engine_seeds(seeds)
    body: dict[str, Any] = {
        "input_ids": [list(prompt) for prompt in prompts],
        "sampling_params": [
            common if seed is None or sampling.temperature == 0 else {**common, "sampling_seed": seed} for seed in drawn
        ],
        "return_logprob": True,
        "logprob_start_len": 0 if sampling.prompt_log_probs else -1,
    }
    if sampling.routed_experts:
        body["return_routed_experts"] = True
    return body


def _rules(
    prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None, deterministic: bool
) -> list[tuple[bool, str]]:
    return [
        (sampling.max_response_len >= 1, f"max_response_len {sampling.max_response_len} must be at least 1"),
        (
            0.0 <= sampling.temperature < float("inf"),
            f"temperature {sampling.temperature} must be finite and at least 0",
        ),
        # SGLang takes smaller ones for 0.
        (
            sampling.temperature == 0 or sampling.temperature >= 1e-6,
            f"temperature {sampling.temperature} is too small for SGLang: use 0, or at least 1e-6",
        ),
        (
            seeds is None or len(seeds) == len(prompts),
            f"{len(prompts)} prompts need as many seeds, not {len(seeds or ())}",
        ),
        (all(map(len, prompts)), "a prompt is empty: begin it with the bos token"),
        (
            seeds is None or sampling.temperature == 0 or deterministic,
            "without enable_deterministic_inference SGLang ignores seeds: set it, or give no seeds",
        ),
    ]


def told_flags(server: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an engine's own arguments that may decide its numbers, for its identity."""
    return {name: server[name] for name in _TOLD if _is_plain(server.get(name))}


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))


# -- which versions of SGLang are supported, and what differs between them

# 0.5.15.post1 was tried on an H200, and 0.5.23 on a CPU. Between them:
#
# - Weight updates: the later one takes tensors only between ``begin_weight_update`` and ``end_weight_update``, and
#   answers ``(False, message)`` without raising elsewhere; the earlier one has neither. Which one it is is asked of the
#   engine itself, not of its number.
# - The later one reports a response's weights in spans (``weight_versions``) besides ``weight_version``.
# - Only the later one has the plugin points that the stand-ins for a CPU need.
FIRST, FIRST_ON_CPU, _AFTER = Version("0.5.15"), Version("0.5.23"), Version("0.6")
SUPPORTED = f">={FIRST},<{_AFTER}"


def installed_version(device: str) -> str:
    """The version of the SGLang that this Python has.

    Args:
        device: that it is to run on, ``cpu`` or ``cuda``.

    Raises:
        EngineError: it has none, or one that is not supported.
    """
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        fix = (
            "pip install 'repro-harness[sglang-cpu]', then pip install --no-deps sglang==0.5.23"
            if device == "cpu"
            else "pip install 'repro-harness[sglang]'"
        )
        raise EngineError(f"this Python has no SGLang: {fix}") from None
    check_version(installed, "the installed SGLang", device)
    return installed


def check_version(version: str, where: str, device: str) -> None:
    """Whether a version can be talked to.

    Args:
        version: what it calls itself.
        where: whose version it is, for the message.
        device: that it runs on, ``cpu`` or ``cuda``.

    Raises:
        EngineError: it is not supported, or its name is no version.
    """
    try:
        number = Version(version)
    except InvalidVersion:
        raise EngineError(f"{where} says it is version {version!r}, which is none: it must be {SUPPORTED}") from None
    if not FIRST <= number < _AFTER:
        raise EngineError(f"{where} is version {version}, which is not supported: it must be {SUPPORTED}")
    if device == "cpu" and number < FIRST_ON_CPU:
        raise EngineError(f"{where} is version {version}, which does not run on a CPU here: it must be {FIRST_ON_CPU}")
