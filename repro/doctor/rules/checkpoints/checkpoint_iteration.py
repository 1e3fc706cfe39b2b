"""The iteration that the tracker names: its folder is there and holds something."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import MegatronCheckpoint
from repro.doctor.artefacts.megatron import RELEASE, TRACKER
from repro.doctor.facts.checkpoints.launches import folder_of
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(checkpoint: MegatronCheckpoint) -> Iterator[Found]:
    word = (checkpoint.tracker or "").strip()
    if word != "release" and not (word.isascii() and word.isdigit() and len(word) < 16):
        return
    iteration = RELEASE if word == "release" else int(word)
    where = Where(str(checkpoint.path / TRACKER), 1, value=word)
    folder = folder_of(checkpoint, iteration).name
    whole = sorted(i for i, files in checkpoint.files.items() if i >= 0 and any(files.values()))
    cure = (
        f"the newest iteration with files is {whole[-1]}: write {whole[-1]} into it, or give --ckpt-step"
        if whole
        else ""
    )
    if iteration not in checkpoint.files:
        yield Found(f"{TRACKER} names {word}, but there is no folder {folder}", where, cure=cure)
    elif not any(checkpoint.files[iteration].values()):
        yield Found(f"{TRACKER} names {word}, but {folder} holds no data", where, cure=cure)
    elif whole and 0 <= iteration < whole[-1]:
        said = f"{TRACKER} names {word}, and there is a newer {folder_of(checkpoint, whole[-1]).name}"
        hint = "if the newer one is complete and wanted, write its number into the tracker or give --ckpt-step"
        yield Found(said, where, "note", "possible", hint)


RULE = Rule(
    "checkpoint-iteration", "The iteration that the tracker names has no folder, or an empty one",
    (MegatronCheckpoint,), "error", "certain",
    "loading fails on the missing folder, or another checkpoint is trained on than you think",
    "copy the iteration again, or write the number of one that is complete into the tracker",
    ("slime guide: Troubleshooting", "Miles FAQ"), _check,
)  # fmt: skip
