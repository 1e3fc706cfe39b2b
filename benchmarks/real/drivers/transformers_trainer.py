"""transformers: its Trainer, three updates of a GPT-2 or Qwen2 of two layers with random weights; no download.

    python transformers_trainer.py gpt2 '{"gradient_accumulation_steps": 4}'

The second argument are settings of TrainingArguments, as JSON. The labels of the examples differ in how many of them
count, so that a mean of micro-batches' means is not the mean over all labels.
"""

import json
import sys
import tempfile

import torch
from kit import DEVICE, report, seed, upstream

upstream("src")
sys.modules["datasets"] = None  # type: ignore[assignment] # not needed here; one of today wants another huggingface_hub
from transformers import (  # noqa: E402 - the release under test
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

COMMON = {
    "max_steps": 3, "seed": 0, "learning_rate": 1e-3, "logging_steps": 1, "use_cpu": DEVICE == "cpu",
    "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "per_device_train_batch_size": 2,
}  # fmt: skip


def model_of(kind: str) -> torch.nn.Module:
    """The model."""
    if kind == "gpt2":
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, **none))
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip


def main() -> None:
    """Train."""
    kind, settings = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    seed()
    set_seed(0)
    model = model_of(kind)
    rows = torch.randint(64, (32, 16))
    data = []
    for number, row in enumerate(rows):
        labels = row.clone()
        labels[: 1 + (5 * number) % 14] = -100
        data.append({"input_ids": row, "labels": labels})
    arguments = TrainingArguments(output_dir=tempfile.mkdtemp(), **COMMON | settings)
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            report(entry["step"] - 1, loss=entry["loss"], grad_norm=float(entry["grad_norm"]))


main()
