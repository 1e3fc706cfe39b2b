"""The Trainer of transformers on a small Llama with dropout and a frozen embedding."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

torch.manual_seed(3)
torch.set_num_threads(1)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=24, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, attention_dropout=0.1,
    )
)  # fmt: skip
model.model.embed_tokens.requires_grad_(False)
tokens = torch.randint(24, (6, 5))
samples = [{"input_ids": row, "labels": row.clone()} for row in tokens]


class Say(TrainerCallback):
    """Prints what the Trainer logs."""

    def on_log(self, *_, logs, **__):
        """Called with what is logged."""
        if "learning_rate" in logs:
            print({"loss": float(logs["loss"]), "norm": float(logs["grad_norm"]), "rate": float(logs["learning_rate"])})


trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="output", max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=1,
        max_grad_norm=0.5, learning_rate=0.01, seed=3, use_cpu=True, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True,
    ),
    train_dataset=samples,
    callbacks=[Say()],
)  # fmt: skip
trainer.remove_callback(PrinterCallback)  # it prints how long training took


def parts():
    """What there is to look at: modules by name, and optimizers in their order."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return {"": model}, [optimizer] if optimizer is not None else []


def data():
    """What the samples hold."""
    return [sample["labels"] for sample in samples]


def knobs():
    """Numbers that a change may move: whose attribute or item, and which."""
    return [(model.model.norm, "variance_epsilon"), (model.model.layers[0].self_attn, "attention_dropout"),
        (model.model.layers[0].self_attn, "scaling")]  # fmt: skip


trainer.train()
