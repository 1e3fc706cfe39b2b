"""``policy = "megatron"``: the same RL step, its models computed by megatron-core over many processes.

Nothing here is imported before a configuration asks for it, and `layout` alone can be imported without torch and
megatron-core. Everything else imports megatron-core through `cpu.load`, which keeps its import quiet.
"""

from __future__ import annotations

__all__: list[str] = []
