"""Training in half precision instead of bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import fsdp, size, tempered, trains
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


@tempered("warning")
def _check(launch: Launch) -> Iterator[Found]:
    if not launch.has("--fp16") or not trains(launch):
        return
    where, experts = launch.where("--fp16"), size(launch, "--expert-model-parallel-size")
    if experts not in (None, 1) and not fsdp(launch):
        message = f"--fp16 with --expert-model-parallel-size {experts}: Megatron refuses expert parallelism in fp16"
        yield Found(message, where, "error")
    elif launch.has("--bf16"):
        yield Found("--fp16 and --bf16 are both given: --fp16 wins and --bf16 is dropped", where)
    else:
        yield Found("--fp16 is given: the trainer leaves bfloat16", where)


RULE = Rule(
    id="fp16",
    title="--fp16 instead of bfloat16",
    inputs=(Launch,),
    severity="warning",
    certainty="certain",
    why="fp16 overflows above 65504, so that losses and gradients become NaN or inf where bf16 goes on",
    cure="remove --fp16 (slime and Miles then train in bf16). If it is meant, sample with --sglang-dtype float16 too",
    sources=(
        "slime guide: Troubleshooting",
        "THUDM/slime@624b824a8 slime/backends/megatron_utils/arguments.py:157",
        "radixark/miles@31f1ca961 miles/backends/megatron_utils/arguments.py:22",
        "NVIDIA/Megatron-LM@000c4ac24 megatron/training/arguments.py (validate_args)",
    ),
    check=_check,
)
