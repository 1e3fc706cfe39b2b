"""The policy and the critic: an embedding and a linear layer each, in float32, with sums in a fixed order."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
from foreign_trainer_parallel import Array, local_index, local_tokens, positions

VOCABULARY = 24
HIDDEN = 8
EPSILON = 1e-8


class Model:
    """Parameters by name, their gradients and Adam's state.

    Args:
        seed: draws the parameters.
        outputs: columns of the linear layer: the vocabulary, or 1 for a critic.
    """

    def __init__(self, seed: int, outputs: int = VOCABULARY) -> None:
        draw = np.random.RandomState(seed)
        self.params: dict[str, Array] = {
            "embedding.weight": draw.normal(0.0, 0.6, (VOCABULARY, HIDDEN)).astype(np.float32),
            "output_layer.weight": draw.normal(0.0, 0.6, (HIDDEN, outputs)).astype(np.float32),
        }
        self.grads: dict[str, Array] = {}
        self.exp_avg = {name: np.zeros_like(param) for name, param in self.params.items()}
        self.exp_avg_sq = {name: np.zeros_like(param) for name, param in self.params.items()}
        self.step = 0

    def zero_grad(self) -> None:
        """Start a step."""
        self.grads = {name: np.zeros_like(param) for name, param in self.params.items()}

    def forward(self, hidden: Array) -> Array:
        """The linear layer's output of each position."""
        weight = self.params["output_layer.weight"]
        out = np.zeros((len(hidden), weight.shape[1]), np.float32)
        for column in range(HIDDEN):
            out += hidden[:, column, None] * weight[column]
        return out

    def backward(self, tokens: Array, hidden: Array, grad: Array) -> None:
        """Add to the gradients what positions with these tokens and hidden states give."""
        self.grads["output_layer.weight"] += np.einsum("th,tv->hv", hidden, grad)
        np.add.at(
            self.grads["embedding.weight"], tokens, np.einsum("tv,hv->th", grad, self.params["output_layer.weight"])
        )

    def grad_norm(self) -> np.float32:
        """The norm over all gradients, before clipping."""
        return np.float32(np.sqrt(sum((np.sum(grad * grad) for grad in self.grads.values()), np.float32(0))))

    def update(self, args: argparse.Namespace, norm: np.float32) -> None:
        """One step of Adam on the clipped gradients."""
        self.step += 1
        scale = np.float32(min(1.0, args.clip_grad / (float(norm) + 1e-6)))
        first, second = np.float32(args.adam_beta1), np.float32(args.adam_beta2)
        rate = np.float32(args.lr * np.sqrt(1 - args.adam_beta2**self.step) / (1 - args.adam_beta1**self.step))
        for name, grad in self.grads.items():
            clipped = grad * scale
            self.exp_avg[name] = first * self.exp_avg[name] + (1 - first) * clipped
            self.exp_avg_sq[name] = second * self.exp_avg_sq[name] + (1 - second) * clipped * clipped
            step = rate * self.exp_avg[name] / (np.sqrt(self.exp_avg_sq[name]) + np.float32(EPSILON))
            self.params[name] = self.params[name] - step


@dataclass
class Packed:
    """The sequences of one microbatch on one context parallel rank, packed into one.

    Attributes:
        tokens: The packed sequence with its padding.
        hidden: The embedding's output of each of its positions.
        at: For each sample, where the logits of its response lie in it.
        targets: For each sample, the tokens that these logits score.
    """

    tokens: Array
    hidden: Array
    at: list[Array]
    targets: list[Array]


def get_batch(args: argparse.Namespace, model: Model, batch: dict[str, list[Array]], cp_rank: int) -> Packed:
    """Pack a microbatch so that tensor parallel ranks can share its sequence, and embed it."""
    tp_size = args.tensor_model_parallel_size
    pad_size = args.tensor_model_parallel_size
    pieces, at, targets, start = [], [], [], 0
    for tokens, total, response in zip(batch["tokens"], batch["total_lengths"], batch["response_lengths"], strict=True):
        piece = local_tokens(tokens, args.context_parallel_size, cp_rank)
        place = positions(int(total), int(response), args.context_parallel_size, cp_rank)
        at.append(start + local_index(place, int(total), args.context_parallel_size, cp_rank))
        targets.append(tokens[place + 1])
        pieces.append(piece)
        start += len(piece)
    pieces.append(np.zeros(-start % pad_size, np.int64))
    packed = np.concatenate(pieces)
    hidden = np.zeros((len(packed), HIDDEN), np.float32)
    share = len(packed) // tp_size  # sequence parallelism: each rank embeds its share
    for tp_rank in range(tp_size):
        part = slice(tp_rank * share, (tp_rank + 1) * share)
        hidden[part] = model.params["embedding.weight"][packed[part]]
    return Packed(packed, hidden, at, targets)


def get_responses(
    args: argparse.Namespace, model: Model, batch: Packed, *, apply_temperature: bool
) -> tuple[Array, Array]:
    """The outputs that belong to responses, and where in the packed sequence they lie."""
    at = np.concatenate(batch.at)
    logits = model.forward(batch.hidden[at])
    if apply_temperature and args.rollout_temperature != 1.0:
        logits = logits / np.float32(args.rollout_temperature)
    return logits, at


def log_softmax(logits: Array, tp_size: int = 1) -> Array:
    """Log-probabilities over a vocabulary that tensor parallel ranks share."""
    logits = logits - logits.max(axis=-1, keepdims=True)
    total = np.zeros((len(logits), 1), np.float32)
    for shard in np.array_split(np.exp(logits), tp_size, axis=-1):
        total = total + shard.sum(axis=-1, keepdims=True)
    return logits - np.log(total)


def get_log_probs(args: argparse.Namespace, model: Model, batch: Packed) -> tuple[Array, Array, Array]:
    """Log-probs of the response tokens, the whole distribution, and where they lie in the packed sequence."""
    logits, at = get_responses(args, model, batch, apply_temperature=True)
    distribution = log_softmax(logits, args.tensor_model_parallel_size)
    targets = np.concatenate(batch.targets)
    return distribution[np.arange(len(targets)), targets], distribution, at


def get_values(args: argparse.Namespace, model: Model, batch: Packed) -> Array:
    """The critic's value at each response token."""
    values, _ = get_responses(args, model, batch, apply_temperature=False)
    return values[:, 0]


def split(values: Array, batch: Packed) -> list[Array]:
    """One array a sample."""
    return np.split(values, np.cumsum([len(at) for at in batch.at])[:-1])
