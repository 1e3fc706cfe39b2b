"""SGLang at an address: a server, or a router with servers behind it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from repro_core.config import ModelConfig, SglangConfig
from repro_core.rollout.engine import EngineError, HeldWeights, Response, Sampling
from repro_core.rollout.sglang.client import Asked, Client, check_address, is_here, responses
from repro_core.rollout.sglang.flags import DTYPES, EXPORT, check_version, engine_seeds, request, told_flags
from repro_core.rollout.sglang.held import no_memory, packed_order, read_held
from repro_core.rollout.sglang.host import output_to

__all__ = ["SglangServer"]

_SHARE = "set sglang.folder to a folder that both see"
_FIRST = "default"  # what SGLang calls the weights that it started with


class SglangServer:
    """A server of SGLang that runs already, or a router: it samples through the address, and weights go to each server.

    Args:
        config: with the address.
        model: that the server is to serve.
        dtype: ``fp32`` or ``bf16``, which it must have.
        log: file that the server writes to, for messages, where the caller knows it.

    Attributes:
        weight_version: of the last weights that it took, or that it started with.
        checkpoint: the folder that it read its weights from, where it has those still and the folder is seen here; else
            None.
        separate: True.

    Raises:
        EngineError: nobody answers, it is no SGLang or of an unsupported version, or the servers of a router differ.
    """

    separate = True

    def __init__(self, config: SglangConfig, model: ModelConfig, dtype: str, *, log: Path | None = None) -> None:
        assert config.url is not None
        self.config, self.model = config, model
        note = f" (log {log})" if log else ""
        self._front = Client(check_address(config.url), config.timeout, note)
        self._workers = [Client(address, config.timeout, note) for address in self._front.workers()]
        infos = [worker.get("/server_info") for worker in self._workers]
        self.device = str(infos[0].get("device"))
        for worker, info in zip(self._workers, infos, strict=True):
            check_version(str(info.get("version")), f"SGLang at {worker.url}", self.device)
            _check_alike(self._workers[0].url, infos[0], worker.url, info, DTYPES[dtype])
        self.version, self._flags, self._server = str(infos[0]["version"]), told_flags(infos[0]), infos[0]
        serves = {worker.url: worker.get("/model_info") for worker in self._workers}
        self.weight_version = _one_version(self._front.url, serves)
        self.checkpoint = _read_at_start(serves)
        self._released = False
        self._scaled = False

    def identity(self) -> dict[str, Any]:
        """See `engine.RolloutEngine.identity`.

        Of stand-ins, the one alone is known without which a server on a CPU has no deterministic mode.
        """
        ours = self.device == "cpu" and bool(self._server.get("enable_deterministic_inference"))
        return {
            "name": "sglang",
            "version": self.version,
            "device": self.device,
            "flags": {**self._flags, "servers": len(self._workers)},
            "stand_ins": ["repro_sglang_cpu"] if ours else [],
        }

    def seeds(self, seeds: Sequence[int]) -> list[int]:
        """See `engine.RolloutEngine.seeds`."""
        return engine_seeds(seeds)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None
    ) -> list[Response]:
        """See `engine.RolloutEngine.generate`. In deterministic mode, rows without seeds all draw from SGLang's own."""
        deterministic = bool(self._server.get("enable_deterministic_inference"))
        body = request(prompts, sampling, seeds, deterministic)
        if not prompts:
            return []
        if sampling.temperature not in (0.0, 1.0) and not self._scaled:
            self._check_scaled(list(prompts[0]))
        answers = self._front.post("/generate", body, "sample")
        where = f"SGLang at {self._front.url}"
        return responses(answers, Asked(prompts, sampling, self.weight_version, self.model, where))

    def update(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> None:
        """See `engine.RolloutEngine.update`. Tensors go through memory, so the servers must be on this machine."""
        for worker in self._workers:
            if not is_here(worker.url):
                raise EngineError(
                    f"SGLang at {worker.url} is on another machine, where tensors in memory do not reach: set "
                    'sglang.sync to "disk" and sglang.folder to a folder that both see'
                )
        named_tensors = [(name, tensor.detach()) for name, tensor in tensors]
        if self.device == "cpu":
            named_tensors = [(name, tensor.cpu()) for name, tensor in named_tensors]
        for worker in self._workers:
            # One for each rank: the memory behind it is freed when that rank has read its own.
            payloads = [_packed(named_tensors) for _ in range(self._ranks)]
            self._send(worker, payloads, {"weight_version": version, "flush_cache": True}, "take weights by tensor")
        self.weight_version = version

    def update_from_disk(self, directory: str, version: str) -> None:
        """See `engine.RolloutEngine.update_from_disk`."""
        for worker in self._workers:
            body = {"model_path": directory, "weight_version": version}
            try:
                worker.agreed("/update_weights_from_disk", body, "take weights from disk")
            except EngineError as error:
                if self.config.folder is None and not is_here(worker.url):
                    raise EngineError(f"{error}: it is on another machine, so {_SHARE}") from error
                raise
        self.weight_version = version

    def held(self) -> list[HeldWeights]:
        """See `engine.RolloutEngine.held`."""
        if self._released:
            raise EngineError("SGLang's memory is released, so it holds no weights: resume it first")
        if EXPORT not in (self._server.get("custom_weight_loader") or []):
            raise EngineError(
                f"SGLang at {self._workers[0].url} cannot say what it holds: start it with --custom-weight-loader "
                f"{EXPORT}, and with repro_core on its PYTHONPATH"
            )

        def export(worker: Client, folder: Path) -> None:
            body = {"load_format": EXPORT, "flush_cache": False}
            self._send(worker, [packed_order(folder)] * self._ranks, body, "show its weights")

        held: list[HeldWeights] = []
        for worker in self._workers:
            where, folder = f"SGLang at {worker.url}", self.config.folder
            if folder is None and not is_here(worker.url):
                raise EngineError(f"{where} is on another machine, so to read its weights back {_SHARE}")
            held += read_held(partial(export, worker), self.model, where, folder=folder, server=True)
        return held

    def flush_cache(self) -> None:
        """See `engine.RolloutEngine.flush_cache`."""
        for worker in self._workers:
            worker.post("/flush_cache", None, "flush its cache")

    def release_memory(self) -> None:
        """See `engine.RolloutEngine.release_memory`."""
        for worker in self._workers:
            worker.post("/release_memory_occupation", {}, "release its memory")
        self._released = True

    def resume_memory(self) -> None:
        """See `engine.RolloutEngine.resume_memory`. With ``enable_memory_saver`` the weights were not kept."""
        for worker in self._workers:
            worker.post("/resume_memory_occupation", {}, "resume its memory")
        self._released = False

    def close(self) -> None:
        """Let go of the connections. The servers are somebody else's and go on."""
        for client in [self._front, *self._workers]:
            client.close()

    @property
    def _ranks(self) -> int:
        return int(self._server.get("tp_size") or 1)

    def _send(self, worker: Client, payloads: list[str], fields: Mapping[str, Any], what: str) -> None:
        """One update by tensor of one server, inside of the session that later versions ask for."""
        body = {"serialized_named_tensors": payloads, **fields}
        session = worker.agreed("/begin_weight_update", {}, "begin a weight update", absent=True)
        try:
            worker.agreed("/update_weights_from_tensor", body, what)
        except EngineError:
            if session:
                # The first error says why; a server that died cannot end what it began.
                with contextlib.suppress(EngineError):
                    worker.agreed("/end_weight_update", {}, "end a weight update")
            raise
        if session:
            worker.agreed("/end_weight_update", {}, "end a weight update")

    def _check_scaled(self, prompt: list[int]) -> None:
        """Whether log-probs are those at the sampling temperature: the two best of one token tell.

        Raises:
            EngineError: they are those at temperature 1 (SGLANG_RETURN_ORIGINAL_LOGPROB is set there).
        """
        gaps = [self._gap(prompt, temperature) for temperature in (1.0, 0.5)]
        if gaps[0] > 0 and abs(gaps[1] - gaps[0]) < abs(gaps[1] - 2 * gaps[0]):
            raise EngineError(
                f"SGLang at {self._front.url} gives log-probs at temperature 1 whatever it samples at: start it "
                "without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )
        self._scaled = True

    def _gap(self, prompt: list[int], temperature: float) -> float:
        """How far the two most probable next tokens are apart, as the server tells it."""
        sampling = {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True, "sampling_seed": 0}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
        answer = self._front.post("/generate", body, "sample")
        try:
            best, second = answer["meta_info"]["output_top_logprobs"][0]
            return float(best[0]) - float(second[0])
        except (KeyError, TypeError, ValueError, IndexError):
            raise EngineError(
                f"SGLang at {self._front.url} does not give the log-probs of the two best tokens"
            ) from None


def _one_version(url: str, serves: Mapping[str, Mapping[str, Any]]) -> str:
    """The version of the weights that all servers have."""
    versions = {address: str(info.get("weight_version")) for address, info in serves.items()}
    if len(set(versions.values())) > 1:
        listed = ", ".join(f"{address} has {version!r}" for address, version in versions.items())
        raise EngineError(f"the servers behind {url} have weights of several versions: {listed}")
    return next(iter(versions.values()))


def _read_at_start(serves: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The checkpoint that all servers have read and still have, where it is a folder of this machine."""
    paths = {str(info.get("model_path")) for info in serves.values()}
    path = min(paths)
    first = all(info.get("weight_version") == _FIRST and is_here(url) for url, info in serves.items())
    readable = Path(path).is_absolute() and os.access(Path(path) / "config.json", os.R_OK)
    return path if first and len(paths) == 1 and readable else None


def _check_alike(first: str, wanted: Mapping[str, Any], url: str, info: Mapping[str, Any], dtype: str) -> None:
    if info.get("dtype") in ("auto", None):
        raise EngineError(f"SGLang at {url} does not say which dtype it computes in: start it with --dtype {dtype}")
    if info["dtype"] != dtype:
        raise EngineError(f"SGLang at {url} computes in {info['dtype']}, not in {dtype}: start it with --dtype {dtype}")
    mine, other = told_flags(wanted), told_flags(info)
    for name in sorted(mine.keys() | other.keys()):
        if mine.get(name) != other.get(name):
            raise EngineError(f"{first} and {url} differ in {name}: {mine.get(name)!r} and {other.get(name)!r}")
    if info.get("version") != wanted.get("version"):
        raise EngineError(f"{first} and {url} differ in version: {wanted.get('version')} and {info.get('version')}")


def _packed(tensors: list[tuple[str, Tensor]]) -> str:
    """Tensors for ``/update_weights_from_tensor``: handles to shared memory."""
    import torch.multiprocessing as shared

    try:
        from sglang.srt.utils import MultiprocessingSerializer
    except ImportError as error:
        raise EngineError(
            f'sending tensors needs SGLang in this Python too ({error}): install it, or set sglang.sync to "disk"'
        ) from error

    before = shared.get_sharing_strategy()
    # The other way hands over open files, which only a child of this process can take: the server would die.
    shared.set_sharing_strategy("file_system")
    try:
        # It starts a process that lives as long as the server uses the memory: it must not hold this one's output.
        with output_to(Path(os.devnull)):
            return str(MultiprocessingSerializer.serialize(tensors, output_str=True))
    except RuntimeError as error:
        raise EngineError(no_memory(error)) from error
    finally:
        shared.set_sharing_strategy(before)
