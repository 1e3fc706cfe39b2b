"""The rollout engine: batched sampling with a KV cache, reproducible row by row."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from repro_core.model.decoder import KvCache, Policy
from repro_core.model.experts import routing_dtype
from repro_core.rollout.engine import Response

__all__ = ["sample", "sample_seeds"]


def sample_seeds(seed: int, rollout_id: int, count: int) -> list[int]:
    """Seeds of the samples of one rollout: 53 bits each, a function of (seed, rollout_id, index) alone."""
    return [int(random.Random(f"repro_core.sampler {seed} {rollout_id} {i}").random() * 2**53) for i in range(count)]


@torch.no_grad()
def sample(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    max_response_len: int,
    temperature: float,
    seeds: Sequence[int],
    eos_id: int | None,
    prompt_log_probs: bool = False,
) -> list[Response]:
    """Sample one response to each prompt.

    Token t of row r is drawn by inverse CDF: the first id whose cumulative probability (fp64, over ids in ascending
    order) exceeds uniform number t of row r, which comes from ``random.Random(seeds[r])``. So the randomness of a row
    does not depend on the other rows, on the response lengths, or on any global generator, and same inputs give the
    same tokens bit for bit. What remains of the batch is rounding: a matrix product may order its sums by the number
    of rows, so another batch can move a log-prob by some ULP, and a token where a uniform lies within that of a
    boundary.

    Args:
        policy: runs in eval mode without gradients, and is left in the mode it had.
        prompts: [rows] lists of ids, of any lengths of at least 1.
        max_response_len: most tokens of one response, the end of sequence included.
        temperature: log-probs are ``log_softmax(logits.float() / temperature)``; 0 takes the most probable token (the
            lowest id among equals), with log-probs at temperature 1.
        seeds: [rows] integers of at least 0 (see `sample_seeds`).
        eos_id: ends a row; its own log-prob is part of the response. None ends no row.
        prompt_log_probs: whether responses have them.

    Returns:
        [rows] responses, in the order of `prompts`.

    Raises:
        ValueError: arguments that do not fit together, or logits that are no distribution (NaN, +inf, all -inf).
    """
    _check(policy, prompts, max_response_len, temperature, seeds)
    if not prompts:
        return []
    device = policy.model.embed_tokens.weight.device
    uniforms = torch.tensor([_uniforms(seed, max_response_len) for seed in seeds], dtype=torch.float64, device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = int(lengths.max())
    # Any id serves as right padding: no real token sees it, and its cache slots are overwritten first. But which one it
    # is decides how many tokens an expert has beside the real ones, and so may decide bits.
    padding = 0 if eos_id is None else eos_id
    batch = torch.tensor([[*prompt, *[padding] * (longest - len(prompt))] for prompt in prompts], device=device)
    cache = KvCache.allocate(policy, len(prompts), longest + max_response_len)
    routes = _Routes(policy)
    was_training = policy.training
    policy.eval()
    try:
        positions = torch.arange(longest, device=device).expand(batch.shape)
        logits = policy(batch, positions, cache, chosen=routes.chosen)
        routes.end_pass()
        last = logits[torch.arange(len(prompts)), lengths - 1]
        of_prompts = [
            _prompt_log_probs(row, prompt, temperature) if prompt_log_probs else None
            for row, prompt in zip(logits, prompts, strict=True)
        ]
        tokens, log_probs = [], []
        open_rows = torch.ones(len(prompts), dtype=torch.bool, device=device)
        for step in range(max_response_len):
            chosen, chosen_log_probs = _draw(last, temperature, uniforms[:, step], open_rows)
            tokens.append(chosen)
            log_probs.append(chosen_log_probs)
            if eos_id is not None:
                open_rows = open_rows & (chosen != eos_id)
            if step + 1 == max_response_len or not bool(open_rows.any()):
                break
            # Finished rows go on (their tokens are cut below), so that the shapes of a row's sums do not depend on
            # when its neighbours end.
            last = policy(chosen[:, None], (lengths + step)[:, None], cache, chosen=routes.chosen)[:, 0]
            routes.end_pass()
    finally:
        policy.train(was_training)
    responses = [
        replace(_cut(row, row_log_probs, eos_id), prompt_log_probs=of_prompt)
        for row, row_log_probs, of_prompt in zip(
            torch.stack(tokens, dim=1).tolist(), torch.stack(log_probs, dim=1).tolist(), of_prompts, strict=True
        )
    ]
    if not policy.config.has_experts:
        return responses
    return [
        replace(response, routed_experts=routes.of_row(row, len(prompt), len(response.tokens)))
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]


class _Routes:
    """The experts of every forward pass of one `sample`, kept on the CPU in the dtype of the record.

    Attributes:
        chosen: to be handed to the policy; emptied by `end_pass`.
    """

    def __init__(self, policy: Policy) -> None:
        self.chosen: list[Tensor] = []
        self._dtype = routing_dtype(policy.config.num_experts)
        self._passes: list[Tensor] = []

    def end_pass(self) -> None:
        """Take over what one pass chose; nothing in a model without experts."""
        if self.chosen:
            self._passes.append(torch.stack(self.chosen, dim=2).to("cpu", self._dtype))
            self.chosen.clear()

    def of_row(self, row: int, prompt: int, response: int) -> Tensor:
        """[prompt + response, layers, top_k]: the prefill's part, one decoded token each, and 0 for the last token."""
        fed = [self._passes[0][row, :prompt], *(decoded[row] for decoded in self._passes[1:response])]
        return torch.cat([*fed, torch.zeros_like(fed[0][:1])])


def _draw(logits: Tensor, temperature: float, uniforms: Tensor, open_rows: Tensor) -> tuple[Tensor, Tensor]:
    """One token [rows] and its fp32 log-prob [rows] from logits [rows, vocab] and fp64 uniforms [rows] in [0, 1)."""
    log_probs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    total = cumulative[:, -1:]
    if bool((total.isnan().squeeze(1) & open_rows).any()):
        raise ValueError(
            "the policy's logits are not a distribution (NaN, +inf or all -inf): its weights have diverged"
        )
    if not temperature:
        chosen = log_probs.argmax(dim=-1, keepdim=True)
        return chosen.squeeze(1), log_probs.gather(1, chosen).squeeze(1)
    # The sum is 1 only up to rounding, so it scales the uniform; the target stays below it, so the id found has a
    # probability above 0.
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    chosen = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
    return chosen.squeeze(1), log_probs.gather(1, chosen).squeeze(1)


def _uniforms(seed: int, count: int) -> list[float]:
    """`count` numbers in [0, 1) with 53 bits. Python's generator keeps all bits of a seed; torch's keeps 32."""
    rng = random.Random(seed)
    return [rng.random() for _ in range(count)]


def _prompt_log_probs(logits: Tensor, prompt: Sequence[int], temperature: float) -> list[float]:
    """Those of a prompt's tokens from the second on, from logits [longest, vocab]."""
    log_probs = torch.log_softmax(logits[: len(prompt) - 1].float() / (temperature or 1.0), dim=-1)
    values: list[float] = log_probs.gather(1, torch.tensor(prompt[1:], device=logits.device)[:, None])[:, 0].tolist()
    return values


def _cut(tokens: list[int], log_probs: list[float], eos_id: int | None) -> Response:
    if eos_id is None or eos_id not in tokens:
        return Response(tokens, log_probs, "truncated")
    end = tokens.index(eos_id) + 1
    return Response(tokens[:end], log_probs[:end], "completed")


def _check(
    policy: Policy, prompts: Sequence[Sequence[int]], max_response_len: int, temperature: float, seeds: Sequence[int]
) -> None:
    longest = max(map(len, prompts), default=0)
    limit = policy.config.max_position_embeddings
    rules = [
        (max_response_len >= 1, f"max_response_len {max_response_len} must be at least 1"),
        (0.0 <= temperature < float("inf"), f"temperature {temperature} must be finite and not negative"),
        (len(seeds) == len(prompts), f"{len(prompts)} prompts need as many seeds, not {len(seeds)}"),
        (all(seed >= 0 for seed in seeds), "seeds must not be negative: Python's generator drops their sign"),
        (all(map(len, prompts)), "a prompt is empty: begin it with the bos token"),
        (
            longest + max_response_len <= limit,
            f"longest prompt {longest} + max_response_len {max_response_len} exceeds max_position_embeddings {limit}",
        ),
    ]
    for holds, message in rules:
        if not holds:
            raise ValueError(message)
