"""Models and data of Hugging Face that could not be had."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Log
from repro.doctor.artefacts.log_lines import goes_on, said, speaker, times
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_DENIED = ("Cannot access gated repo for url", "GatedRepoError", "RepositoryNotFoundError", "Invalid user token")
_OFFLINE = (
    "couldn't connect to 'https://huggingface.co'", "LocalEntryNotFoundError", "OfflineModeIsEnabled",
    "Max retries exceeded with url: /api/models", "Cannot find the requested files in the disk cache",
)  # fmt: skip
_NO_PATH = "is not a local folder and is not a valid model identifier"
_HTTP = ("401 Client Error", "403 Client Error")


def _check(log: Log) -> Iterator[Found]:
    http = [hit for hit in said(log, *_HTTP) if "huggingface" in hit.text or "hf.co" in hit.text]
    hits = sorted({hit.line: hit for hit in [*said(log, *_DENIED, *_OFFLINE, _NO_PATH), *http]}.values())
    if not hits:
        return
    hit = hits[0]
    who = f" by {speaker(hit)}" if speaker(hit) else ""
    if _NO_PATH in hit.text:
        what, cure = "a model's path does not exist, and is no name of a model either", "correct the path on every node"
    elif any(phrase in hit.text for phrase in _OFFLINE):
        what, cure = "a model could not be downloaded: the hub was not reached", (
            "download it beforehand and give the folder, or set HF_ENDPOINT; HF_HUB_OFFLINE=1 forbids downloads"
        )  # fmt: skip
    else:
        what, cure = "a model could not be downloaded: access was denied", "set HF_TOKEN in Ray's runtime environment"
    yield Found(
        f"{what}{who}{times(log, *_DENIED, *_OFFLINE, _NO_PATH)}",
        log.where(hit),
        severity="warning" if goes_on(log, hit) else None,
        cure=cure,
    )


RULE = Rule(
    id="hf-download",
    title="A model or its files that could not be downloaded",
    inputs=(Log,),
    severity="error",
    certainty="likely",
    why="the process that needs it ends",
    cure="download it beforehand and give the folder",
    sources=("huggingface/huggingface_hub src/huggingface_hub/errors.py",),
    check=_check,
    phrases=(*_DENIED, *_OFFLINE, _NO_PATH, *_HTTP),
)
