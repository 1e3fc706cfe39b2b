"""Train dumps: the files of all ranks of a rollout, joined on samples, with context-parallel parts put together."""

from __future__ import annotations
