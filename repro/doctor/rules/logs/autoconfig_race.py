"""Workers that read a model's configuration from a shared file system at the same time."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Hit, Launch, Log
from repro.doctor.artefacts.log_lines import above, argument, goes_on, said, speaker, times
from repro.doctor.rule import Found, Rule, Severity

__all__ = ["RULE"]

_NO_FILE = "does not appear to have a file named config.json"
_NO_PATH = "is not a local folder and is not a valid model identifier"
_SEEN = (
    "Should have a `model_type` key in its config.json",
    _NO_FILE,
    "Can't load the configuration of",
    "It looks like the config file at",
    _NO_PATH,
)
_ALONE = (
    _NO_FILE,
    _NO_PATH,
)
"""What says enough without a frame of AutoConfig above it."""

_DYNAMIC = "transformers_modules"
_NEAR = ("AutoConfig", "configuration_auto.py", "configuration_utils.py", "dynamic_module_utils.py")


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    if argument("model_name", launch, log) not in (None, "None"):
        return
    hits = [hit for hit in said(log, *_SEEN, _DYNAMIC) if _DYNAMIC not in hit.text or "Error" in hit.text]
    alone = None
    for hit in hits[:20]:
        if any(word in line for line in above(log, hit, 40) for word in _NEAR):
            yield _found(log, hit, "warning" if goes_on(log, hit) else None)
            return
        if alone is None and "Error" in hit.text and any(phrase in hit.text for phrase in _ALONE):
            alone = hit
    if alone is not None:
        yield _found(log, alone, "warning")


def _found(log: Log, hit: Hit, severity: Severity | None) -> Found:
    who = f" by {speaker(hit)}" if speaker(hit) else ""
    said_of = f"a model's configuration could not be read{who}{times(log, *_SEEN)}"
    return Found(said_of, log.where(hit), severity=severity)


RULE = Rule(
    id="autoconfig-race",
    title="Workers that race for a model's configuration (AutoConfig.from_pretrained)",
    inputs=(Log,),
    uses=(Launch,),
    severity="error",
    certainty="possible",
    why="a worker that reads a half-written file fails, now and then",
    cure="--model-name with the model's id, so that workers do not resolve the path again; where every worker fails, "
    "the path itself is wrong",
    sources=("Miles FAQ",),
    check=_check,
    phrases=(*_SEEN, _DYNAMIC),
)
