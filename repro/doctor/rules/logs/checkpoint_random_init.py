"""A checkpoint was asked for and not found, so the model starts from random weights."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Log
from repro.doctor.artefacts.log_lines import above, said, speaker
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_SEEN = (
    "will not load any checkpoints and will start from random",
    "is empty; starting from model_provider-initialized weights",
)
_FILE = "could not find the metadata file "


def _check(log: Log) -> Iterator[Found]:
    for hit in said(log, *_SEEN)[:1]:
        named = next((line.partition(_FILE)[2].strip() for line in reversed(above(log, hit, 5)) if _FILE in line), "")
        who = f" of {speaker(hit)}" if speaker(hit) else ""
        yield Found(
            f"the model{who} starts from random weights" + (f": there is no {named[:200]}" if named else ""),
            log.where(hit),
        )


RULE = Rule(
    id="checkpoint-random-init",
    title="A model that starts from random weights because its checkpoint was not found",
    inputs=(Log,),
    severity="error",
    certainty="likely",
    why="post-training of a random model: rollouts are gibberish and nothing else says so",
    cure="let --load and --ref-load name a folder with latest_checkpointed_iteration.txt; convert a Hugging Face model "
    "with the trainer's tool first",
    sources=(
        "Miles FAQ",
        "NVIDIA/Megatron-LM megatron/training/checkpointing.py",
        "radixark/miles@31f1ca961 miles/backends/megatron_utils/model.py:962",
    ),
    check=_check,
    phrases=_SEEN,
)
