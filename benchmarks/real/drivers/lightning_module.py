"""Lightning: its Trainer, three updates of a small module; the worker of the data loader draws noise. No download.

python lightning_module.py
"""

import warnings

import torch
from kit import DEVICE, report, seed, upstream

upstream("src")
warnings.simplefilter("ignore")
import lightning  # noqa: E402 - Lightning's, of the commit


class Noisy(torch.utils.data.Dataset):
    """Rows with noise of the worker's own generator."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.arange(8) / 8 + number / 24 + 0.1 * torch.randn(8)


class Module(lightning.LightningModule):
    """A small network that learns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        """The loss, told with every digit."""
        loss = torch.nn.functional.mse_loss(self.body(batch), batch)
        report(number, loss=loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train."""
    seed()
    lightning.seed_everything(0, workers=True)
    trainer = lightning.Trainer(
        max_steps=3, accelerator="gpu" if DEVICE == "cuda" else "cpu", devices=1, logger=False, precision="32-true",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=1))


if __name__ == "__main__":
    main()
