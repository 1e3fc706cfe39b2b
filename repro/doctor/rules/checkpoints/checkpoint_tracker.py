"""The file that says which iteration is the newest: there, and a number or ``release``."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import MegatronCheckpoint
from repro.doctor.artefacts.megatron import TRACKER, iteration_of
from repro.doctor.facts.checkpoints.launches import folder_of, shown
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_WEIGHTS = (".distcp", ".pt", ".safetensors", ".metadata")


def _check(checkpoint: MegatronCheckpoint) -> Iterator[Found]:
    where = Where(str(checkpoint.path / TRACKER))
    weights = sorted(i for i, files in checkpoint.files.items() if any(name.endswith(_WEIGHTS) for name in files))
    if checkpoint.tracker is None:
        if iteration_of(checkpoint.path.absolute().name) is not None:
            said = "this is the folder of one iteration, which has no tracker of its own"
            cure = (
                f"give the folder above, and --ckpt-step for another iteration than its newest ({checkpoint.path.name})"
            )
            yield Found(said, Where(str(checkpoint.path)), "note", cure=cure)
        elif weights:
            newest = folder_of(checkpoint, weights[-1]).name
            word = "release" if weights[-1] < 0 else str(weights[-1])
            cure = f"if {newest} is complete: echo {word} > {checkpoint.path / TRACKER}"
            yield Found(f"{TRACKER} is missing beside {newest}", where, cure=cure)
        else:
            yield Found("folders of iterations without weights and without a tracker", where, "note")
        return
    word = checkpoint.tracker.strip()
    if not word:
        yield Found(f"{TRACKER} is empty", where)
    elif word != "release" and not (word.isascii() and word.isdigit()):
        yield Found(f"{TRACKER} holds {shown(word)!r}, no iteration and not 'release'", where)


RULE = Rule(
    "checkpoint-tracker", "The tracker of a Megatron checkpoint: missing, empty, or no iteration",
    (MegatronCheckpoint,), "error", "certain",
    "without a readable tracker Megatron finds no checkpoint: slime and Miles then train from --ref-load, without an "
    "error, and a reference without one gives garbled text",
    "write the number of the newest complete iteration into latest_checkpointed_iteration.txt, or name the folder that "
    "has it",
    ("Miles FAQ", "slime guide: Troubleshooting", "THUDM/slime@624b824a8 slime/utils/arguments.py:1817"),
    _check,
)  # fmt: skip
