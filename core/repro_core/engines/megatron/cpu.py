"""megatron-core on a machine without CUDA: what that takes, in one place, for as long as a ``with`` block lasts.

megatron-core 0.16.1 asks for its buffers on "cuda" by name. `without_cuda` lets it have them on the CPU. What could be
had by a flag, by a submodule of the layer specification or by an argument is done that way (see `model` and
`parallel`); `CHANGES` lists what is left, and nothing else is changed.

A mode of ``torch.overrides`` belongs to one thread and is off inside ``backward``, so what Megatron does there has to
run without it: recomputed layers make no attention mask (`layers.CoreAttention` needs none).
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from repro_core.config import ConfigError

__all__ = ["CHANGES", "VERSION", "Change", "check_installed", "load", "quiet", "without_cuda"]

VERSION = "0.16.1"
"""The megatron-core that this package is written for: the newest for Python 3.11."""


class Change(NamedTuple):
    """One thing that is different inside `without_cuda`.

    Attributes:
        what: is replaced, and by what.
        why: what asks for it, with files and lines of megatron-core 0.16.1.
    """

    what: str
    why: str


CHANGES = (
    Change(
        "torch.cuda.current_device() answers the CPU device",
        "buffers are allocated on it: distributed/param_and_grad_buffer.py:800,806, "
        "pipeline_parallel/p2p_communication.py:313,321, tensor_parallel/mappings.py:141,148,181,442, utils.py:631",
    ),
    Change(
        'device="cuda" in a call of torch means the CPU',
        "literals: pipeline_parallel/schedules.py:596,983,2138, optimizer/optimizer.py:481,485,907, "
        "optimizer/clip_grads.py:103, utils.py:1207",
    ),
    Change(
        "Tensor.cuda() is the tensor itself",
        "embeddings tied across pipeline stages: models/common/language_module/language_module.py:244",
    ),
    Change(
        'Tensor.type() of a CPU tensor says "torch.cuda.*"',
        "optimizers know parameters by that name: optimizer/optimizer.py:671, optimizer/clip_grads.py:167, "
        "optimizer/distrib_optimizer.py:361,420,582",
    ),
    Change(
        "tensor_parallel.random reads and sets no CUDA generator",
        "recomputed layers restore its state, which dropout 0 never changes: tensor_parallel/random.py:55,457",
    ),
    Change(
        "torch.cuda.synchronize() returns at once",
        "saving waits for copies from the GPU: dist_checkpointing/strategies/filesystem_async.py:230",
    ),
    Change(
        "MoEAlltoAllTokenDispatcher takes its counts from CPU tensors, without a CUDA stream",
        "it makes a stream and copies the counts on it: transformer/moe/token_dispatcher.py:445,871,874",
    ),
)
_DEVICE, _LITERAL, _CUDA, _TYPE, _RNG, _WAIT, _ALLTOALL = CHANGES

_loaded = False
_active = False


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of megatron-core's own modules: on absent libraries, on old arguments, on memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.core")
        yield


def load() -> None:
    """Import megatron-core, without the warnings that it gives where Transformer Engine and Apex are absent.

    While it is imported TORCHDYNAMO_DISABLE=1 is set: its fused functions are decorated with ``torch.compile``, which
    would import the compiler (seconds), and compile at the first call. So they stay plain Python in this process,
    whatever the variable is later. A process that imports megatron-core in another way wants the variable itself.

    Raises:
        ConfigError: megatron-core, or what it needs to save, is not installed, or is another version than `VERSION`.
    """
    global _loaded
    if _loaded:
        return
    wanted = {"TORCHDYNAMO_DISABLE": "1"}
    if "setuptools" not in sys.modules and {"pip", "distutils"} & sys.modules.keys():
        # Megatron imports setuptools, which refuses to replace distutils once one of these was imported
        wanted["SETUPTOOLS_USE_DISTUTILS"] = "stdlib"
    with quiet(), ExitStack() as stack:
        warnings.filterwarnings("ignore", "(The|Reliance on) distutils|Setuptools is replacing distutils")
        for name, value in wanted.items():
            stack.callback(_restore, name, os.environ.get(name))
            os.environ[name] = value
        check_installed(_version(), psutil=find_spec("psutil") is not None)
        import megatron.core.distributed
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel.schedules  # noqa: F401 - for what importing it says
    _loaded = True


def check_installed(version: str | None, *, psutil: bool) -> None:
    """Refuse what this was not written for.

    Args:
        version: of megatron-core; None where it is not installed.
        psutil: whether it is there: megatron-core 0.16.1 does not declare it, and a save waits for ever without.

    Raises:
        ConfigError: in one line that names the cure.
    """
    fix = "pip install 'repro-harness[megatron]'"
    if version is None or not psutil:
        raise ConfigError(f"policy megatron needs {'megatron-core' if version is None else 'psutil'}: {fix}")
    if version != VERSION:
        raise ConfigError(f"policy megatron is written for megatron-core {VERSION}, not {version}: {fix}")


def _version() -> str | None:
    try:
        from megatron.core import __version__
    except ImportError:
        return None
    return str(__version__)


@contextmanager
def without_cuda(*, cuda: bool | None = None, leave_out: Collection[Change] = ()) -> Iterator[None]:
    """Let megatron-core run on the CPU inside the block; everything is as it was after it, however it ends.

    Args:
        cuda: whether this machine has CUDA; None asks torch.
        leave_out: changes that are not made, for the test that each is needed.

    Raises:
        RuntimeError: CUDA is there, or another block is active (in this process: the changes are global).
    """
    global _active
    if torch.cuda.is_available() if cuda is None else cuda:
        raise RuntimeError("this machine has CUDA: megatron-core runs on it as it is, so nothing may be changed")
    if _active:
        raise RuntimeError("without_cuda is already active in this process: leave that block first")
    load()
    changes = [change for change in CHANGES if change not in leave_out]
    _active = True
    try:
        with quiet(), ExitStack() as stack:
            for change in changes:
                if change in _REPLACED:
                    for holder, name, value in _REPLACED[change]():
                        stack.enter_context(_replaced(holder, name, value))
            stack.enter_context(_OnCpu(changes))
            yield
    finally:
        _active = False


class _OnCpu(TorchFunctionMode):
    """The changes that concern single calls of torch."""

    def __init__(self, changes: Sequence[Change]) -> None:
        super().__init__()
        self.literal, self.cuda, self.type = (change in changes for change in (_LITERAL, _CUDA, _TYPE))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        device = given.get("device")
        if self.literal and device is not None and torch.device(device).type == "cuda":
            given["device"] = torch.device("cpu")
        if self.cuda and func is torch.Tensor.cuda:
            return args[0]
        out = func(*args, **given)
        if self.type and func is torch.Tensor.type and len(args) == 1 and not given:
            return out.replace("torch.", "torch.cuda.")
        return out


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute that the holder itself has, replaced for the block."""
    before = vars(holder)[name]
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def _current_device() -> list[tuple[Any, str, Any]]:
    return [(torch.cuda, "current_device", lambda: torch.device("cpu"))]


def _synchronize() -> list[tuple[Any, str, Any]]:
    return [(torch.cuda, "synchronize", lambda _device=None: None)]


def _generators() -> list[tuple[Any, str, Any]]:
    from megatron.core.tensor_parallel import random

    def read(*_args: Any, **_kwargs: Any) -> None:
        return None

    return [(random, "_get_cuda_rng_state", read), (random, "_set_cuda_rng_state", read)]


def _dispatcher() -> list[tuple[Any, str, Any]]:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def counts(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                split = getattr(self, name)
                if torch.is_tensor(split):
                    setattr(self, name, split.numpy())
        return tokens_per_expert

    # Anything but None keeps the dispatcher from making a stream.
    return [
        (MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", "none"),
        (MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", counts),
    ]


_REPLACED = {_DEVICE: _current_device, _RNG: _generators, _WAIT: _synchronize, _ALLTOALL: _dispatcher}
