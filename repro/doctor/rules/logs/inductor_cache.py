"""A corrupt cache of torch's compiler: JSONDecodeError out of inductor."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Log
from repro.doctor.artefacts.log_lines import above, below, said, times
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_INDUCTOR = ("_inductor", "InductorError", "torch._dynamo.exc.BackendCompilerFailed")


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    for hit in said(log, "JSONDecodeError")[:20]:
        near = [*above(log, hit, 80), *below(log, hit, 10)]
        if any(word in line for line in near for word in _INDUCTOR):
            variable = None if launch is None else launch.env.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES")
            cure = ""
            if variable is not None and variable.value == "1" and variable.origin != "runtime-env":
                cure = "the launch sets TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 where Ray's workers may not see it: " + (
                    "put it into the runtime environment, or delete the cache"
                )
            yield Found(
                f"torch's compiler could not read its cache: JSONDecodeError{times(log, 'JSONDecodeError')}",
                log.where(hit),
                cure=cure,
            )
            return


RULE = Rule(
    id="inductor-cache",
    title="A corrupt cache of torch's compiler (JSONDecodeError from inductor)",
    inputs=(Log,),
    uses=(Launch,),
    severity="error",
    certainty="likely",
    why="compilation fails on every start until the cache is gone",
    cure="set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 in Ray's runtime environment, or delete /tmp/torchinductor_$USER",
    sources=("Miles guide: Debugging", "Miles FAQ"),
    check=_check,
    phrases=("JSONDecodeError",),
)
