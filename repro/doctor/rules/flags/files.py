"""Flags that name files, or how weights travel."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import HfConfig, Launch
from repro.doctor.facts.launches import absent, nonzero, open_ended, samples, trains
from repro.doctor.facts.sources import MILES, MILES_ARGS, SLIME, SLIME_ARGS
from repro_golden.base.checks import Found, Where, rule

_ROLLOUT, _TRAIN, _LOAD = "--save-debug-rollout-data", "--save-debug-train-data", "--load-debug-rollout-data"
_ALL = "--dump-details"


@rule(
    title="Dumps of rollouts and of training with one path",
    severity="error",
    certainty="certain",
    why="the trainer refuses equal paths; --dump-details sets both, whatever else is given",
    cure="give --save-debug-train-data a path of its own",
    sources=("Relax guide: Debugging", f"{SLIME_ARGS}:1890-1895"),
)
def _dump_paths_collide(launch: Launch) -> Iterator[Found]:
    folder = launch.flags.get(_ALL)
    if folder is not None:
        for name, below in ((_ROLLOUT, "rollout_data"), (_TRAIN, "train_data")):
            if launch.has(name):
                place = " ".join(folder.values)[:80]
                message = f"{_ALL} puts these dumps into {place}/{below}: {name} is overridden"
                yield Found(message, launch.where(name), "warning", cure=f"drop {name}, or {_ALL}")
        return
    given = {name: " ".join(launch.flags[name].values) for name in (_ROLLOUT, _TRAIN, _LOAD) if launch.has(name)}
    if given.get(_TRAIN) and given[_TRAIN] == given.get(_ROLLOUT):
        message = f"{_TRAIN} and {_ROLLOUT} are the same path {given[_TRAIN][:80]}"
        yield Found(message, launch.where(_TRAIN))
    if given.get(_LOAD) and given[_LOAD] in (given.get(_ROLLOUT), given.get(_TRAIN)):
        name = _ROLLOUT if given[_LOAD] == given.get(_ROLLOUT) else _TRAIN
        message = f"{name} writes over the dumps that {_LOAD} reads: {given[_LOAD][:80]}"
        yield Found(message, launch.where(name), "warning", cure=f"give {name} another folder")


_NAMED = re.compile(r"(?i)(?<![a-z])(fp8|int4|int8|w4a16|w8a8|awq|gptq|mxfp[48]|nvfp4)(?![a-z])")


@rule(
    title="A quantized rollout checkpoint without --check-weight-update-equal",
    severity="note",
    certainty="likely",
    why="a weight that is quantized by mistake, or lost on the way to the engine, shows only as worse samples",
    cure="add --check-weight-update-equal for one start (Miles has --check-weight-update-allow-quant-error)",
    sources=(
        "slime guide: Debugging",
        f"{SLIME} train.py:29; slime/utils/arguments.py:1321",
        f"{MILES} train.py:54; miles/utils/arguments.py:3260",
    ),
)
def _weight_check_off(launch: Launch, config: HfConfig | None) -> Iterator[Found]:
    # Miles switches the check on by itself in its own tests
    on = launch.has("--check-weight-update-equal") or (launch.has("--ci-test") and launch.system == "miles")
    if on or not samples(launch) or not trains(launch) or open_ended(launch):
        return
    checkpoint = (launch.value("--hf-checkpoint") or launch.where("--hf-checkpoint").value).rstrip("/")
    scheme = config.values.get("quantization_config") if config else None
    if config is not None and isinstance(scheme, dict):
        method = str(scheme.get("quant_method", "quantized"))[:40]
        where = Where(str(config.path), item="quantization_config.quant_method", value=method)
        message = f"engines hold {method} weights, and --check-weight-update-equal is not given"
        yield Found(message, where, "warning" if method == "compressed-tensors" else None)
    elif config is None and (named := _NAMED.search(checkpoint)):
        message = f"--hf-checkpoint looks quantized ({named[1]}), and --check-weight-update-equal is not given"
        yield Found(message, launch.where("--hf-checkpoint"), None, "possible")


_MODE, _TRANSPORT = "--update-weight-mode", "--update-weight-transport"
_TRANSFER, _DIR, _LOCAL = (
    "--update-weight-transfer-mode", "--update-weight-disk-dir", "--update-weight-local-checkpoint-dir",
)  # fmt: skip


@rule(
    title="A way of sending weights that the launch's layout does not allow",
    severity="error",
    certainty="certain",
    why="the launch is refused when its arguments are checked, after it has waited for its GPUs",
    cure="colocated engines get weights over CUDA IPC: leave the transfer flags out, or remove --colocate",
    sources=(f"{SLIME_ARGS}:2041,2059", f"{MILES_ARGS}:3263,3273"),
)
def _weight_transfer(launch: Launch) -> Iterator[Found]:
    delta, transfer = launch.value(_MODE) == "delta", launch.value(_TRANSFER)
    if delta and launch.value(_TRANSPORT) != "disk" and (not launch.has(_TRANSPORT) or launch.value(_TRANSPORT)):
        yield Found(f"{_MODE} delta needs {_TRANSPORT} disk", launch.where(_MODE), *absent(launch, "error"))
    needs = [_DIR] if launch.value(_TRANSPORT) == "disk" else []
    needs += [_LOCAL] if delta else []
    shown = _MODE if delta else _TRANSPORT
    if transfer == "disk-delta":
        needs, shown = [_DIR, _LOCAL], _TRANSFER
    for name in needs:
        if not launch.has(name):
            yield Found(f"{shown} {launch.value(shown)} needs {name}", launch.where(shown), *absent(launch, "error"))
    moves = f"{_MODE} delta" if delta else f"{_TRANSFER} {transfer}" if transfer in ("p2p", "disk-delta") else ""
    if moves and launch.has("--colocate") and not launch.has("--debug-rollout-only"):
        yield Found(f"{moves} together with --colocate: the trainer refuses it", launch.where(moves.split()[0]))
    if transfer in ("p2p", "disk-delta"):
        for name, there in (
            ("--prefill-num-servers", launch.has("--prefill-num-servers")),
            ("--lora-rank", nonzero(launch, "--lora-rank")),
        ):
            if there:
                yield Found(f"{moves} together with {name}: the trainer refuses it", launch.where(name))
