"""Miles' true-on-policy mode without all that makes trainer and engine compute the same bits."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.determinism import TRAINER, TRUE_ON_POLICY
from repro.doctor.facts.launches import absent, fsdp, samples, trains
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_BOTH = (
    (TRAINER,),
    ("--sglang-true-on-policy-contract", "--sglang-rl-on-policy-target"),
    ("--sglang-attention-backend",),
)
_MEGATRON = (
    ("--true-on-policy-contract",), ("--transformer-impl",), ("--batch-invariant-mode",), ("--use-cpu-initialization",),
    ("--no-bias-swiglu-fusion",), ("--no-rope-fusion",), ("--recompute-logprobs-via-prefill",),
)  # fmt: skip
_FSDP = (("--attn-implementation",),)


def _check(launch: Launch) -> Iterator[Found]:
    if not launch.has(TRUE_ON_POLICY) or launch.system == "relax" or not samples(launch) or not trains(launch):
        return
    groups = (*_BOTH, *(_FSDP if fsdp(launch) else _MEGATRON))
    missing = [group[0] for group in groups if not any(launch.has(name) for name in group)]
    if missing:
        message = f"{TRUE_ON_POLICY} is given, and {len(missing)} of its set missing: {', '.join(missing)}"
        yield Found(message, launch.where(TRUE_ON_POLICY), *absent(launch, "warning"), cure="add " + " ".join(missing))
    if not fsdp(launch) and launch.has("--transformer-impl") and launch.value("--transformer-impl") != "local":
        message = (
            f"{TRUE_ON_POLICY} with --transformer-impl {launch.value('--transformer-impl')}: the contract wants local"
        )
        yield Found(message, launch.where("--transformer-impl"))
    if not fsdp(launch) and launch.has("--sequence-parallel"):
        message = f"{TRUE_ON_POLICY} with --sequence-parallel, which the contract switches off"
        yield Found(message, launch.where("--sequence-parallel"), certainty="likely")


RULE = Rule(
    id="true-on-policy-half",
    title="--true-on-policy-mode without the rest of its set",
    inputs=(Launch,),
    severity="warning",
    certainty="certain",
    why="log_probs of trainer and engine are then not equal bit by bit, which the mode takes for granted",
    cure="let Miles build the flags (miles.true_on_policy), or add what is named",
    sources=(
        "radixark/miles@31f1ca961 miles/true_on_policy/config.py:60-106,190-235",
        "radixark/miles@31f1ca961 tests/e2e/fsdp/test_qwen3_4B_fsdp_true_on_policy.py",
    ),
    check=_check,
)
