"""Where rules come from: the trainers' code, each at the commit that was read, and the guides."""

from __future__ import annotations

__all__ = [
    "GUIDES", "MEGATRON_ARGS", "MEGATRON_DETERMINISM", "MILES", "MILES_ARGS", "RELAX_ARGS", "SLIME", "SLIME_ARGS",
    "SLIME_IGNORES", "SLIME_INT4",
]  # fmt: skip

SLIME, MILES = "THUDM/slime@624b824a8", "radixark/miles@31f1ca961"
SLIME_ARGS = f"{SLIME} slime/utils/arguments.py"
SLIME_IGNORES = f"{SLIME} slime/backends/megatron_utils/arguments.py:195 (ignore_unknown_args=True)"
SLIME_INT4 = f"{SLIME} slime/backends/megatron_utils/megatron_to_hf/processors/quantizer_compressed_tensors.py"
MILES_ARGS = f"{MILES} miles/utils/arguments.py"
RELAX_ARGS = "redai-infra/Relax@05149ae1a relax/utils/arguments.py"
MEGATRON_ARGS = "NVIDIA/Megatron-LM@000c4ac24 megatron/training/arguments.py (validate_args)"
MEGATRON_DETERMINISM = "NVIDIA/Megatron-LM@6ae8fe11d megatron/training/determinism.py (apply_determinism_to_args)"
GUIDES = ("Miles guide: Debugging", "slime guide: Debugging", "Relax guide: Debugging")
"""The three systems' guides to debugging, which have much in common."""
