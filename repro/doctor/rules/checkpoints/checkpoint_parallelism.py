"""The layout of a launch against the one that the checkpoint was saved with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from repro.doctor.artefacts.kinds import Launch, MegatronCheckpoint
from repro.doctor.facts.checkpoints.launches import flag_of, flagged, is_whole
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_FLAGS = (
    ("--tensor-model-parallel-size", "tensor_model_parallel_size", "TP"),
    ("--pipeline-model-parallel-size", "pipeline_model_parallel_size", "PP"),
    ("--expert-model-parallel-size", "expert_model_parallel_size", "EP"),
    ("--expert-tensor-parallel-size", "expert_tensor_parallel_size", "ETP"),
    ("--context-parallel-size", "context_parallel_size", "CP"),
)
_LOADS = ("--load", "--ref-load", "--critic-load")
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?/", re.ASCII)


def _check(launch: Launch, checkpoint: MegatronCheckpoint) -> Iterator[Found]:
    if not launch.words or not checkpoint.files:
        return
    files = checkpoint.files[max(checkpoint.files)]
    saved = _saved(checkpoint, files)
    distributed = any(name.endswith(".distcp") for name in files)
    flag = flag_of(launch, checkpoint.path, _LOADS)
    sure = flag is not None or not flagged(launch, _LOADS)
    for name, key, short in _FLAGS:
        if launch.value(name) is None and (launch.has(name) or not is_whole(launch)):
            continue  # only a shell knows it
        default = saved.get("tensor_model_parallel_size") if key == "expert_tensor_parallel_size" else 1
        asked, held = launch.number(name, None if default is None else float(default)), saved.get(key)
        if asked is None or held is None or asked == held:
            continue
        where = Where(str(checkpoint.path), item=key, value=str(held))
        said = f"saved with {short} {held}, and the launch asks for {short} {asked:g} ({launch.where(name)})"
        if distributed or short == "CP":
            why = "context parallelism cuts no weights" if short == "CP" else "a distributed checkpoint is cut anew"
            yield Found(f"{said}: {why}", where, "note", cure="nothing, if that is meant")
        else:
            cure = f"give {name} {held}, or convert the checkpoint to torch_dist, which loads into any layout"
            yield Found(said, where, None if sure else "warning", None if sure else "possible", cure)


def _saved(checkpoint: MegatronCheckpoint, files: Any) -> dict[str, int]:
    """Sizes of the save: of its arguments, else of the ranks' folders."""
    args = checkpoint.args or {}
    found = {key: args[key] for _, key, _ in _FLAGS if type(args.get(key)) is int}
    ranks = [match.groups() for name in files if (match := _RANK.match(name))]
    if ranks and not found:
        found["tensor_model_parallel_size"] = max(int(rank[0]) for rank in ranks) + 1
        if any(len(rank) == 3 and rank[2] is not None for rank in ranks):
            found["pipeline_model_parallel_size"] = max(int(rank[1] or 0) for rank in ranks) + 1
            found["expert_model_parallel_size"] = max(int(rank[2] or 0) for rank in ranks) + 1
        elif not any(rank[1] for rank in ranks):
            found["pipeline_model_parallel_size"] = 1
    return found


RULE = Rule(
    "checkpoint-parallelism", "The launch's TP, PP, EP or CP where the checkpoint was saved with another",
    (Launch, MegatronCheckpoint), "error", "certain",
    "a checkpoint of one file for each rank (mp_rank_TT_PPP) loads only into the layout that wrote it",
    "give the launch the layout of the save, or convert the checkpoint",
    ("slime guide: Troubleshooting",), _check,
)  # fmt: skip
