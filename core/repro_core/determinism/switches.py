"""The table of determinism switches: what sets each one, what shows it, and why it is there.

`determinism` is the interface; this file is read top to bottom when a bit moved and nobody knows why.
"""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from repro_core.determinism import cuda as gpu
from repro_core.determinism import proofs

__all__ = ["ENVIRONMENT", "MIXED_HOSTS", "Switch", "switches"]

ENVIRONMENT: dict[str, str] = {
    # Python salts the hash of str and bytes per process; it orders sets of strings, and so whatever iterates them.
    "PYTHONHASHSEED": "0",
    # 8 buffers of 4 MiB. The workspace bounds cuBLAS's choice of algorithm (how far it splits K), and over several
    # streams cuBLAS promises equal bits only with a fixed one (cuBLAS manual, "Results reproducibility").
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Ring and tree add the ranks' terms in different orders; the tuner would pick by size and topology.
    "NCCL_ALGO": "Ring",
    # Transformer Engine's fused attention adds its gradients atomically unless told not to.
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
"""What must be in the environment before the process starts: set inside it, it comes too late."""

MIXED_HOSTS: dict[str, str] = {
    # Libraries pick kernels by CPU model, and different kernels round differently. AVX2 is what every hosted x86-64
    # runner has; of MKL's branches only COMPATIBLE is meant to agree between Intel and other makers' CPUs.
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    # The default is the number of cores: for code that runs before or beside `apply`.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""Wanted as well where hosts of different CPU models should agree. Not in `ENVIRONMENT`: they cost speed, and each
removes one cause of difference without promising equality."""


@dataclass(frozen=True)
class Switch:
    """One source of nondeterminism. `on` and `off` leave settings as they found them."""

    name: str
    why: str
    set: Callable[[], object] | None
    """Switches it on in this process; None where the environment decides."""
    here: Callable[[], str]
    """What the operation shows as the process stands."""
    on: Callable[[], str]
    """What it shows when the switch is on."""
    off: Callable[[], str]
    """What it shows when the switch is off."""
    absent: Callable[[], str] = str
    """Why nothing can be shown here; empty when it can."""


def switches(seed: int, threads: int) -> tuple[Switch, ...]:
    """All switches, in the order in which `control.apply` sets them.

    Raises:
        ValueError: `seed` or `threads` out of range.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must lie in 0 .. 2^32 - 1 (NumPy's range), not {seed}")
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    return (*_generators(seed), *_cpu(threads), *_cuda(), *_environment())


def _generators(seed: int) -> tuple[Switch, ...]:
    def row(name: str, start: Any, read: Any, restore: Any, draws: Any, fresh: Any, absent: Any = str) -> Switch:
        def write(value: Any) -> None:
            (start if isinstance(value, int) else restore)(value)

        why = "weights, sampling, dropout, shuffling; shown against an independent generator with the same seed"
        return _setting(name, why, read, write, seed, (seed + 1) % 2**32, draws, lambda: draws(fresh(seed)), absent)

    def cuda_generator(value: int) -> torch.Generator:
        return torch.Generator("cuda").manual_seed(value)

    cpu = torch.default_generator
    cuda = torch.cuda
    return (
        row("seed: random", random.seed, random.getstate, random.setstate, proofs.draws_python, random.Random),
        row("seed: numpy", np.random.seed, np.random.get_state, np.random.set_state, proofs.draws_numpy,
            np.random.RandomState),
        row("seed: torch CPU", cpu.manual_seed, cpu.get_state, cpu.set_state, proofs.draws_torch,
            torch.Generator().manual_seed),
        row("seed: torch CUDA", cuda.manual_seed_all, cuda.get_rng_state_all, cuda.set_rng_state_all,
            gpu.draws_cuda, cuda_generator, _no_cuda),
    )  # fmt: skip


def _cpu(threads: int) -> tuple[Switch, ...]:
    def algorithms() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    def set_algorithms(value: tuple[bool, bool]) -> None:
        # What use_deterministic_algorithms sets too, which also imports the compiler to tell it so: a trainer that
        # compiles nothing need not wait for that.
        torch.set_deterministic_debug_mode("default" if not value[0] else "warn" if value[1] else "error")

    return (
        _setting(
            "deterministic algorithms",
            "kernels that add atomically give way to ordered ones, and an op without such a kernel raises",
            algorithms, set_algorithms, (True, False), (False, False),
            proofs.nondeterministic_op, lambda: "put_ raises",
        ),
        _flag(
            # A fill makes reading unwritten memory repeatable, i.e. hides that bug from the second run that should find
            # it, and it writes every buffer once more: 24 layers forward and backward on an H200 took 158 ms with
            # it, 126 ms without, 128 ms with nothing deterministic at all, and the digests were equal.
            "no fill of empty tensors",
            "the fill decides no bit of a correct program and costs 25 % of a step",
            torch.utils.deterministic, "fill_uninitialized_memory", False, True,
            proofs.uninitialized, lambda: "empty keeps memory",
        ),
        _setting(
            "intra-op threads",
            "each thread sums a slice of its own: their number is the order of summation",
            torch.get_num_threads, torch.set_num_threads, threads, threads + 1, proofs.thread_sums,
        ),
        Switch(
            # Torch takes the number once per process. Only TorchScript's fork uses the pool; 1 makes it sequential.
            "inter-op threads",
            "forked TorchScript would run in an order of its own",
            _fix_interop, proofs.interop_pool, lambda: "pool of 1",
            partial(proofs.child, "proofs.interop_pool", {}),
            lambda: "" if Path("/proc/self/task").exists() else "no /proc to count threads in",
        ),
        _setting(
            # The mode is per thread, so worker threads would keep denormals while the caller flushes them; and a
            # library linked with -ffast-math switches it on in whatever thread loads it.
            "denormals kept",
            "flushing is per thread, and a library built with -ffast-math turns it on behind our back",
            lambda: proofs.denormals() == proofs.FLUSHED, torch.set_flush_denormal, False, True,
            proofs.denormals, lambda: proofs.KEPT,
        ),
        _setting(
            "float32 matmul: CPU", "lower precisions let oneDNN take bfloat16-grade kernels where the CPU has them",
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest", "medium",
            proofs.fp32_matmul_cpu,
        ),
    )  # fmt: skip


def _cuda() -> tuple[Switch, ...]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    reduction = "cuBLAS may otherwise add split-K partial sums in the 16-bit dtype"
    return (
        _setting(
            "float32 matmul: CUDA", "TF32 keeps 10 of 23 fraction bits",
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest", "high",
            gpu.fp32_matmul_cuda, lambda: gpu.EXACT, _no_cuda,
        ),
        _flag("float32 convolution: cuDNN", "a TF32 switch of its own, on by default", cudnn, "allow_tf32",
              False, True, gpu.fp32_conv_cuda, lambda: gpu.EXACT, _no_cuda),
        _flag("bf16 reduction", reduction, matmul, "allow_bf16_reduced_precision_reduction", False, True,
              partial(gpu.half_matmul, torch.bfloat16), None, _no_cuda),
        _flag("fp16 reduction", reduction, matmul, "allow_fp16_reduced_precision_reduction", False, True,
              partial(gpu.half_matmul, torch.float16), None, _no_cuda),
        _flag("fp16 accumulation", "products would be accumulated in float16", matmul, "allow_fp16_accumulation",
              False, True, partial(gpu.half_matmul, torch.float16), None, _no_cuda),
        _setting(
            "attention reduction", "the math backend may otherwise keep its softmax in 16 bits",
            torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp, False, True,
            gpu.attention_reduction, None, _no_cuda,
        ),
        _flag("cuDNN deterministic", "some backward algorithms add atomically", cudnn, "deterministic", True, False,
              gpu.cudnn_repeats, lambda: "8 backward agree", _no_cuda),
        _flag("cuDNN benchmark off", "the fastest algorithm of the moment is chosen by a stopwatch", cudnn, "benchmark",
              False, True, gpu.cudnn_choice, None, _no_cuda),
    )  # fmt: skip


def _environment() -> tuple[Switch, ...]:
    ranks = f"fewer than {gpu.NCCL_RANKS} GPUs: two terms add up the same in either order"
    return (
        _variable("PYTHONHASHSEED", "order of sets of strings", proofs.string_hash),
        _variable("CUBLAS_WORKSPACE_CONFIG", "bounds cuBLAS's choice of algorithm; off is :16:8, since unset means "
                  "32 MiB on Hopper too", gpu.cublas_workspace, off=":16:8", absent=_no_cuda),
        _variable("NCCL_ALGO", "order in which the ranks' terms are added; off is Tree", gpu.nccl_all_reduce,
                  off="Tree", inherited=True,
                  absent=lambda: _no_cuda() or ("" if torch.cuda.device_count() >= gpu.NCCL_RANKS else ranks)),
        _variable("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "fused attention's gradients; the difference is a race, so the "
                  "backward pass is repeated", gpu.fused_attention, inherited=True,
                  absent=lambda: _no_cuda() or _no_module("transformer_engine")),
        _variable("ATEN_CPU_CAPABILITY", "kernels by instruction set", proofs.cpu_kernels),
        _variable("MKL_CBWR", "kernels by CPU model", proofs.mkl_kernels),
        _variable("ONEDNN_MAX_CPU_ISA", "kernels by instruction set", proofs.onednn_kernels),
        _variable("OMP_NUM_THREADS", "threads where nobody set them", proofs.default_threads, inherited=True,
                  without="MKL_NUM_THREADS"),
        _variable("MKL_NUM_THREADS", "threads where nobody set them", proofs.default_threads, inherited=True,
                  without="OMP_NUM_THREADS"),
    )  # fmt: skip


def _setting(
    name: str,
    why: str,
    read: Callable[[], Any],
    write: Callable[[Any], object],
    on: Any,
    off: Any,
    observe: Callable[[], str],
    want: Callable[[], str] | None = None,
    absent: Callable[[], str] = str,
) -> Switch:
    """A switch thrown both ways in this process. `want` says what on shows, where that is known beforehand."""

    def under(value: Any) -> str:
        before = read()
        write(value)
        try:
            return observe()
        finally:
            write(before)

    return Switch(name, why, lambda: write(on), observe, want or partial(under, on), partial(under, off), absent)


def _flag(name: str, why: str, owner: Any, attribute: str, on: bool, off: bool, *rest: Any) -> Switch:
    """A `_setting` that is an attribute of `owner`."""
    read, write = partial(getattr, owner, attribute), partial(setattr, owner, attribute)
    return _setting(name, why, read, write, on, off, *rest)


def _variable(
    name: str,
    why: str,
    observe: Callable[[], str],
    *,
    off: str | None = None,
    inherited: bool = False,
    without: str | None = None,
    absent: Callable[[], str] = str,
) -> Switch:
    """A switch that a process meets at its start, so on and off are child processes.

    Args:
        name: the variable.
        why: as in `Switch`.
        observe: the operation, a public function of `proofs` or `cuda`.
        off: the variable's value when off; None takes it away.
        inherited: the operation as the process stands needs a process of its own too: a child with our environment.
        without: a variable taken away from all children, because it hides this one.
        absent: as in `Switch`; a variable of `MIXED_HOSTS` is absent as long as it is not set.
    """
    base: dict[str, str | None] = {} if without is None else {without: None}
    optional = name in MIXED_HOSTS
    wanted = os.environ.get(name) if optional else ENVIRONMENT[name]
    child = partial(proofs.child, f"{observe.__module__.rpartition('.')[2]}.{observe.__name__}")
    return Switch(
        name,
        why,
        None,
        partial(child, base) if inherited else observe,
        partial(child, {**base, name: wanted}),
        partial(child, {**base, name: off}),
        (lambda: "not set: for mixed hosts only") if optional and wanted is None else absent,
    )


def _fix_interop() -> None:
    try:
        torch.set_num_interop_threads(1)
    except RuntimeError:
        return  # fixed before, by us or by others: the proof tells which


def _no_cuda() -> str:
    return "" if torch.cuda.is_available() else "no CUDA device"


def _no_module(name: str) -> str:
    return "" if importlib.util.find_spec(name) else f"no {name}"
