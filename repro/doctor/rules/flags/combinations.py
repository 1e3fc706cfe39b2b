"""Flags that exclude or need each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import absent, critic, fsdp, nonzero, open_ended, programmed, ranks, sft, size, trains
from repro.doctor.facts.sources import GUIDES, MEGATRON_ARGS, MILES, MILES_ARGS, RELAX_ARGS, SLIME, SLIME_ARGS
from repro_golden.base.checks import Found, rule
from repro_golden.base.systems import SYSTEMS, System

_CORRECTIONS = ("--use-rollout-logprobs", "--use-tis", "--keep-old-actor")


@rule(
    title="Asynchronous PPO without a correction for stale samples",
    severity="error",
    certainty="certain",
    why="samples come from weights before the update, and clipping is anchored to a policy that never wrote them",
    fix="one of --use-rollout-logprobs, --use-tis, --keep-old-actor",
    sources=(f"{MILES_ARGS}:3591; train_async.py:24",),
)
def _async_ppo(launch: Launch) -> Iterator[Found]:
    if not launch.asynchronous or not critic(launch) or launch.has(*_CORRECTIONS):
        return
    refused = launch.system == "miles"
    message = "train_async.py with --advantage-estimator ppo and no correction for the older policy"
    message += ": Miles stops" if refused else ""
    yield Found(message, launch.where("--advantage-estimator"), *absent(launch, "error" if refused else "warning"))


@rule(
    title="--colocate with train_async.py",
    severity="error",
    certainty="certain",
    why="training and sampling at the same time cannot share GPUs: the trainer stops at an assertion",
    fix="drop --colocate and give sampling its own GPUs with --rollout-num-gpus",
    sources=("slime guide: Troubleshooting", f"{SLIME} train_async.py:11", f"{MILES} train_async.py:23"),
)
def _colocate_async(launch: Launch) -> Iterator[Found]:
    # sampling alone sets it back to false
    if launch.asynchronous and launch.has("--colocate") and not launch.has("--debug-rollout-only"):
        gpus = ranks(launch)
        message = f"--colocate is given to {launch.entry}, which refuses it"
        usage = f"; training takes {gpus}" if gpus else ""
        fix = f"drop --colocate and give sampling its own GPUs with --rollout-num-gpus{usage}; or start train.py"
        yield Found(message, launch.where("--colocate"), fix=fix)


_ROLLOUT, _TRAIN, _LOAD = "--debug-rollout-only", "--debug-train-only", "--load-debug-rollout-data"


@rule(
    title="--debug-rollout-only with --debug-train-only, or with data to train on",
    severity="error",
    certainty="certain",
    why="the trainer stops at an assertion: one loads no Megatron, the other no SGLang",
    fix="keep one of the two",
    sources=(*GUIDES, f"{SLIME_ARGS}:1897-1902,1933", f"{MILES_ARGS}:3189,3250"),
)
def _debug_modes_exclusive(launch: Launch) -> Iterator[Found]:
    if launch.has(_ROLLOUT) and launch.has(_TRAIN):
        yield Found(f"{_ROLLOUT} and {_TRAIN} are both given: nothing would be left to run", launch.where(_TRAIN))
    elif launch.has(_ROLLOUT) and launch.has(_LOAD):
        message = f"{_LOAD} sets {_TRAIN}, and {_ROLLOUT} is given too"
        yield Found(message, launch.where(_LOAD), fix=f"drop {_ROLLOUT} to train on the data, {_LOAD} to sample anew")
    elif launch.has(_TRAIN) and not launch.has(_LOAD, "--rollout-function-path"):
        # a rollout function of one's own may need no engine
        if sft(launch):
            return
        message = f"{_TRAIN} is given without {_LOAD}: no engine is started that could sample"
        fix = f"give {_LOAD} DIR/{{rollout_id}}.pt"
        yield Found(message, launch.where(_TRAIN), *absent(launch, "warning", "likely"), fix=fix)


_PAIRS: tuple[tuple[str, str, tuple[System, ...]], ...] = (
    ("--only-train-params-name-list", "--freeze-params-name-list", ("slime",)),
    ("--sglang-config", "--prefill-num-servers", SYSTEMS),
    ("--prefill-num-servers", "--rollout-external-engine-addrs", SYSTEMS),
    ("--sglang-config", "--rollout-external-engine-addrs", SYSTEMS),
    ("--fully-async", "--partial-rollout", ("miles",)),
    ("--fully-async", "--rollout-function-path", ("miles",)),
    ("--fully-async", "--recompute-logprobs-via-prefill", ("miles",)),
    ("--fully-async", "--normalize-advantages", ("relax",)),
    ("--num-epoch", "--disable-rollout-global-dataset", SYSTEMS),
)


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


@rule(
    title="Flags that are refused together",
    severity="error",
    certainty="certain",
    why="the launch is refused when its arguments are checked, after it has waited for its GPUs",
    fix="keep one of the two",
    sources=(
        f"{SLIME_ARGS}:1994,2037",
        f"{SLIME} slime/backends/sglang_utils/arguments.py:188-200",
        f"{SLIME} slime/backends/megatron_utils/arguments.py (validate_args)",
        f"{MILES_ARGS}:50-67,3210,3217,3456; train.py",
        RELAX_ARGS,
    ),
)
def _exclusive_flags(launch: Launch) -> Iterator[Found]:
    for flag, other, systems in _PAIRS:
        excused = flag == "--num-epoch" and launch.has("--num-rollout")
        if launch.system in (None, *systems) and launch.has(flag) and launch.has(other) and not excused:
            message = f"{flag} and {other} are both given: the trainer refuses them"
            yield Found(message, launch.where(other), None if launch.system else "warning")
    if launch.system == "miles":
        yield from _miles(launch)
    flags = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
    if launch.system == "slime" and size(launch, "--pipeline-model-parallel-size") == 1:
        for name in flags:
            if launch.has(name) and not launch.has("--debug-rollout-only"):
                message = f"{name} is given, and --pipeline-model-parallel-size is 1: slime refuses it"
                yield Found(message, launch.where(name))


@rule(
    title="--kl-coef and --kl-loss-coef are both set",
    severity="error",
    certainty="certain",
    why="the KL penalty would be applied to the reward and to the loss; the trainers refuse to start",
    fix="keep one: --kl-coef shapes the reward, --use-kl-loss --kl-loss-coef adds to the loss. Set the other to 0",
    sources=(f"{SLIME_ARGS}:1846", f"{MILES_ARGS}:3134", RELAX_ARGS),
)
def _kl_coefs_exclusive(launch: Launch) -> Iterator[Found]:
    both = nonzero(launch, "--kl-coef") and nonzero(launch, "--kl-loss-coef")
    if not both or (launch.system == "relax" and sft(launch)):
        return
    message = (
        f"--kl-coef {launch.value('--kl-coef')} and --kl-loss-coef {launch.value('--kl-loss-coef')} are both not zero:"
        " the trainer stops at its arguments"
    )
    yield Found(message, launch.where("--kl-coef"))


@rule(
    title="--use-rollout-routing-replay together with --partial-rollout (Relax)",
    severity="error",
    certainty="certain",
    why="partial rollouts mix weights within a sample, so its recorded routes belong to no one policy",
    fix="remove --partial-rollout, or --use-rollout-routing-replay",
    sources=(f"{RELAX_ARGS} (slime_validate_args)",),
)
def _r3_partial_rollout(launch: Launch) -> Iterator[Found]:
    both = launch.has("--use-rollout-routing-replay") and launch.has("--partial-rollout")
    if launch.system == "relax" and both and not sft(launch):
        message = "--partial-rollout and --use-rollout-routing-replay are both given: Relax refuses them together"
        yield Found(message, launch.where("--partial-rollout"))


_TRANSPORT = "--update-weight-transport"


@rule(
    title="--release-train (slime) without what it needs",
    severity="error",
    certainty="certain",
    why="the launch is refused when its arguments are checked",
    fix="--release-train --save DIR --update-weight-transport disk --update-weight-disk-dir DIR, without a critic",
    sources=(f"{SLIME_ARGS}:2046",),
)
def _release_train(launch: Launch) -> Iterator[Found]:
    if not launch.has("--release-train"):
        return
    for flag, what in (("--save", "--save: the next actor reloads from there"), (_TRANSPORT, f"{_TRANSPORT} disk")):
        if not launch.has(flag):
            where = launch.where("--release-train")
            yield Found(f"--release-train needs {what}", where, *absent(launch, "error"))
    for flag, there, what in (
        (_TRANSPORT, launch.value(_TRANSPORT) == "nccl", f"{_TRANSPORT} nccl"),
        ("--update-weight-mode", launch.value("--update-weight-mode") == "delta", "--update-weight-mode delta"),
        ("--advantage-estimator", critic(launch), "a critic (--advantage-estimator ppo)"),
        ("--keep-old-actor", launch.has("--keep-old-actor"), "--keep-old-actor"),
    ):
        if there:
            yield Found(f"--release-train with {what}", launch.where(flag))


class _Need(NamedTuple):
    flag: str
    any_of: tuple[str, ...]
    systems: tuple[System, ...] = SYSTEMS
    value: str = ""
    """Only with this value; ``>0`` and ``>1`` for numbers above."""
    megatron: bool = False
    """Only where Megatron checks its arguments."""
    model: bool = False
    """What is needed comes with the model's flags: not missed where some of the flags are not known."""


_NEEDS = (
    _Need("--save-interval", ("--save",)),
    _Need("--save-trigger-sentinel", ("--save",), ("miles",)),
    _Need("--eval-interval", ("--eval-prompt-data", "--eval-config", "--eval-size", "--custom-dataset-class-path")),
    _Need("--enable-mtp-training", ("--mtp-num-layers",), model=True),
    _Need("--use-opd", ("--opd-type",), ("slime", "miles")),
    _Need("--opd-teacher-load", ("--use-opd",), ("slime", "miles")),
    _Need("--opd-teacher-urls", ("--use-opd",), ("miles",)),
    _Need("--opd-type", ("--opd-teacher-load",), ("slime", "miles"), "megatron"),
    _Need("--lora-rank", ("--target-modules",), ("miles",), ">0"),
    _Need("--sglang-dp-size", ("--sglang-enable-dp-attention",), value=">1"),
    _Need("--sglang-data-parallel-size", ("--sglang-enable-dp-attention",), value=">1"),
    _Need("--recompute-logprobs-via-prefill", ("--true-on-policy-mode",), ("miles",)),
    _Need("--mini-ft-controller-enable", ("--control-server-port",), ("miles",)),
    _Need("--expert-model-parallel-size", ("--num-experts",), value=">1", megatron=True, model=True),
    _Need("--tp-comm-overlap", ("--sequence-parallel",), megatron=True),
)


def _applies(need: _Need, launch: Launch) -> bool:
    if not launch.has(need.flag) or (launch.system is not None and launch.system not in need.systems):
        return False
    if need.megatron and (fsdp(launch) or not trains(launch) or launch.value("--megatron-to-hf-mode") == "bridge"):
        return False
    if need.model and open_ended(launch):
        return False
    if need.flag.startswith("--sglang-") and launch.has("--debug-train-only", "--load-debug-rollout-data"):
        return False
    if need.value.startswith(">"):
        number = launch.number(need.flag)
        return number is not None and number > int(need.value[1:])
    return not need.value or launch.value(need.flag) == need.value


@rule(
    title="A flag that needs another one, which is not given",
    severity="error",
    certainty="certain",
    why="the launch is refused when its arguments are checked, after it has waited for its GPUs",
    fix="add the flag that is named, or remove the one that needs it",
    sources=(
        f"{SLIME_ARGS}:1786,1814,1840,1843,1988,2003,2008",
        f"{SLIME} slime/backends/sglang_utils/arguments.py:183",
        f"{MILES_ARGS}:2882,2986,3029,3060,3075,3450,3465,3470",
        RELAX_ARGS,
        MEGATRON_ARGS,
    ),
)
def _required_with(launch: Launch) -> Iterator[Found]:
    for need in _NEEDS:
        if not _applies(need, launch) or launch.has(*need.any_of):
            continue
        flag = " ".join((need.flag, *launch.flags[need.flag].values[:1]))
        message = f"{flag} needs {' or '.join(need.any_of)}, which is not given: the trainer stops at its arguments"
        yield Found(message, launch.where(need.flag), *absent(launch, "error"), fix=f"add {need.any_of[0]}")
    if not launch.has("--num-rollout") and not launch.has("--num-epoch") and launch.has("--rollout-batch-size"):
        message = "neither --num-rollout nor --num-epoch is given: the trainer stops at its arguments"
        yield Found(message, launch.where("--num-rollout"), *absent(launch, "error"), fix="add --num-rollout N")
    over, batch = launch.number("--over-sampling-batch-size"), launch.number("--rollout-batch-size")
    if over is not None and batch is not None and nonzero(launch, "--over-sampling-batch-size") and over < batch:
        message = f"--over-sampling-batch-size {over:.0f} is below --rollout-batch-size {batch:.0f}: the trainer stops"
        yield Found(message, launch.where("--over-sampling-batch-size"), fix=f"--over-sampling-batch-size {batch:.0f}")


@rule(
    title="--use-rollout-logprobs together with --use-tis",
    severity="error",
    certainty="certain",
    why="with the engine's log-probs as the old policy there is no mismatch left to weigh; the trainers refuse both",
    fix="keep --use-tis to weigh the mismatch, or --use-rollout-logprobs to train against the engine's log-probs",
    sources=(f"{SLIME_ARGS}:1855", f"{MILES_ARGS}:3143", RELAX_ARGS),
)
def _tis_exclusive(launch: Launch) -> Iterator[Found]:
    if launch.has("--use-rollout-logprobs") and launch.has("--use-tis"):
        message = "--use-rollout-logprobs and --use-tis are both given: the trainer stops at its arguments"
        yield Found(message, launch.where("--use-tis"))
