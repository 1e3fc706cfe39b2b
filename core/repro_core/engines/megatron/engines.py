"""The models of a run on megatron-core: each process holds its part of all of them, and whole tensors come from all."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from repro_core.config import ModelConfig, TrainConfig
from repro_core.engines.megatron import checkpoint, cpu, parallel
from repro_core.engines.megatron.engine import MegatronEngine
from repro_core.engines.megatron.layout import check
from repro_core.engines.megatron.shares import Slot
from repro_core.engines.megatron.weights import Held, Where, join, layout, names, to_local
from repro_core.engines.torch_engine import DTYPES, starting_policy
from repro_core.model.decoder import Policy
from repro_core.model.layout_free import Joining, LayoutError, Local

__all__ = ["MegatronEngines"]

_T = TypeVar("_T")
_POLICY, _CRITIC = ("log_probs", "entropy"), ("values",)


class MegatronEngines:
    """See `interface.Engines`. A process has one at a time: making another one ends the groups of the one before.

    Args:
        config: of the run.
        root: directory that a relative `hf_checkpoint` starts from.

    Raises:
        repro_core.config.ConfigError: the layout cannot be had on these processes.
        repro_core.model.hf.HfError: `hf_checkpoint` cannot be read.
    """

    def __init__(self, config: TrainConfig, root: str) -> None:
        start = starting_policy(config, root).to(DTYPES[config.dtype])
        self.model: ModelConfig = start.config
        self.config = config = replace(config, model=self.model)
        self.cuda = torch.cuda.is_available()
        _, world = parallel.rank_and_world()
        self.layout = check(config, world_size=world, cuda=self.cuda)
        parallel.stop()
        if not config.megatron.deterministic_mode:
            torch.use_deterministic_algorithms(mode=False)
        self.here: Callable[[], AbstractContextManager[None]] = nullcontext if self.cuda else cpu.without_cuda
        with self.here():
            self.at = parallel.start(
                self.layout, seed=config.seed, cuda=self.cuda, timeout_s=parallel.timeout_s(config)
            )
        atexit.register(parallel.stop)
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")
        self.lead = self.at.rank == 0
        self._critic: MegatronEngine | None = None
        self.policy = self._engine(start.state_dict(), config, trained=True)

    @cached_property
    def reference(self) -> MegatronEngine:
        """A copy of the policy as it is when this is first asked for, which is before the first update."""
        engine = self._made(self.config, trained=False)
        for chunk, theirs in zip(engine.raw, self.policy.raw, strict=True):
            chunk.load_state_dict(theirs.state_dict())
            chunk.requires_grad_(False)
        return engine

    @property
    def critic(self) -> MegatronEngine | None:
        """Under ppo, the policy's decoder with a value head, copied when this is first asked for."""
        if self.config.advantage_estimator != "ppo":
            return None
        if self._critic is None:
            engine = self._made(replace(self.config, lr=self.config.critic_lr), trained=True, critic=True)
            for chunk, theirs in zip(engine.raw, self.policy.raw, strict=True):
                weights = _weights(theirs)
                for name, value in _weights(chunk).items():
                    if name != "output_layer.weight":
                        value.copy_(weights[name])
            self._critic = engine
        return self._critic

    def generator(self) -> Policy:
        """A policy in plain torch on every process, with the weights of all of them."""
        parts: list[Any] = [None] * self.layout.world_size
        mine = [
            Held(where, {name: tensor.cpu() for name, tensor in _weights(chunk).items()})
            for where, chunk in zip(self.policy.where, self.policy.raw, strict=True)
        ]
        dist.all_gather_object(parts, mine)
        policy = Policy(self.model).to(DTYPES[self.config.dtype])
        whole = join(self.model, [part for rank in parts for part in rank])
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                parameter.copy_(whole[name])
        return policy

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `interface.Engines.whole_weights`; see `_whole_tensors` for errors."""
        held = [(where, _weights(chunk)) for where, chunk in zip(self.policy.where, self.policy.raw, strict=True)]
        return _whole_tensors(self.model, held, lead=self.lead)

    def tell(self, value: _T) -> _T:
        """See `interface.Engines.tell`."""
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def state(self) -> dict[str, Tensor]:
        """See `interface.Engines.state`: what lies on this rank."""
        critic = self.critic.state("critic/") if self.critic is not None else {}
        return self.policy.state() | self.reference.state("ref/") | critic

    def save(self, directory: str, rest: Mapping[str, Tensor]) -> None:
        """See `interface.Engines.save`; the form is that of Megatron's ``dist_checkpointing``.

        Raises:
            repro_core.config.ConfigError: this layout cannot be saved here.
            repro_core.engines.checkpoint.CheckpointError: something that is no checkpoint lies at `directory`.
            OSError: the disk refuses.
        """
        engines = self.engines
        with self.here():
            checkpoint.save(directory, engines, rest, self.config, cuda=self.cuda)

    def load(self, directory: str, rest: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `interface.Engines.load`; another layout may have saved it.

        Raises:
            repro_core.engines.checkpoint.CheckpointError: unreadable, damaged, of a newer format, or of another model
                or dtype.
        """
        engines = self.engines
        with self.here():
            return checkpoint.load(directory, engines, rest, self.config, cuda=self.cuda)

    @property
    def engines(self) -> dict[str, MegatronEngine]:
        """All of them with their optimizers, by what their names begin with in a checkpoint."""
        critic = {"critic.": self.critic} if self.critic is not None else {}
        engines = {"": self.policy, "reference.": self.reference} | critic
        for engine in engines.values():
            if engine.trained:
                engine.optimizer  # noqa: B018 - made here, outside of a block of `here`, which cannot be entered twice
        return engines

    def close(self) -> None:
        """End the process groups."""
        parallel.stop()

    def _engine(self, weights: Mapping[str, Tensor], config: TrainConfig, *, trained: bool) -> MegatronEngine:
        engine = self._made(config, trained=trained)
        for where, chunk in zip(engine.where, engine.raw, strict=True):
            chunk_weights = _weights(chunk)
            with torch.no_grad():
                for name, value in to_local(self.model, where, weights).items():
                    chunk_weights[name].copy_(value)
        return engine

    def _made(self, config: TrainConfig, *, trained: bool, critic: bool = False) -> MegatronEngine:
        """An engine whose weights are still to be filled; its optimizer, made later, takes them over."""
        from repro_core.engines.megatron.model import build  # imports Megatron, which `parallel.start` has made quiet

        with self.here():
            chunks = build(self.model, config, self.layout, trained=trained, head="value" if critic else "lm")
            chunks = [chunk.to(self.device) for chunk in chunks]
            wrapped = _wrapped(chunks, config) if trained else chunks
        return MegatronEngine(
            wrapped,
            _CRITIC if critic else _POLICY,
            config,
            self.model,
            [self._where(number, critic=critic) for number in range(len(chunks))],
            self._slot,
            self.here,
            first_row=self.layout.vocab_rows(self.model, self.at.tp_rank).start,
            trained=trained,
        )

    def _where(self, chunk: int, *, critic: bool) -> Where:
        layout, at = self.layout, self.at
        layers = layout.layers(self.model, at.pp_rank, chunk)
        return Where(
            tp=layout.tp,
            tp_rank=at.tp_rank,
            ep=layout.ep,
            ep_rank=at.ep_rank,
            first_layer=layers.start,
            layers=len(layers),
            first=at.is_first_stage and chunk == 0,
            last=at.is_last_stage and chunk == (layout.vpp or 1) - 1,
            critic=critic,
            vocab=layout.padded_vocab_size(self.model),
            fused_norms=self.config.megatron.transformer_impl == "transformer_engine",
            grouped_experts=self.config.megatron.moe_grouped_gemm,
        )

    @property
    def _slot(self) -> Slot:
        layout = self.layout
        # an interleaved pipeline takes micro-batches in rounds of as many as it has stages
        return Slot(layout.dp, self.at.dp_rank, layout.cp, self.at.cp_rank, layout.pp if layout.vpp else 1)


def _weights(chunk: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in chunk.named_parameters()}


def _wrapped(chunks: Sequence[Any], config: TrainConfig) -> list[Any]:
    """With Megatron's gradient buffers, and what its schedules ask of the model's configuration."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.module import Float16Module

    m, model_config = config.megatron, chunks[0].config
    asked = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=m.use_distributed_optimizer,
        overlap_grad_reduce=m.overlap_grad_reduce,
    )
    halves = [Float16Module(model_config, chunk) if config.dtype == "bf16" else chunk for chunk in chunks]
    wrapped = [
        DistributedDataParallel(model_config, asked, half, disable_bucketing=number > 0)
        for number, half in enumerate(halves)
    ]

    def finalize(model: Any, _: Any = None, **how: Any) -> None:
        # the losses of micro-batches are shares that add up: nothing is divided by the number of tokens
        finalize_model_grads(model, None, **how)

    model_config.finalize_model_grads_func = finalize
    model_config.no_sync_func = [ddp.no_sync for ddp in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    return wrapped


def _whole_tensors(
    model: ModelConfig, held: Sequence[tuple[Where, Mapping[str, Tensor]]], *, lead: bool
) -> Iterator[tuple[str, Tensor]]:
    """The canonical tensors, on the CPU of the lead; no more than a layer is gathered at once.

    Every rank must exhaust the iterator, and only the lead's (rank 0's) yields any.

    Args:
        model: its sizes.
        held: this rank's chunks and their tensors, by Megatron's names.
        lead: whether this is rank 0.

    Raises:
        LayoutError: on the lead: an element is missing, or replicas differ. It is raised after every layer was
            gathered, so that no rank is left alone in a collective operation.
    """
    failure: LayoutError | None = None
    for layer in (None, *range(model.num_hidden_layers)):
        mine = [
            (local, tensors[name].cpu())
            for where, tensors in held
            for name, local in layout(model, where).items()
            if _layer(local.boxes[0].name) == layer
        ]
        every: list[list[tuple[Local, Tensor]]] | None = [[]] * dist.get_world_size() if lead else None
        dist.gather_object(mine, every)
        if every is None or failure is not None:
            continue
        joining = Joining({name: shape for name, shape in names(model).items() if _layer(name) == layer})
        try:
            for local, tensor in (part for rank in every for part in rank):
                joining.add(local, tensor)
            whole = joining.finish()
        except LayoutError as error:
            failure = error
        else:
            yield from whole.items()
    if failure is not None:
        raise failure


def _layer(name: str) -> int | None:
    """The number of the layer that a canonical tensor is of; None for the embedding and what follows the layers."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None
