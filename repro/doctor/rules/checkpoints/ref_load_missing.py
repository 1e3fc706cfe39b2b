"""The reference model: named where it is needed, and there."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.artefacts.megatron import TRACKER, iteration_of
from repro.doctor.facts.checkpoints.launches import exists, is_known, named
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


def _check(launch: Launch) -> Iterator[Found]:
    kl = launch.has("--use-kl-loss") or (launch.number("--kl-coef", 0.0) or 0.0) != 0.0
    ref = named(launch, "--ref-load")
    if not launch.has("--ref-load"):
        return  # `kl-without-ref` says what that leads to
    if ref is None or not is_known(launch, ref):
        return
    where = launch.where("--ref-load")
    if not exists(ref):
        if kl:
            said = f"--ref-load {ref} does not exist here: the trainer raises FileNotFoundError"
            yield Found(said, where, certainty="likely")
        else:
            yield Found(f"--ref-load {ref} does not exist", where, "warning", "likely")
    elif not exists(ref / TRACKER) and not exists(ref / "config.json") and iteration_of(ref.name) is None:
        said = f"--ref-load {ref} has neither {TRACKER} nor config.json: it is no checkpoint that the trainers load"
        yield Found(said, where, "error" if kl else "warning", "likely")


RULE = Rule(
    "ref-load-missing", "--ref-load names what is not there, or no checkpoint",
    (Launch,), "error", "certain",
    "the trainer fails when it checks its arguments, or loads nothing and generates garbled text",
    "give --ref-load the Megatron folder of the initial model (tools/convert_hf_to_torch_dist.py writes one), or its "
    "Hugging Face folder where the trainer loads those; or drop --use-kl-loss and --kl-coef",
    ("Miles FAQ", "Miles guide: Debugging", "THUDM/slime@624b824a8 slime/utils/arguments.py:1775",
     "radixark/miles@31f1ca961 miles/utils/arguments.py:2975"),
    _check,
)  # fmt: skip
