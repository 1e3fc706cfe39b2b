"""The page of all nights and pull requests: a static site that works from a folder, without a server or a network."""

from __future__ import annotations

__all__: list[str] = []
