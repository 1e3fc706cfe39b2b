"""Training programs around the trainers of transformers and Lightning, which know nothing of the recorder, as text."""

from __future__ import annotations

from attach_kit import PRELUDE, Programs

_ARGUMENTS = """
torch.manual_seed(int(sys.argv[1]))

def show(step, model, optimizer):
    # what the model holds after a step, fingerprinted by the program itself
    if "shown" not in sys.argv:
        return
    from repro_golden.fingerprint import fingerprint

    for name, p in model.named_parameters():
        tensors = {"grad": p.grad, "update": p, **optimizer.state.get(p, {})}
        for kind, tensor in tensors.items():
            if tensor is not None:
                phase, prefix = (kind, "") if kind in ("grad", "update") else ("update", f"{kind}/")
                print("shown", step, phase, prefix + name, fingerprint(tensor.detach()))
"""

TRAINERS = {
    # arguments: seed, then "shown", "bf16"
    "transformers": """
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

class Show(TrainerCallback):
    def on_optimizer_step(self, args, state, control, model, optimizer, **_):
        show(state.global_step, model, optimizer)

model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, attention_dropout=0.1,
    )
)
model.model.embed_tokens.requires_grad_(False)
model.register_forward_hook(lambda module, args, out: losses.append(out.loss.item()))
samples = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(32, (12, 8))]
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="output", max_steps=5, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        max_grad_norm=0.1, learning_rate=0.01, bf16="bf16" in sys.argv, seed=int(sys.argv[1]), use_cpu=True,
        ddp_find_unused_parameters=False, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    ),
    train_dataset=samples,
    callbacks=[Show()],
)
trainer.remove_callback(PrinterCallback)  # it prints how long training took
trainer.train()
if trainer.is_world_process_zero():
    for entry in trainer.state.log_history[:-1]:
        numbers = (float(entry[key]).hex() for key in ("loss", "grad_norm", "learning_rate"))
        print("logged", entry["step"] - 1, *numbers)
finish([model], [trainer.optimizer])
""",
    # arguments: seed, then "shown"
    "lightning": """
import lightning
from torch.utils.data import DataLoader, TensorDataset

class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network(nn.Dropout(0.2))
        self.net[0].bias.requires_grad_(False)

    def training_step(self, batch, index):
        loss = loss_of(self.net, *batch)
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer):
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        print("logged", self.global_step, losses[-1].hex(), norm.item().hex(), optimizer.param_groups[0]["lr"].hex())

    def on_train_batch_end(self, outputs, batch, index):
        if index % 2:
            show(self.global_step - 1, self, self.trainer.optimizers[0])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

model = Regression()
batches = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=4, shuffle=True)
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, max_steps=5, accumulate_grad_batches=2, gradient_clip_val=0.1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(model, batches)
finish([model], trainer.optimizers)
""",
}


class Trainers(Programs):
    """The programs around trainers, in a folder of their own."""

    def _write(self, name: str) -> str:
        file = f"train_{name}.py"  # a program called transformers.py would hide the library
        (self.folder / file).write_text(PRELUDE + _ARGUMENTS + TRAINERS[name])
        return file
