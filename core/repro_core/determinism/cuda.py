"""Operations on CUDA devices whose outcome tells whether a determinism switch is in effect.

As in `proofs`: each returns what happened, or a digest of bits, and none reads a setting.
"""

from __future__ import annotations

import importlib
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import conv2d, linear, scaled_dot_product_attention

from repro_core.determinism.proofs import algorithms, digest, normal

__all__ = [
    "EXACT",
    "NCCL_RANKS",
    "TE_REPEATS",
    "attention_reduction",
    "cublas_workspace",
    "cudnn_choice",
    "cudnn_repeats",
    "draws_cuda",
    "fp32_conv_cuda",
    "fp32_matmul_cuda",
    "fused_attention",
    "half_matmul",
    "nccl_all_reduce",
]

T = TypeVar("T")

NCCL_RANKS = 3
"""Fewest ranks at which the order of an all-reduce shows: a sum of two is the same either way round."""
TE_REPEATS = 10
"""Backward passes compared; without the switch 7 of 10 differed on an H200, so a miss is unlikely, not impossible."""
_TF32_WITNESS = 1.0 + 2.0**-12
"""Exact in float32 (23 fraction bits); TF32 (10) and bfloat16 (7) round it to 1."""
EXACT = f"1 + 2^-12 -> {_TF32_WITNESS:.6f}"


def draws_cuda(generator: torch.Generator | None = None) -> str:
    """Digest of the next 16 normals of the current device's generator."""
    return digest(torch.randn(16, generator=generator, device="cuda"))


def fp32_matmul_cuda() -> str:
    """A float32 product with the identity: exact unless the inputs are rounded to TF32."""
    witness = torch.full((256, 256), _TF32_WITNESS, device="cuda")
    return f"1 + 2^-12 -> {(witness @ torch.eye(256, device='cuda'))[0, 0].item():.6f}"


def fp32_conv_cuda() -> str:
    """A float32 convolution by the identity: exact unless cuDNN rounds the inputs to TF32."""
    identity = torch.eye(64, device="cuda")[:, :, None, None]
    image = torch.full((8, 64, 32, 32), _TF32_WITNESS, device="cuda")
    return f"1 + 2^-12 -> {_fresh_thread(lambda: conv2d(image, identity)[0, 0, 0, 0]).item():.6f}"


def half_matmul(dtype: torch.dtype) -> str:
    """Long-K products in a 16-bit dtype: split-K partial sums are where a reduced-precision reduction would show."""
    shapes = [(16, 16384, 16), (64, 16384, 64), (8, 8192, 4096), (512, 16384, 512), (1024, 1024, 1024)]
    pairs = [(normal(m, k, device="cuda"), normal(k, n, seed=1, device="cuda")) for m, k, n in shapes]
    return digest(*(linear(a.to(dtype), b.T.to(dtype)) for a, b in pairs))


def attention_reduction() -> str:
    """bfloat16 attention by the math backend, whose softmax and sums may otherwise stay in bfloat16."""
    q = normal(1, 4, 512, 64, device="cuda").bfloat16()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return digest(scaled_dot_product_attention(q, q, q))


def cudnn_repeats() -> str:
    """Gradients of one strided 7x7 convolution, eight times over: atomic sums differ from call to call."""

    def gradients() -> str:
        image, weight = normal(4, 3, 112, 112, device="cuda"), normal(64, 3, 7, 7, seed=1, device="cuda")
        image, weight = image.requires_grad_(), weight.requires_grad_()
        loss = conv2d(image, weight, stride=2, padding=3).square().sum()
        return digest(*torch.autograd.grad(loss, (image, weight)))

    with algorithms(deterministic=False):  # they alone make cuDNN deterministic and would hide its own switch
        return "8 backward agree" if len(_fresh_thread(lambda: {gradients() for _ in range(8)})) == 1 else "8 differ"


def cudnn_choice() -> str:
    """One 5x5 convolution: under benchmark the fastest algorithm of the moment computes it."""
    image, weight = normal(16, 32, 28, 28, device="cuda"), normal(128, 32, 5, 5, seed=1, device="cuda")
    return digest(_fresh_thread(lambda: conv2d(image, weight, padding=2)))


def _fresh_thread(call: Callable[[], T]) -> T:
    """Run in a new thread, which chooses algorithms anew: cuDNN's plans are cached per thread, not per setting."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def cublas_workspace() -> str:
    """Long-K products in float32 and bfloat16: the workspace bounds how far cuBLAS may split K."""
    return digest(normal(64, 16384, device="cuda") @ normal(16384, 64, seed=1, device="cuda")) + half_matmul(
        torch.bfloat16
    )


def fused_attention() -> str:
    """Transformer Engine's attention, forward and backward, `TE_REPEATS` times over; for a child process."""
    te = importlib.import_module("transformer_engine.pytorch")

    attention = te.DotProductAttention(16, 128, attention_dropout=0.0, qkv_format="bshd", attn_mask_type="causal")
    q, k, v = (normal(4, 2048, 16, 128, seed=i, device="cuda").bfloat16().requires_grad_() for i in range(3))
    upstream = normal(4, 2048, 16 * 128, seed=3, device="cuda").bfloat16()
    seen = {digest(*torch.autograd.grad(attention(q, k, v), (q, k, v), upstream)) for _ in range(TE_REPEATS)}
    return f"{TE_REPEATS} backward {'agree' if len(seen) == 1 else 'differ'}"


def nccl_all_reduce() -> str:
    """All-reduce of float32 normals, 4 KiB to 64 MiB, over the GPUs of this host; for a child process."""
    ranks = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        spawn(_all_reduce, args=(ranks, folder), nprocs=ranks)  # type: ignore[no-untyped-call]
        return Path(folder, "digest").read_text()


def _all_reduce(rank: int, ranks: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    tensors = [normal(1 << n, seed=rank, device="cuda") for n in (10, 16, 20, 24)]
    for tensor in tensors:
        torch.distributed.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank == 0:
        Path(folder, "digest").write_text(digest(*tensors))
    torch.distributed.destroy_process_group()
