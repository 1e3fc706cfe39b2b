"""``--load`` names a folder without a tracker: the trainer quietly starts over from the reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from repro.doctor.artefacts.kinds import Launch, MegatronCheckpoint
from repro.doctor.artefacts.megatron import TRACKER
from repro.doctor.facts.checkpoints.launches import exists, flag_of, has_checkpoints, is_known, named, same
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


def _check(launch: Launch, checkpoint: MegatronCheckpoint | None) -> Iterator[Found]:
    load = named(launch, "--load")
    if load is None or launch.value("--train-backend") == "fsdp":
        return
    if checkpoint is not None and not exists(load) and flag_of(launch, checkpoint.path, ("--load",)):
        load = checkpoint.path  # a copy of it
    if exists(load / TRACKER) or not is_known(launch, load):
        return
    where = launch.where("--load")
    instead = launch.value("--ref-load") or "nothing at all (there is no --ref-load)"
    then = f"training starts at rollout 0 from {instead}, without optimizer and random state"
    save = named(launch, "--save")
    if exists(load / "config.json"):
        said = f"--load {load} is a Hugging Face folder, which starts a fresh run: no optimizer, no random state"
        yield Found(said, where, "note")
    elif has_checkpoints(load):
        said = f"--load {load} holds iterations but no {TRACKER}: {then}"
        cure = f"write the iteration to load into {load / TRACKER}, or give the folder that holds it"
        yield Found(said, where, cure=cure)
    elif save is not None and same(save, load):
        said = f"--load {load} has nothing yet: a first run, {then}"
        yield Found(said, where, "note")
    elif not exists(load):
        yield Found(f"--load {load} does not exist: {then}", where, "warning", "likely", _near(launch, load))
    else:
        yield Found(f"--load {load} has no {TRACKER}: {then}", where, "warning", "likely", _near(launch, load))


def _near(launch: Launch, load: Path) -> str:
    """The folder that was probably meant."""
    save = named(launch, "--save")
    near = [load.parent] if exists(load.parent / TRACKER) else []
    if save is not None and exists(save / TRACKER):
        near.append(save)
    return f"give --load {near[0]}, which has a tracker" if near else ""


RULE = Rule(
    "silent-finetune", "--load names a folder without a tracker, so the trainer starts over from --ref-load",
    (Launch,), "error", "certain",
    "slime and Miles set finetune, no_load_optim, no_load_rng, load = ref_load and start_rollout_id = 0 without a "
    "word: the run you meant to resume is not resumed",
    "give --load the folder that holds latest_checkpointed_iteration.txt; convert Hugging Face weights with "
    "tools/convert_hf_to_torch_dist.py; leave --load out for a fresh run",
    ("Miles guide: Debugging", "Miles FAQ", "slime guide: Troubleshooting",
     "THUDM/slime@624b824a8 slime/utils/arguments.py:1817", "radixark/miles@31f1ca961 miles/utils/arguments.py:3047"),
    _check, uses=(MegatronCheckpoint,),
)  # fmt: skip
