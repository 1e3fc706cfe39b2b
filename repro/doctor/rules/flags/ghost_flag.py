"""Flags that guides name and that no code has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from repro.doctor.artefacts.kinds import Launch, ParserDump
from repro.doctor.rule import Certainty, Found, Rule

__all__ = ["RULE"]


class _Ghost(NamedTuple):
    instead: str
    certainty: Certainty = "certain"


_GHOSTS = {
    "--debug-determinism": _Ghost(
        "take --deterministic-mode, --sglang-enable-deterministic-inference, NCCL_ALGO=Ring, "
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 and CUBLAS_WORKSPACE_CONFIG=:4096:8; `repro golden record` proves it"
    ),
    "--debug-weight-sync": _Ghost("take --check-weight-update-equal: it compares every weight after the first sync"),
    "--debug-rollout-print-every": _Ghost(
        "take --save-debug-rollout-data DIR/{rollout_id}.pt, and read it with `repro rollout show`"
    ),
    "--sglang-log-dir": _Ghost("SGLang logs to the Ray worker's output: take --sglang-log-level info, and read those"),
    "--async-buffer-size": _Ghost("how far sampling runs ahead is --update-weights-interval: 1 syncs every rollout"),
    "--num-data-workers": _Ghost("prompts are read by the rollout manager, with no workers: tokenize them beforehand"),
    "--streaming-data": _Ghost(
        "prompts are read whole: cut the JSONL file, or name a part of it, as in data.jsonl@[0:1000]"
    ),
    "--sglang-router-strategy": _Ghost(
        "slime has --router-policy round_robin, Miles --sglang-router-policy round_robin"
    ),
    "--offload-optimizer-states": _Ghost(
        "slime and Miles do not register it and few Megatrons do: take --optimizer-cpu-offload "
        "--overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer",
        "possible",
    ),
    "--log-level": _Ghost("it is SGLang's, as --sglang-log-level debug"),
}


def _check(launch: Launch, parsers: ParserDump | None) -> Iterator[Found]:
    for name, flag in launch.flags.items():
        ghost = _GHOSTS.get(name)
        if ghost and not (parsers and name in parsers.options):
            message = f"{name} is in a guide, and in no code of slime, Miles or Relax"
            sure = "certain" if parsers and parsers.complete else ghost.certainty
            yield Found(message, flag.where, certainty=sure, cure=f"drop it: {ghost.instead}")


RULE = Rule(
    id="ghost-flag",
    title="Flags that guides name and no trainer has",
    inputs=(Launch,),
    uses=(ParserDump,),
    severity="warning",
    certainty="certain",
    why="the trainer's parser ignores what it does not know, without a word: the run goes on as if it were not there",
    cure="drop it, and take the flag that exists",
    sources=(
        "Miles guide: Debugging",
        "slime guide: Troubleshooting",
        "THUDM/slime@624b824a8 slime/backends/megatron_utils/arguments.py:195 (ignore_unknown_args=True)",
    ),
    check=_check,
)
