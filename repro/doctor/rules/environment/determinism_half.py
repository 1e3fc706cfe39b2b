"""The same bits are asked for, and part of what that takes is missing."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.determinism import CUBLAS, ENGINES, NCCL_ALGO, NVTE, SET, TRAINER, TRUE_ON_POLICY, asked
from repro.doctor.facts.launches import absent, fsdp, ranks, samples, seen, trains
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_WITHOUT = {
    NCCL_ALGO: "NCCL picks by size and topology; Megatron's validator stops or sets Ring in its own process alone",
    NVTE: "Transformer Engine's attention stops a deterministic Megatron, or adds gradients atomically",
    CUBLAS: "torch stops at the first cuBLAS call of a deterministic trainer",
    TRAINER: "the trainer's kernels stay free to add in any order",
    ENGINES: "responses depend on which requests share a batch",
}


def _missing(launch: Launch) -> list[str]:
    """What belongs to the set and is not there, as far as it applies."""
    found: list[str] = []
    if trains(launch):
        found += [] if launch.has(TRAINER) else [TRAINER]
        alone = ranks(launch) == 1
        wanted = [name for name in SET if not (name == NCCL_ALGO and alone) and not (name == NVTE and fsdp(launch))]
        found += [name for name in wanted if seen(launch, name) is None]
    if samples(launch) and not launch.has(ENGINES) and not launch.has(TRUE_ON_POLICY):
        found.append(ENGINES)
    return found


def _check(launch: Launch) -> Iterator[Found]:
    where = asked(launch)
    if where is None:
        return
    by = where.item
    weak = not by.startswith("--")
    for name in _missing(launch):
        flag = name.startswith("--")
        severity, certainty = absent(launch, "warning") if flag else ("warning", "likely")
        cure = f"add {name}" if flag else f"{name}={SET[name]} in env_vars of the job's runtime environment"
        message = f"determinism is asked for by {by}, and {name} is missing: {_WITHOUT[name]}"
        place = where if flag else Where(str(launch.path), where.line, name)
        yield Found(message, place, "note" if weak else severity, certainty, cure)


RULE = Rule(
    id="determinism-half",
    title="Part of the determinism set is asked for, another part is missing",
    inputs=(Launch,),
    severity="warning",
    certainty="certain",
    why="one free choice of a kernel or of an order is enough: two runs of this launch differ",
    cure="give the whole set: --deterministic-mode --sglang-enable-deterministic-inference and the three variables",
    sources=(
        "Miles guide: Debugging",
        "THUDM/slime@624b824a8 docs/en/advanced/reproducibility.md",
        "THUDM/slime@624b824a8 slime/backends/megatron_utils/initialize.py:88",
        "radixark/miles@31f1ca961 examples/experimental/reproducibility/README.md",
        "NVIDIA/Megatron-LM@000c4ac24 megatron/training/arguments.py (validate_args)",
        "NVIDIA/Megatron-LM@6ae8fe11d megatron/training/determinism.py (apply_determinism_to_args)",
    ),
    check=_check,
)
