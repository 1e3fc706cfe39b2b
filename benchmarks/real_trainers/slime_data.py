"""What slime's launch here trains on: ``python -P slime_data.py OUT``, with slime on PYTHONPATH.

OUT gets ``tiny-qwen3``, a Qwen3 of two layers with random weights in bfloat16 and a tokenizer of 1,024 words, and three
dumps in slime's own format (its ``Sample``) in each of ``rollouts``, sampled by that model, and ``stale``: the same
responses with noise on their log-probs, as if an older policy had written them. 4 prompts with 4 responses each; in
every fourth response three tokens are masked.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 1024
PADDING, END = VOCABULARY - 2, VOCABULARY - 1
DUMPS, PROMPTS, RESPONSES = 3, 4, 4
NOISE = 1.2
"""Standard deviation of what is added to a stale log-prob."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    write_tokenizer(out / "tiny-qwen3")
    write_dumps(write_model(out / "tiny-qwen3"), out)


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [f"w{i}" for i in range(PADDING)] + ["<pad>", "<eos>"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": words[PADDING], "eos_token": words[END]}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def write_model(folder: Path) -> torch.nn.Module:
    """The model, in float32 as read back from what was written."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    config = Qwen3Config(vocab_size=VOCABULARY, eos_token_id=END, pad_token_id=PADDING, tie_word_embeddings=True,
                         rms_norm_eps=1e-6, initializer_range=0.1, **sizes)  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written["rope_theta"] = 1_000_000  # where slime looks for it; transformers 5 has it in a table of its own
    (folder / "config.json").write_text(json.dumps(written, indent=1))
    return model.float().eval()


def write_dumps(model: torch.nn.Module, out: Path) -> None:
    """Three dumps of each kind, from one stream of random numbers."""
    draw = torch.Generator().manual_seed(2)

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=draw))

    for dump in range(DUMPS):
        samples: dict[str, list[Any]] = {"rollouts": [], "stale": []}
        for group in range(PROMPTS):
            prompt = torch.randint(0, PADDING, (whole(6, 20),), generator=draw).tolist()
            for number in range(RESPONSES):
                response, logprobs = sampled(model, prompt, whole(8, 48), draw)
                mask = [0 if number == RESPONSES - 1 and 2 <= at < 5 else 1 for at in range(len(response))]
                reward = float(torch.rand(1, generator=draw))
                noise = torch.randn(len(response), generator=draw).tolist()
                stale = [min(-1e-3, value + NOISE * by) for value, by in zip(logprobs, noise, strict=True)]
                place = (dump * PROMPTS + group, (dump * PROMPTS + group) * RESPONSES + number, str(dump))
                for kind, column in (("rollouts", logprobs), ("stale", stale)):
                    samples[kind].append(sample(place, prompt, response, column, mask, reward))
        for kind, rows in samples.items():
            (out / kind).mkdir(exist_ok=True)
            torch.save({"rollout_id": dump, "samples": rows}, out / kind / f"{dump}.pt")


@torch.no_grad()
def sampled(
    model: torch.nn.Module, prompt: Sequence[int], length: int, draw: torch.Generator
) -> tuple[list[int], list[float]]:
    """A response, and its tokens' log-probs under the model at temperature 1."""
    tokens, logprobs = list(prompt), []
    for _ in range(length):
        row = torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1].float(), -1)
        token = int(torch.multinomial(row.exp(), 1, generator=draw))
        tokens.append(token)
        logprobs.append(float(row[token]))
    return tokens[len(prompt) :], logprobs


def sample(
    place: tuple[int, int, str],
    prompt: Sequence[int],
    response: Sequence[int],
    logprobs: Sequence[float],
    mask: Sequence[int],
    reward: float,
) -> dict[str, Any]:
    """One sample by slime's own class; `place` is its group, its number and the version of the weights."""
    from slime.utils.types import Sample

    group, number, version = place
    words = [" ".join(f"w{token}" for token in tokens) for tokens in (prompt, response)]
    made = Sample(
        group_index=group, index=number, prompt=words[0], tokens=[*prompt, *response], response=words[1],
        response_length=len(response), label="7", reward=reward, loss_mask=list(mask), weight_versions=[version],
        rollout_log_probs=list(logprobs), status=Sample.Status.COMPLETED,
    )  # fmt: skip
    return dict(made.to_dict())


if __name__ == "__main__":
    main()
