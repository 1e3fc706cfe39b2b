"""The built-in subject: a deterministic RL trainer, in plain torch or on megatron-core.

It imports nothing of the instrument. The instrument meets it through one interface: `CONTRACT` says which shape that
has, `build` opens it. Any trainer that offers the same two names can be guarded in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from repro_core.contract import CONTRACT, Observe, Rollout, Subject

if TYPE_CHECKING:
    from repro_core.rollout.source import RolloutsOnly

__all__ = ["CONTRACT", "Observe", "Rollout", "Subject", "build", "rollouts_only"]


def build(case: Mapping[str, Any]) -> Subject:
    """Make the trainer of a case.

    Args:
        case: ``{"config": {...}, "root": "directory that relative paths start from"}``; see `config.TrainConfig`.
            ``"sync"`` may hold an observer of weight syncs; see `rollout.sync.SyncObserver`.

    Raises:
        repro_core.config.ConfigError: the configuration cannot be trained.
    """
    from repro_core.config import TrainConfig
    from repro_core.train.trainer import Trainer

    config = TrainConfig.from_mapping(case.get("config", {}))
    return Trainer(config, root=str(case.get("root", ".")), sync=case.get("sync"))


def rollouts_only(case: Mapping[str, Any]) -> RolloutsOnly:
    """Open a case's rollout engine with the weights that its training starts from, and no trainer.

    Args:
        case: as `build` takes it.

    Raises:
        repro_core.config.ConfigError: the configuration cannot be trained.
        repro_core.rollout.engine.EngineError: the engine does not start.
    """
    from repro_core.config import TrainConfig
    from repro_core.rollout.source import RolloutsOnly

    config = TrainConfig.from_mapping(case.get("config", {}))
    return RolloutsOnly(config, str(case.get("root", ".")), case.get("sync"))
