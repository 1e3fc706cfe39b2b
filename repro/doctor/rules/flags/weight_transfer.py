"""How weights go to the engines, against where the engines are."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import absent, nonzero, tempered
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_MODE, _TRANSPORT = "--update-weight-mode", "--update-weight-transport"
_TRANSFER, _DIR, _LOCAL = (
    "--update-weight-transfer-mode", "--update-weight-disk-dir", "--update-weight-local-checkpoint-dir",
)  # fmt: skip


@tempered("error")
def _check(launch: Launch) -> Iterator[Found]:
    delta, transfer = launch.value(_MODE) == "delta", launch.value(_TRANSFER)
    if delta and launch.value(_TRANSPORT) != "disk" and (not launch.has(_TRANSPORT) or launch.value(_TRANSPORT)):
        yield Found(f"{_MODE} delta needs {_TRANSPORT} disk", launch.where(_MODE), *absent(launch, "error"))
    needs = [_DIR] if launch.value(_TRANSPORT) == "disk" else []
    needs += [_LOCAL] if delta else []
    shown = _MODE if delta else _TRANSPORT
    if transfer == "disk-delta":
        needs, shown = [_DIR, _LOCAL], _TRANSFER
    for name in needs:
        if not launch.has(name):
            yield Found(f"{shown} {launch.value(shown)} needs {name}", launch.where(shown), *absent(launch, "error"))
    moves = f"{_MODE} delta" if delta else f"{_TRANSFER} {transfer}" if transfer in ("p2p", "disk-delta") else ""
    if moves and launch.has("--colocate") and not launch.has("--debug-rollout-only"):
        yield Found(f"{moves} together with --colocate: the trainer refuses it", launch.where(moves.split()[0]))
    if transfer in ("p2p", "disk-delta"):
        for name, there in (
            ("--prefill-num-servers", launch.has("--prefill-num-servers")),
            ("--lora-rank", nonzero(launch, "--lora-rank")),
        ):
            if there:
                yield Found(f"{moves} together with {name}: the trainer refuses it", launch.where(name))


RULE = Rule(
    id="weight-transfer",
    title="A way of sending weights that the launch's layout does not allow",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="the launch is refused when its arguments are checked, after it has waited for its GPUs",
    cure="colocated engines get weights over CUDA IPC: leave the transfer flags out, or remove --colocate",
    sources=(
        "THUDM/slime@624b824a8 slime/utils/arguments.py:2041,2059",
        "radixark/miles@31f1ca961 miles/utils/arguments.py:3263,3273",
    ),
    check=_check,
)
