"""Algorithms of NCCL that Megatron's validator refuses, or that a deterministic run cannot rely on."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.determinism import NCCL_ALGO, NCCL_ALGOS, asked_of_trainer
from repro.doctor.facts.launches import fsdp, known_text, seen, tempered
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


@tempered("error")
def _check(launch: Launch) -> Iterator[Found]:
    variable = seen(launch, NCCL_ALGO)
    value = known_text(variable)
    if variable is None or value is None or asked_of_trainer(launch) is None or value in NCCL_ALGOS:
        return
    where, allowed = variable.where, ", ".join(NCCL_ALGOS)
    tokens = [token.strip() for token in value.split(",") if token.strip()]
    if fsdp(launch):
        if value.lower() not in ("allreduce:tree", "allreduce:ring", "ring", "tree"):
            yield Found(f"{NCCL_ALGO}={value[:60]} leaves NCCL a choice", where, "warning", "likely")
    elif value == "Tree" or (tokens and all(token in NCCL_ALGOS for token in tokens)):
        message = f"{NCCL_ALGO}={value[:60]} is taken by some versions of Megatron and refused by others: {allowed}"
        yield Found(message, where, "warning")
    else:
        yield Found(f"{NCCL_ALGO}={value[:60]} is none of {allowed}: --deterministic-mode stops at it", where)


RULE = Rule(
    id="determinism-nccl-algo",
    title="NCCL_ALGO that Megatron refuses in deterministic mode",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="Megatron's validator compares the text letter by letter, and stops the launch at SGLang's own value too",
    cure="NCCL_ALGO=Ring. Engines with several GPUs set allreduce:tree for themselves",
    sources=(
        "NVIDIA/Megatron-LM@000c4ac24 megatron/training/arguments.py (validate_args)",
        "NVIDIA/Megatron-LM@6ae8fe11d megatron/training/determinism.py (apply_determinism_to_args)",
        "THUDM/slime@624b824a8 docs/en/advanced/reproducibility.md",
        "radixark/miles@31f1ca961 tests/e2e/fsdp/test_qwen3_4B_fsdp_true_on_policy.py (allreduce:tree, FSDP alone)",
    ),
    check=_check,
)
