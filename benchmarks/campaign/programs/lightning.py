"""Lightning's Trainer on a small regression with dropout, BatchNorm, a frozen bias and a schedule."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning.seed_everything(3)
torch.set_num_threads(1)


class Regression(lightning.LightningModule):
    """A module of Lightning's."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, 2))
        self.net[0].bias.requires_grad_(False)
        self.losses = []

    def training_step(self, batch):
        """The loss."""
        loss = self.net(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, *_):
        """Print what was lost."""
        print({"loss": self.losses[-1], "number": len(self.losses)})

    def configure_optimizers(self):
        """One, and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


model = Regression()
samples = torch.randn(12, 6)
batches = DataLoader(TensorDataset(samples), batch_size=4, shuffle=True)
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, max_steps=3, gradient_clip_val=0.1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip


def parts():
    """What there is to look at: modules by name, and optimizers in their order."""
    return {"": model}, list(trainer.optimizers)


def data():
    """What the samples hold."""
    return [samples]


def knobs():
    """Numbers that a change may move: whose attribute or item, and which."""
    return [(model.net[1], "momentum"), (model.net[1], "eps"), (model.net[3], "p"), (trainer, "gradient_clip_val")]


trainer.fit(model, batches)
