"""What SGLang rests on where there is no GPU: the folder ``cpu``, and which of it an engine really uses."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

from repro_core.rollout.engine import EngineError

__all__ = ["FOLDER", "NAMES", "make_importable", "stand_ins"]

FOLDER = Path(__file__).parent / "cpu"
NAMES = ("repro_sglang_cpu", "sgl_kernel", "torchvision")


def make_importable(device: str) -> list[str]:
    """Make the stand-ins importable for an engine on a CPU, in this process and those that it spawns.

    Args:
        device: the engine's, ``cpu`` or ``cuda``.

    Returns:
        What `stand_ins` says.

    Raises:
        EngineError: the engine is to run on the CPU of a machine with a GPU, where the stand-ins refuse to load.
    """
    if device != "cpu":
        return []
    if torch.cuda.is_available():
        raise EngineError(
            "SGLang on a CPU rests on stand-ins, which refuse to load where there is a GPU: "
            "let the engine run on the GPU, or hide it with CUDA_VISIBLE_DEVICES="
        )
    if str(FOLDER) not in sys.path:
        # At the end, so that a package that is really installed comes first.
        sys.path.append(str(FOLDER))
        importlib.invalidate_caches()
    return stand_ins(device)


def stand_ins(device: str) -> list[str]:
    """Names of the stand-ins that an engine on `device`, started by this process, rests on; none on a GPU."""
    if device != "cpu":
        return []
    return [name for name in NAMES if _is_ours(name)]


def _is_ours(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None and Path(spec.origin).is_relative_to(FOLDER)
