"""The modules with weights that all parts of the model share. They start at zero and draw no random numbers."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Embedding", "Linear"]


class Linear(nn.Linear):
    """`nn.Linear` that starts at zero instead of drawing from the global generator (see `model.init_weights`)."""

    def reset_parameters(self) -> None:
        """Zero weight and bias."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()


class Embedding(nn.Embedding):
    """`nn.Embedding` that starts at zero instead of drawing from the global generator."""

    def reset_parameters(self) -> None:
        """Zero the table."""
        with torch.no_grad():
            self.weight.zero_()
