"""A small trainer in the shape of slime, Miles and Relax: a test repository holds it as its train.py.

Samples come from an engine or from debug files; ranks are simulated in one process; what the flags ask for is written
in the systems' own layouts.
"""

from __future__ import annotations

import argparse

from foreign_trainer_actor import TrainGroup
from foreign_trainer_arguments import SYSTEM, parse_args, print_arguments
from foreign_trainer_logs import log
from foreign_trainer_samples import RolloutManager


def train(args: argparse.Namespace) -> None:
    """The loop over rollouts."""
    print_arguments(args)
    if args.load_debug_rollout_data is not None:
        only = "will not instantiate sglang servers and will only run the training process."
        log("", __file__, f"load_debug_rollout_data {args.load_debug_rollout_data} is set, {only}")
    manager = RolloutManager(args)
    group = TrainGroup(args)
    for rollout_id in range(args.start_rollout_id, args.num_rollout):
        samples = manager.generate(rollout_id, group.actor)
        if not args.debug_rollout_only:
            group.train(rollout_id, samples)
        done = rollout_id - args.start_rollout_id + 1
        if SYSTEM == "miles" and args.debug_exit_after_rollout is not None and done >= args.debug_exit_after_rollout:
            log("", __file__, f"debug_exit_after_rollout={done} reached at rollout_id={rollout_id}, exiting")
            break


if __name__ == "__main__":
    train(parse_args())
