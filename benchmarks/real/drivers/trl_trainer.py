"""TRL: one of its trainers, three updates of a Qwen2 of two layers with random weights; no download.

    python trl_trainer.py grpo '{"mask_truncated_completions": true}'

The second argument are settings of the trainer's configuration, as JSON.
"""

import json
import sys
import tempfile

from kit import report, upstream

upstream()
import trl  # noqa: E402 - TRL's, of the commit
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed  # noqa: E402

WORDS = ["<pad>", "<eos>", *(str(n) for n in range(30))]
COMMON = {
    "max_steps": 3, "seed": 0, "learning_rate": 1e-3, "logging_steps": 1, "use_cpu": True, "report_to": "none",
    "save_strategy": "no", "disable_tqdm": True, "bf16": False, "gradient_checkpointing": False,
}  # fmt: skip
OWN = {
    "grpo": {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 16},
    "rloo": {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 16},
    "dpo": {"per_device_train_batch_size": 4},
    "kto": {"per_device_train_batch_size": 4},
    "sft": {"per_device_train_batch_size": 4},
    "reward": {"per_device_train_batch_size": 4},
}


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each number below 30."""
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token=WORDS[0]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=WORDS[0], eos_token=WORDS[1], unk_token=WORDS[0], padding_side="left"
    )


def sum_of_numbers(completions: list[str], **_: object) -> list[float]:
    """The reward: what the numbers of a completion add up to."""
    return [sum(int(w) for w in text.split() if w.isdigit()) / 100 for text in completions]


def rows(kind: str) -> dict[str, list[object]]:
    """Sixteen examples, of lengths that differ."""
    prompts = [" ".join(str((n + k) % 30) for k in range(1 + n % 3)) for n in range(16)]
    answers = [" ".join(str((3 * n + k) % 30) for k in range(1 + n % 5)) for n in range(16)]
    others = [" ".join(str((7 * n + k) % 30) for k in range(1 + n % 4)) for n in range(16)]
    return {
        "grpo": {"prompt": prompts},
        "rloo": {"prompt": prompts},
        "dpo": {"prompt": prompts, "chosen": answers, "rejected": others},
        "kto": {"prompt": prompts, "completion": answers, "label": [n % 2 == 0 for n in range(16)]},
        "sft": {"prompt": prompts, "completion": answers},
        "reward": {"prompt": prompts, "chosen": answers, "rejected": others},
    }[kind]


def main() -> None:
    """Train."""
    kind, settings = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    name = {"reward": "Reward"}.get(kind, kind.upper())
    set_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=1, pad_token_id=0,
        )
    )  # fmt: skip
    config = getattr(trl, f"{name}Config")(output_dir=tempfile.mkdtemp(), **COMMON | OWN[kind] | settings)
    more = {"reward_funcs": sum_of_numbers} if kind in ("grpo", "rloo") else {}
    trainer = getattr(trl, f"{name}Trainer")(
        model=model, processing_class=tokenizer(), train_dataset=Dataset.from_dict(rows(kind)), args=config, **more
    )
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            report(entry["step"] - 1, loss=entry["loss"], grad_norm=entry["grad_norm"])


main()
