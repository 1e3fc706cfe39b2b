"""Metrics of the mismatch between engine and trainer without the function that computes them."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import absent, tempered
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


@tempered("error")
def _check(launch: Launch) -> Iterator[Found]:
    if launch.has("--get-mismatch-metrics") and not launch.has("--custom-tis-function-path"):
        message = "--get-mismatch-metrics is given without --custom-tis-function-path: the trainer stops"
        yield Found(message, launch.where("--get-mismatch-metrics"), *absent(launch, "error"))


RULE = Rule(
    id="mismatch-needs-tis",
    title="--get-mismatch-metrics without --custom-tis-function-path",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="the metrics come out of that function; the launch is refused when its arguments are checked",
    cure="--custom-tis-function-path MODULE.FUNCTION, or remove --get-mismatch-metrics",
    sources=(
        "THUDM/slime@624b824a8 slime/utils/arguments.py:1859",
        "radixark/miles@31f1ca961 miles/utils/arguments.py:3147",
        "redai-infra/Relax@05149ae1a relax/utils/arguments.py",
    ),
    check=_check,
)
