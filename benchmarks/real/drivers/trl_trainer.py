"""TRL: one of its trainers, three updates of a Qwen2 of two layers with random weights; no download.

    python trl_trainer.py dpo '{"gradient_accumulation_steps": 2}'
    python trl_trainer.py grpo '{}' unscored                  # the reward is None for some completions
    torchrun --nproc-per-node 2 trl_trainer.py grpo '{}' logged entropy   # prints a logged number, not the loss

The second argument are settings of the trainer's configuration, as JSON.
"""

import copy
import json
import os
import sys
import tempfile

import transformers.utils.import_utils as there
from kit import DEVICE, report, seed, upstream

upstream()


class Pair(tuple):
    """What transformers 5 answers, (there, version), but as true as its first: TRL before 0.29 asks for a truth.

    It took the pair for true and went on to import packages that it only needs where they are there.
    """

    def __bool__(self) -> bool:
        return bool(self[0])


_asked = there._is_package_available
there._is_package_available = lambda *given, **more: Pair(_asked(*given, **more))

import trl  # noqa: E402 - TRL's, of the commit
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    set_seed,
)

WORDS = ["<pad>", "<eos>", *(str(n) for n in range(30))]
COMMON = {
    "max_steps": 3, "seed": 0, "learning_rate": 1e-3, "logging_steps": 1, "use_cpu": DEVICE == "cpu",
    "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "bf16": False, "gradient_checkpointing": False,
}  # fmt: skip
OWN = {
    "grpo": {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 16},
    "rloo": {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 16},
    "dpo": {"per_device_train_batch_size": 4},
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


def unscored(completions: list[str], **_: object) -> list[float | None]:
    """The same, but None for a completion of an odd sum: it cannot be scored."""
    sums = [sum(int(w) for w in text.split() if w.isdigit()) for text in completions]
    return [None if number % 2 else number / 100 for number in sums]


def rows(kind: str) -> dict[str, list[object]]:
    """Thirty-two examples, of lengths that differ."""
    prompts = [" ".join(str((n + k) % 30) for k in range(1 + n % 3)) for n in range(32)]
    answers = [" ".join(str((3 * n + k) % 30) for k in range(1 + n % 5)) for n in range(32)]
    others = [" ".join(str((7 * n + k) % 30) for k in range(1 + n % 4)) for n in range(32)]
    if kind in ("grpo", "rloo"):
        return {"prompt": prompts}
    if kind == "sft":
        return {"prompt": prompts, "completion": answers}
    return {"prompt": prompts, "chosen": answers, "rejected": others}


def main() -> None:
    """Train."""
    kind, settings = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    more = sys.argv[3:]
    name = {"reward": "Reward"}.get(kind, kind.upper())
    seed()
    set_seed(0)
    shape = Qwen2Config(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=1, pad_token_id=0,
        num_labels=1,
    )  # fmt: skip
    model = (Qwen2ForSequenceClassification if kind == "reward" else Qwen2ForCausalLM)(shape)
    model.warnings_issued = {}  # transformers 4 gave each model this; TRL before 0.28 writes to it
    given = {}
    if kind in ("grpo", "rloo"):
        given["reward_funcs"] = unscored if "unscored" in more else sum_of_numbers
    if kind == "dpo":
        given["ref_model"] = copy.deepcopy(model)
    config = getattr(trl, f"{name}Config")(output_dir=tempfile.mkdtemp(), **COMMON | OWN[kind] | settings)
    trainer = getattr(trl, f"{name}Trainer")(
        model=model, processing_class=tokenizer(), train_dataset=Dataset.from_dict(rows(kind)), args=config, **given
    )
    trainer.train()
    wanted = more[more.index("logged") + 1 :] if "logged" in more else ["loss", "grad_norm"]
    for entry in trainer.state.log_history if os.environ.get("RANK", "0") == "0" else []:
        if "loss" in entry:
            report(entry["step"] - 1, **{key: entry[key] for key in wanted})


main()
