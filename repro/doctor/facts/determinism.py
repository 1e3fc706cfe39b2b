"""What a launch asks for where it wants the same bits again, and what belongs to it."""

from __future__ import annotations

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import fsdp, known_text, samples, seen, trains
from repro_golden.base.checks import Where

__all__ = [
    "CUBLAS",
    "CUBLAS_VALUES",
    "ENGINES",
    "NCCL_ALGO",
    "NCCL_ALGOS",
    "NVTE",
    "SET",
    "TRAINER",
    "TRUE_ON_POLICY",
    "asked",
    "asked_of_engines",
    "asked_of_trainer",
    "determinism",
    "megatron",
]

TRAINER, ENGINES = "--deterministic-mode", "--sglang-enable-deterministic-inference"
TRUE_ON_POLICY = "--true-on-policy-mode"
NCCL_ALGO, NVTE, CUBLAS = "NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUBLAS_WORKSPACE_CONFIG"
SET = {NCCL_ALGO: "Ring", NVTE: "0", CUBLAS: ":4096:8"}
"""Variables of the determinism set, with the values of slime's and Miles' recipes."""

NCCL_ALGOS = ("Ring", "CollnetDirect", "CollnetChain", "^NVLS")
"""What every version of Megatron's validator takes."""
CUBLAS_VALUES = (":4096:8", ":16:8")
"""What torch takes for deterministic."""


def asked_of_trainer(launch: Launch) -> Where | None:
    """Where it is asked of the trainer by a flag; None where it is not."""
    return launch.where(TRAINER) if trains(launch) and launch.has(TRAINER) else None


def asked_of_engines(launch: Launch) -> Where | None:
    """Where it is asked of the engines; None where it is not, or none run. Miles' true-on-policy mode asks as well."""
    flag = next((name for name in (ENGINES, TRUE_ON_POLICY) if launch.has(name)), None)
    return launch.where(flag) if flag and samples(launch) else None


def asked(launch: Launch) -> Where | None:
    """Where the same bits are asked for, by a flag, or by a variable that has no other use; None where they are not."""
    where = asked_of_trainer(launch) or asked_of_engines(launch)
    if where is None and known_text(variable := seen(launch, NVTE)) == "0" and variable is not None:
        return variable.where
    return where


# -- whether a launch asks for equal bits, and of whom

_TRAINING = ("--deterministic-mode", "--true-on-policy-mode", "--debug-deterministic-collective")
_SAMPLING = ("--sglang-enable-deterministic-inference",)


def determinism(launch: Launch | None, *, sampling: bool = True) -> str:
    """The flag by which equal bits are asked for; '' where none is.

    Args:
        launch: The launch, if there is one.
        sampling: Whether determinism of the inference engine alone counts.
    """
    names = _TRAINING + (_SAMPLING if sampling else ())
    return next((name for name in names if launch and launch.has(name)), "")


def megatron(launch: Launch) -> bool:
    """Whether Megatron trains."""
    return trains(launch) and not fsdp(launch)
