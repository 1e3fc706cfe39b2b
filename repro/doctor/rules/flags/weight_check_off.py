"""Engines that start from a quantized checkpoint, and nobody compares the weights that are sent to them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import HfConfig, Launch
from repro.doctor.facts.launches import open_ended, samples, trains
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_NAMED = re.compile(r"(?i)(?<![a-z])(fp8|int4|int8|w4a16|w8a8|awq|gptq|mxfp[48]|nvfp4)(?![a-z])")


def _check(launch: Launch, config: HfConfig | None) -> Iterator[Found]:
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


RULE = Rule(
    id="weight-check-off",
    title="A quantized rollout checkpoint without --check-weight-update-equal",
    inputs=(Launch,),
    uses=(HfConfig,),
    severity="note",
    certainty="likely",
    why="a weight that is quantized by mistake, or lost on the way to the engine, shows only as worse samples",
    cure="add --check-weight-update-equal for one start (Miles has --check-weight-update-allow-quant-error)",
    sources=(
        "slime guide: Debugging",
        "THUDM/slime@624b824a8 train.py:29; slime/utils/arguments.py:1321",
        "radixark/miles@31f1ca961 train.py:54; miles/utils/arguments.py:3260",
    ),
    check=_check,
)
