"""The number of CUDA's queues that Megatron wants with tensor or context parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import fsdp, known_text, programmed, seen, size, trains
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_NAME = "CUDA_DEVICE_MAX_CONNECTIONS"
_SIZES = ("--tensor-model-parallel-size", "--context-parallel-size")


def _check(launch: Launch) -> Iterator[Found]:
    sizes = {name: size(launch, name) for name in _SIZES}
    name = next((name for name, value in sizes.items() if value is not None and value > 1), None)
    overlaps = launch.has("--overlap-moe-expert-parallel-comm")
    if name is None or fsdp(launch) or overlaps or not trains(launch):
        return
    variable = seen(launch, _NAME)
    value = known_text(variable)
    # Python launchers start it by execute_train, which sets 1
    if value == "1" or (variable is not None and value is None) or (variable is None and programmed(launch)):
        return
    said = f"is {value[:20]}" if value is not None else "is not set"
    message = f"{_NAME} {said} with {name} {sizes[name]}: Megatron stops on GPUs before Blackwell"
    yield Found(message, variable.where if variable else Where(str(launch.path), item=_NAME))


RULE = Rule(
    id="cuda-connections",
    title="CUDA_DEVICE_MAX_CONNECTIONS is not 1 with tensor or context parallelism",
    inputs=(Launch,),
    severity="warning",
    certainty="likely",
    why="Megatron relies on one queue for the order of computation and communication, and asserts it up to Hopper",
    cure="CUDA_DEVICE_MAX_CONNECTIONS=1 in the runtime environment",
    sources=(
        "NVIDIA/Megatron-LM@000c4ac24 megatron/training/arguments.py (validate_args)",
        "THUDM/slime@624b824a8 slime/utils/external_utils/command_utils.py:142",
        "radixark/miles@31f1ca961 miles/utils/external_utils/command_utils.py:201",
    ),
    check=_check,
)
