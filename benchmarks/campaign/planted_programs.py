"""The foreign programs that changes are planted in, and what each of them imports."""

from __future__ import annotations

import importlib
from pathlib import Path

__all__ = ["IMPORTS", "path", "warm"]

IMPORTS = {
    "loop": (),
    "hf": ("transformers", "transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate"),
    "lightning": ("lightning", "lightning.pytorch.trainer"),
}


def path(program: str) -> Path:
    """Its file."""
    return Path(__file__).parent / "programs" / f"{program}.py"


def warm(program: str) -> None:
    """Import what it will."""
    for name in ("pyarrow.parquet", *IMPORTS[program]):
        importlib.import_module(name)
