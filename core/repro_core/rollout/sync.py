"""The way of weights from the trainer to a rollout engine, shown to an observer from both sides.

What is shown is what the trainer has and what the engine holds, never what went over the wire: so nothing on the way
can be wrong on both sides. An observer costs a reading of all of the engine's weights; without one nothing is read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from repro_core.config import TrainConfig
from repro_core.engines.interface import Engines
from repro_core.engines.torch_engine import DTYPES
from repro_core.model.decoder import Policy
from repro_core.model.hf import read_tensors, save_hf
from repro_core.model.hf_config import read_config
from repro_core.rollout.engine import EngineError, HeldWeights, RolloutEngine
from repro_core.rollout.scratch import scratch_folder

__all__ = ["SyncObserver", "WeightSync", "from_lead", "show_start"]

_T = TypeVar("_T")
_FAILED = "the process that talks to the rollout engine failed: its log says why"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class SyncObserver(Protocol):
    """Sees every weight sync. Each process calls `begin` and `end` of its own, alike."""

    def alone(self) -> None:
        """From here on this process syncs by itself: others of its program take no part."""

    def begin(self, version: str, how: str) -> None:
        """A sync begins: ``start`` (what the engine read itself, against the checkpoint), ``tensor`` or ``disk``."""

    def sent(self, tensors: Mapping[str, Tensor], placements: Mapping[str, Any] | None) -> None:
        """What this process has of the weights, in the engine's dtype; unchanged until `end`. Called once or more.

        Placements (see `repro_core.Observe`) are by key; None where the tensors are whole, under canonical names.
        """

    def received(self, held: HeldWeights) -> None:
        """What one process of the engine holds; on the lead alone."""

    def end(self, seconds: float) -> None:
        """The sync is over, after so many seconds; raises on every process where weights did not arrive."""


class WeightSync:
    """Brings the trained policy's weights to an engine that has its own. All processes make one and call it alike.

    Args:
        config: of the run; ``sglang.sync`` says how, and `dtype` in which dtype.
        engines: the trainer's models.
        engine: on the lead; None on the others.
        observer: sees both sides of every sync.
        scratch: where checkpoints are written that are brought by disk, each removed once it was read; by default
            ``sglang.folder``, or a temporary one. The engine must see the same path.
    """

    def __init__(
        self,
        config: TrainConfig,
        engines: Engines,
        engine: RolloutEngine | None,
        observer: SyncObserver | None,
        scratch: str | None = None,
    ) -> None:
        self.config, self.engines, self.engine, self.observer = config, engines, engine, observer
        self.scratch = config.sglang.folder if scratch is None else scratch
        self._dtype = DTYPES[config.dtype]

    def bring(self, version: str) -> None:
        """Give the engine the present weights as `version`.

        Raises:
            EngineError: on every process: it refused them, or says that it has other ones.
            repro_core.model.layout_free.LayoutError: replicas of the trainer's weights differ; on the lead, and an
                EngineError on the others.
        """
        how = self.config.sglang.sync
        if self.observer is not None:
            self.observer.begin(version, how)
        began = time.perf_counter()
        weights = self._weights()
        from_lead(self.engines, lambda: self._bring(weights, version, how), last=lambda: _exhaust(weights))
        seconds = time.perf_counter() - began
        if self.observer is not None:
            self.observer.sent(*self._mine())
            _show_held(self.engines, self.engine, self.observer)
            self.observer.end(seconds)

    def _mine(self) -> tuple[Mapping[str, Tensor], Mapping[str, Any] | None]:
        tensors, placements = self.engines.policy.weights()
        return {name: tensor.to(self._dtype) for name, tensor in tensors.items()}, placements

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        model = self.engines.model
        for name, tensor in self.engines.whole_weights():
            # Not every tensor of a trainer is contiguous, and what shares storage sends its bytes as they lie.
            sent = tensor.to(self._dtype).contiguous()
            yield name, sent
            if name == _EMBEDDING and model.tie_word_embeddings and model.has_experts:
                yield _HEAD, sent  # SGLang's class for experts has a matrix of its own even where they are tied

    def _bring(self, weights: Iterable[tuple[str, Tensor]], version: str, how: str) -> None:
        engine = _here(self.engine)
        if how == "tensor":
            engine.update(weights, version)
        else:
            with contextlib.ExitStack() as stack:
                try:
                    folder = stack.enter_context(scratch_folder("weights", self.scratch))
                    folder.chmod(0o755)  # a server may run as another user
                    save_hf(_policy_of(self.engines, weights), folder)
                except OSError as error:
                    raise EngineError(
                        f"cannot write weights to {self.scratch or 'a temporary folder'} ({error.strerror or error}): "
                        "set sglang.folder to another one"
                    ) from error
                engine.update_from_disk(str(folder), version)
        if engine.weight_version != version:
            raise EngineError(
                f"the engine took weights {version!r} and says that it has {engine.weight_version!r}: start it anew"
            )


def show_start(
    observer: SyncObserver | None,
    engine: RolloutEngine | None,
    checkpoint: str | None,
    config: TrainConfig,
    engines: Engines | None = None,
) -> None:
    """Show an observer a checkpoint on disk and what an engine has read of it. Without one nothing happens.

    Args:
        observer: who is shown it.
        engine: on the lead; None on the others.
        checkpoint: on the lead, the directory that the engine was started from; None on the others.
        config: of the run: `dtype` is what the engine was asked to load the tensors in.
        engines: the trainer's models, all of whose processes call this; None where one process calls it alone.

    Raises:
        HfError: the checkpoint cannot be read.
        EngineError: the engine cannot be read.
    """
    if observer is None:
        return
    if engines is None:
        observer.alone()

    def show() -> None:
        tensors = _on_disk(Path(checkpoint or ""))
        observer.sent({name: tensor.to(DTYPES[config.dtype]) for name, tensor in tensors.items()}, None)

    version = from_lead(engines, lambda: _here(engine).weight_version)
    observer.begin(version, "start")
    from_lead(engines, show)
    _show_held(engines, engine, observer)
    observer.end(0.0)


def _show_held(engines: Engines | None, engine: RolloutEngine | None, observer: SyncObserver) -> None:
    def show() -> None:
        for held in _here(engine).held():
            observer.received(held)

    from_lead(engines, show)


def from_lead(engines: Engines | None, make: Callable[[], _T], last: Callable[[], None] = lambda: None) -> _T:
    """What the lead makes, on every process; `last` is called on each, whatever became of it.

    Raises:
        EngineError: on the others, where the lead fails with anything; the lead keeps its own error.
    """
    value: _T | None = None
    failure: str | None = _FAILED
    if engines is None or engines.lead:
        try:
            value, failure = make(), None
        except (ValueError, OSError) as error:
            failure = str(error)
            raise
        finally:  # the others wait in here, also where it fails in a way that nobody expected
            try:
                last()
            except BaseException:
                value, failure = None, failure or _FAILED
                raise
            finally:
                if engines is not None:
                    engines.tell((value, failure))
        return value
    last()
    value, failure = engines.tell((value, failure))
    if failure is not None:
        raise EngineError(failure)
    return value  # type: ignore[return-value]  # None only where the lead made None


def _exhaust(iterator: Iterator[Any]) -> None:
    for _ in iterator:
        pass


def _here(engine: RolloutEngine | None) -> RolloutEngine:
    assert engine is not None, "the lead has the engine"
    return engine


def _policy_of(engines: Engines, weights: Iterable[tuple[str, Tensor]]) -> Policy:
    """A policy of these tensors themselves, without a copy."""
    tensors, model = dict(weights), engines.model
    if model.tie_word_embeddings and _HEAD in tensors:  # an engine that has a head of its own must find it in the file
        tensors[_HEAD] = tensors[_HEAD].clone()
        model = replace(model, tie_word_embeddings=False)
    elif model.tie_word_embeddings:
        tensors[_HEAD] = tensors[_EMBEDDING]
    with torch.device("meta"):
        policy = Policy(model)
    policy.load_state_dict(tensors, assign=True)
    return policy


def _on_disk(checkpoint: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint as its files name them: nothing that maps names is between.

    Raises:
        HfError: it cannot be read.
    """
    tied = read_config(checkpoint).tie_word_embeddings
    return {name: tensor for name, tensor in read_tensors(checkpoint).items() if not (tied and name == _HEAD)}
