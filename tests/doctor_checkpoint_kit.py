"""Tiny checkpoints of both kinds, written by the libraries that write real ones, and launches that name them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from findings_kit import told
from safetensors.torch import save_file

from repro.doctor.artefacts.checkpoints.hf import CONFIG, HF
from repro.doctor.artefacts.checkpoints.megatron import MEGATRON
from repro.doctor.artefacts.checkpoints.tokenizer import TOKENIZER
from repro.doctor.artefacts.kinds import HfCheckpoint, HfConfig, Launch, MegatronCheckpoint, Tokenizer
from repro.doctor.artefacts.launches.scripts import LAUNCH
from repro.doctor.catalogue import catalogue
from repro_golden.base.checks import Finding

__all__ = [
    "TEMPLATE", "cut", "dense", "experts", "finding", "findings", "hf", "legacy", "made", "megatron_core",
    "model_args", "paths", "read", "shard_of", "state", "tokenizer", "torch_dist", "write_config",
]  # fmt: skip

HIDDEN, WORDS, INNER = 16, 32, 24
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"

Tensors = dict[str, torch.Tensor]


# -- readers, and rules of what they read


def read(path: Path) -> list[object]:
    """What the first reader that claims a path makes of it."""
    reader = next(each for each in (MEGATRON, HF, TOKENIZER, CONFIG, LAUNCH) if each.fits(path))
    return list(reader.read(path))


def findings(name: str, *artefacts: Path) -> list[Finding]:
    """What a rule finds in artefacts that are read from their files, each kind as the rule asks for it."""
    rule = catalogue()[name]
    read_ = [artefact for path in artefacts for artefact in read(path)]
    given: list[object] = []
    for kind in rule.inputs:
        given.append(next(a for a in read_ if isinstance(a, kind) and not any(a is g for g in given)))
    given += [next((a for a in read_ if isinstance(a, kind)), None) for kind in rule.uses]
    return told(name, *given)


def finding(name: str, *artefacts: Path) -> Finding:
    """The one finding."""
    (finding,) = findings(name, *artefacts)
    return finding


# -- Hugging Face


def dense(layers: int = 4, *, seed: int = 0, tied: bool = False) -> Tensors:
    """A model with the names of Qwen2."""
    draw = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": matrix(WORDS, HIDDEN), "model.norm.weight": torch.ones(HIDDEN).bfloat16()}
    if not tied:
        tensors["lm_head.weight"] = matrix(WORDS, HIDDEN)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for part in "qkvo":
            tensors[f"{at}.self_attn.{part}_proj.weight"] = matrix(HIDDEN, HIDDEN)
        for part in "qkv":
            tensors[f"{at}.self_attn.{part}_proj.bias"] = torch.zeros(HIDDEN).bfloat16()
        for part, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            tensors[f"{at}.mlp.{part}_proj.weight"] = matrix(*shape)
        for part in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{part}.weight"] = torch.ones(HIDDEN).bfloat16()
    return tensors


def experts(layers: int = 4, count: int = 4, *, first_dense: int = 1, packed: bool = False) -> Tensors:
    """A model with the names of GLM's MoE: dense layers first, then routed and shared experts."""
    tensors = dense(layers)
    draw = torch.Generator().manual_seed(1)
    for layer in range(first_dense, layers):
        at = f"model.layers.{layer}.mlp"
        shapes = {part: tensors.pop(f"{at}.{part}_proj.weight").shape for part in ("gate", "up", "down")}
        tensors[f"{at}.gate.weight"] = torch.randn(count, HIDDEN, generator=draw).bfloat16()
        tensors[f"{at}.gate.e_score_correction_bias"] = torch.zeros(count)
        for part, shape in shapes.items():
            tensors[f"{at}.shared_experts.{part}_proj.weight"] = torch.randn(shape, generator=draw).bfloat16()
            for expert in range(count):
                name = f"{at}.experts.{expert}.{part}_proj.weight"
                if packed:
                    tensors[f"{name}_packed"] = torch.randint(
                        -(2**31), 2**31 - 1, (shape[0], shape[1] // 8), generator=draw, dtype=torch.int32
                    )
                    tensors[f"{name}_scale"] = torch.rand(shape[0], 1, generator=draw).bfloat16()
                    tensors[f"{name}_shape"] = torch.tensor(shape, dtype=torch.int32)
                else:
                    tensors[name] = torch.randn(shape, generator=draw).bfloat16()
    return tensors


def _config(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    layers = {int(name.split(".")[2]) for name in tensors if name.startswith("model.layers.")}
    config: dict[str, Any] = {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": HIDDEN, "vocab_size": WORDS,
        "intermediate_size": INNER, "num_hidden_layers": max(layers, default=-1) + 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "torch_dtype": "bfloat16", "tie_word_embeddings": "lm_head.weight" not in tensors,
        "eos_token_id": 2,
    }  # fmt: skip
    routed = [name for name in tensors if ".experts." in name]
    if routed:
        first = min(int(name.split(".")[2]) for name in routed)
        count = 1 + max(int(name.split(".")[5]) for name in routed)
        config |= {"model_type": "glm4_moe", "n_routed_experts": count, "num_experts_per_tok": 2}
        config |= {"first_k_dense_replace": first, "moe_intermediate_size": INNER}
    return config


def hf(
    folder: Path, tensors: Tensors, *, shards: int = 2, index: bool = True, config: Mapping[str, Any] | None = None
) -> Path:
    """A checkpoint with its config, cut into shards by name."""
    folder.mkdir(parents=True)
    names = sorted(tensors)
    size = -(-len(names) // shards)
    placed: dict[str, str] = {}
    for number in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[number * size : (number + 1) * size]}
        save_file(part, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(part, file)
    if index and shards > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        whole = {"metadata": {"total_size": total}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(whole))
    write_config(folder, {**_config(tensors), **(config or {})})
    return folder


def write_config(folder: Path, values: Mapping[str, Any]) -> Path:
    """A ``config.json``; fields that are None are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in values.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def shard_of(folder: Path, tensor: str) -> Path:
    """The shard that holds a tensor."""
    whole = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / str(whole["weight_map"][tensor])


def cut(path: Path, bytes_: int = 1) -> None:
    """Take bytes off a file's end."""
    path.write_bytes(path.read_bytes()[:-bytes_])


def tokenizer(folder: Path, *, template: str | None = TEMPLATE, words: int = WORDS) -> Path:
    """The files of a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": words - 1, "content": "<|end|>", "special": True, **plain}]
    model = {"type": "BPE", "vocab": {f"w{n}": n for n in range(words - 1)}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    end = {"__type": "AddedToken", "content": "<|end|>", "special": True, **plain}
    config: dict[str, Any] = {"eos_token": end, "pad_token": "w0"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


# -- Megatron


def state(layers: int = 2) -> Tensors:
    """What one rank holds."""
    draw = torch.Generator().manual_seed(2)
    return {f"decoder.layers.{n}.mlp.linear_fc1.weight": torch.randn(8, 4, generator=draw) for n in range(layers)}


def _args(**more: Any) -> Namespace:
    """Arguments as ``common.pt`` has them, with values that are no plain types."""
    sizes = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "swiglu": True, "vocab_size": 1000}
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1}
    odd = {"params_dtype": torch.bfloat16, "ckpt_path": Path("somewhere"), "context_parallel_size": 1, "device": None}
    return Namespace(**{**sizes, **layout, **odd, **more})


def torch_dist(folder: Path, *iterations: int, tracker: str | None = "newest", **args: Any) -> Path:
    """A folder of distributed checkpoints: ``.distcp``, ``.metadata``, ``common.pt``, ``metadata.json``."""
    from torch.distributed.checkpoint import FileSystemWriter, save

    folder.mkdir(parents=True, exist_ok=True)
    for iteration in iterations:
        inner = folder / ("release" if iteration < 0 else f"iter_{iteration:07d}")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(state(), storage_writer=FileSystemWriter(inner), no_dist=True)
        torch.save({"args": _args(**args), "iteration": iteration, "checkpoint_version": 3.0}, inner / "common.pt")
        (inner / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    _track(folder, tracker, iterations)
    return folder


def legacy(
    folder: Path, *iterations: int, tracker: str | None = "newest", tp: int = 2, pp: int = 2, **args: Any
) -> Path:
    """A folder of checkpoints of one file for each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for iteration in iterations:
        for t in range(tp):
            for p in range(pp):
                name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "")
                inner = folder / f"iter_{iteration:07d}" / name
                inner.mkdir(parents=True)
                sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, **args}
                torch.save({"args": _args(**sizes), "model": state()}, inner / "model_optim_rng.pt")
    _track(folder, tracker, iterations)
    return folder


def _track(folder: Path, tracker: str | None, iterations: Sequence[int]) -> None:
    if tracker == "newest":
        tracker = "release" if max(iterations) < 0 else str(max(iterations))
    if tracker is not None:
        (folder / "latest_checkpointed_iteration.txt").write_text(tracker)


# -- launches


def model_args(**sizes: Any) -> str:
    """Flags of a model that fits the arguments of the checkpoints here."""
    values = {"num-layers": 4, "hidden-size": 64, "num-attention-heads": 4, "vocab-size": 1000, **sizes}
    return " ".join(f"--{key} {shlex.quote(str(value))}" for key, value in values.items()) + " --swiglu"


def paths(**flags: Path | str) -> str:
    """Flags that name folders."""
    return " ".join(f"--{key.replace('_', '-')} {shlex.quote(str(value))}" for key, value in flags.items())


def made(path: Path) -> HfCheckpoint | HfConfig | Launch | MegatronCheckpoint | Tokenizer:
    """The first artefact of a path."""
    content = read(path)[0]
    assert isinstance(content, HfCheckpoint | HfConfig | Launch | MegatronCheckpoint | Tokenizer)
    return content


_SAVER = """
import sys
from argparse import Namespace
from repro_core.engines.megatron import cpu, layout, parallel

def save(folder):
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    weight = torch.arange(512.0).reshape(32, 16)
    state = {"layer": ShardedTensor.from_rank_offsets("decoder.layers.0.mlp.linear_fc1.weight", weight)}
    args = Namespace(num_layers=4, hidden_size=64, params_dtype=torch.bfloat16)
    dist_checkpointing.save({**state, "args": args, "iteration": 11}, folder)

if __name__ == "__main__":
    cpu.load()
    with cpu.without_cuda(), cpu.quiet():
        parallel.start(layout.Layout(1, 1, 1, None, 1, 1, 1), seed=1, timeout_s=60)
        try:
            save(sys.argv[1])
        finally:
            parallel.stop()
"""


def megatron_core(folder: Path) -> Path:
    """A folder with iteration 11, saved by megatron-core itself in a process of its own."""
    inner = folder / "iter_0000011"
    inner.mkdir(parents=True)
    driver = folder.parent / "saver.py"
    driver.write_text(_SAVER)
    done = subprocess.run([sys.executable, driver, inner], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    _track(folder, "11", (11,))
    return folder
