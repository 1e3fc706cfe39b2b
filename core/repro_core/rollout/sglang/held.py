"""Reading an engine's weights back: `sglang_inside.export` writes them into a folder that both sides see."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro_core.config import ModelConfig
from repro_core.model.layout_free import Ints, LayoutError, Local, box, padding, stack
from repro_core.rollout.engine import EngineError, HeldWeights
from repro_core.rollout.scratch import scratch_folder

__all__ = ["export_order", "layout", "no_memory", "packed_order", "placements", "read_held"]

_MEMORY = Path("/dev/shm")  # noqa: S108 - a fresh folder of our own in it
_SPARE = 1 << 30


def export_order(folder: Path) -> list[tuple[str, Tensor]]:
    """What `sglang_inside.export` is sent: where to write."""
    return [("export", torch.tensor(list(json.dumps({"folder": str(folder)}).encode()), dtype=torch.uint8))]


def packed_order(folder: Path) -> str:
    """`export_order` for ``/update_weights_from_tensor``, with the bytes themselves: it reaches any machine."""
    # SGLang's own way puts tensors into shared memory; plain pickle does not, and is read by the same reader there.
    return base64.b64encode(pickle.dumps(export_order(folder))).decode()


def no_memory(error: RuntimeError) -> str:
    """What is said where torch cannot put tensors into shared memory."""
    line = " ".join(str(error).split())[:200]
    return f'cannot put weights into shared memory ({line}): make room in /dev/shm, or set sglang.sync to "disk"'


def read_held(
    export: Callable[[Path], None], model: ModelConfig, where: str, *, folder: str | None = None, server: bool = False
) -> list[HeldWeights]:
    """What each process of an engine holds.

    Args:
        export: makes every process write into the folder that it is given.
        model: that the engine was started with.
        where: whose weights they are, for messages.
        folder: that this process and the engine both see; None is one of this machine.
        server: whether it may run as another user.

    Raises:
        EngineError: nothing readable was written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with _exchange(model, folder, server=server) as seen:
        export(seen)
        for failure in sorted(seen.glob("process-*.error")):
            raise EngineError(f"{where} cannot write its weights to {seen.parent}: {failure.read_text()[:300]}")
        files = sorted(seen.glob("rank-*.safetensors"))
        if not files:
            raise EngineError(
                f"{where} wrote no weights to {seen.parent}: set sglang.folder to a folder that this process and the "
                "engine both see, and the engine may write to"
            )
        held = []
        for file in files:
            try:
                place = json.loads(file.with_suffix(".json").read_text())
                tensors = load_file(file)
            except (OSError, ValueError, SafetensorError) as error:
                raise EngineError(f"{where}: its written weights cannot be read ({error})") from error
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            held.append(HeldWeights(tensors, placements(model, place["tp_rank"], place["tp_size"], shapes)))
        if len(held) != place["tp_size"]:
            raise EngineError(f"{where} has {place['tp_size']} processes, of which {len(held)} wrote their weights")
        return held


@contextlib.contextmanager
def _exchange(model: ModelConfig, given: str | None, *, server: bool) -> Iterator[Path]:
    """A folder in the one given, else in memory where there is room for the model, else among temporary files."""
    parent = None if given is None else Path(given)
    if parent is None and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 2 * _bytes(model) + _SPARE:
        parent = _MEMORY
    with contextlib.ExitStack() as stack:
        try:
            seen = stack.enter_context(scratch_folder("held", parent, shared=server))
        except OSError as error:
            raise EngineError(
                f"cannot make a folder for the engine's weights in {parent or 'the temporary one'} "
                f"({error.strerror or error}): set sglang.folder to another one"
            ) from error
        yield seen


def _bytes(model: ModelConfig) -> int:
    """About what a model's fp32 tensors take."""
    width, heads = model.hidden_size, model.num_attention_heads * model.head_dim
    dense = model.num_experts * model.moe_intermediate_size if model.has_experts else model.intermediate_size
    return 4 * (2 * model.vocab_size * width + model.num_hidden_layers * width * (3 * dense + 4 * heads))


# -- which canonical tensors SGLang's parameters hold: its fused and sharded ones under Hugging Face's names


_VOCAB_PADDING = 64
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def placements(model: ModelConfig, tp_rank: int, tp_size: int, shapes: Mapping[str, Ints]) -> dict[str, Any]:
    """What each parameter of one process of SGLang holds, as plain data (see `layout_free.Local.data`).

    Args:
        model: its sizes.
        tp_rank: the process among those that divide the model.
        tp_size: how many do.
        shapes: of its parameters, by SGLang's names. Tables of rotary embeddings may be among them; they have none.

    Raises:
        LayoutError: the model does not divide so, or a parameter is unknown or of another shape, such as of
            quantized weights or of a backend that lays experts out in its own way.
    """
    known = layout(model, tp_rank, tp_size)
    parameters = {name: tuple(shape) for name, shape in shapes.items() if ".rotary_emb." not in name}
    unknown = sorted(parameters.keys() - known.keys())
    if unknown:
        raise LayoutError(
            f"{', '.join(unknown[:3])}{' and more' * (len(unknown) > 3)}: parameters of SGLang that a plain "
            f"{model.model_type} has not: serve it without quantization and adapters"
        )
    for name, shape in parameters.items():
        if shape != known[name].shape:
            raise LayoutError(
                f"{name}: shape {list(shape)} in SGLang, where rank {tp_rank} of {tp_size} has "
                f"{list(known[name].shape)}: serve it with tensor parallelism alone and the default layout of experts"
            )
    return {name: known[name].data() for name in parameters}


@lru_cache(maxsize=64)
def layout(model: ModelConfig, tp_rank: int, tp_size: int) -> dict[str, Local]:
    """What every parameter holds, by SGLang's names.

    Raises:
        LayoutError: the model does not divide so.
    """
    cut = _Cut(model, tp_rank, tp_size)
    vocabulary = (model.vocab_size, model.hidden_size)
    contents = {_EMBEDDING: cut.vocabulary(_EMBEDDING, vocabulary), "model.norm.weight": cut.norm("model.norm.weight")}
    for n in range(model.num_hidden_layers):
        contents |= _attention(cut, f"model.layers.{n}.") | _mlp(cut, f"model.layers.{n}.mlp.")
    # Tied, it is the embedding by another name; but SGLang's class for experts has a matrix of its own, tied or not.
    contents[_HEAD] = cut.vocabulary(_EMBEDDING if model.tie_word_embeddings else _HEAD, vocabulary)
    return contents


class _Cut:
    """How one process divides a model's tensors.

    Raises:
        LayoutError: they do not divide.
    """

    def __init__(self, model: ModelConfig, rank: int, ranks: int) -> None:
        heads, groups = model.num_attention_heads, model.num_key_value_heads
        if not 0 <= rank < ranks:
            raise LayoutError(f"there is no tensor-parallel rank {rank} among {ranks}")
        if heads % ranks or (groups % ranks and ranks % groups):
            raise LayoutError(f"{heads} heads in {groups} key-value groups do not divide over tp_size {ranks}")
        self.model, self.rank, self.ranks = model, rank, ranks

    def whole(self, name: str, shape: Sequence[int]) -> Local:
        """The same on every process."""
        return box(name, shape, [0] * len(shape), shape)

    def norm(self, name: str) -> Local:
        """A norm over the hidden state."""
        return self.whole(name, (self.model.hidden_size,))

    def rows(self, name: str, shape: Sequence[int], rank: int | None = None, ranks: int | None = None) -> Local:
        """An equal part of the rows."""
        rank, ranks = (self.rank if rank is None else rank), ranks or self.ranks
        width = self._width(name, shape[0], ranks)
        rest = shape[1:]
        return box(name, shape, (rank * width, *(0 for _ in rest)), (width, *rest))

    def columns(self, name: str, shape: Sequence[int]) -> Local:
        """An equal part of the columns."""
        width = self._width(name, shape[1], self.ranks)
        return box(name, shape, (0, self.rank * width), (shape[0], width))

    def vocabulary(self, name: str, shape: Sequence[int]) -> Local:
        """An equal part of the rows once they are padded to a multiple of 64, or of 64 for each process."""
        padded = -(-shape[0] // _VOCAB_PADDING) * _VOCAB_PADDING
        if padded % self.ranks:
            multiple = _VOCAB_PADDING * self.ranks
            padded = -(-shape[0] // multiple) * multiple
        width = padded // self.ranks
        first = min(self.rank * width, shape[0])
        true = min((self.rank + 1) * width, shape[0]) - first
        return stack([box(name, shape, (first, 0), (true, shape[1])), padding((width - true, shape[1]))])

    def qkv(self, layer: str, kind: str, rest: Ints) -> Local:
        """Queries, keys and values. Where processes are more than key-value heads, neighbours hold the same head."""
        model = self.model
        queries, keys = (n * model.head_dim for n in (model.num_attention_heads, model.num_key_value_heads))
        copies = max(1, self.ranks // model.num_key_value_heads)
        key = {"rank": self.rank // copies, "ranks": self.ranks // copies}
        names = [f"{layer}self_attn.{letter}_proj.{kind}" for letter in "qkv"]
        return stack([
            self.rows(names[0], (queries, *rest)),
            self.rows(names[1], (keys, *rest), **key),
            self.rows(names[2], (keys, *rest), **key),
        ])  # fmt: skip

    def _width(self, name: str, count: int, ranks: int) -> int:
        if count % ranks:
            raise LayoutError(f"{name}: {count} do not divide over tp_size {ranks}")
        return count // ranks


def _attention(cut: _Cut, layer: str) -> dict[str, Local]:
    model, at = cut.model, f"{layer}self_attn."
    queries = model.num_attention_heads * model.head_dim
    contents = {
        f"{layer}input_layernorm.weight": cut.norm(f"{layer}input_layernorm.weight"),
        f"{layer}post_attention_layernorm.weight": cut.norm(f"{layer}post_attention_layernorm.weight"),
        f"{at}qkv_proj.weight": cut.qkv(layer, "weight", (model.hidden_size,)),
        f"{at}o_proj.weight": cut.columns(f"{at}o_proj.weight", (model.hidden_size, queries)),
    }
    if model.qkv_bias:
        contents[f"{at}qkv_proj.bias"] = cut.qkv(layer, "bias", ())
    if model.output_bias:  # every process has it, and the first one adds it
        contents[f"{at}o_proj.bias"] = cut.norm(f"{at}o_proj.bias")
    if model.qk_norm:
        for norm in ("q_norm", "k_norm"):
            contents[f"{at}{norm}.weight"] = cut.whole(f"{at}{norm}.weight", (model.head_dim,))
    return contents


def _mlp(cut: _Cut, mlp: str) -> dict[str, Local]:
    model = cut.model
    hidden = model.hidden_size
    if not model.has_experts:
        up, down = _swiglu(cut, mlp, model.intermediate_size)
        return {f"{mlp}gate_up_proj.weight": up, f"{mlp}down_proj.weight": down}
    count = model.num_experts
    pairs = [_swiglu(cut, f"{mlp}experts.{e}.", model.moe_intermediate_size) for e in range(count)]
    up, down = (stack(pieces) for pieces in zip(*pairs, strict=True))
    width = pairs[0][1].shape[1]
    return {
        f"{mlp}gate.weight": cut.whole(f"{mlp}gate.weight", (count, hidden)),
        # stacked by rows, which is the same elements in the same order
        f"{mlp}experts.w13_weight": Local((count, 2 * width, hidden), up.boxes),
        f"{mlp}experts.w2_weight": Local((count, hidden, width), down.boxes),
    }


def _swiglu(cut: _Cut, at: str, width: int) -> tuple[Local, Local]:
    """Gate over up, and down."""
    hidden = cut.model.hidden_size
    up = stack([cut.rows(f"{at}{part}_proj.weight", (width, hidden)) for part in ("gate", "up")])
    return up, cut.columns(f"{at}down_proj.weight", (hidden, width))
