"""Tiny models for SGLang, a server of it for the test run, and an engine in a process of its own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from repro_core.config import ModelConfig, SglangConfig
from repro_core.model.decoder import Policy, init_weights
from repro_core.model.hf import save_hf
from repro_core.rollout.engine import Response
from repro_core.rollout.sglang.process import serve

__all__ = [
    "CONFIG",
    "CORE",
    "DENSE",
    "EXPERTS",
    "Served",
    "drive",
    "gap",
    "prompts_of",
    "scored",
    "sglang_server",
    "tiny_checkpoint",
    "tiny_policy",
]

CORE = Path(__file__).parents[1] / "core"

DENSE = ModelConfig(model_type="qwen3", kv_channels=32, initializer_range=0.1, tie_word_embeddings=False)
EXPERTS = ModelConfig(
    model_type="qwen3_moe",
    kv_channels=32,
    initializer_range=0.1,
    tie_word_embeddings=False,  # SGLang's class for it does not tie
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    norm_topk_prob=True,
)
CONFIG = SglangConfig(max_total_tokens=8192, timeout=240.0)


@dataclass(frozen=True)
class Served:
    """A running server of SGLang.

    Attributes:
        url: its address.
        checkpoint: that it was started with; its weights are those of the last update.
        model: of the checkpoint.
        log: what it writes.
    """

    url: str
    checkpoint: Path
    model: ModelConfig
    log: Path


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server of a tiny Qwen3 in fp32 for all tests of this process."""
    folder = tmp_path_factory.mktemp("sglang")
    checkpoint = tiny_checkpoint(folder / "checkpoint", DENSE)
    with serve(CONFIG, checkpoint, "fp32", log=folder / "server.log", term_s=1.0) as server:
        yield Served(server.url, checkpoint, DENSE, server.log)


def tiny_policy(model: ModelConfig = DENSE, seed: int = 0, dtype: torch.dtype = torch.float32) -> Policy:
    """A policy with random weights. Equal arguments give equal weights."""
    policy = Policy(model)
    init_weights(policy, seed)
    return policy.to(dtype)


def tiny_checkpoint(
    folder: Path, model: ModelConfig = DENSE, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """`tiny_policy` in Hugging Face's form."""
    save_hf(tiny_policy(model, seed, dtype), folder)
    return folder


def prompts_of(count: int, seed: int = 1) -> list[list[int]]:
    """Prompts of 3 to 39 ids."""
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(draw.randrange(3, 40))] for _ in range(count)]


@torch.no_grad()
def scored(policy: Policy, prompt: list[int], tokens: list[int], temperature: float) -> tuple[list[float], list[float]]:
    """Log-probs of a prompt's tokens from the second on at temperature 1, and of a response's at `temperature`."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = policy(ids, torch.arange(ids.shape[1])[None])[0, :-1].float()
    wanted = ids[0, 1:, None]
    plain = torch.log_softmax(logits, -1).gather(1, wanted)[:, 0].tolist()
    scaled = torch.log_softmax(logits / (temperature or 1.0), -1).gather(1, wanted)[:, 0].tolist()
    return plain[: len(prompt) - 1], scaled[len(prompt) - 1 :]


def gap(policy: Policy, prompts: list[list[int]], responses: list[Response], temperature: float) -> float:
    """Largest difference between an engine's log-probs and the policy's own."""
    largest = 0.0
    for prompt, response in zip(prompts, responses, strict=True):
        before, after = scored(policy, prompt, response.tokens, temperature)
        pairs = [*zip(response.log_probs, after, strict=True)]
        if response.prompt_log_probs is not None:
            pairs += zip(response.prompt_log_probs, before, strict=True)
        largest = max(largest, *(abs(theirs - ours) for theirs, ours in pairs))
    return largest


def drive(program: str, folder: Path, timeout: float = 280.0) -> Any:
    """Run a driver of this folder in a process of its own, in `folder`; the JSON that is all it prints."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / program), str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(CORE), str(Path(__file__).parent)])},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr, f"SGLang is to write to its log, not to the terminal: {done.stderr}"
    return json.loads(done.stdout)
