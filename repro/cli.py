"""The command line's table of contents. A command's module is imported only when the command runs."""

from __future__ import annotations

import click

from repro import __version__
from repro.lazy_group import LazyGroup

__all__ = ["cli"]


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    lazy={
        "init": ("repro.commands.init:init", "Prepare a repository: golden/ and DVC."),
        "golden": ("repro.commands.golden:golden", "Record, verify and manage golden runs."),
        "rollout": ("repro.commands.rollout.group:rollout", "Record rollouts, and show what was recorded."),
        "check": ("repro.commands.check:check", "Check one part of a run: does a rollout engine repeat its bits?"),
        "bisect": ("repro.commands.bisect:bisect", "Find the commit of GOOD..BAD that moved the numbers."),
        "history": ("repro.commands.history:history", "List every commit of GOOD..BAD that changed the numbers."),
        "explain": ("repro.commands.explain:explain", "Name the operation and the line that moved the numbers."),
        "trace": ("repro.commands.trace:trace", "Record any PyTorch program's training steps, without changing it."),
        "diff": ("repro.commands.diff:diff", "Compare two traces, or one with TensorBoard's event files."),
        "doctor": ("repro.commands.doctor:doctor", "What is wrong with a launch, a checkpoint, a dump, a log?"),
        "report": ("repro.commands.report:report", "The pull request, the night, the page."),
        "demo": ("repro.commands.demo:demo", "The whole job on a scratch repository with a hidden regression."),
    },
    epilog="Exit codes: 0 agrees or found, 1 differs, 2 usage or environment error, 3 not verifiable.",
)
@click.version_option(__version__, prog_name="repro")
def cli() -> None:
    """Golden runs, replay and bisect for RL post-training.

    Which commit moved grad_norm, KL or the train/rollout log-prob gap?
    """
