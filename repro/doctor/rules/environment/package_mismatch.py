"""Packages that must be of one version, and packages that write over each other's files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from packaging.version import InvalidVersion, Version

from repro.doctor.artefacts.kinds import Machine
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_TOGETHER: tuple[tuple[str, ...], ...] = (
    ("transformer-engine", "transformer-engine-cu12", "transformer-engine-cu13", "transformer-engine-torch"),
    ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache"),
    (
        "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core",
        "nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13",
    ),
)  # fmt: skip
_SHARED: tuple[tuple[str, ...], ...] = (
    ("opencv-python", "opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless"),
    ("transformer-engine-cu12", "transformer-engine-cu13"),
    ("sgl-kernel", "sglang-kernel"),
)
_CUDA = re.compile(r"(nvidia-(?:cudnn|nccl|nvshmem|cusparselt))-cu(\d\d)")


def _check(machine: Machine) -> Iterable[Found]:
    packages = machine.packages
    for names in _TOGETHER:
        found = {name: public for name in names if (public := _public(packages.get(name, "")))}
        if len(set(found.values())) > 1:
            yield Found(f"{_listed(found)} must be of one version", _where(machine, next(iter(found))))
    for names in (*_SHARED, *_libraries(packages)):
        both = {name: packages[name] for name in names if name in packages}
        if len(both) > 1:
            first = next(iter(both))
            cure = f"uninstall all of them, then install the one that is meant: pip uninstall -y {' '.join(both)}"
            yield Found(f"{_listed(both)} write over each other's files", _where(machine, first), cure=cure)
    yield from _torch(machine)


def _torch(machine: Machine) -> Iterable[Found]:
    """Minor versions that belong together: torch 2.N, torchaudio 2.N, torchvision 0.(N + 15)."""
    torch = _release(machine.packages.get("torch", ""))
    if len(torch) < 2 or torch[0] != 2:
        return
    for name, wanted in (("torchvision", (0, torch[1] + 15)), ("torchaudio", (2, torch[1]))):
        has = _release(machine.packages.get(name, ""))
        # torchaudio is in maintenance, and its wheels since 2.11 fit later torches
        late = name == "torchaudio" and has >= (2, 11) and torch[1] >= 11
        if has and has[:2] != wanted and not late:
            yield Found(
                f"{name} {machine.packages[name]} is not the one of torch {machine.packages['torch']}",
                _where(machine, name), cure=f'pip install "{name}=={wanted[0]}.{wanted[1]}.*"',
            )  # fmt: skip


def _libraries(packages: Mapping[str, str]) -> list[tuple[str, ...]]:
    """CUDA libraries that are installed for more than one CUDA: both lie in the same folder."""
    found: dict[str, list[str]] = {}
    for name in sorted(packages):
        if match := _CUDA.fullmatch(name):
            found.setdefault(match[1], []).append(name)
    return [tuple(names) for names in found.values()]


def _public(version: str) -> str:
    try:
        return Version(version).public
    except InvalidVersion:
        return ""


def _release(version: str) -> tuple[int, ...]:
    try:
        return Version(version).release
    except InvalidVersion:
        return ()


def _listed(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}".strip() for name, version in found.items())


def _where(machine: Machine, name: str) -> Where:
    return Where(machine.source, item=name, value=machine.packages[name])


RULE = Rule(
    id="package-mismatch",
    title="Packages that belong together are of different versions, or lie on top of each other",
    inputs=(Machine,),
    severity="warning",
    certainty="likely",
    why="what is loaded is a mixture: it fails at import, or in a kernel much later",
    cure="install all of them with one command, at one version",
    sources=(
        "radixark/miles@31f1ca961 docker/verify_transformer_engine.py",
        "radixark/miles#2600",
        "THUDM/slime@624b824a8 build_conda.sh",
    ),
    check=_check,
)
