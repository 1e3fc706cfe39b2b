"""Checkpoints of Megatron: what a launch finds where it looks, and whether it can take it up."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from repro.doctor.artefacts.checkpoints.megatron import RELEASE, TRACKER, iteration_of
from repro.doctor.artefacts.kinds import Launch, MegatronCheckpoint
from repro.doctor.facts.launches import (
    exists,
    flag_of,
    flagged,
    folder_of,
    has_checkpoints,
    is_known,
    is_whole,
    named,
    same,
    shown,
)
from repro.doctor.facts.sources import MILES_ARGS, SLIME, SLIME_ARGS
from repro.doctor.facts.tensor_names import ranges
from repro_golden.base.checks import Found, Severity, Where, rule


@rule(
    title="The iteration that the tracker names has no folder, or an empty one",
    severity="error",
    certainty="certain",
    why="loading fails on the missing folder, or another checkpoint is trained on than you think",
    fix="copy the iteration again, or write the number of one that is complete into the tracker",
    sources=("slime guide: Troubleshooting", "Miles FAQ"),
)
def _checkpoint_iteration(checkpoint: MegatronCheckpoint) -> Iterator[Found]:
    word = (checkpoint.tracker or "").strip()
    if word != "release" and not (word.isascii() and word.isdigit() and len(word) < 16):
        return
    iteration = RELEASE if word == "release" else int(word)
    where = Where(str(checkpoint.path / TRACKER), 1, value=word)
    folder = folder_of(checkpoint, iteration).name
    whole = sorted(i for i, files in checkpoint.files.items() if i >= 0 and any(files.values()))
    fix = (
        f"the newest iteration with files is {whole[-1]}: write {whole[-1]} into it, or give --ckpt-step"
        if whole
        else ""
    )
    if iteration not in checkpoint.files:
        yield Found(f"{TRACKER} names {word}, but there is no folder {folder}", where, fix=fix)
    elif not any(checkpoint.files[iteration].values()):
        yield Found(f"{TRACKER} names {word}, but {folder} holds no data", where, fix=fix)
    elif whole and 0 <= iteration < whole[-1]:
        message = f"{TRACKER} names {word}, and there is a newer {folder_of(checkpoint, whole[-1]).name}"
        hint = "if the newer one is complete and wanted, write its number into the tracker or give --ckpt-step"
        yield Found(message, where, "note", "possible", hint)


_LOADS = ("--load", "--ref-load")
_NUMBERS = (
    "--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--num-query-groups",
    "--kv-channels", "--num-experts", "--moe-ffn-hidden-size", "--moe-router-topk",
    "--moe-shared-expert-intermediate-size", "--rotary-base", "--vocab-size",
)  # fmt: skip
_SWITCHES = ("--swiglu", "--qk-layernorm", "--add-qkv-bias", "--untie-embeddings-and-output-weights")
_SOFT = frozenset({"--moe-router-topk", "--rotary-base"})
"""These do not change a shape: loading succeeds, and the model is another one."""


def _found(launch: Launch, checkpoint: MegatronCheckpoint, flag: str, asked: str, held: str, *, sure: bool) -> Found:
    what = "loads, and is another model" if flag in _SOFT else "does not load"
    message = f"saved with {flag[2:].replace('-', '_')} {held}, and the launch says {asked}: it {what}"
    place = launch.where(flag)
    return Found(
        message, Where(place.path, place.line, flag, asked), None if sure else "warning", None if sure else "possible",
        f"give {flag} {held}, or the checkpoint of this model; {checkpoint.path} is not it",
    )  # fmt: skip


@rule(
    title="Sizes of the model in the launch that are not those of the checkpoint",
    severity="error",
    certainty="certain",
    why="shapes do not fit and loading fails, or the same weights are run as another model and generate garbled text",
    fix="source the file of model arguments (scripts/models/) that belongs to the checkpoint",
    sources=("slime guide: Debugging", "slime guide: Troubleshooting"),
)
def _checkpoint_model_args(launch: Launch, checkpoint: MegatronCheckpoint) -> Iterator[Found]:
    args = checkpoint.args
    if not args or not launch.argv:
        return
    sure = flag_of(launch, checkpoint.path, _LOADS) is not None or not flagged(launch, _LOADS)
    for flag in _NUMBERS:
        asked = launch.number(flag) if launch.has(flag) else None
        held = args.get(flag[2:].replace("-", "_"))
        if asked is not None and type(held) in (int, float) and asked != held:
            yield _found(launch, checkpoint, flag, f"{asked:g}", f"{held:g}", sure=sure)
    if not is_whole(launch) or not any(launch.value(flag) for flag in ("--num-layers", "--hidden-size")):
        return  # the model's flags come from elsewhere: a switch that is not seen here says nothing
    for flag in _SWITCHES:
        held = args.get(flag[2:].replace("-", "_"))
        if isinstance(held, bool) and held != launch.has(flag):
            yield _found(launch, checkpoint, flag, str(launch.has(flag)), str(held), sure=sure)


_FLAGS = (
    ("--tensor-model-parallel-size", "tensor_model_parallel_size", "TP"),
    ("--pipeline-model-parallel-size", "pipeline_model_parallel_size", "PP"),
    ("--expert-model-parallel-size", "expert_model_parallel_size", "EP"),
    ("--expert-tensor-parallel-size", "expert_tensor_parallel_size", "ETP"),
    ("--context-parallel-size", "context_parallel_size", "CP"),
)
_CHECKPOINT_PARALLELISM_LOADS = ("--load", "--ref-load", "--critic-load")
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?/", re.ASCII)


def _saved(checkpoint: MegatronCheckpoint, files: Any) -> dict[str, int]:
    """Sizes of the save: of its arguments, else of the ranks' folders."""
    args = checkpoint.args or {}
    sizes = {key: args[key] for _, key, _ in _FLAGS if type(args.get(key)) is int}
    ranks = [match.groups() for name in files if (match := _RANK.match(name))]
    if ranks and not sizes:
        sizes["tensor_model_parallel_size"] = max(int(rank[0]) for rank in ranks) + 1
        if any(len(rank) == 3 and rank[2] is not None for rank in ranks):
            sizes["pipeline_model_parallel_size"] = max(int(rank[1] or 0) for rank in ranks) + 1
            sizes["expert_model_parallel_size"] = max(int(rank[2] or 0) for rank in ranks) + 1
        elif not any(rank[1] for rank in ranks):
            sizes["pipeline_model_parallel_size"] = 1
    return sizes


@rule(
    title="The launch's TP, PP, EP or CP where the checkpoint was saved with another",
    severity="error",
    certainty="certain",
    why="a checkpoint of one file for each rank (mp_rank_TT_PPP) loads only into the layout that wrote it",
    fix="give the launch the layout of the save, or convert the checkpoint",
    sources=("slime guide: Troubleshooting",),
)
def _checkpoint_parallelism(launch: Launch, checkpoint: MegatronCheckpoint) -> Iterator[Found]:
    if not launch.argv or not checkpoint.files:
        return
    files = checkpoint.files[max(checkpoint.files)]
    saved = _saved(checkpoint, files)
    distributed = any(name.endswith(".distcp") for name in files)
    flag = flag_of(launch, checkpoint.path, _CHECKPOINT_PARALLELISM_LOADS)
    sure = flag is not None or not flagged(launch, _CHECKPOINT_PARALLELISM_LOADS)
    for name, key, short in _FLAGS:
        if launch.value(name) is None and (launch.has(name) or not is_whole(launch)):
            continue  # only a shell knows it
        default = saved.get("tensor_model_parallel_size") if key == "expert_tensor_parallel_size" else 1
        asked, held = launch.number(name, None if default is None else float(default)), saved.get(key)
        if asked is None or held is None or asked == held:
            continue
        where = Where(str(checkpoint.path), item=key, value=str(held))
        message = f"saved with {short} {held}, and the launch asks for {short} {asked:g} ({launch.where(name)})"
        if distributed or short == "CP":
            why = "context parallelism cuts no weights" if short == "CP" else "a distributed checkpoint is cut anew"
            yield Found(f"{message}: {why}", where, "note", fix="nothing, if that is meant")
        else:
            fix = f"give {name} {held}, or convert the checkpoint to torch_dist, which loads into any layout"
            yield Found(message, where, None if sure else "warning", None if sure else "possible", fix)


_WEIGHTS = (".distcp", ".pt", ".safetensors", ".metadata")


@rule(
    title="The tracker of a Megatron checkpoint: missing, empty, or no iteration",
    severity="error",
    certainty="certain",
    why="without a readable tracker Megatron finds no checkpoint: slime and Miles then train from --ref-load, without"
    " an error, and a reference without one gives garbled text",
    fix="write the number of the newest complete iteration into latest_checkpointed_iteration.txt, or name the folder"
    " that has it",
    sources=("Miles FAQ", "slime guide: Troubleshooting", f"{SLIME_ARGS}:1817"),
)
def _checkpoint_tracker(checkpoint: MegatronCheckpoint) -> Iterator[Found]:
    where = Where(str(checkpoint.path / TRACKER))
    weights = sorted(i for i, files in checkpoint.files.items() if any(name.endswith(_WEIGHTS) for name in files))
    if checkpoint.tracker is None:
        if iteration_of(checkpoint.path.absolute().name) is not None:
            message = "this is the folder of one iteration, which has no tracker of its own"
            fix = (
                f"give the folder above, and --ckpt-step for another iteration than its newest ({checkpoint.path.name})"
            )
            yield Found(message, Where(str(checkpoint.path)), "note", fix=fix)
        elif weights:
            newest = folder_of(checkpoint, weights[-1]).name
            word = "release" if weights[-1] < 0 else str(weights[-1])
            fix = f"if {newest} is complete: echo {word} > {checkpoint.path / TRACKER}"
            yield Found(f"{TRACKER} is missing beside {newest}", where, fix=fix)
        else:
            yield Found("folders of iterations without weights and without a tracker", where, "note")
        return
    word = checkpoint.tracker.strip()
    if not word:
        yield Found(f"{TRACKER} is empty", where)
    elif word != "release" and not (word.isascii() and word.isdigit()):
        yield Found(f"{TRACKER} holds {shown(word)!r}, no iteration and not 'release'", where)


_CHECKPOINT_TRUNCATED_RANK = re.compile(r"mp_rank_(\d{2,})((?:_\d{3,})*)/", re.ASCII)
_NEEDED = (".metadata", "common.pt", "metadata.json")
_MOST = 8


def _broken(files: Mapping[str, int], extents: Mapping[str, int] | None) -> Iterator[tuple[str, str]]:
    """Files of one iteration and what is wrong with each."""
    distributed = any(name.endswith(".distcp") for name in files)
    for name in sorted(files):
        needed = name in _NEEDED or name.endswith("/model_optim_rng.pt") or (extents and name in extents)
        if not files[name] and needed:
            yield name, "has 0 bytes"
    if distributed and ".metadata" not in files:
        yield ".metadata", "is missing beside its .distcp files: the save was interrupted before its end"
    for name, end in sorted((extents or {}).items()):
        if name not in files:
            yield name, "is missing, and .metadata names it"
        elif 0 < files[name] < end:
            yield name, f"has {files[name]} bytes, and .metadata says that it has at least {end}"
    yield from _ranks(files)


def _ranks(files: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Ranks that are missing in the grid of ``mp_rank_TT_PPP``."""
    ranks: set[tuple[int, ...]] = set()
    for name in files:
        match = _CHECKPOINT_TRUNCATED_RANK.match(name)
        if match:
            ranks.add((int(match[1]), *(int(part) for part in match[2].split("_")[1:])))
    lengths = {len(rank) for rank in ranks}
    if len(lengths) != 1 or len(ranks) > 100_000:
        return
    sizes = [max(rank[axis] for rank in ranks) + 1 for axis in range(lengths.pop())]
    if not len(ranks) < math.prod(sizes) <= 100_000:
        return
    for rank in itertools.product(*map(range, sizes)):
        if rank not in ranks:
            name = f"mp_rank_{rank[0]:02d}" + "".join(f"_{part:03d}" for part in rank[1:])
            yield name, f"is missing: the other ranks make a grid of {' x '.join(map(str, sizes))}"


@rule(
    title="Files of a Megatron checkpoint that are missing, empty or too short",
    severity="error",
    certainty="certain",
    why="loading fails, on some ranks only and after minutes, or reads what is not there",
    fix="copy the iteration again from where it is whole, or go back to an older one with --ckpt-step",
    sources=("slime guide: Troubleshooting", f"{SLIME} slime/backends/megatron_utils/checkpoint.py:95"),
)
def _checkpoint_truncated(checkpoint: MegatronCheckpoint) -> Iterator[Found]:
    newest = max(checkpoint.files, default=None)
    for iteration, files in sorted(checkpoint.files.items()):
        folder = folder_of(checkpoint, iteration)
        broken = list(_broken(files, checkpoint.extents.get(iteration)))
        for name, what in broken[:_MOST]:
            severity: Severity | None = None if iteration in (newest, *checkpoint.extents) else "warning"
            yield Found(f"{folder.name}/{name} {what}", Where(str(folder / name)), severity)
        if len(broken) > _MOST:
            yield Found(f"{folder.name} has {len(broken) - _MOST} more such files", Where(str(folder)))
    for name, why in sorted(checkpoint.damage.items()):
        lost = "cut short" in why or "is empty" in why or "breaks off" in why
        already = any(
            name.endswith(f"/{file}") and not size
            for files in checkpoint.files.values()
            for file, size in files.items()
        )
        if not already:
            yield Found(
                f"{name} cannot be read: {why}", Where(str(checkpoint.path / name)), None if lost else "warning"
            )


def _iterations(
    launch: Launch, checkpoint: MegatronCheckpoint | None, flags: tuple[str, ...]
) -> tuple[str, set[int]] | None:
    """What the folder that would be loaded has: its name and its iterations; None where it is not at hand."""
    if checkpoint is not None and flag_of(launch, checkpoint.path, flags):
        return str(checkpoint.path), {i for i in checkpoint.iterations if i != RELEASE}
    for flag in flags:
        folder = named(launch, flag)
        if folder is None:
            if launch.has(flag):
                return None  # only a shell knows it
            continue
        if exists(folder / TRACKER):
            return str(folder), _listed(folder)
    return None


def _listed(folder: Path) -> set[int]:
    try:
        numbers = {iteration_of(child.name) for child in folder.iterdir()}
    except OSError:
        return set()
    return {number for number in numbers if number is not None and number != RELEASE}


@rule(
    title="--ckpt-step names an iteration that the checkpoint does not have",
    severity="error",
    certainty="certain",
    why="Megatron asserts or fails on the missing folder when it loads",
    fix="give an iteration whose folder iter_NNNNNNN is there, or drop the flag to load the newest",
    sources=("Miles FAQ", "slime guide: Troubleshooting", f"{SLIME} slime/backends/megatron_utils/model.py:120"),
)
def _ckpt_step(launch: Launch, checkpoint: MegatronCheckpoint | None) -> Iterator[Found]:
    # Without a tracker in --load the trainers load from --ref-load, and --ref-ckpt-step replaces --ckpt-step there.
    for flag, folders in (("--ckpt-step", ("--load", "--ref-load")), ("--ref-ckpt-step", ("--ref-load",))):
        if not launch.has(flag) or launch.value(flag) is None:
            continue
        step = launch.number(flag)
        where = launch.where(flag)
        if step is None or step != int(step) or not 0 <= step < 10**15:
            yield Found(f"{flag} {launch.value(flag)} is no iteration", where)
            continue
        if step == 0 and flag == "--ckpt-step":
            yield Found(
                "--ckpt-step 0 counts as not given: the tracker decides", where, "warning", "likely",
                "write 0 into a tracker of its own folder to load iteration 0",
            )  # fmt: skip
            continue
        there = _iterations(launch, checkpoint, folders)
        if there is not None and int(step) not in there[1]:
            source, iterations = there
            has = f"it has {ranges(iterations)}" if iterations else "it has none"
            choice = f"{'one of ' if len(iterations) > 1 else ''}{ranges(iterations)}"
            yield Found(
                f"{flag} {int(step)}: {source} has no iter_{int(step):07d} ({has})", where,
                fix=f"give {choice}, or drop {flag} to load the newest" if iterations else "",
            )  # fmt: skip


@rule(
    title="--ref-load names what is not there, or no checkpoint",
    severity="error",
    certainty="certain",
    why="the trainer fails when it checks its arguments, or loads nothing and generates garbled text",
    fix="give --ref-load the Megatron folder of the initial model (tools/convert_hf_to_torch_dist.py writes one), or "
    "its Hugging Face folder where the trainer loads those; or drop --use-kl-loss and --kl-coef",
    sources=("Miles FAQ", "Miles guide: Debugging", f"{SLIME_ARGS}:1775", f"{MILES_ARGS}:2975"),
)
def _ref_load_missing(launch: Launch) -> Iterator[Found]:
    kl = launch.has("--use-kl-loss") or (launch.number("--kl-coef", 0.0) or 0.0) != 0.0
    ref = named(launch, "--ref-load")
    if not launch.has("--ref-load"):
        return  # `kl-without-ref` says what that leads to
    if ref is None or not is_known(launch, ref):
        return
    where = launch.where("--ref-load")
    if not exists(ref):
        if kl:
            text = f"--ref-load {ref} does not exist here: the trainer raises FileNotFoundError"
            yield Found(text, where, certainty="likely")
        else:
            yield Found(f"--ref-load {ref} does not exist", where, "warning", "likely")
    elif not exists(ref / TRACKER) and not exists(ref / "config.json") and iteration_of(ref.name) is None:
        text = f"--ref-load {ref} has neither {TRACKER} nor config.json: it is no checkpoint that the trainers load"
        yield Found(text, where, "error" if kl else "warning", "likely")


@rule(
    title="--save has checkpoints already, and --load reads another folder",
    severity="warning",
    certainty="likely",
    why="the run starts again from another model and overwrites what was saved",
    fix="set --load to the folder that --save wrote to",
    sources=("Miles FAQ",),
)
def _resume_elsewhere(launch: Launch, checkpoint: MegatronCheckpoint | None) -> Iterator[Found]:
    save, load = named(launch, "--save"), named(launch, "--load")
    if (
        save is None
        or (launch.has("--load") and launch.value("--load") is None)
        or (load is not None and same(save, load))
    ):
        return
    held = has_checkpoints(save)
    if not held and checkpoint is not None and not exists(save):
        held = flag_of(launch, checkpoint.path, ("--save",)) is not None
    if held:
        reads = f"--load {load}" if load is not None else "no --load"
        yield Found(
            f"--save {save} already has checkpoints, and the launch has {reads}: it will not resume from them, and "
            "overwrites them", launch.where("--save"),
            fix=f"to resume: --load {save}; to start over: a new folder for --save",
        )  # fmt: skip


def _near(launch: Launch, load: Path) -> str:
    """The folder that was probably meant."""
    save = named(launch, "--save")
    near = [load.parent] if exists(load.parent / TRACKER) else []
    if save is not None and exists(save / TRACKER):
        near.append(save)
    return f"give --load {near[0]}, which has a tracker" if near else ""


@rule(
    title="--load names a folder without a tracker, so the trainer starts over from --ref-load",
    severity="error",
    certainty="certain",
    why="slime and Miles set finetune, no_load_optim, no_load_rng, load = ref_load and start_rollout_id = 0 without a"
    " word: the run you meant to resume is not resumed",
    fix="give --load the folder that holds latest_checkpointed_iteration.txt; convert Hugging Face weights with "
    "tools/convert_hf_to_torch_dist.py; leave --load out for a fresh run",
    sources=(
        "Miles guide: Debugging",
        "Miles FAQ",
        "slime guide: Troubleshooting",
        f"{SLIME_ARGS}:1817",
        f"{MILES_ARGS}:3047",
    ),
)
def _silent_finetune(launch: Launch, checkpoint: MegatronCheckpoint | None) -> Iterator[Found]:
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
        message = f"--load {load} is a Hugging Face folder, which starts a fresh run: no optimizer, no random state"
        yield Found(message, where, "note")
    elif has_checkpoints(load):
        message = f"--load {load} holds iterations but no {TRACKER}: {then}"
        fix = f"write the iteration to load into {load / TRACKER}, or give the folder that holds it"
        yield Found(message, where, fix=fix)
    elif save is not None and same(save, load):
        message = f"--load {load} has nothing yet: a first run, {then}"
        yield Found(message, where, "note")
    elif not exists(load):
        yield Found(f"--load {load} does not exist: {then}", where, "warning", "likely", _near(launch, load))
    else:
        yield Found(f"--load {load} has no {TRACKER}: {then}", where, "warning", "likely", _near(launch, load))
