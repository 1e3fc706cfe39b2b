"""One rollout gives rollout_batch_size x n_samples_per_prompt samples."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Rollout
from repro.doctor.facts.train_columns import executions
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_OTHER_COUNT = (
    "--rollout-function-path", "--custom-generate-function-path", "--buffer-filter-path", "--partial-rollout",
    "--rollout-all-samples-process-path", "--rollout-data-postprocess-path", "--load-debug-rollout-data-subsample",
)  # fmt: skip
"""Flags under which a rollout may rightly have another number of samples."""


def _check(rollout: Rollout, launch: Launch) -> Iterator[Found]:
    prompts, each = launch.number("--rollout-batch-size"), launch.number("--n-samples-per-prompt", 1)
    if rollout.dump.evaluation or not prompts or not each:
        return
    wanted, found = int(prompts * each), executions(rollout)
    if found == wanted:
        return
    explained = [flag for flag in _OTHER_COUNT if launch.has(flag)]
    text = f"{found} samples, and {prompts:g} prompts x {each:g} samples are {wanted}"
    step = launch.number("--global-batch-size")
    if step and found % step:
        text += f"; {found} do not divide into batches of {step:g}"
    if explained:
        text += f" (the launch has {explained[0]}, which may change the number)"
    yield Found(
        text,
        Where(str(rollout.path), item="samples", value=str(found)),
        severity="note" if explained else None,
        certainty="possible" if explained else None,
    )


RULE = Rule(
    id="dump-sample-count",
    title="A rollout with more or fewer samples than the launch asks for",
    inputs=(Rollout, Launch),
    severity="warning",
    certainty="certain",
    why="the batch is cut into optimizer steps by the launch's numbers: samples are dropped, or a step is short",
    cure="make sure that the dump is of this launch, and that no filter drops samples without sampling others for them",
    sources=("Miles FAQ (samples of a rollout)", "THUDM/slime@624b824a8 slime/utils/arguments.py:1971"),
    check=_check,
)
