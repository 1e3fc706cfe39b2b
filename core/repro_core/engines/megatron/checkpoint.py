"""Checkpoints in the form of Megatron's ``dist_checkpointing``: any layout loads what any other saved.

A checkpoint is one directory: the shards, Megatron's metadata and ``common.pt``, and ``trainer.json`` with the format
number, the configuration, and the SHA-256 of every other file. It is written next to its place and renamed there whole.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from repro_core.config import TrainConfig
from repro_core.data.rollout_file import replace_file
from repro_core.engines.checkpoint import (
    META,
    CheckpointError,
    check_architecture,
    check_files,
    check_settings,
    digest_of,
    fit,
    model_of,
    read_meta,
)
from repro_core.engines.megatron.engine import MegatronEngine
from repro_core.engines.megatron.layout import check_saving
from repro_core.engines.megatron.mains import Main

__all__ = ["FORMAT", "load", "save"]

FORMAT = 1
"""Raised when an older reader would misread the files; readers refuse a newer one."""


def save(
    directory: str,
    engines: Mapping[str, MegatronEngine],
    rest: Mapping[str, Tensor],
    config: TrainConfig,
    *,
    cuda: bool,
) -> None:
    """Write a checkpoint, replacing an older one at the same place. Every rank calls it.

    Args:
        directory: its parents are made.
        engines: by what their names begin with.
        rest: tensors that are the same on every rank.
        config: of the run.
        cuda: whether this runs on GPUs.

    Raises:
        repro_core.config.ConfigError: this layout cannot be saved here.
        CheckpointError: something that is no checkpoint lies at `directory`; it is left alone.
        OSError: the disk refuses.
    """
    from megatron.core import dist_checkpointing

    check_saving(config, cuda=cuda)
    target = Path(directory)
    fresh, stale = target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")
    with _together() as lead:
        if lead:
            if target.exists() and not (target / META).is_file() and (not target.is_dir() or any(target.iterdir())):
                raise CheckpointError(f"{target} exists and is no checkpoint: choose another directory")
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
    with _together():
        common = {name: value.detach().cpu().clone() for name, value in rest.items()}
        with _quiet():
            dist_checkpointing.save({**_sharded(engines, loading=False), "rest": common}, str(fresh))
    with _together() as lead:
        if lead:
            meta = {"format": FORMAT, "config": config.to_mapping(), "sha256": _digests(fresh)}
            replace_file(fresh / META, (json.dumps(meta, indent=1, sort_keys=True) + "\n").encode())
            shutil.rmtree(stale, ignore_errors=True)
            if target.exists():
                target.rename(stale)
            fresh.rename(target)
            shutil.rmtree(stale, ignore_errors=True)


def load(
    directory: str,
    engines: Mapping[str, MegatronEngine],
    rest: Mapping[str, Tensor],
    config: TrainConfig,
    *,
    cuda: bool,
) -> dict[str, Tensor]:
    """Fill the engines from a checkpoint and return what else it holds. Every rank calls it.

    Args:
        directory: what `save` wrote, in this or another layout.
        engines: as for `save`.
        rest: which other tensors are wanted, with their dtypes and shapes.
        config: of the run.
        cuda: whether this runs on GPUs.

    Raises:
        repro_core.config.ConfigError: this layout cannot resume here.
        CheckpointError: no checkpoint, of a newer format, of another model or dtype, or damaged: then nothing has
            changed. Or the shards could not be read, and then the models are of no use any more.
    """
    from megatron.core import dist_checkpointing

    check_saving(config, cuda=cuda)
    source = Path(directory)
    with _together() as lead:
        meta = read_meta(source, FORMAT, "megatron")
        check_settings(source, meta["config"], config)
        check_architecture(source, model_of(source, meta["config"]), config.model)
        check_files(source, meta["sha256"], whole=lead)
    with _together(), _quiet(), torch.no_grad():
        state = dist_checkpointing.load(_sharded(engines, loading=True), str(source))
        others: dict[str, Tensor] = state["rest"]
        fit(directory, others, rest)
        for prefix, engine in engines.items():
            for number, chunk in enumerate(engine.raw):
                loaded = state[f"{prefix}model{number}"]
                chunk.load_state_dict({name.removeprefix(prefix): value for name, value in loaded.items()})
            if engine.trained:
                _resume(engine, state[f"{prefix}optimizer"], int(state[f"{prefix}updates"]))
    return others


def _resume(engine: MegatronEngine, state: dict[str, Any], updates: int) -> None:
    """Put what was loaded into an engine's optimizer. Learning rate and the like stay the configuration's."""
    engine.updates = updates
    if engine.config.megatron.use_distributed_optimizer:
        settings = [_settings(group) for group in engine.optimizer.param_groups]
        engine.optimizer.load_state_dict(state)
        for group, group_settings in zip(engine.optimizer.param_groups, settings, strict=True):
            group.update(group_settings)
    else:
        for number, main in engine.mains:
            for kind, tensor in _held(main):
                tensor.copy_(state[f"{kind}/{number}/{main.name}"])
    engine.count_steps()


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "step")}


def _sharded(engines: Mapping[str, MegatronEngine], *, loading: bool) -> dict[str, Any]:
    """What Megatron writes or fills: each tensor with its place in the whole."""
    out: dict[str, Any] = {}
    for prefix, engine in engines.items():
        chunks = [chunk.sharded_state_dict(prefix=prefix) for chunk in engine.raw]
        out |= {f"{prefix}model{number}": chunk for number, chunk in enumerate(chunks)}
        if engine.trained:
            out[f"{prefix}optimizer"] = _sharded_optimizer(engine, prefix, chunks, loading=loading)
            out[f"{prefix}updates"] = engine.updates
    return out


def _sharded_optimizer(
    engine: MegatronEngine, prefix: str, chunks: Sequence[Mapping[str, Any]], *, loading: bool
) -> dict[str, Any]:
    """Main weights and moments, named as Megatron names them and placed as their parameters are.

    Megatron's own form is taken for slices alone: it cannot place an fp32 parameter of a bf16 model, drops a step of 0,
    and differs between layouts with expert parallelism and without.
    """
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

    if engine.config.megatron.use_distributed_optimizer:
        every = {f"{number}.{name}": value for number, chunk in enumerate(chunks) for name, value in chunk.items()}
        asked = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
        state: dict[str, Any] = engine.optimizer.sharded_state_dict(every, is_loading=loading, metadata=asked)
        return state
    return {
        f"{kind}/{number}/{main.name}": make_sharded_optimizer_tensor(
            chunks[number][prefix + main.name], tensor, prefix=f"optimizer.state.{kind}"
        )
        for number, main in engine.mains
        for kind, tensor in _held(main)
    }


def _held(main: Main) -> Iterator[tuple[str, Tensor]]:
    """What an optimizer holds of a parameter besides the parameter itself, by Megatron's names."""
    if main.main is not main.parameter:
        yield "fp32_param", main.main
    for kind in ("exp_avg", "exp_avg_sq"):
        yield kind, main.moment(kind)


def _digests(directory: Path) -> dict[str, str | None]:
    """None for ``.metadata``, which numbers each saving at random: equal states would have unequal digests."""
    return {
        path.name: None if path.name == ".metadata" else digest_of(path)
        for path in sorted(directory.iterdir())
        if path.is_file()
    }


@contextmanager
def _together() -> Iterator[bool]:
    """A block that all ranks leave together: where one raises, all do. Gives whether this is rank 0."""
    rank, world = dist.get_rank(), dist.get_world_size()
    failure: BaseException | None = None
    try:
        yield rank == 0
    except (CheckpointError, OSError) as error:
        failure = error
    except Exception as error:  # noqa: BLE001 - whatever it is, the others must not wait for this rank
        failure = CheckpointError(
            f"Megatron's checkpoint failed ({' '.join(str(error).split())[:300]}): use another one"
        )
    failures: list[Any] = [None] * world
    if world > 1:
        dist.all_gather_object(failures, None if failure is None else f"{failure}")
    if failure is not None:
        raise failure
    if any(failures):
        raise CheckpointError(next(text for text in failures if text))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch and Megatron warn of each other inside."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(megatron\.core|torch|repro_core\.megatron)\b")
        yield
