"""Flags that the trainers refuse together."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import critic, nonzero, programmed, size, tempered
from repro.doctor.rule import Found, Rule
from repro_golden.dumps.values import System

__all__ = ["RULE"]

_PAIRS: tuple[tuple[str, str, tuple[System, ...]], ...] = (
    ("--only-train-params-name-list", "--freeze-params-name-list", ("slime",)),
    ("--sglang-config", "--prefill-num-servers", ("slime", "miles", "relax")),
    ("--prefill-num-servers", "--rollout-external-engine-addrs", ("slime", "miles", "relax")),
    ("--sglang-config", "--rollout-external-engine-addrs", ("slime", "miles", "relax")),
    ("--fully-async", "--partial-rollout", ("miles",)),
    ("--fully-async", "--rollout-function-path", ("miles",)),
    ("--fully-async", "--recompute-logprobs-via-prefill", ("miles",)),
    ("--fully-async", "--normalize-advantages", ("relax",)),
    ("--num-epoch", "--disable-rollout-global-dataset", ("slime", "miles", "relax")),
)


@tempered("error")
def _check(launch: Launch) -> Iterator[Found]:
    for one, other, systems in _PAIRS:
        excused = one == "--num-epoch" and launch.has("--num-rollout")
        if launch.system in (None, *systems) and launch.has(one) and launch.has(other) and not excused:
            message = f"{one} and {other} are both given: the trainer refuses them"
            yield Found(message, launch.where(other), None if launch.system else "warning")
    if launch.system == "miles":
        yield from _miles(launch)
    ends = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
    if launch.system == "slime" and size(launch, "--pipeline-model-parallel-size") == 1:
        for name in ends:
            if launch.has(name) and not launch.has("--debug-rollout-only"):
                message = f"{name} is given, and --pipeline-model-parallel-size is 1: slime refuses it"
                yield Found(message, launch.where(name))


def _miles(launch: Launch) -> Iterator[Found]:
    if critic(launch) and nonzero(launch, "--kl-coef"):
        message = (
            f"--advantage-estimator ppo with --kl-coef {launch.value('--kl-coef')}: Miles has --use-kl-loss for PPO"
        )
        yield Found(message, launch.where("--kl-coef"))
    if critic(launch) and launch.value("--megatron-to-hf-mode") == "bridge":
        message = "--advantage-estimator ppo with --megatron-to-hf-mode bridge: critics have no bridge"
        yield Found(message, launch.where("--megatron-to-hf-mode"))
    # Python launchers name the program in another place
    if launch.has("--fully-async") and launch.entry == "train.py" and not programmed(launch):
        yield Found("--fully-async is given to train.py: it wants train_async.py", launch.where("--fully-async"))
    if launch.has("--use-rollout-indexer-replay") and size(launch, "--context-parallel-size") not in (None, 1):
        message = "--use-rollout-indexer-replay with --context-parallel-size above 1"
        yield Found(message, launch.where("--use-rollout-indexer-replay"))


RULE = Rule(
    id="exclusive-flags",
    title="Flags that are refused together",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="the launch is refused when its arguments are checked, after it has waited for its GPUs",
    cure="keep one of the two",
    sources=(
        "THUDM/slime@624b824a8 slime/utils/arguments.py:1994,2037",
        "THUDM/slime@624b824a8 slime/backends/sglang_utils/arguments.py:188-200",
        "THUDM/slime@624b824a8 slime/backends/megatron_utils/arguments.py (validate_args)",
        "radixark/miles@31f1ca961 miles/utils/arguments.py:50-67,3210,3217,3456; train.py",
        "redai-infra/Relax@05149ae1a relax/utils/arguments.py",
    ),
    check=_check,
)
