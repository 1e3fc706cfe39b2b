"""Flags that need a package which is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from repro.doctor.artefacts.kinds import Launch, Machine
from repro.doctor.facts.asked import megatron
from repro.doctor.facts.launches import absent, samples, trains
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


@dataclass(frozen=True)
class _Need:
    """A flag, the value that counts ('' for any), when, and of which names one must be installed or importable."""

    flag: str
    value: str
    when: Callable[[Launch], bool]
    packages: tuple[str, ...]
    modules: tuple[str, ...]
    cure: str


_TE = (("transformer-engine", "transformer-engine-cu12", "transformer-engine-cu13"), ("transformer_engine",))
_FLASH = (
    ("flash-attn", "flash-attn-3", "flash-attn-4"),
    ("flash_attn", "flash_attn_3", "flash_attn_interface"),
)


def _with_engine(launch: Launch) -> bool:
    return megatron(launch) and launch.value("--transformer-impl") in (None, "transformer_engine")


def _always(launch: Launch) -> bool:  # noqa: ARG001 - a condition like the others
    return True


_NEEDS = (
    _Need("--attention-backend", "flash", _with_engine, *_FLASH, "flash-attn==2.8.3 --no-build-isolation"),
    _Need("--transformer-impl", "transformer_engine", megatron, *_TE, '"transformer-engine[pytorch]"'),
    _Need("--fp8-format", "", megatron, *_TE, '"transformer-engine[pytorch]"'),
    _Need("--moe-permute-fusion", "", megatron, *_TE, '"transformer-engine[pytorch]"'),
    _Need("--moe-enable-deepep", "", megatron, ("deep-ep",), ("deep_ep",), "DeepEP from its source"),
    _Need(
        "--sglang-moe-a2a-backend", "deepep", samples, ("deep-ep",), ("deep_ep",), "DeepEP from its source"
    ),
    _Need("--sglang-attention-backend", "flashinfer", samples, ("flashinfer-python",), ("flashinfer",),
          "flashinfer-python"),
    _Need("--attn-implementation", "flash_attention_2", trains, ("flash-attn",), ("flash_attn",), "flash-attn"),
    _Need("--attn-implementation", "flash_attention_3", trains, ("flash-attn-3",),
          ("flash_attn_3", "flash_attn_interface"), "flash_attn_3"),
    _Need("--megatron-to-hf-mode", "bridge", megatron, ("megatron-bridge",), (), "megatron-bridge"),
    _Need("--use-wandb", "", _always, ("wandb",), ("wandb",), "wandb"),
    _Need("--use-tensorboard", "", _always, ("tensorboard", "tensorboardx"), ("tensorboard",), "tensorboard"),
    _Need("", "", _always, ("torch",), ("torch",), "torch"),
    _Need("", "", _always, ("ray",), ("ray",), '"ray[default]"'),
    _Need("", "", samples, ("sglang",), ("sglang",), "sglang"),
)  # fmt: skip


def _check(machine: Machine, launch: Launch) -> Iterable[Found]:
    if not machine.complete:
        return
    for need in _asked(launch):
        if any(name in machine.packages for name in need.packages) or machine.modules.intersection(need.modules):
            continue
        given = f"{need.flag} {need.value}".strip()
        severity, certainty = absent(launch, "error", "likely")
        yield Found(
            f"{given or launch.system or 'the trainer'} needs {need.packages[0]}, which is not installed",
            launch.where(need.flag) if need.flag else Where(machine.source, item=need.packages[0]),
            severity,
            certainty,
            f"install {need.cure}" if "source" in need.cure else f"pip install {need.cure}",
        )


def _asked(launch: Launch) -> Iterator[_Need]:
    for need in _NEEDS:
        if need.flag and not launch.has(need.flag):
            continue
        if not need.flag and launch.system is None:
            continue  # who knows what that trainer needs
        if (not need.value or launch.value(need.flag) == need.value) and need.when(launch):
            yield need


RULE = Rule(
    id="package-missing",
    title="A flag needs a package that is not installed",
    inputs=(Machine, Launch),
    severity="error",
    certainty="likely",
    why="the run fails when the first process imports it, after GPUs are taken and weights are loaded",
    cure="install it in the environment that trains",
    sources=(
        "THUDM/slime@624b824a8 docker/Dockerfile",
        "radixark/miles@31f1ca961 docker/Dockerfile",
        "radixark/miles#2518",
    ),
    check=_check,
)
