"""Engines that did not take the trainer's weights."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Log
from repro.doctor.artefacts.log_lines import said, speaker, times
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_SEEN = (
    "Failed to update parameter online",
    "Failed to update weights",
    "IPC weight update failed",
    "Failed to initialize custom process group",
    "Weight version mismatch",
    "[P2P] Transfer future failed",
    "Max retries exceeded with url: /update_weights",
    "Max retries exceeded with url: /init_weights_update_group",
)
_REFUSED = (" Server Error: ", " Client Error: ", 'HTTP/1.1" 500', 'HTTP/1.1" 400')
_PATH = re.compile(r"/(?:update_weights_from_\w+|init_weights_update_group|pull_weights)")


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    refused = [hit for hit in said(log, *_REFUSED) if _PATH.search(hit.text)]
    hits = sorted({hit.line: hit for hit in [*said(log, *_SEEN), *refused]}.values())
    if not hits:
        return
    who = f" by {speaker(hits[0])}" if speaker(hits[0]) else ""
    more = f" (on {len(hits)} lines)" if len(hits) > 1 else times(log, *_SEEN)
    missing = [
        f"{name}={value}"
        for name, value in (("NCCL_DEBUG", "INFO"), ("NCCL_SOCKET_IFNAME", "eth0"), ("NCCL_IB_DISABLE", "0"))
        if launch is None or name not in launch.env
    ]
    cure = "read the engine's own log at that time"
    if missing:
        cure += f"; across nodes set {', '.join(missing)} (with the interface that the nodes share)"
    yield Found(f"weights of the trainer were not taken{who}{more}", log.where(hits[0]), cure=cure)


RULE = Rule(
    id="weight-sync-failed",
    title="Engines that did not take the trainer's weights",
    inputs=(Log,),
    uses=(Launch,),
    severity="error",
    certainty="certain",
    why="the engines go on sampling with other weights than those that are trained, or half of them",
    cure="read the engine's own log at that time; across nodes set NCCL_DEBUG=INFO and NCCL_SOCKET_IFNAME",
    sources=(
        "slime guide: Troubleshooting",
        "sgl-project/sglang python/sglang/srt/model_executor/model_runner.py",
        "radixark/miles@31f1ca961 miles/backends/megatron_utils/actor.py:794",
        "THUDM/slime@624b824a8 slime/ray/actor_group.py:264",
    ),
    check=_check,
    phrases=_SEEN + _REFUSED,
)
