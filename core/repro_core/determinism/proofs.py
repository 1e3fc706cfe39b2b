"""Operations whose outcome tells whether a determinism switch is in effect.

Each function returns one short string: what happened, or a digest of bits. None reads a setting. Inputs come from
generators of their own, so that an observation neither depends on nor moves the generators of the process.
`determinism` runs each one as the process stands, with the switch on and with it off.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv2d, log_softmax

__all__ = [
    "FLUSHED",
    "KEPT",
    "algorithms",
    "child",
    "cpu_kernels",
    "default_threads",
    "denormals",
    "digest",
    "draws_numpy",
    "draws_python",
    "draws_torch",
    "fp32_matmul_cpu",
    "interop_pool",
    "mkl_kernels",
    "nondeterministic_op",
    "normal",
    "one_thread",
    "onednn_kernels",
    "string_hash",
    "thread_sums",
    "uninitialized",
]

_FORK = "def forked(x: Tensor) -> Tensor:\n  return torch.jit.wait(torch.jit.fork(torch.neg, x))\n"
KEPT, FLUSHED = "1e-40 / 2 = 5e-41", "1e-40 / 2 = 0"


def digest(*tensors: Tensor) -> str:
    """First 8 hex digits of the SHA-256 of the tensors' bytes, row-major."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return sha.hexdigest()[:8]


def child(observation: str, changes: Mapping[str, str | None]) -> str:
    """The observation of that name, made by a fresh process whose environment differs from ours by `changes`.

    Args:
        observation: ``module.function``, a function without arguments of a module of this package.
        changes: variables to set; None removes one.

    Returns:
        What it returned, or ``failed: <last line of its error output>``.
    """
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    for name, value in changes.items():
        environ.pop(name, None)
        if value is not None:
            environ[name] = value
    return _child(observation, tuple(sorted(environ.items())))


@functools.cache  # a report asks for the same child more than once, and each one imports torch
def _child(observation: str, environ: tuple[tuple[str, str], ...]) -> str:
    module, function = observation.split(".")
    code = f"from repro_core.determinism import {module}; print({module}.{function}())"
    if function == "string_hash":  # needs no torch: 20 ms instead of seconds
        code = "print(hash('repro'))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=dict(environ), capture_output=True, text=True, timeout=180
        )
    except subprocess.TimeoutExpired:
        return "failed: no answer in 180 s"
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return ("failed: " if done.returncode else "") + (lines[-1] if lines else "no output")


@contextmanager
def algorithms(deterministic: bool) -> Iterator[None]:
    """Deterministic algorithms on or off for a while: several switches act only under one of the two."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def one_thread() -> Iterator[None]:
    """One intra-op thread for a while, so that an observation does not depend on that switch."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    """Standard normal float32 from a generator of its own."""
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device)


# --- generators: the next draws; an independent generator is given to learn what they should be ---


def draws_python(generator: random.Random | None = None) -> str:
    """Next 64 bits of `random`."""
    return f"{(generator or random).getrandbits(64):016x}"


def draws_numpy(generator: np.random.RandomState | None = None) -> str:
    """Next 8 bytes of `numpy.random`'s global generator."""
    return (generator.bytes(8) if generator else np.random.bytes(8)).hex()


def draws_torch(generator: torch.Generator | None = None) -> str:
    """Digest of the next 16 normals of torch's CPU generator."""
    return digest(torch.randn(16, generator=generator))


# --- CPU ---


def nondeterministic_op() -> str:
    """`put_` without accumulation has no deterministic implementation: under the switch it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warn_only is a way of being off, not a message for the report's reader
        try:
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        except RuntimeError:
            return "put_ raises"
    return "put_ runs"


def uninitialized() -> str:
    """Whether `empty` writes: its `out` already holds ones."""
    buffer = torch.ones(64)
    with algorithms(deterministic=True):
        torch.empty(64, out=buffer)
    return "empty keeps memory" if bool(buffer.eq(1.0).all()) else "empty fills with NaN"


def denormals() -> str:
    """1e-40 halved: 5e-41 in IEEE arithmetic, 0 where denormals are flushed."""
    return FLUSHED if torch.full((16,), 1e-40).mul(0.5)[0].item() == 0.0 else KEPT


def thread_sums() -> str:
    """Sixteen sums of 2^18 float32: each thread sums a slice of its own, then the slices' sums are added."""
    return digest(*(normal(1 << 18, seed=i).abs().sum() for i in range(16)))


def default_threads() -> str:
    """`thread_sums`, for a child process that sets no thread count."""
    return thread_sums()


def interop_pool() -> str:
    """Size of the inter-op pool once a TorchScript `fork` has started it.

    Where nobody fixed the number yet, a second call does not raise; it then fixes it at 1, which cannot be undone.
    """
    try:
        torch.set_num_interop_threads(1)
    except RuntimeError:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # no other operation is left that uses this pool
            torch.jit.CompilationUnit(_FORK).forked(torch.ones(1))
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        return f"pool of {names.count('PTThreadPool')}"
    return "not fixed"


def fp32_matmul_cpu() -> str:
    """[256, 1024] x [1024, 256] in float32, one thread: "medium" lets oneDNN take its bfloat16-grade kernels."""
    with one_thread():
        return digest(normal(256, 1024) @ normal(1024, 256, seed=1))


def cpu_kernels() -> str:
    """Sum, exp and softmax by ATen's own kernels, which are compiled once per instruction set."""
    x = normal(513, 1000)
    with one_thread():
        return digest(x.sum(), x.exp(), x.softmax(-1), log_softmax(x, -1))


def mkl_kernels() -> str:
    """Matrix-vector product and QR by MKL, which picks code by CPU model unless MKL_CBWR pins it."""
    with one_thread():
        return digest(normal(100, 333) @ normal(333, seed=1), torch.linalg.qr(normal(256, 64))[0])


def onednn_kernels() -> str:
    """bfloat16 product and float32 convolution by oneDNN."""
    a, b = normal(256, 1024).bfloat16(), normal(1024, 256, seed=1).bfloat16()
    with one_thread():
        return digest(a @ b, conv2d(normal(1, 16, 64, 64), normal(16, 16, 3, 3, seed=1)))


def string_hash() -> str:
    """Hash of a string in this process: it orders sets of strings."""
    return str(hash("repro"))
