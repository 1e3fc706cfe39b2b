"""Where the reward comes from: its type, the key within it, and the label that it is graded against."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import absent, open_ended, samples, tempered
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_NUMBERS = frozenset(
    {"deepscaler", "gemma_math", "math", "f1", "gpqa", "ifbench", "random", "deterministic_random", "remote_rm"}
)
_FIELDS = {"dapo": ("score", "acc", "pred")}
_GRADE = frozenset({"deepscaler", "gemma_math", "math", "f1", "dapo"})
"""Reward types that compare with the label."""
_LABELLED = ("--label-key", "--data-source-path", "--disable-rollout-global-dataset")
"""Where labels come from; of own data nothing is known."""
_OWN_REWARDS = (
    "--custom-rm-path", "--rollout-function-path", "--custom-generate-function-path", "--use-opd",
    "--custom-reward-post-process-path", "--custom-convert-samples-to-train-data-path", "--group-rm",
    "--use-agentic-rollout",
)  # fmt: skip


@tempered("error")
def _check(launch: Launch) -> Iterator[Found]:
    if not samples(launch):
        return
    yield from _keys(launch)
    # metadata of a row may name another type, and own code may do anything
    if any(launch.has(name) for name in _OWN_REWARDS) or launch.system == "relax":
        return
    given, key = launch.value("--rm-type"), launch.value("--reward-key")
    if given is None:
        if not launch.has("--rm-type") and not open_ended(launch):
            message = "no reward: neither --rm-type nor --custom-rm-path is given"
            cure = "--rm-type TYPE or --custom-rm-path MODULE.FUNCTION, unless each row's metadata names its rm_type"
            yield Found(message, launch.where("--rm-type"), "warning", "likely", cure)
        return
    kind, where = given.strip().removeprefix("boxed_"), launch.where("--rm-type")
    if kind in _FIELDS and not launch.has("--reward-key"):
        message = f"--rm-type {given} gives a dict ({', '.join(_FIELDS[kind])}), and --reward-key is not given"
        yield Found(message, where, *absent(launch, "error", "likely"), cure=f"--reward-key {_FIELDS[kind][0]}")
    elif kind in _FIELDS and key is not None and key not in _FIELDS[kind]:
        message = f"--reward-key {key[:40]} is not in what --rm-type {given} gives: {', '.join(_FIELDS[kind])}"
        yield Found(message, launch.where("--reward-key"), "error", "likely", f"--reward-key {_FIELDS[kind][0]}")
    elif kind in _NUMBERS - {"remote_rm"} and key:
        message = f"--rm-type {given} gives a number: --reward-key {key[:40]} looks for a key in it and fails"
        yield Found(message, launch.where("--reward-key"), "error", "likely", "remove --reward-key")
    elif kind not in _NUMBERS and kind not in _FIELDS:
        yield Found(f"--rm-type {given[:40]} is none that slime or Miles knows", where, "warning", "likely")
    if kind == "remote_rm" and not launch.has("--rm-url"):
        yield Found("--rm-type remote_rm has no --rm-url to ask", where, *absent(launch, "error"), cure="--rm-url URL")
    if kind in _GRADE and not any(launch.has(name) for name in _LABELLED):
        message = f"--rm-type {given} grades against a label, and --label-key is not given: labels are None"
        yield Found(message, where, *absent(launch, "error", "likely"), cure="--label-key KEY of the data's answer")


def _keys(launch: Launch) -> Iterator[Found]:
    label = launch.value("--label-key")
    for name in ("--input-key", "--metadata-key", "--tool-key"):
        if label is not None and launch.value(name) == label:
            message = f"--label-key {label[:40]} is {name} too: samples are graded against it"
            yield Found(message, launch.where("--label-key"), "warning", "likely", "name the key of the answer")


RULE = Rule(
    id="reward-key",
    title="--rm-type, --reward-key and --label-key that do not go together",
    inputs=(Launch,),
    severity="error",
    certainty="likely",
    why="the first rollout fails, or every reward is the same and nothing is learned",
    cure="give --rm-type, --label-key, and --reward-key for rewards that are dicts",
    sources=(
        "Miles guide: Debugging",
        "THUDM/slime@624b824a8 slime/rollout/rm_hub/__init__.py; slime/utils/types.py:246",
        "THUDM/slime@624b824a8 slime/rollout/rm_hub/math_dapo_utils.py (compute_score)",
        "radixark/miles@31f1ca961 miles/rollout/rm_hub/__init__.py; miles/utils/types.py:177",
    ),
    check=_check,
)
