"""The program that benchmarks/recorder.py measures: it trains a decoder, now recorded, now bare, now with a rival.

``python benchmarks/recorded_step.py SAMPLES DUMPS LIMIT`` under `run_traced` of
`repro_golden.recording.attach.gathered.run`, which arms the recorder; this program knows only how to take its hooks off
torch's optimizers and put them back. With a limit of no seconds there are no rivals, but only steps in a row.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import optimizer as optimizers
from torch.profiler import ProfilerActivity, profile

from repro_golden.case.identity import collect
from repro_golden.fingerprint import fingerprints

WARM, ROUNDS, SLOW_ROUNDS, SHA_ROUNDS = 5, 8, 5, 3
FAST = [("bare", 5), ("recorded", 5), ("bare", 5), ("hash_tensor", 5), ("bare", 5), ("DebugMode", 1),
        ("flowing bare", 10), ("flowing", 10), ("long bare", 4), ("long", 4)]  # fmt: skip
ALONE = [("flowing bare", 10), ("flowing", 10)]
BUSY = [("busy bare", 2), ("busy", 2)]  # of a GPU: the time in which it is at work, whatever the host does
WIDE = [("wide bare", 4), ("wide", 4)]
PAIRS = 40  # of these: reading takes about a hundredth of such a step, which few of them do not show
IDLE = [("idle bare", 4), ("idle", 4)]  # of a GPU: the time in which it waits within such steps
RECORDED = ("recorded", "flowing", "long", "wide", "busy", "idle")
IN_A_ROW = ("flowing", "long", "wide")
MICRO = 8  # micro-batches of a long step; a wide one has them all in one
SLOW = [("bare", 5), ("torch.save", 1), ("bare", 5), ("sha256", 1)]
HOOKS: list[dict[int, Any]] = [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
ARMED = [dict(hooks) for hooks in HOOKS]


def switch(on: bool) -> None:
    """Whether steps are recorded. Off, nothing of the recorder runs: torch calls no hook of it."""
    for hooks, armed in zip(HOOKS, ARMED, strict=True):
        hooks.clear()
        if on:
            hooks.update(armed)


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder and of its batches."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    vocabulary: int
    sequences: int
    tokens: int


QWEN = Shape(896, 24, 14, 2, 64, 4864, 151936, 2, 1024)  # Qwen2.5-0.5B's config.json
TINY = Shape(64, 2, 4, 2, 16, 128, 512, 2, 32)


class Layer(nn.Module):
    """Attention and MLP; x is [sequences, tokens, hidden], cos and sin are [tokens, head]."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.head = s.head
        self.before_attention = nn.RMSNorm(s.hidden, eps=1e-6)
        self.q = nn.Linear(s.hidden, s.heads * s.head)
        self.k = nn.Linear(s.hidden, s.kv_heads * s.head)
        self.v = nn.Linear(s.hidden, s.kv_heads * s.head)
        self.o = nn.Linear(s.heads * s.head, s.hidden, bias=False)
        self.before_mlp = nn.RMSNorm(s.hidden, eps=1e-6)
        self.gate = nn.Linear(s.hidden, s.inner, bias=False)
        self.up = nn.Linear(s.hidden, s.inner, bias=False)
        self.down = nn.Linear(s.inner, s.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The layer's output, shaped as x."""
        y = self.before_attention(x)
        q, k, v = (p(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        y = self.before_mlp(x)
        return x.add(self.down(functional.silu(self.gate(y)) * self.up(y)))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Decoder(nn.Module):
    """Tokens [sequences, tokens] to logits [sequences, tokens, vocabulary]; input and output share the embedding."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(s.vocabulary, s.hidden)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.hidden, eps=1e-6)
        angles = torch.outer(torch.arange(s.tokens), 1e6 ** -(torch.arange(0, s.head, 2) / s.head)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return functional.linear(self.norm(x), self.embedding.weight)


class Trainer:
    """bf16 parameters and gradients, fp32 main weights, their gradients and AdamW's state: as mixed precision does."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        torch.manual_seed(0)
        with device:
            self.model = Decoder(shape).to(torch.bfloat16)
            self._batches = torch.randint(shape.vocabulary, (MICRO, shape.sequences, shape.tokens + 1))
        self.main = copy.deepcopy(self.model).float()  # a module owns the main weights, so they have names
        self._low: list[Tensor] = list(self.model.parameters())
        self._high: list[Tensor] = list(self.main.parameters())
        for parameter in self._high:
            parameter.grad = torch.zeros_like(parameter)
        self._grads = [p.grad for p in self._high if p.grad is not None]
        self.optimizer = torch.optim.AdamW(self._high, lr=1e-5, fused=True)
        self.loss = torch.zeros((), device=device)
        self._count = 0

    def step(self, micro: int = 1, *, wide: bool = False) -> None:
        """One training step on the next micro-batches; a wide one on all of them at once."""
        for _ in range(micro):
            batch = self._batches.flatten(0, 1) if wide else self._batches[self._count % MICRO]
            self._count += 1
            logits = self.model(batch[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
            torch.autograd.backward(loss)
        self.loss = loss.detach()
        with torch.no_grad():
            torch._foreach_copy_(self._grads, [p.grad for p in self._low if p.grad is not None])
            self.optimizer.step()
            torch._foreach_copy_(self._low, self._high)
        for parameter in self._low:
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """All that a step leaves behind, by phase and name as in a trace; they stay where they are."""
        out: dict[str, Tensor] = {}
        for name, parameter in self.main.named_parameters():
            assert parameter.grad is not None
            out |= {f"grad {name}": parameter.grad, f"update {name}": parameter.detach()}
            out |= {f"update {kind}/{name}": t for kind, t in self.optimizer.state[parameter].items()}
        return out


class Bench:
    """Blocks of steps of one kind each, and what was measured of them.

    Attributes:
        blocks: For each block its kind, round (-1 for warming up), seconds of a step (one figure for all steps where
            the device is waited for only after the last; of `busy` and `idle` ones the device's own), and on a GPU its
            peaks of allocated and reserved bytes and the bytes that were free after it.
        failed: Rivals that this torch cannot run, with the reason.
        facts: What the rivals did: calls hashed, bytes saved.
    """

    def __init__(self, trainer: Trainer, device: torch.device, dump: Path) -> None:
        self._trainer, self._device, self._dump = trainer, device, dump
        self._kinds: dict[str, Callable[[], None]] = {
            "bare": trainer.step,
            "recorded": trainer.step,
            "flowing bare": trainer.step,
            "flowing": trainer.step,
            "long bare": lambda: trainer.step(MICRO),
            "long": lambda: trainer.step(MICRO),
            "wide bare": lambda: trainer.step(wide=True),
            "wide": lambda: trainer.step(wide=True),
            "busy bare": trainer.step,
            "busy": trainer.step,
            "idle bare": lambda: trainer.step(wide=True),
            "idle": lambda: trainer.step(wide=True),
            "hash_tensor": self._hash_tensor,
            "DebugMode": self._debug_mode,
            "torch.save": self._save,
            "sha256": self._sha256,
        }
        self._tensors: dict[str, Tensor] = {}
        self.blocks: list[dict[str, Any]] = []
        self.failed: dict[str, str] = {}
        self.facts: dict[str, int] = {}

    def block(self, kind: str, steps: int, number: int) -> None:
        """Run and time steps of a kind, each until the device is done with it; those of `IN_A_ROW` together."""
        if kind in self.failed:
            return
        cuda = self._device.type == "cuda"
        self._done()
        if cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        seconds = []
        switch(kind in RECORDED)
        together = steps if kind.startswith(IN_A_ROW) else 1
        try:
            if kind.startswith(("busy", "idle")):
                busy, idle = self._on_device(kind, steps)
                seconds.append((idle if kind.startswith("idle") else busy) / steps)
            for _ in range(0 if seconds else steps // together):
                began = time.perf_counter()
                for _ in range(together):
                    self._kinds[kind]()
                self._done()
                seconds.append((time.perf_counter() - began) / together)
                self._dump.unlink(missing_ok=True)
        except Exception as error:
            if kind in RECORDED or kind.endswith("bare"):
                raise
            self.failed[kind] = f"{type(error).__name__}: {error}"[:300]  # it must not cost the others their figures
            self._dump.unlink(missing_ok=True)
            return
        finally:
            switch(False)
        block: dict[str, Any] = {"kind": kind, "round": number, "steps": steps, "seconds": seconds}
        if cuda:
            block["allocated"] = torch.cuda.max_memory_allocated(self._device)
            block["reserved"] = torch.cuda.max_memory_reserved(self._device)
            block["free"] = torch.cuda.mem_get_info(self._device)[0]
        self.blocks.append(block)
        self._tensors = self._tensors or self._trainer.tensors()

    def _done(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _on_device(self, kind: str, steps: int) -> tuple[float, float]:
        """Seconds in which the device computes or copies in these steps, and in which it waits between."""
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
            for _ in range(steps):
                self._kinds[kind]()
            self._done()
        of_device = [e for e in seen.events() or [] if e.device_type == torch.autograd.DeviceType.CUDA]
        spans = sorted((e.time_range.start, e.time_range.end) for e in of_device)
        idle, until = 0.0, spans[0][0]
        for start, end in spans:
            idle += max(0.0, start - until)
            until = max(until, end)
        return sum(end - start for start, end in spans) / 1e6, idle / 1e6

    def _hash_tensor(self) -> None:
        self._trainer.step()
        torch.stack([torch.hash_tensor(t) for t in self._tensors.values()]).tolist()

    def _debug_mode(self) -> None:
        from torch.utils._debug_mode import DebugMode

        with DebugMode() as mode, DebugMode.log_tensor_hashes(hash_fn="hash_tensor"):
            self._trainer.step()
        self.facts["calls_hashed"] = sum("hash" in (getattr(call, "log", None) or {}) for call in mode.logs)
        if not self.facts["calls_hashed"]:
            raise RuntimeError("no call was hashed")

    def _save(self) -> None:
        self._trainer.step()
        torch.save(self._tensors, self._dump)
        self.facts["bytes_saved"] = self._dump.stat().st_size

    def _sha256(self) -> None:
        self._trainer.step()
        for tensor in self._tensors.values():
            hashlib.sha256(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data).digest()


def _read_ceiling() -> float:
    """Bytes a second that this GPU can read."""
    from gpu import read_ceiling

    size = 4 << 30
    milliseconds: float = read_ceiling(torch.randint(1 << 62, (size // 8,), device="cuda"))[0]
    torch.cuda.empty_cache()
    return size / milliseconds * 1e3


def main(samples: Path, dumps: Path, limit: float) -> None:
    """Measure; `samples` is written anew after each round, and slow rivals begin none after `limit` seconds."""
    began = time.monotonic()
    if not all(ARMED):
        sys.exit("recorded_step: no recorder is armed: run benchmarks/recorder.py")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    shape = QWEN if device.type == "cuda" else TINY
    about = {
        "identity": collect(os.environ, threads=torch.get_num_threads()).to_mapping(),
        "device_bytes": torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0,
        "shape": asdict(shape),
        "micro": MICRO,
        "read": _read_ceiling() if device.type == "cuda" else None,
    }
    switch(False)
    trainer = Trainer(shape, device)
    bench = Bench(trainer, device, dumps / "step.pt")

    def write(**more: object) -> None:
        measured = {"blocks": bench.blocks, "failed": bench.failed, "facts": bench.facts}
        samples.write_text(json.dumps(about | measured | more), encoding="utf-8")

    bench.block("bare", WARM, -1)
    rivals = ("hash_tensor", "DebugMode") if limit else ()
    for kind in ("recorded", *rivals):  # each beside bare steps: what memory it takes is seen here
        bench.block("bare", WARM, -1)
        bench.block(kind, 1 if kind == "DebugMode" else WARM, -1)
    for kind in ("wide bare", "wide") if limit else ():
        bench.block(kind, WARM, -1)
    for number in range(ROUNDS):
        for kind, steps in [*FAST, *(BUSY if device.type == "cuda" else [])] if limit else ALONE:
            bench.block(kind, steps, number)
        write()
    for number in range(ROUNDS, ROUNDS + SLOW_ROUNDS) if limit else ():
        for kind, steps in SLOW:
            enough = kind == "sha256" and number >= ROUNDS + SHA_ROUNDS
            if not enough and time.monotonic() - began < limit:
                bench.block(kind, steps, number)
        write()
    for number in range(PAIRS) if limit else ():
        turns = [*WIDE, *(IDLE if device.type == "cuda" and number < ROUNDS else [])]
        # where little is added to much, neither side always comes first: what drifts within a pair would be one's
        for kind, steps in turns if number % 2 else reversed(turns):
            bench.block(kind, steps, number)
    bench.block("recorded", 1, ROUNDS + SLOW_ROUNDS)  # the last step's record is compared with what is in memory now
    tensors = trainer.tensors()
    now = dict(zip(tensors, fingerprints(tensors.values()), strict=True))
    if not math.isfinite(trainer.loss.item()):
        sys.exit("recorded_step: the loss is not finite")
    write(
        parameters=sum(p.numel() for p in trainer.main.parameters()),
        recorded=sum(b["steps"] for b in bench.blocks if b["kind"] in RECORDED),
        fingerprints=now,
        elapsed=time.monotonic() - began,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
