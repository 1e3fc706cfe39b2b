"""Other layouts of a case, as tables of its file: they are no part of the case, and of no golden run."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Layout"]


class Layout(BaseModel):
    """`[layouts.NAME]`: what `repro bisect --layout` puts in place of the case's own."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    command: str | None = Field(default=None, min_length=1)
    """What trains, of kind command."""
    ranks: int | None = Field(default=None, ge=1)
    """Processes that train."""
    cpus: int | None = Field(default=None, ge=1)
    """Threads of each."""
    gpus: int | None = Field(default=None, ge=0)
    """GPUs of all."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables beside those of `subject.env`, or in place of them."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Keys of the trainer's own, of kind core, likewise; tables are joined level by level."""
