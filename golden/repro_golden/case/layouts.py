"""Other layouts of a case, as tables of its file: they are no part of the case, and of no golden run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["ROUNDINGS", "Absolute", "Layout", "Relative", "Tolerance", "joined"]

Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)]
"""Units of epsilon that another order of sums may make; 0 where every bit must be equal."""
Absolute = dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)]]
"""By signal, as a glob: how far apart layouts may be in its own unit, for what is no more than roundings itself."""
Relative = dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)]]
"""By signal, as a glob: how far apart layouts may be as a share of the larger side."""

ROUNDINGS: Absolute = {"rollout/*": 1e-6, "*abs_diff": 1e-6, "*loss": 1e-6, "*kl": 1e-6}
"""`absolute` of slime, Miles and Relax where a case says nothing: on-policy these are 0 but for roundings, in nats.

With normalised advantages so are their means, and the loss: -7e-9 in the logs that slime's own code writes.
"""


class Layout(BaseModel):
    """`[layouts.NAME]`: what `repro bisect --layout` puts in place of the case's own."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    command: str | None = Field(default=None, min_length=1)
    """What trains, of kind command."""
    flags: tuple[str, ...] = Field(default=(), strict=False)
    """More flags, of kind slime, miles and relax: after those of `subject.flags`, so that they win."""
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
    tolerance: Tolerance | None = None
    """How far this table alone may be from the case, in place of `[nightly] tolerance`."""
    absolute: Absolute | None = None
    """Likewise, in place of the whole of `[nightly] absolute`."""
    relative: Relative | None = None
    """Likewise, in place of the whole of `[nightly] relative`."""


def joined(config: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Two tables of a trainer's keys, level by level; the second wins."""
    both = {
        key: joined(config[key], value)
        for key, value in more.items()
        if isinstance(value, Mapping) and isinstance(config.get(key), Mapping)
    }
    return {**config, **more, **both}
