"""Engines and planted faults for the tests of weight sync."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from repro_core.config import ModelConfig, SglangConfig, TrainConfig
from repro_core.engines.torch_engine import TorchEngines
from repro_core.model.hf import load_hf
from repro_core.model.layout_free import take
from repro_core.rollout.engine import HeldWeights
from repro_core.rollout.sglang.held import layout, placements
from repro_core.rollout.sync import WeightSync
from repro_golden.base.errors import ReproError
from repro_golden.recording.weight_sync import SyncJudge

__all__ = [
    "CHANGES",
    "CONFIG",
    "MODEL",
    "ROUTER",
    "SQUARE",
    "TABLE",
    "WIDE",
    "Change",
    "Fused",
    "Wire",
    "brought",
    "move",
]

MODEL = ModelConfig(
    model_type="qwen3_moe",
    vocab_size=259,
    kv_channels=32,
    initializer_range=0.1,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    norm_topk_prob=True,
    tie_word_embeddings=False,
)
CONFIG = TrainConfig(model=MODEL, rollout_engine="sglang", sglang=SglangConfig(max_total_tokens=4096))

Sent = list[tuple[str, Tensor]]
SQUARE = "model.layers.1.mlp.experts.2.gate_proj.weight"
WIDE = "model.layers.0.self_attn.o_proj.weight"
ROUTER = "model.layers.1.mlp.gate.weight"
Q, K = "model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.k_norm.weight"
TABLE = "model.layers.0.self_attn.rotary_emb.cos_sin_cache"
STALE = "stale: the engine still holds what it held before, version '1'"


class Change(NamedTuple):
    """What is done to tensors on their way, and what must be said of it.

    Attributes:
        make: the tensors that go over the wire, from those that should.
        says: what the message must contain.
    """

    make: Callable[[Sent], Sent]
    says: tuple[str, ...]


def one(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Sent], Sent]:
    """One tensor is sent changed."""
    return lambda sent: [(n, change(t) if n == name else t) for n, t in sent]


def swapped(sent: Sent) -> Sent:
    """Two tensors change names."""
    names = {Q: K, K: Q}
    return [(names.get(n, n), t) for n, t in sent]


def with_nan(tensor: Tensor) -> Tensor:
    out = tensor.clone()
    out[0, 0] = float("nan")
    return out


CHANGES: dict[str, Change] = {
    "never sent": Change(lambda sent: [(n, t) for n, t in sent if n != SQUARE], (f"{SQUARE}: {STALE}",)),
    "sent to another name": Change(
        swapped,
        (f"{K}: sent to another name: the engine holds {Q} in its", f"{Q}: sent to another name: the engine holds {K}"),
    ),
    "transposed": Change(one(SQUARE, lambda t: t.T.contiguous()), (f"{SQUARE}: transposed",)),
    "broadcast though not contiguous": Change(
        one(WIDE, lambda t: t.T.contiguous().view(t.shape)), (f"{WIDE}: transposed, or sent as the memory of",)
    ),
    "one cast to bf16": Change(one(WIDE, lambda t: t.bfloat16()), (f"{WIDE}: rounded to bfloat16 on the way",)),
    "all cast to bf16": Change(
        lambda sent: [(n, t.bfloat16()) for n, t in sent], ("lm_head.weight", "more: rounded to bfloat16 on the way")
    ),
    "cast to fp16": Change(one(WIDE, lambda t: t.half()), (f"{WIDE}: rounded to float16 on the way",)),
    "an all-zero router": Change(one(ROUTER, torch.zeros_like), (f"{ROUTER}: all zero in the engine",)),
    "a NaN": Change(one(WIDE, with_nan), (f"{WIDE}: 1 NaN or infinite elements in the engine, 0 sent",)),
    "other values": Change(one(WIDE, lambda t: t + 1), (f"{WIDE}: other values: absmax ",)),
    "nothing sent": Change(lambda _: [], ("weights '2' did not arrive at all (tensor)", STALE)),
}


class Fused:
    """Holds weights as the processes of an SGLang with tensor parallelism would: fused and cut, and a table of its own.

    Args:
        model: its sizes.
        ranks: how many processes.
    """

    separate = True

    def __init__(self, model: ModelConfig, ranks: int) -> None:
        self.model, self.ranks, self.weight_version = model, ranks, "default"
        self.processes = [
            {name: torch.zeros(local.shape) for name, local in layout(model, rank, ranks).items()}
            | {TABLE: torch.ones(8)}
            for rank in range(ranks)
        ]
        self._whole: dict[str, Tensor] = {}

    def update(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> None:
        """Take what is sent, and keep the rest."""
        self._whole |= {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors}
        for rank, process in enumerate(self.processes):
            for name, local in layout(self.model, rank, self.ranks).items():
                # a head of its own is filled by its own name alone, also where it is tied
                by_name = name == "lm_head.weight" and self.model.has_experts
                whole = {part.name: self._whole.get(name if by_name else part.name) for part in local.boxes}
                if all(tensor is not None for tensor in whole.values()):
                    process[name].copy_(take(local, whole))
        self.weight_version = version

    def update_from_disk(self, directory: str, version: str) -> None:
        """Take a checkpoint's."""
        self.update([(name, p.detach()) for name, p in load_hf(directory).named_parameters()], version)

    def held(self) -> list[HeldWeights]:
        """All of it."""
        looks = [{name: tuple(tensor.shape) for name, tensor in process.items()} for process in self.processes]
        return [
            HeldWeights(process, placements(self.model, rank, self.ranks, look))
            for rank, (process, look) in enumerate(zip(self.processes, looks, strict=True))
        ]


class Wire:
    """An engine behind a wire that changes what is sent over it.

    Args:
        engine: the one that takes weights.
        change: see `Change.make`.
    """

    separate = True

    def __init__(self, engine: Any, change: Callable[[Sent], Sent]) -> None:
        self.engine, self.change = engine, change

    @property
    def weight_version(self) -> str:
        """The engine's."""
        return str(self.engine.weight_version)

    def update(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> None:
        """Give the engine what is left of them."""
        sent = self.change(list(tensors))
        if sent:
            self.engine.update(sent, version)
        self.engine.weight_version = version

    def held(self) -> list[HeldWeights]:
        """What the engine really has."""
        held: list[HeldWeights] = self.engine.held()
        return held


def move(engines: TorchEngines, seed: int) -> None:
    """Change every element of the trained policy."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in engines.generator().parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def brought(
    engines: Any,
    engine: Any,
    judge: SyncJudge | None,
    version: str,
    *,
    how: str = "tensor",
    scratch: Path | None = None,
) -> str:
    """What a sync says that raises; empty where the weights arrived."""
    config = replace(CONFIG, sglang=replace(CONFIG.sglang, sync=how))
    sync = WeightSync(config, engines, engine, judge, None if scratch is None else str(scratch))
    try:
        sync.bring(version)
    except ReproError as error:
        return str(error)
    return ""
