"""The states of a process's random number generators."""

from __future__ import annotations

import array
import contextlib
import functools
import random
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from repro_golden.recording.attach.base.guard import stand_in

__all__ = ["SEEDED", "states", "watch"]

SEEDED = "_repro_seeded"
"""Of `sys`: the generators that the program has seeded, as `site` saw. Any other starts elsewhere in every run."""


_by_chance: set[int] = set()
"""Seeds of torch's generator that nobody chose: that of the start of the process, and what `torch.seed` drew."""


def watch() -> None:
    """Note it when the program seeds torch's generators, which start from chance; `site` does so for the others."""
    known: set[str] = sys.__dict__.setdefault(SEEDED, set())
    _by_chance.add(torch.initial_seed())
    stand_in((torch.random, torch), "seed", lambda seed: _telling(seed, lambda out, *_: _by_chance.add(out)))
    for name, owners in (("torch", (torch.random, torch)), ("torch.cuda", (torch.cuda.random, torch.cuda))):
        for function in ("manual_seed", "manual_seed_all"):  # states are also set back, by activation checkpointing
            stand_in(owners, function, functools.partial(_noting, known=known, name=name))
        _watch_states(owners, known, name)


def _watch_states(owners: Sequence[Any], known: set[str], name: str) -> None:
    """Note it when the program sets a state: a checkpoint's. One that it asked for before is only set back.

    Activation checkpointing and torch.compile set states back, which are another in every run as long as nothing seeded
    them.
    """
    chance: set[int] = set()

    def asked(states: Any) -> None:
        if name not in known:
            chance.update(map(_hash, states if isinstance(states, list) else [states]))

    def put(states: Any) -> None:
        if name not in known and not chance.issuperset(
            map(_hash, states if isinstance(states, (list, tuple)) else [states])
        ):
            known.add(name)

    for suffix in ("", "_all"):
        stand_in(owners, f"get_rng_state{suffix}", lambda get: _telling(get, lambda out, *_: asked(out)))
        stand_in(owners, f"set_rng_state{suffix}", lambda set_: _telling(set_, lambda _, states, *__: put(states)))


def _hash(state: torch.Tensor) -> int:
    return hash(state.cpu().numpy().tobytes())


def _telling(function: Callable[..., Any], listener: Callable[..., None]) -> Callable[..., Any]:
    """The function, whose result and arguments a listener hears."""

    @torch._disable_dynamo  # type: ignore[attr-defined]
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        with contextlib.suppress(Exception):  # a state that is none, as under a compiler's fake tensors
            listener(out, *args, *kwargs.values())
        return out

    return call


def _noting(set_: Callable[..., Any], known: set[str], name: str) -> Callable[..., Any]:
    @functools.wraps(set_)
    def call(*args: Any, **kwargs: Any) -> Any:
        known.add(name)
        return set_(*args, **kwargs)

    return call


def states(*, seeded: bool = False) -> dict[str, torch.Tensor]:
    """The state of each generator as bytes: torch's, those of the GPUs in use, Python's and NumPy's.

    Args:
        seeded: Leave out those that the program has not been seen to seed.
    """
    known: set[str] = getattr(sys, SEEDED, set())
    if (
        _by_chance and torch.initial_seed() not in _by_chance
    ):  # by `torch.default_generator.manual_seed`, which nobody can watch
        known.add("torch")
    snapshot = {} if seeded and "torch" not in known else {"torch": torch.get_rng_state()}
    gpus = not seeded or {"torch", "torch.cuda"} & set(known)
    if gpus and torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        snapshot |= {f"cuda:{k}": device for k, device in enumerate(torch.cuda.get_rng_state_all())}
    if not seeded or "random" in known:
        version, vector, normal = random.getstate()
        left = b"" if normal is None else struct.pack("<d", normal)
        snapshot["random"] = _bytes(struct.pack("<q", version) + array.array("Q", vector).tobytes() + left)
    if "numpy" in sys.modules and (not seeded or "numpy.random" in known):
        state = sys.modules["numpy"].random.get_state(legacy=False)
        snapshot["numpy"] = _bytes(_of_numpy(**state) if state["bit_generator"] == "MT19937" else repr(state).encode())
    return snapshot


def _of_numpy(bit_generator: str, state: Mapping[str, Any], has_gauss: int, gauss: float) -> bytes:
    """The state of NumPy's own generator."""
    rest = [float(part) for part in (state["pos"], has_gauss, gauss)]
    return bit_generator.encode() + bytes(state["key"].tobytes()) + repr(rest).encode()


def _bytes(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
