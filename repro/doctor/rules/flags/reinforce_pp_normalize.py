"""REINFORCE++ without normalised advantages."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import absent, tempered
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_ESTIMATORS = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")


@tempered("error")
def _check(launch: Launch) -> Iterator[Found]:
    estimator = launch.value("--advantage-estimator")
    if estimator in _ESTIMATORS and not launch.has("--normalize-advantages"):
        message = f"--advantage-estimator {estimator} is given without --normalize-advantages: the trainer stops"
        yield Found(message, launch.where("--advantage-estimator"), *absent(launch, "error"))


RULE = Rule(
    id="reinforce-pp-normalize",
    title="REINFORCE++ without --normalize-advantages",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="these estimators are defined on normalised advantages; the launch is refused when its arguments are checked",
    cure="add --normalize-advantages",
    sources=(
        "THUDM/slime@624b824a8 slime/utils/arguments.py:1849",
        "radixark/miles@31f1ca961 miles/utils/arguments.py:3137",
        "redai-infra/Relax@05149ae1a relax/utils/arguments.py",
    ),
    check=_check,
)
