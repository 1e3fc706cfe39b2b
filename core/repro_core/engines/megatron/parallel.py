"""The processes of a run: torch.distributed and Megatron's process groups, started and stopped as often as needed.

Where a process stands is read from torchrun's variables: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
Without RANK there is one process, which needs no port.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from repro_core.config import ConfigError, TrainConfig
from repro_core.engines.megatron import cpu
from repro_core.engines.megatron.layout import Layout

__all__ = ["TIMEOUT_S", "Coordinates", "current", "rank_and_world", "start", "stop", "timeout_s"]

TIMEOUT_S = 600.0
"""How long a process waits for another one in a collective operation."""


@dataclass(frozen=True)
class Coordinates:
    """Where a process stands in a layout.

    Attributes:
        rank: of the process among all.
        tp_rank: in its tensor-parallel group.
        pp_rank: its pipeline stage.
        cp_rank: in its context-parallel group.
        dp_rank: in its data-parallel group, context parallelism not counted.
        ep_rank: in its expert-parallel group.
        is_first_stage: whether it holds the embedding.
        is_last_stage: whether it makes logits.
    """

    rank: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    dp_rank: int
    ep_rank: int
    is_first_stage: bool
    is_last_stage: bool


def timeout_s(config: TrainConfig) -> float:
    """Seconds that a run's processes wait for each other: longer than the first of them may wait for SGLang."""
    return max(TIMEOUT_S, config.sglang.timeout + 60) if config.rollout_engine == "sglang" else TIMEOUT_S


class _Process:
    """What outlives a start: the store of the rendezvous, which must be made once, and how often it was used."""

    store: Any = None
    starts: int = 0
    layout: Layout | None = None


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of processes, from RANK and WORLD_SIZE; (0, 1) without them.

    Raises:
        ConfigError: one of the two is missing or no number.
    """
    given = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    if not any(given.values()):
        return 0, 1
    try:
        rank, world = (int(given[name] or "") for name in ("RANK", "WORLD_SIZE"))
    except ValueError:
        raise ConfigError(f"RANK={given['RANK']} and WORLD_SIZE={given['WORLD_SIZE']} must both be numbers") from None
    if not 0 <= rank < world:
        raise ConfigError(f"RANK={rank} must be at least 0 and below WORLD_SIZE={world}")
    return rank, world


def start(layout: Layout, *, seed: int, cuda: bool | None = None, timeout_s: float = TIMEOUT_S) -> Coordinates:
    """Join the other processes and lay them out. On the CPU this runs inside `cpu.without_cuda`.

    Args:
        layout: what `layout.check` gave.
        seed: of Megatron's generators. Nothing here draws from them: dropout is 0.
        cuda: NCCL on the GPU of LOCAL_RANK rather than gloo; None asks torch.
        timeout_s: seconds to wait for the other processes, here and in every collective operation.

    Raises:
        ConfigError: the layout is for another number of processes, or MASTER_ADDR or MASTER_PORT is missing.
        RuntimeError: a layout is already started in this process.
    """
    if _Process.layout is not None:
        raise RuntimeError(f"{_describe(_Process.layout)} is already started in this process: stop it first")
    cpu.load()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    cuda = torch.cuda.is_available() if cuda is None else cuda
    rank, world = rank_and_world()
    if world != layout.world_size:
        raise ConfigError(f"WORLD_SIZE={world}, but {_describe(layout)} is for {layout.world_size} processes")
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=timeout_s)
    store = PrefixStore(f"start-{_Process.starts}", _store(rank, world, timeout))
    _Process.starts += 1
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=rank, world_size=world, timeout=timeout
    )
    _Process.layout = layout
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            distributed_timeout_minutes=max(1, round(timeout_s / 60)),
            create_gloo_process_groups=cuda,
        )
        # The tracker for inference keeps no state, so that without CUDA there is none to read.
        model_parallel_cuda_manual_seed(seed, inference_rng_tracker=not cuda, force_reset_rng=True)
    except BaseException:
        stop()
        raise
    return current()


def current() -> Coordinates:
    """Where this process stands.

    Raises:
        RuntimeError: nothing is started.
    """
    if _Process.layout is None:
        raise RuntimeError("no layout is started in this process")
    from megatron.core import parallel_state as state

    return Coordinates(
        rank=dist.get_rank(),
        tp_rank=state.get_tensor_model_parallel_rank(),
        pp_rank=state.get_pipeline_model_parallel_rank(),
        cp_rank=state.get_context_parallel_rank(),
        dp_rank=state.get_data_parallel_rank(),
        ep_rank=state.get_expert_model_parallel_rank(),
        is_first_stage=state.is_pipeline_first_stage(ignore_virtual=True),
        is_last_stage=state.is_pipeline_last_stage(ignore_virtual=True),
    )


def stop() -> None:
    """Give the process groups back; another layout may be started afterwards. Without a start, nothing happens.

    It waits for no other process, so that one whose neighbour died can call it.
    """
    if _Process.layout is None:
        return
    from megatron.core import parallel_state

    _Process.layout = None
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def _store(rank: int, world: int, timeout: timedelta) -> Any:
    """One store for all starts: its server holds the port of MASTER_PORT for as long as the process lives."""
    if _Process.store is None:
        if "RANK" not in os.environ:
            _Process.store = HashStore()
        else:
            missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
            if missing:
                raise ConfigError(f"RANK={rank} is set, but {' and '.join(missing)} is not: torchrun sets them")
            _Process.store, _, _ = next(rendezvous("env://", rank, world, timeout=timeout))
    return _Process.store


def _describe(layout: Layout) -> str:
    return f"TP{layout.tp} x PP{layout.pp} x CP{layout.cp} x DP{layout.dp} (EP{layout.ep})"
