"""Packages and their versions, and variables that do not fit the launch or the machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from repro.doctor.artefacts.kinds import Launch, Machine
from repro.doctor.facts.determinism import determinism, megatron
from repro.doctor.facts.known_versions import KNOWN, Known, matches
from repro.doctor.facts.launches import absent, fsdp, known_text, programmed, samples, seen, size, trains, unset
from repro.doctor.facts.sources import MEGATRON_ARGS, MILES, SLIME
from repro_golden.base.checks import Found, Where, rule


def _installed(machine: Machine, known: Known) -> bool:
    if known.python and not matches(known.python, machine.python):
        return False
    return all(matches(specifier, machine.packages.get(name, "")) for name, specifier in known.packages.items())


@rule(
    title="A version that is known to be bad is installed, or two that do not fit",
    severity="warning",
    certainty="likely",
    why="others ran into it, and the place that is named says how",
    fix="install another version",
    sources=tuple(dict.fromkeys(known.source for known in KNOWN)),
)
def _bad_version(machine: Machine, launch: Launch | None) -> Iterable[Found]:
    for known in KNOWN:
        if not _installed(machine, known) or (launch and known.when and not known.when(launch)):
            continue
        named = " with ".join(f"{name} {machine.packages[name]}" for name in known.packages)
        on = f" on Python {machine.python}" if known.python else ""
        met = launch is not None or known.when is None
        condition = "" if met else f" (with {known.if_})"
        yield Found(
            f"{named}{on}: {known.what}{condition} [{known.source}]",
            Where(machine.source, item=next(iter(known.packages)), value=machine.packages[next(iter(known.packages))]),
            known.severity if met else "note",
            known.certainty if met else "possible",
            f"install {known.fix}" if known.fix[0].isalpha() and " install" not in known.fix[:12] else known.fix,
        )


_ASSERTING = ("slime", "relax")


@rule(
    title="NumPy 2 is installed for slime or Relax, which assert NumPy 1",
    severity="error",
    certainty="certain",
    why="every training rank fails when Megatron is initialized: Megatron does not support numpy 2.x",
    fix='pip install "numpy==1.26.4" "scipy==1.17.1" (scipy 1.18 and later need numpy 2)',
    sources=(
        f"{SLIME} slime/backends/megatron_utils/initialize.py:66",
        f"{SLIME} docker/Dockerfile",
        "NVIDIA/Megatron-LM#1563",
    ),
)
def _numpy_2(machine: Machine, launch: Launch | None) -> Iterable[Found]:
    version = machine.packages.get("numpy", "")
    if not matches(">=2", version):
        return
    where = Where(machine.source, item="numpy", value=version)
    if launch is not None:
        if launch.system in _ASSERTING and megatron(launch):
            message = f"{launch.system} asserts numpy 1, and {version} is installed"
            yield Found(message, where, *absent(launch, "error"))
        return
    installed = [name for name in _ASSERTING if name in machine.packages or name in machine.modules]
    if installed:
        yield Found(f"{installed[0]} asserts numpy 1, and {version} is installed", where, "warning", "likely")


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
                _where(machine, name), fix=f'pip install "{name}=={wanted[0]}.{wanted[1]}.*"',
            )  # fmt: skip


def _libraries(packages: Mapping[str, str]) -> list[tuple[str, ...]]:
    """CUDA libraries that are installed for more than one CUDA: both lie in the same folder."""
    by_library: dict[str, list[str]] = {}
    for name in sorted(packages):
        if match := _CUDA.fullmatch(name):
            by_library.setdefault(match[1], []).append(name)
    return [tuple(names) for names in by_library.values()]


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


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}".strip() for name, version in versions.items())


def _where(machine: Machine, name: str) -> Where:
    return Where(machine.source, item=name, value=machine.packages[name])


@rule(
    title="Packages that belong together are of different versions, or lie on top of each other",
    severity="warning",
    certainty="likely",
    why="what is loaded is a mixture: it fails at import, or in a kernel much later",
    fix="install all of them with one command, at one version",
    sources=(f"{MILES} docker/verify_transformer_engine.py", "radixark/miles#2600", f"{SLIME} build_conda.sh"),
)
def _package_mismatch(machine: Machine) -> Iterable[Found]:
    packages = machine.packages
    for names in _TOGETHER:
        versions = {name: public for name in names if (public := _public(packages.get(name, "")))}
        if len(set(versions.values())) > 1:
            yield Found(f"{_listed(versions)} must be of one version", _where(machine, next(iter(versions))))
    for names in (*_SHARED, *_libraries(packages)):
        both = {name: packages[name] for name in names if name in packages}
        if len(both) > 1:
            first = next(iter(both))
            fix = f"uninstall all of them, then install the one that is meant: pip uninstall -y {' '.join(both)}"
            yield Found(f"{_listed(both)} write over each other's files", _where(machine, first), fix=fix)
    yield from _torch(machine)


@dataclass(frozen=True)
class _Need:
    """A flag, the value that counts ('' for any), when, and of which names one must be installed or importable."""

    flag: str
    value: str
    when: Callable[[Launch], bool]
    packages: tuple[str, ...]
    modules: tuple[str, ...]
    fix: str


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


def _asked(launch: Launch) -> Iterator[_Need]:
    for need in _NEEDS:
        if need.flag and not launch.has(need.flag):
            continue
        if not need.flag and launch.system is None:
            continue  # who knows what that trainer needs
        if (not need.value or launch.value(need.flag) == need.value) and need.when(launch):
            yield need


@rule(
    title="A flag needs a package that is not installed",
    severity="error",
    certainty="likely",
    why="the run fails when the first process imports it, after GPUs are taken and weights are loaded",
    fix="install it in the environment that trains",
    sources=(f"{SLIME} docker/Dockerfile", f"{MILES} docker/Dockerfile", "radixark/miles#2518"),
)
def _package_missing(machine: Machine, launch: Launch) -> Iterable[Found]:
    if not machine.complete:
        return
    for need in _asked(launch):
        if any(name in machine.packages for name in need.packages) or machine.modules.intersection(need.modules):
            continue
        flag = f"{need.flag} {need.value}".strip()
        severity, certainty = absent(launch, "error", "likely")
        yield Found(
            f"{flag or launch.system or 'the trainer'} needs {need.packages[0]}, which is not installed",
            launch.where(need.flag) if need.flag else Where(machine.source, item=need.packages[0]),
            severity,
            certainty,
            f"install {need.fix}" if "source" in need.fix else f"pip install {need.fix}",
        )


@rule(
    title="A torch that was built without CUDA",
    severity="warning",
    certainty="certain",
    why="neither the trainer nor the engine finds a GPU",
    fix="install the build for the driver's CUDA: `pip install torch --index-url "
    "https://download.pytorch.org/whl/cu129`",
    sources=("pytorch: Get started, local installation",),
)
def _torch_cpu_only(machine: Machine, launch: Launch | None) -> Iterable[Found]:
    version = machine.packages.get("torch", "")
    if not version.endswith("+cpu") or not (machine.gpus or launch):
        return
    where = Where(machine.source, item="torch", value=version)
    if machine.gpus:
        yield Found(f"torch {version} knows no CUDA, and the machine has {machine.gpus} GPUs", where)
    else:  # tests of the trainers run so
        yield Found(f"torch {version} knows no CUDA", where, "note")


_SIZES = ("--tensor-model-parallel-size", "--context-parallel-size")


@rule(
    title="CUDA_DEVICE_MAX_CONNECTIONS is not 1 with tensor or context parallelism",
    severity="warning",
    certainty="likely",
    why="Megatron relies on one queue for the order of computation and communication, and asserts it up to Hopper",
    fix="CUDA_DEVICE_MAX_CONNECTIONS=1 in the runtime environment",
    sources=(
        MEGATRON_ARGS,
        f"{SLIME} slime/utils/external_utils/command_utils.py:142",
        f"{MILES} miles/utils/external_utils/command_utils.py:201",
    ),
)
def _cuda_connections(launch: Launch) -> Iterator[Found]:
    sizes = {name: size(launch, name) for name in _SIZES}
    name = next((name for name, value in sizes.items() if value is not None and value > 1), None)
    overlaps = launch.has("--overlap-moe-expert-parallel-comm")
    if name is None or fsdp(launch) or overlaps or not trains(launch):
        return
    variable = seen(launch, "CUDA_DEVICE_MAX_CONNECTIONS")
    value = known_text(variable)
    # Python launchers start it by execute_train, which sets 1
    if value == "1" or (variable is not None and value is None) or (variable is None and programmed(launch)):
        return
    state = f"is {value[:20]}" if value is not None else "is not set"
    message = f"CUDA_DEVICE_MAX_CONNECTIONS {state} with {name} {sizes[name]}: Megatron stops on GPUs before Blackwell"
    where = variable.where if variable else Where(str(launch.path), item="CUDA_DEVICE_MAX_CONNECTIONS")
    yield Found(message, where, *(("warning", "likely") if variable else unset(launch, "warning", "likely")))


@rule(
    title="CUDA_VISIBLE_DEVICES hides GPUs, or names some that are not there",
    severity="warning",
    certainty="certain",
    why="CUDA ignores everything from the first entry on that it does not know, so Ray waits for GPUs that never come",
    fix="name each GPU once, from 0 to one less than `nvidia-smi -L` lists, or unset it",
    sources=("CUDA programming guide: CUDA_VISIBLE_DEVICES", "Miles FAQ"),
)
def _cuda_visible(machine: Machine, launch: Launch | None) -> Iterable[Found]:
    variable = seen(launch, "CUDA_VISIBLE_DEVICES") if launch else None
    text = known_text(variable) if variable else (machine.variables or {}).get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return
    place = variable.where if variable else Where(machine.source)
    where = Where(place.path, place.line, "CUDA_VISIBLE_DEVICES", text)
    entries = [entry.strip() for entry in text.split(",")] if text.strip() else []
    if not entries or entries[0] == "-1":
        if machine.gpus:
            yield Found(f"CUDA_VISIBLE_DEVICES={text!r} hides all {machine.gpus} GPUs", where)
        return
    # what is not a number is a UUID or a part of a GPU
    numbers = [int(entry) for entry in entries if entry.isdecimal() and len(entry) < 9]
    beyond = [number for number in numbers if machine.gpus is not None and number >= machine.gpus]
    if beyond and machine.gpus:
        seen_ones = entries.index(str(beyond[0])) if str(beyond[0]) in entries else 0
        yield Found(
            f"CUDA_VISIBLE_DEVICES names GPU {beyond[0]}, and the machine has {machine.gpus}: CUDA shows the "
            f"{seen_ones} before it",
            where,
        )
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        yield Found(f"CUDA_VISIBLE_DEVICES names GPU {twice[0]} twice: CUDA then shows none", where)


_DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": r"0",
    "CUBLAS_WORKSPACE_CONFIG": r":4096:8|:16:8",
    "NCCL_ALGO": r"Ring|CollnetDirect|CollnetChain|\^NVLS",
    "PYTHONHASHSEED": r"\d+",
}
"""Values that a deterministic run can have. Megatron's own validator allows those of NCCL_ALGO."""


@rule(
    title="A variable of the machine that says something else than the launch",
    severity="warning",
    certainty="likely",
    why="processes inherit the machine's value where the launch's does not reach them, so ranks may differ in bits",
    fix="unset it, or set it in the job's env_vars (--runtime-env-json), which reach every worker",
    sources=("slime guide: Reproducibility (docs/en/advanced/reproducibility.md)", "areal-project/AReaL#1544"),
    any_program=True,
)
def _env_contradicts_launch(machine: Machine, launch: Launch) -> Iterable[Found]:
    flag = determinism(launch, sampling=False)
    for name, inherited in sorted((machine.variables or {}).items()):
        variable = seen(launch, name)
        where = Where(machine.source, item=name, value=inherited)
        if variable is not None:
            value = known_text(variable)
            if value is None or value == inherited:
                continue
            if variable.origin == "export" and launch.submitted:
                yield Found(
                    f"{name} is {value!r} in the script and {inherited!r} on the machine: a submitted job's workers "
                    "see what Ray was started with, not what the script exports",
                    variable.where, "warning", "possible", f'put "{name}": "{value}" into the job\'s env_vars',
                )  # fmt: skip
        elif flag and name in _DETERMINISTIC and not re.fullmatch(_DETERMINISTIC[name], inherited, re.IGNORECASE):
            message = f"{flag} is given, and the machine's {name}={inherited} goes against it"
            yield Found(message, where, *unset(launch, "warning", "likely"))


_INTERFACE, _NO_IB = "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE"


@rule(
    title="Several nodes without NCCL_SOCKET_IFNAME, or with InfiniBand switched off",
    severity="note",
    certainty="possible",
    why="nodes that pick different or slow networks fail to get weights, or wait for them until the time-out",
    fix="NCCL_SOCKET_IFNAME=eth0 (the interface that the nodes share), NCCL_IB_DISABLE=0, NCCL_DEBUG=INFO to look",
    sources=("slime guide: Troubleshooting", f"{SLIME} docs/en/get_started/quick_start.md:582"),
)
def _nccl_interface(launch: Launch) -> Iterator[Found]:
    nodes = size(launch, "--actor-num-nodes")
    if nodes is None or nodes < 2:
        return
    interface, no_ib = seen(launch, _INTERFACE), seen(launch, _NO_IB)
    if interface is None:
        message = f"--actor-num-nodes {nodes} without {_INTERFACE}: NCCL picks an interface itself"
        yield Found(message, Where(str(launch.path), item=_INTERFACE))
    elif known_text(interface) in ("lo", "=lo"):
        message = f"{_INTERFACE}={interface.value}: {nodes} nodes cannot meet on the loopback interface"
        yield Found(message, interface.where, "warning", "certain")
    if no_ib is not None and known_text(no_ib) == "1":
        message = f"{_NO_IB}=1 on {nodes} nodes: weights and gradients go over TCP sockets"
        yield Found(message, no_ib.where, "warning", "certain")
