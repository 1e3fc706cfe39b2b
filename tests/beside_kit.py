"""A model for the tests of what lives beside optimizers, and all that is read of it."""

from __future__ import annotations

import torch
from torch import nn

from repro_golden.recording.attach.alive.beside import Beside


class Network(nn.Module):
    """A linear layer whose statistics are normalized, and a mask that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(4), persistent=False)


def read(beside: Beside, step: int, model: nn.Module) -> dict[str, torch.Tensor]:
    """All that is read, by its whole name."""
    groups = beside.readings(step, list(model.parameters()))
    return {prefix + name: tensor for prefix, reading in groups for name, tensor in reading.tensors.items()}
