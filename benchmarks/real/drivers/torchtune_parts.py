"""torchtune: its Llama 2 of two layers on random tokens, three updates.

python torchtune_parts.py packed    its PackedDataset, of samples several times as long as a pack
python torchtune_parts.py kd        its chunked distillation loss against a second model
"""

import sys

import torch
from kit import norm_of, report, seed, upstream
from torch.nn.functional import cross_entropy

upstream()
from torchtune.datasets import PackedDataset  # noqa: E402 - torchtune's, of the commit
from torchtune.models.llama2 import llama2  # noqa: E402
from torchtune.modules import loss as losses  # noqa: E402

IGNORED, VOCABULARY, WIDTH = -100, 64, 16


def built() -> torch.nn.Module:
    """A model."""
    return llama2(
        vocab_size=VOCABULARY, num_layers=2, num_heads=2, num_kv_heads=2, embed_dim=32, max_seq_len=128
    )  # fmt: skip


def packed(model: torch.nn.Module, _: int) -> torch.Tensor:
    """The loss of four packs."""
    lengths = [40, 3, 5, 2, 50, 4, 6, 3, 5, 4]
    samples = [torch.randint(1, VOCABULARY, (length,)).tolist() for length in lengths]
    packs = PackedDataset(
        [{"tokens": sample, "labels": sample} for sample in samples], max_seq_len=WIDTH, split_across_pack=True
    )
    rows = [packs[index] for index in range(4)]
    tokens, labels, places = (torch.stack([row[key] for row in rows]) for key in ("tokens", "labels", "input_pos"))
    logits = model(tokens, input_pos=places)
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def kd(model: torch.nn.Module, step: int) -> torch.Tensor:
    """How far the model is from another, over tokens of which the later chunks hold fewer that count."""
    with torch.random.fork_rng():
        torch.manual_seed(99)
        teacher = built()
    tokens = torch.randint(VOCABULARY, (4, WIDTH))
    labels = tokens.clone()
    for row in range(4):
        labels[row, 5 + 3 * row + step :] = IGNORED
    loss = losses.ForwardKLWithChunkedOutputLoss(num_output_chunks=4)
    with torch.no_grad():
        wanted = teacher(tokens).chunk(4, dim=1)
    return loss(list(model(tokens).chunk(4, dim=1)), list(wanted), labels)


seed()
model = built()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(3):
    loss = {"packed": packed, "kd": kd}[sys.argv[1]](model, step)
    loss.backward()
    norm = norm_of(model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    report(step, loss=loss.item(), grad_norm=norm)
