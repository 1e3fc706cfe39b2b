"""The cost of determinism that buys nothing: new memory is filled."""

from __future__ import annotations

from collections.abc import Iterable

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.asked import megatron
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_HOOK = "--custom-megatron-init-path"


def _check(launch: Launch) -> Iterable[Found]:
    if not launch.has("--deterministic-mode") or not megatron(launch) or launch.has(_HOOK):
        return  # the hook is where it would be turned off
    if "fill_uninitialized_memory" in launch.text:
        return
    yield Found(
        "torch.use_deterministic_algorithms fills every new tensor before its first use: forward and backward took "
        "158 ms with it and 126 ms without, with equal digests (24 layers in bf16, one H200)",
        launch.where("--deterministic-mode"),
    )


RULE = Rule(
    id="fill-uninitialized-memory",
    title="A deterministic run also fills memory that nobody reads",
    inputs=(Launch,),
    severity="note",
    certainty="likely",
    why="most of what a deterministic run costs, 15 to 25 %, is this fill, and equal bits do not need it",
    cure="no variable turns it off: put `def init(args): import torch; "
    "torch.utils.deterministic.fill_uninitialized_memory = False` into a module of yours and give "
    f"{_HOOK} MODULE.init; prove it with `repro golden verify`",
    sources=(
        "Miles guide: Debugging",
        "NVIDIA/Megatron-LM#6253 and #7093",
        "THUDM/slime@624b824a8 slime/backends/megatron_utils/initialize.py:88",
    ),
    check=_check,
)
