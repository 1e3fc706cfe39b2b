"""One model on megatron-core: scored and trained by its own schedules, gradient buffers and optimizer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from repro_core.config import MegatronConfig, ModelConfig, TrainConfig
from repro_core.contract import Observe
from repro_core.engines.interface import Scores
from repro_core.engines.megatron.mains import Main, mains, prime
from repro_core.engines.megatron.scoring import token_scores
from repro_core.engines.megatron.shares import Share, Slot, packed, shares
from repro_core.engines.megatron.weights import Where, placement_of
from repro_core.engines.optimizer import step_counts
from repro_core.rl.batching import Update

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MegatronEngine"]


class MegatronEngine:
    """One model, of which this process has the chunks of its pipeline stage.

    The columns of an update come from a pass without gradient. Its backward pass runs the schedule again, with the sum
    of columns times their gradients as each micro-batch's loss: such losses add up, so nothing is divided by a number
    of micro-batches, tokens or ranks (Megatron's ``calculate_per_token_loss``, with the division left out).

    Args:
        chunks: the GPTModels of this rank's stage, wrapped for gradients (DDP) where the model is trained.
        names: of the columns that it makes.
        config: of the run, with the learning rate of this model.
        model: its sizes.
        where: which part of the model each chunk is.
        slot: where this rank stands.
        here: makes megatron-core run on this device while it is entered.
        first_row: the first row of the vocabulary on this rank.
        trained: whether it has an optimizer.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        names: tuple[str, ...],
        config: TrainConfig,
        model: ModelConfig,
        where: Sequence[Where],
        slot: Slot,
        here: Callable[[], AbstractContextManager[None]],
        *,
        first_row: int,
        trained: bool,
    ) -> None:
        self.chunks, self.names, self.config, self.model = list(chunks), names, config, model
        self.where, self.slot, self.here, self.trained = list(where), slot, here, trained
        self.first_row = first_row
        self.updates = 0
        self.routers: _Routers | None = None
        if config.use_rollout_routing_replay and names != ("values",):  # the rollout engine chose for the policy alone
            self.routers = _Routers(self.chunks, config.megatron)
        self._update: list[Share] = []

    @property
    def raw(self) -> list[Any]:
        """The GPTModels themselves."""
        return [_unwrapped(chunk) for chunk in self.chunks]

    @cached_property
    def optimizer(self) -> Any:
        """Megatron's optimizer; made when it is first needed."""
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        c = self.config
        asked = OptimizerConfig(
            optimizer="adam",
            lr=c.lr,
            weight_decay=c.weight_decay,
            adam_beta1=c.betas[0],
            adam_beta2=c.betas[1],
            adam_eps=c.adam_eps,
            clip_grad=c.clip_grad,
            bf16=c.dtype == "bf16",
            params_dtype=torch.bfloat16 if c.dtype == "bf16" else torch.float32,
            use_distributed_optimizer=c.megatron.use_distributed_optimizer,
        )
        with self.here():
            # no overrides: by default biases and norms would not decay
            optimizer = get_megatron_optimizer(
                asked, self.chunks, config_overrides={}, use_gloo_process_groups=torch.cuda.is_available()
            )
        prime(optimizer)
        return optimizer

    def count_steps(self) -> None:
        """Have the optimizer's step counters say what `updates` does: torch's of each weight, others' of a group."""
        for _, main in self.mains:
            if "step" in main.kinds:
                main.moment("step").fill_(float(self.updates))
            else:
                for group in main.optimizer.param_groups:
                    group["step"] = self.updates

    def score(self, tensors: Mapping[str, Tensor], plan: Sequence[Update]) -> Scores:
        """See `interface.Engine.score`."""
        parts = [self._score(tensors, update) for update in plan]
        return {name: torch.cat([part[name] for part in parts]) for name in self.names}

    def forward(self, tensors: Mapping[str, Tensor], update: Update) -> Scores:
        """See `interface.Engine.forward`."""
        scores = self._score(tensors, update)
        self._update = self._shares(tensors, update)
        return scores

    def backward(self, gradients: Mapping[str, Tensor | None]) -> None:
        """See `interface.Engine.backward`."""
        batch, self._update = self._update, []

        def surrogate(share: Share, columns: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, dict[str, Any]]:
            total = columns[0].new_zeros(())
            for name, column in zip(self.names, columns, strict=True):
                gradient = gradients[name]
                if gradient is not None:
                    total = total + (column * gradient[share.columns]).sum()
            return total, torch.zeros((), dtype=torch.int, device=total.device), {}

        with self.here():
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            self._run(batch, surrogate, forward_only=False)

    def step(self, observe: Observe, prefix: str = "") -> float:
        """See `interface.Engine.step`. The norm and the clipping are Megatron's."""
        parts = self.mains
        self._observe(observe, "grad", prefix, [(number, main, main.gradient) for number, main in parts])
        with self.here():
            _, norm, _ = self.optimizer.step()
        observe("grad", f"{prefix}grad_norm", float(norm))
        self.updates += 1
        self.show(observe, "update", prefix)
        for kind in ("exp_avg", "exp_avg_sq"):
            moments = [(number, main, main.moment(kind)) for number, main in parts]
            self._observe(observe, "update", f"{prefix}{kind}/", moments)
        counts = step_counts(main.moment("step") for _, main in parts if "step" in main.kinds)
        observe("update", f"{prefix}number/", counts)
        if self.config.dtype == "bf16":
            self._observe(observe, "update", f"{prefix}model/", self._own)
        return float(norm)

    def show(self, observe: Observe, phase: str, prefix: str) -> None:
        """See `interface.Engine.show`."""
        self._observe(observe, phase, prefix, [(number, main, main.main.detach()) for number, main in self.mains])

    def weights(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """See `interface.Engine.weights`."""
        return self._placed("", self._own)

    @property
    def mains(self) -> list[tuple[int, Main]]:
        """What this rank's optimizer holds, with the number of the chunk each is of."""
        return [
            (number, main)
            for number, chunk in enumerate(self.raw)
            for main in mains(self.optimizer, chunk.named_parameters())
        ]

    def state(self, prefix: str = "") -> dict[str, Tensor]:
        """Weights and, of a trained model, main weights and moments, as they lie on this rank: live tensors by name."""
        out: dict[str, Tensor] = {}
        for number, chunk in enumerate(self.raw):
            out |= {f"{prefix}model/{number}/{name}": p.detach() for name, p in chunk.named_parameters()}
        if not self.trained:
            return out
        for number, main in self.mains:
            out[f"{prefix}main/{number}/{main.name}"] = main.main.detach()
            for kind in main.kinds:
                out[f"{prefix}{kind}/{number}/{main.name}"] = main.moment(kind)
        return out

    @property
    def _own(self) -> list[tuple[int, None, tuple[str, Tensor]]]:
        """The model's own weights as `_placed` takes them."""
        chunks = enumerate(self.raw)
        return [(number, None, (name, p.detach())) for number, chunk in chunks for name, p in chunk.named_parameters()]

    def _observe(self, observe: Observe, phase: str, prefix: str, parts: Sequence[tuple[int, Any, Any]]) -> None:
        observe(phase, prefix, *self._placed(prefix, parts))

    def _placed(
        self, prefix: str, parts: Sequence[tuple[int, Any, Any]]
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        tensors: dict[str, Tensor] = {}
        places: dict[str, dict[str, Any]] = {}
        for number, main, value in parts:
            name, tensor = value if main is None else (main.name, value)
            key = f"{number}/{name}"
            tensors[key] = tensor
            places[key] = placement_of(self.model, self.where[number], name, prefix, main and main.part)
        return tensors, places

    def _shares(self, tensors: Mapping[str, Tensor], update: Update) -> list[Share]:
        m = self.config.megatron
        make = packed if m.qkv_format == "thd" else shares
        return make(tensors, update, self.slot, m.pad_to_multiple)

    @torch.no_grad()
    def _score(self, tensors: Mapping[str, Tensor], update: Update) -> Scores:
        """The columns of one update, gathered from the ranks that have them."""
        parts: list[tuple[Tensor, tuple[Tensor, ...]]] = []

        def keep(share: Share, columns: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, dict[str, Any]]:
            parts.append((share.columns, columns))
            zero = columns[0].new_zeros(())
            return zero, torch.zeros((), dtype=torch.int, device=zero.device), {}

        with self.here():
            self._run(self._shares(tensors, update), keep, forward_only=True)
        count = update.responses.stop - update.responses.start
        mine = tensors["rollout_log_probs"].new_zeros((1 + len(self.names), count), dtype=torch.float32)
        for at, columns in parts:
            mine[0, at] = 1.0
            for k, column in enumerate(columns):
                mine[1 + k, at] = column
        return dict(zip(self.names, _gathered(mine), strict=True))

    def _run(self, batch: Sequence[Share], close: Any, *, forward_only: bool) -> None:
        """Run Megatron's schedule over micro-batches; `close` makes the loss of one from its columns."""
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        def step(shares: Iterator[Share], chunk: Any) -> tuple[Tensor, Any]:
            share = next(shares)
            if self.routers is not None:
                self.routers.replay(chunk, share.routing, trained=not forward_only)
            # attention needs no mask: see layers.CoreAttention
            out = chunk(share.tokens, share.positions, None, packed_seq_params=_packing(share))
            return out, partial(self._close, share, close)

        for chunk in self.chunks:
            chunk.train(not forward_only)
        rows, seq = batch[0].tokens.shape
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(batch) for _ in self.chunks] if len(self.chunks) > 1 else iter(batch),
            model=self.chunks,
            num_microbatches=len(batch),
            seq_length=seq * self.slot.cp,
            micro_batch_size=rows,
            forward_only=forward_only,
        )

    def _close(self, share: Share, close: Any, out: Tensor) -> Any:
        from megatron.core import parallel_state

        rows = out.flatten(0, 1).index_select(0, share.rows)
        if self.names == ("values",):
            return close(share, (torch.where(share.mask != 0, rows[:, 0].float(), 0.0),))
        group = parallel_state.get_tensor_model_parallel_group()
        columns = token_scores(rows, share.targets, share.mask, self.config.temperature, self.first_row, group)
        return close(share, columns)


def _gathered(mine: Tensor) -> Tensor:
    """Columns [1 + n, tokens] of all ranks as one [n, tokens]; row 0 says which tokens a rank has.

    Several ranks may have a token (those of one tensor-parallel group).

    Raises:
        RuntimeError: their bits of it differ, so what is shown would not be what one of them trains on.
    """
    world = dist.get_world_size()
    if world == 1:
        return mine[1:]
    every = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(every, mine)
    out = every[0].clone()
    for rank, columns in enumerate(every[1:], 1):
        here, both = columns[0] != 0, (columns[0] != 0) & (out[0] != 0)
        # bits, not ==: a NaN equals itself, -0.0 is not 0.0
        if bool((columns.view(torch.int32) != out.view(torch.int32))[:, both].any()):
            raise RuntimeError(f"rank {rank} scores a token otherwise than a rank that has it too")
        out[:, here] = columns[:, here]
    if not bool((out[0] != 0).all()):
        raise RuntimeError("a token was scored by no rank")
    return out[1:]


def _packing(share: Share) -> Any:
    """Megatron's description of packed samples; None of padded ones."""
    if share.ends is None:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    longest = int((share.ends[1:] - share.ends[:-1]).max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=share.ends,
        cu_seqlens_kv=share.ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _unwrapped(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


# -- routing replay (R3): the experts that the rollout engine chose, in place of each router's own choice


class _Choice:
    """What Megatron asks for one layer's experts."""

    def __init__(self) -> None:
        self._now: Tensor | None = None
        self._again: deque[Tensor] = deque()

    def give(self, experts: Tensor | None, *, again: bool) -> None:
        """The next forward pass's experts, int64 [tokens, top k]; `again`: the backward pass will run it once more."""
        self._now = experts
        if again and experts is not None:
            self._again.append(experts)

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute: Callable[..., Any]
    ) -> Any:
        """The scores of the chosen experts, and these; see `RouterReplay.get_replay_topk`."""
        experts = self._now
        if torch._C._current_graph_task_id() != -1 and self._again:  # recomputed, in the order of the forward passes
            experts = self._again.popleft()
        if experts is None:
            return compute(scores, topk, num_groups, group_topk)
        return scores.gather(1, experts), experts


class _Routers:
    """The routers of a model's chunks on this rank.

    Args:
        chunks: GPTModels, wrapped or not.
        config: whether layers are run again in the backward pass, and sequences split over tensor-parallel ranks.
    """

    def __init__(self, chunks: Sequence[Any], config: MegatronConfig) -> None:
        # selective recompute runs attention alone again: no router asks a second time
        self._recompute, self._split = config.recompute_granularity == "full", config.sequence_parallel
        self._choices: dict[int, list[tuple[int, _Choice]]] = {}
        for chunk in chunks:
            choices = []
            for router in _routers(chunk):
                router.router_replay = _Choice()
                choices.append((router.layer_number - 1, router.router_replay))
            self._choices[id(chunk)] = choices

    def replay(self, chunk: Any, routing: Tensor | None, *, trained: bool) -> None:
        """Have a chunk's next forward pass use these experts.

        Args:
            chunk: one of the chunks.
            routing: int64 [rows, local seq, layers, top k], or None for each router's own choice.
            trained: whether a backward pass follows.
        """
        for layer, choice in self._choices[id(chunk)]:
            experts = None if routing is None else _sequence_first(routing[:, :, layer], split=self._split)
            choice.give(experts, again=self._recompute and trained)


def _routers(chunk: Any) -> Iterator[Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            yield module


def _sequence_first(experts: Tensor, *, split: bool) -> Tensor:
    """[rows, seq, k] as [tokens, k] in Megatron's order, and of these what a router sees under sequence parallelism."""
    from megatron.core import parallel_state

    out = experts.transpose(0, 1)
    if split:
        ranks, rank = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        out = out.chunk(ranks)[rank]
    return out.flatten(0, 1).contiguous()
