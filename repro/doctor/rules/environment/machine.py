"""Devices, networks and variables of a launch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from repro.doctor.artefacts.kinds import Launch, Machine
from repro.doctor.facts.determinism import determinism
from repro.doctor.facts.launches import fsdp, known_text, programmed, seen, size, trains, unset
from repro.doctor.facts.sources import MEGATRON_ARGS, MILES, SLIME
from repro_golden.base.checks import Found, Where, rule

_SIZES = ("--tensor-model-parallel-size", "--context-parallel-size")


@rule(
    title="CUDA_DEVICE_MAX_CONNECTIONS is not 1 with tensor or context parallelism",
    severity="warning",
    certainty="likely",
    why="Megatron relies on one queue for the order of computation and communication, and asserts it up to Hopper",
    cure="CUDA_DEVICE_MAX_CONNECTIONS=1 in the runtime environment",
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
    cure="name each GPU once, from 0 to one less than `nvidia-smi -L` lists, or unset it",
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
    cure="unset it, or set it in the job's env_vars (--runtime-env-json), which reach every worker",
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
    cure="NCCL_SOCKET_IFNAME=eth0 (the interface that the nodes share), NCCL_IB_DISABLE=0, NCCL_DEBUG=INFO to look",
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
