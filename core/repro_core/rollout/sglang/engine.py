"""SGLang in this process: `sglang.Engine`, kept from taking the process down with it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from repro_core.config import ModelConfig, SglangConfig
from repro_core.model.hf_config import read_config
from repro_core.rollout.engine import EngineError, HeldWeights, Response, Sampling
from repro_core.rollout.sglang.client import Asked, responses
from repro_core.rollout.sglang.flags import (
    EXPORT,
    default_device,
    engine_seeds,
    environment,
    installed_version,
    request,
    server_arguments,
    told_flags,
)
from repro_core.rollout.sglang.held import export_order, no_memory, read_held
from repro_core.rollout.sglang.host import Host
from repro_core.rollout.sglang.stand_ins import make_importable, stand_ins

__all__ = ["SglangEngine"]

_T = TypeVar("_T")


class SglangEngine:
    """`sglang.Engine`, with its scheduler and detokenizer as children of this process.

    It must be made and used in the main thread, and the program that makes it needs ``if __name__ == "__main__"``:
    its children import the main module again.

    Args:
        config: how it samples; `SglangConfig.url` is None.
        checkpoint: directory in Hugging Face's form that it loads; a tokenizer is not needed.
        dtype: ``fp32`` or ``bf16``.
        device: ``cpu`` or ``cuda``; None is a GPU where there is one.
        log: file that its processes write to; None makes one among temporary files, kept only where an error named it.

    Attributes:
        weight_version: of the last weights that it took; SGLang's ``default`` at the start.
        separate: True.
        model: that the checkpoint holds.
        log: its processes' output.

    Raises:
        EngineError: SGLang is missing or of an unsupported version, refuses an argument, or does not start.
        repro_core.model.hf.HfError: the checkpoint's config cannot be read.
    """

    separate = True

    def __init__(
        self,
        config: SglangConfig,
        checkpoint: str | os.PathLike[str],
        dtype: str,
        *,
        device: str | None = None,
        log: Path | None = None,
    ) -> None:
        self.config, self.device = config, device or default_device()
        self.model: ModelConfig = read_config(Path(checkpoint))
        self.version = installed_version(self.device)
        arguments = server_arguments(config, self.model, checkpoint, dtype, self.device)
        make_importable(self.device)
        self._host = Host(arguments, environment(self.device), config.timeout, log)
        self.log = self._host.log
        self._released = False
        info = self._call("answer what it serves", self._host.engine.tokenizer_manager.get_internal_state)
        self._flags = told_flags({**self._host.arguments(), **(info[0] if info else {})})
        self.weight_version = str(self._host.arguments().get("weight_version", "default"))

    def identity(self) -> dict[str, Any]:
        """See `engine.RolloutEngine.identity`."""
        return {
            "name": "sglang",
            "version": self.version,
            "device": self.device,
            "flags": self._flags,
            "stand_ins": stand_ins(self.device),
        }

    def seeds(self, seeds: Sequence[int]) -> list[int]:
        """See `engine.RolloutEngine.seeds`."""
        return engine_seeds(seeds)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None
    ) -> list[Response]:
        """See `engine.RolloutEngine.generate`. In deterministic mode, rows without seeds all draw from SGLang's own."""
        body = request(prompts, sampling, seeds, self.config.enable_deterministic_inference)
        if not prompts:
            return []
        answers = self._call("sample", lambda: self._host.engine.async_generate(**body))
        with self._host.named() as where:
            return responses(answers, Asked(prompts, sampling, self.weight_version, self.model, where))

    def update(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> None:
        """See `engine.RolloutEngine.update`."""
        self._in_update(list(tensors), load_format=None, flush_cache=True, weight_version=version)
        self.weight_version = version

    def update_from_disk(self, directory: str, version: str) -> None:
        """See `engine.RolloutEngine.update_from_disk`."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        manager = self._host.engine.tokenizer_manager
        asked = UpdateWeightFromDiskReqInput(model_path=directory, weight_version=version)
        self._agreed("take weights from disk", lambda: manager.update_weights_from_disk(asked, None))
        self.weight_version = version

    def held(self) -> list[HeldWeights]:
        """See `engine.RolloutEngine.held`."""
        if self._released:
            raise EngineError("SGLang's memory is released, so it holds no weights: resume it first")

        def export(folder: Path) -> None:
            self._in_update(export_order(folder), load_format=EXPORT, flush_cache=False)

        with self._host.named() as where:
            return read_held(export, self.model, where, folder=self.config.folder)

    def flush_cache(self) -> None:
        """See `engine.RolloutEngine.flush_cache`."""
        answer = self._call("flush its cache", self._host.engine.tokenizer_manager.flush_cache)
        if not answer.success:
            raise self._refused("flush its cache", getattr(answer, "message", ""))

    def release_memory(self) -> None:
        """See `engine.RolloutEngine.release_memory`."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        manager = self._host.engine.tokenizer_manager
        asked = ReleaseMemoryOccupationReqInput()
        self._call("release its memory", lambda: manager.release_memory_occupation(asked, None))
        self._released = True

    def resume_memory(self) -> None:
        """See `engine.RolloutEngine.resume_memory`. With ``enable_memory_saver`` the weights were not kept."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        manager = self._host.engine.tokenizer_manager
        asked = ResumeMemoryOccupationReqInput()
        self._call("resume its memory", lambda: manager.resume_memory_occupation(asked, None))
        self._released = False

    def close(self) -> None:
        """See `engine.RolloutEngine.close`. Nothing else of this process's children is touched."""
        self._host.close()

    def _in_update(self, tensors: list[tuple[str, Tensor]], **fields: Any) -> None:
        """One update by tensor, inside of the session that later versions ask for."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        engine = self._host.engine
        named_tensors = [(name, tensor.detach()) for name, tensor in tensors]
        if self.device == "cpu":
            named_tensors = [(name, tensor.cpu()) for name, tensor in named_tensors]
        # One for each rank: the memory behind it is freed when that rank has read its own.
        try:
            payloads = [MultiprocessingSerializer.serialize(named_tensors) for _ in range(self.config.tp_size)]
        except RuntimeError as error:
            raise EngineError(no_memory(error)) from error
        asked = UpdateWeightsFromTensorReqInput(serialized_named_tensors=payloads, **fields)
        sessions = hasattr(engine, "begin_weight_update")
        if sessions:
            from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

            begin, end = BeginWeightUpdateReqInput(), EndWeightUpdateReqInput()
            self._agreed("begin a weight update", lambda: engine.tokenizer_manager.begin_weight_update(begin, None))
        what = "show its weights" if fields["load_format"] == EXPORT else "take weights by tensor"
        try:
            self._agreed(what, lambda: engine.tokenizer_manager.update_weights_from_tensor(asked, None))
        except EngineError:
            # The first error says why.
            with contextlib.suppress(EngineError):
                if sessions and self._host.alive():
                    self._agreed("end a weight update", lambda: engine.tokenizer_manager.end_weight_update(end, None))
            raise
        if sessions:
            self._agreed("end a weight update", lambda: engine.tokenizer_manager.end_weight_update(end, None))

    def _agreed(self, what: str, ask: Callable[[], Awaitable[Any]]) -> None:
        """Ask for what SGLang answers with (success, message, ...): it refuses without raising."""
        answer = self._call(what, ask)
        success, message = (answer[0], answer[1]) if isinstance(answer, tuple) else (answer.success, answer.message)
        if not success:
            raise self._refused(what, str(message))

    def _refused(self, what: str, message: str) -> EngineError:
        return self._host.failure(f"SGLang refuses to {what}: {' '.join(message.split()) or 'it says no more'}")

    def _call(self, what: str, ask: Callable[[], Awaitable[_T]]) -> _T:
        return self._host.call(what, ask)
