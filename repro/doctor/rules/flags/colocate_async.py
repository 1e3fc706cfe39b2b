"""--colocate with the asynchronous trainer."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import ranks
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


def _check(launch: Launch) -> Iterator[Found]:
    # sampling alone sets it back to false
    if launch.asynchronous and launch.has("--colocate") and not launch.has("--debug-rollout-only"):
        gpus = ranks(launch)
        message = f"--colocate is given to {launch.entry}, which refuses it"
        rest = f"; training takes {gpus}" if gpus else ""
        cure = f"drop --colocate and give sampling its own GPUs with --rollout-num-gpus{rest}; or start train.py"
        yield Found(message, launch.where("--colocate"), cure=cure)


RULE = Rule(
    id="colocate-async",
    title="--colocate with train_async.py",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="training and sampling at the same time cannot share GPUs: the trainer stops at an assertion",
    cure="drop --colocate and give sampling its own GPUs with --rollout-num-gpus",
    sources=(
        "slime guide: Troubleshooting",
        "THUDM/slime@624b824a8 train_async.py:11",
        "radixark/miles@31f1ca961 train_async.py:23",
    ),
    check=_check,
)
