"""What the trainer asks of whatever samples its rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

__all__ = ["EngineError", "HeldWeights", "Response", "RolloutEngine", "Sampling", "Status"]

Status = Literal["completed", "truncated"]


class EngineError(ValueError):
    """A rollout engine that fails, refuses or answers nonsense, in one line with the cure.

    What it had sampled by then is discarded whole.
    """


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled.

    Attributes:
        max_response_len: most tokens of one response, the end of sequence included.
        temperature: log-probs are ``log_softmax(logits.float() / temperature)``; 0 takes the most probable token, and
            gives log-probs at temperature 1.
        eos_id: ends a response, and is part of it.
        ignore_eos: go on past it.
        prompt_log_probs: also give the log-probs of the prompts' own tokens.
        routed_experts: also give the experts of every token; the model must have some.
    """

    max_response_len: int
    temperature: float
    eos_id: int
    ignore_eos: bool = False
    prompt_log_probs: bool = False
    routed_experts: bool = False


@dataclass(frozen=True)
class Response:
    """One sampled response.

    Attributes:
        tokens: at least one id; ends with the end-of-sequence id if completed.
        log_probs: of each token at the sampling temperature, fp32 values.
        status: ``completed`` (the end of sequence was sampled) or ``truncated`` (the length ran out first).
        routed_experts: which experts each token of prompt and response went through, [tokens, layers, top_k] on the
            CPU, uint8 (int16 where a layer has more than 256 experts); None for a model without experts. The last
            token was never fed to the model: its row is 0. Left out of comparisons.
        prompt_log_probs: of the prompt's tokens from the second on, where asked for.
        weight_version: what the engine says its weights are; None where it does not say.
    """

    tokens: list[int]
    log_probs: list[float]
    status: Status
    routed_experts: Tensor | None = field(default=None, compare=False)
    prompt_log_probs: list[float] | None = None
    weight_version: str | None = None


@dataclass(frozen=True)
class HeldWeights:
    """What one process of an engine holds.

    Attributes:
        tensors: its parameters and buffers by the engine's own names, on the CPU; read-only.
        placements: which canonical tensors (Hugging Face's names) each parameter holds, as plain data (see
            `repro_core.Observe`), by the engine's own names. A tensor without one is the engine's own, such as a
            table of rotary embeddings.
    """

    tensors: Mapping[str, Tensor]
    placements: Mapping[str, Any]


class RolloutEngine(Protocol):
    """Samples responses. One request is in flight at a time.

    Attributes:
        weight_version: of the last weights that it took, such as ``"3"``.
        separate: whether it has weights of its own, which `update` must bring.
    """

    weight_version: str
    separate: bool

    def identity(self) -> dict[str, Any]:
        """What may decide its numbers, as JSON types: ``name``, ``version``, ``device``, ``flags``, ``stand_ins``."""

    def seeds(self, seeds: Sequence[int]) -> list[int]:
        """What the engine makes of seeds: the numbers that it really draws from."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None
    ) -> list[Response]:
        """One response to each prompt, in order.

        Args:
            prompts: [rows] lists of ids, of any lengths of at least 1.
            sampling: how.
            seeds: [rows] integers of at least 0; None leaves randomness to the engine.

        Raises:
            EngineError: it failed, or its answer does not hold together; nothing of the batch is kept.
        """

    def update(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> None:
        """Take weights by tensor: canonical names (Hugging Face's), whole, in the engine's dtype.

        Raises:
            EngineError: it refuses.
        """

    def update_from_disk(self, directory: str, version: str) -> None:
        """Take the weights of a checkpoint in Hugging Face's form, which it must be able to read at that path.

        Raises:
            EngineError: it refuses.
        """

    def held(self) -> list[HeldWeights]:
        """What it holds now, one entry for each of its processes.

        Raises:
            EngineError: it cannot be read, with what makes it readable.
        """

    def flush_cache(self) -> None:
        """Forget prefixes."""

    def release_memory(self) -> None:
        """Give back the memory of weights and cache."""

    def resume_memory(self) -> None:
        """Take it again. The weights must be brought again where the engine says that they were not kept."""

    def close(self) -> None:
        """End it, with every process that it started."""
