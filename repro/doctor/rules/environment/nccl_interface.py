"""Which network NCCL takes between nodes."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import known_text, seen, size
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_INTERFACE, _NO_IB = "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE"


def _check(launch: Launch) -> Iterator[Found]:
    nodes = size(launch, "--actor-num-nodes")
    if nodes is None or nodes < 2:
        return
    interface, no_ib = seen(launch, _INTERFACE), seen(launch, _NO_IB)
    if interface is None:
        message = f"--actor-num-nodes {nodes} without {_INTERFACE}: NCCL picks an interface itself"
        yield Found(message, Where(str(launch.path), item=_INTERFACE))
    elif known_text(interface) in ("lo", "=lo"):
        message = f"{_INTERFACE}={interface.value}: {nodes} nodes cannot meet on the loopback interface"
        yield Found(message, interface.where, "warning", "certain")
    if no_ib is not None and known_text(no_ib) == "1":
        message = f"{_NO_IB}=1 on {nodes} nodes: weights and gradients go over TCP sockets"
        yield Found(message, no_ib.where, "warning", "certain")


RULE = Rule(
    id="nccl-interface",
    title="Several nodes without NCCL_SOCKET_IFNAME, or with InfiniBand switched off",
    inputs=(Launch,),
    severity="note",
    certainty="possible",
    why="nodes that pick different or slow networks fail to get weights, or wait for them until the time-out",
    cure="NCCL_SOCKET_IFNAME=eth0 (the interface that the nodes share), NCCL_IB_DISABLE=0, NCCL_DEBUG=INFO to look",
    sources=("slime guide: Troubleshooting", "THUDM/slime@624b824a8 docs/en/get_started/quick_start.md:582"),
    check=_check,
)
