"""What may change bits besides the subject's code, in three parts: host, environment, layout."""

from __future__ import annotations

import functools
import hashlib
import platform
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from repro_golden.base.canonical import canonical_json, digest

__all__ = [
    "BITS_VARIABLES",
    "PACKAGES",
    "Difference",
    "Identity",
    "collect",
    "megatron_layout",
    "megatron_variables",
    "short_digest",
    "versions_of",
]

Part = Literal["host", "environment", "layout"]
PARTS: tuple[Part, ...] = ("host", "environment", "layout")

BITS_VARIABLES = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "DNNL_DEFAULT_FPMATH_MODE",
    "KMP_DETERMINISTIC_REDUCTION", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS", "NCCL_ALGO",
    "NCCL_NVLS_ENABLE", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN", "OMP_NUM_THREADS", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA",
    "PYTHONHASHSEED", "TORCHDYNAMO_DISABLE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip
"""The environment variables that an identity records. It is an allow-list, so no secret ever is."""

PACKAGES = (
    "torch", "numpy", "triton", "transformers", "transformer-engine", "megatron-core", "sglang", "flash-attn",
    "flashinfer-python", "safetensors", "tokenizers",
)  # fmt: skip
"""Libraries whose version may change bits; those not installed are left out."""

_SAMPLING = ("sglang", "flashinfer-python")
"""Those of them that a trainer on recorded rollouts does not run."""

_MODULES = {"megatron-core": "megatron", "flashinfer-python": "flashinfer"}
"""Modules of libraries that are called otherwise."""


@dataclass(frozen=True)
class Difference:
    """One entry in which two identities differ; an absent entry is ''."""

    part: Part
    key: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.part} {self.key}: {self.a or '(absent)'} -> {self.b or '(absent)'}"


@dataclass(frozen=True)
class Identity:
    """The three parts, each a flat mapping of names to text."""

    host: Mapping[str, str]
    environment: Mapping[str, str]
    layout: Mapping[str, str]

    @property
    def machine(self) -> str:
        """The short name that keys the golden store: readable first, then 8 digits over everything."""
        chip = self.host.get("gpu") or self.host.get("cpu", "")
        chip_name = re.sub(r"\((r|tm)\)|\b(cpu|processor|nvidia|amd|intel)\b|@.*", " ", chip.lower())
        slug = re.sub(r"[^a-z0-9]+", "-", chip_name).strip("-")[:24] or self.host.get("architecture", "host")
        torch = f"torch{version.split('+')[0]}" if (version := self.environment.get("torch")) else "no-torch"
        return f"{slug}-{torch}-{self.digest[:8]}"

    @property
    def digest(self) -> str:
        """32 hex digits over all three parts."""
        return digest("identity", canonical_json(self.to_mapping()))

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        return {part: dict(values) for part, values in asdict(self).items()}

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Identity:
        """The inverse of `to_mapping`."""
        return cls(*(dict(raw.get(part, {})) for part in PARTS))

    def replaying(self) -> Identity:
        """The same without the libraries of rollout engines: those of a recording are facts of its rollouts."""
        return replace(self, environment={k: v for k, v in self.environment.items() if k not in _SAMPLING})

    def loading(self, modules: Collection[str]) -> Identity:
        """The same without the libraries of which no module was loaded: installed and unused, they decide nothing.

        Args:
            modules: Names of top-level modules. torch stays: without it nothing is recorded.
        """
        unused = {name for name in PACKAGES if _MODULES.get(name, name.replace("-", "_")) not in {*modules, "torch"}}
        return replace(self, environment={k: v for k, v in self.environment.items() if k not in unused})

    def laid_out(self, more: Mapping[str, str]) -> Identity:
        """The same with more entries of its layout."""
        return replace(self, layout={**self.layout, **more})

    def differences(self, other: Identity) -> list[Difference]:
        """Every entry in which `other` differs, part by part."""
        differences = []
        for part in PARTS:
            a, b = getattr(self, part), getattr(other, part)
            differences += [
                Difference(part, key, a.get(key, ""), b.get(key, ""))
                for key in sorted({*a, *b})
                if a.get(key) != b.get(key)
            ]
        return differences


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """``name==version`` by normalised names: releases of one package may spell its name in several ways."""
    pairs = (package.partition("==") for package in packages)
    return {re.sub("[-_.]+", "-", name).lower(): version for name, _, version in pairs}


def collect(environ: Mapping[str, str], *, threads: int, ranks: int = 1) -> Identity:
    """The identity of a process on this host that runs with `environ`. Imports torch only where there is a GPU."""
    environment = {"python": platform.python_version(), "libc": "-".join(platform.libc_ver())}
    environment |= _library_versions()
    environment |= {name: environ[name] for name in BITS_VARIABLES if name in environ}
    return Identity(
        host=_host(environ.get("ATEN_CPU_CAPABILITY")),
        environment=environment,
        layout={"ranks": str(ranks), "threads": str(threads)},
    )


_MEGATRON = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
"""What a layout calls the sizes of Megatron's groups, and what Megatron calls them."""


def megatron_layout(config: Mapping[str, Any], ranks: int) -> dict[str, str]:
    """How a trainer of kind core lays its model out, from its configuration.

    Args:
        config: ``subject.config``.
        ranks: Processes that train.

    Returns:
        The entries of the layout: empty but for ``policy = "megatron"``. What is no size is for the trainer to refuse.
    """
    table = config.get("megatron", {})
    if config.get("policy") != "megatron" or not isinstance(table, Mapping):
        return {}
    sizes = {short: table.get(name) or 1 for short, name in _MEGATRON.items()}
    if not all(type(size) is int and size > 0 for size in sizes.values()):
        return {}
    others = sizes["tp"] * sizes["pp"] * sizes["cp"]
    return {name: str(size) for name, size in (sizes | {"dp": ranks // others}).items()}


def megatron_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """What a trainer of kind core needs in its environment to run Megatron as its configuration says.

    Args:
        config: ``subject.config``.

    Returns:
        Empty but for ``policy = "megatron"``. Transformer Engine reads its kernels from variables, once.
    """
    table = config.get("megatron", {})
    if config.get("policy") != "megatron" or not isinstance(table, Mapping):
        return {}
    # it compiles small functions as they are imported, in ways that depend on the machine
    variables = {"TORCHDYNAMO_DISABLE": "1"}
    if table.get("transformer_impl") == "transformer_engine":
        chosen = table.get("attention_backend")
        for kind in ("flash", "fused", "unfused"):
            variables[f"NVTE_{kind.upper()}_ATTN"] = str(int(chosen in ("auto", kind)))
    return variables


@functools.cache
def _library_versions() -> dict[str, str]:
    """Installed versions, and a digest of torch's build: BLAS, oneDNN and flags differ behind one version number."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if "torch" in versions:  # a program that is judged by its exit code may have none
        versions["torch build"] = _torch_build()
    return versions


def _torch_build() -> str:
    """Eight digits over torch's list of installed files with their hashes; of a build without one, over its facts."""
    files = metadata.distribution("torch").read_text("RECORD")
    if files and "sha256=" in files:
        # bytecode and scripts are written by the installer and differ from folder to folder
        entries = (line for line in files.splitlines() if line.startswith("torch/") and not line.endswith(",,"))
        return short_digest("\n".join(sorted(entries)))
    import torch

    return short_digest(torch.__config__.show() + str(torch.version.git_version))


def short_digest(text: str) -> str:
    """Eight digits; by the standard library, because foreign programs say who they are too."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]


@functools.cache
def _host(capability: str | None) -> dict[str, str]:
    host = {
        "architecture": platform.machine(),
        "cpu": _cpu_model(),
        "instructions": capability or _capability(),
    }
    driver = Path("/proc/driver/nvidia/version")
    if (driver.exists() or shutil.which("nvidia-smi")) and "torch" in _library_versions():
        import torch

        if torch.cuda.is_available():
            host["gpu"] = torch.cuda.get_device_name()
            host["cuda"] = str(torch.version.cuda)
            match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", driver.read_text()) if driver.exists() else None
            host["driver"] = match[1] if match else "unknown"
    return host


def _capability() -> str:
    """The vector level torch's CPU kernels dispatch to, by the rules of aten/src/ATen/native/DispatchStub.cpp."""
    flags = set(_cpu_fields().get("flags", "").split())
    if not flags:  # not Linux on x86: ask torch itself
        import torch

        return torch.backends.cpu.get_cpu_capability()
    if {"avx512vl", "avx512bw", "avx512dq", "fma"} <= flags:
        return "AVX512"
    return "AVX2" if {"avx2", "fma"} <= flags else "DEFAULT"


@functools.cache
def _cpu_fields() -> dict[str, str]:
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace").split("\n\n")[0] if info.exists() else ""
    return {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in text.splitlines())}


def _cpu_model() -> str:
    """Model name, then family/model/stepping and vector extensions: clouds hide generations behind one name."""
    fields = _cpu_fields()
    if not fields:
        return platform.processor() or platform.machine()
    name = fields.get("model name") or fields.get("Hardware") or platform.machine()
    numbers = "/".join(fields[k] for k in ("cpu family", "model", "stepping") if k in fields)
    # BLAS and oneDNN pick kernels by these; the other flags change with the kernel and decide no bits
    vector = [f for f in fields.get("flags", "").split() if re.match(r"sse|ssse|avx|amx|fma|f16c|bmi", f)]
    return f"{name} {numbers} {short_digest(' '.join(sorted(vector)))}"
