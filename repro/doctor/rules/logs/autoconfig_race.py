"""Workers that read a model's configuration from a shared file system at the same time."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Log
from repro.doctor.artefacts.log_lines import above, argument, goes_on, said, speaker, times
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_SEEN = (
    "Should have a `model_type` key in its config.json",
    "does not appear to have a file named config.json",
    "Can't load the configuration of",
    "It looks like the config file at",
)
_DYNAMIC = "transformers_modules"
_NEAR = ("AutoConfig", "configuration_auto.py", "configuration_utils.py", "dynamic_module_utils.py")


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    if argument("model_name", launch, log) not in (None, "None"):
        return
    hits = [hit for hit in said(log, *_SEEN, _DYNAMIC) if _DYNAMIC not in hit.text or "Error" in hit.text]
    for hit in hits[:20]:
        near = above(log, hit, 40)
        if any(word in line for line in near for word in _NEAR):
            who = f" by {speaker(hit)}" if speaker(hit) else ""
            yield Found(
                f"a model's configuration could not be read{who}{times(log, *_SEEN)}",
                log.where(hit),
                severity="warning" if goes_on(log, hit) else None,
            )
            return


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
