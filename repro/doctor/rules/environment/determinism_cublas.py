"""A workspace of cuBLAS that torch does not take for deterministic."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.determinism import CUBLAS, CUBLAS_VALUES, asked, asked_of_trainer
from repro.doctor.facts.launches import known_text, seen, tempered, trains
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


@tempered("error")
def _check(launch: Launch) -> Iterator[Found]:
    variable = seen(launch, CUBLAS)
    value = known_text(variable)
    if variable is None or value is None or value in CUBLAS_VALUES or asked(launch) is None or not trains(launch):
        return
    message = f"{CUBLAS}={value[:40]} is neither {CUBLAS_VALUES[0]} nor {CUBLAS_VALUES[1]}"
    stops = asked_of_trainer(launch) is not None
    message += ": torch stops at the first cuBLAS call in deterministic mode" if stops else ""
    yield Found(message, variable.where, "error" if stops else "warning")


RULE = Rule(
    id="determinism-cublas",
    title="CUBLAS_WORKSPACE_CONFIG is neither :4096:8 nor :16:8",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="with another workspace cuBLAS may split sums differently from call to call",
    cure="CUBLAS_WORKSPACE_CONFIG=:4096:8",
    sources=(
        "THUDM/slime@624b824a8 docs/en/advanced/reproducibility.md",
        "THUDM/slime@624b824a8 slime/backends/megatron_utils/initialize.py:93",
        "torch documentation: torch.use_deterministic_algorithms",
        "NVIDIA/Megatron-LM@6ae8fe11d megatron/training/determinism.py (apply_determinism_to_args)",
    ),
    check=_check,
)
