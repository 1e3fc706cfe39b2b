"""The trainer's command line: a parser for the debug flags, then Megatron's, which keeps silent on what it lacks."""

from __future__ import annotations

import argparse
import sys

SYSTEM = "slime"  # or miles, relax: the test repository holds one of them


def parse_args() -> argparse.Namespace:
    """The run's options; flags that no parser knows are ignored, except by Miles."""
    pre, _ = _debug_parser().parse_known_args()
    parser = _megatron_parser()
    if SYSTEM == "miles":
        _debug_arguments(parser)
        _miles_arguments(parser)
        args = parser.parse_args()
    else:
        args, _ = parser.parse_known_args()
    for name, value in vars(pre).items():
        setattr(args, name, value)
    _validate(args)
    return args


def print_arguments(args: argparse.Namespace) -> None:
    """The table of all options, as Megatron prints it."""
    print("------------------------ arguments ------------------------")
    for name, value in sorted(vars(args).items(), key=lambda item: item[0].lower()):
        print(f"  {name} {'.' * (48 - len(name))} {value}")
    print("-------------------- end of arguments ---------------------", flush=True)


def _debug_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug-rollout-only", action="store_true")
    parser.add_argument("--debug-train-only", action="store_true")
    parser.add_argument("--load-debug-rollout-data")


def _debug_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _debug_arguments(parser)
    return parser


def _megatron_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)  # Megatron's own sets the same
    for name in ("--save-debug-rollout-data", "--save-debug-train-data", "--dump-details"):
        parser.add_argument(name)
    parser.add_argument("--num-rollout", type=int, default=3)
    parser.add_argument("--start-rollout-id", type=int, default=0)
    parser.add_argument("--rollout-batch-size", type=int, default=4)
    parser.add_argument("--n-samples-per-prompt", type=int, default=4)
    parser.add_argument("--global-batch-size", type=int, default=16)
    parser.add_argument("--rollout-max-response-len", type=int, default=9)
    parser.add_argument("--rollout-temperature", type=float, default=1.0)
    parser.add_argument("--rollout-seed", type=int, default=42)
    parser.add_argument("--sglang-enable-deterministic-inference", action="store_true")
    parser.add_argument("--advantage-estimator", choices=("grpo", "ppo", "reinforce_plus_plus"), default="grpo")
    parser.add_argument("--normalize-advantages", action="store_true")
    parser.add_argument("--calculate-per-token-loss", action="store_true")
    parser.add_argument("--use-critic", action="store_true")
    parser.add_argument("--use-kl-loss", action="store_true")
    for name, value in (
        ("--kl-loss-coef", 0.0), ("--kl-coef", 0.0), ("--entropy-coef", 0.0), ("--eps-clip", 0.2),
        ("--eps-clip-high", 0.28), ("--value-clip", 0.2), ("--gamma", 1.0), ("--lambd", 0.95), ("--lr", 1e-2),
        ("--adam-beta1", 0.9), ("--adam-beta2", 0.98), ("--clip-grad", 1.0),
    ):  # fmt: skip
        parser.add_argument(name, type=float, default=value)
    parser.add_argument("--eps-clip-c", type=float)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--actor-num-nodes", type=int, default=1)
    parser.add_argument("--colocate", action="store_true")
    parser.add_argument("--actor-num-gpus-per-node", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--deterministic-mode", action="store_true")
    parser.add_argument("--ci-test", action="store_true")
    parser.add_argument("--ci-save-grad-norm")
    return parser


def _miles_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug-exit-after-rollout", type=int)
    parser.add_argument("--save-debug-event-data")
    parser.add_argument("--save-local-weight-checksum", action="store_true")
    parser.add_argument("--true-on-policy-mode", action="store_true")
    parser.add_argument("--qkv-format", choices=("thd",), default="thd")


def _validate(args: argparse.Namespace) -> None:
    if args.dump_details is not None:
        rank = "" if SYSTEM == "slime" else "_{rank}"
        args.save_debug_rollout_data = f"{args.dump_details}/rollout_data/{{rollout_id}}.pt"
        args.save_debug_train_data = f"{args.dump_details}/train_data/{{rollout_id}}{rank}.pt"
        if SYSTEM == "miles":
            args.save_debug_event_data = f"{args.dump_details}/events"
    if args.load_debug_rollout_data is not None:
        args.debug_train_only = True
    if args.debug_train_only and args.debug_rollout_only:
        sys.exit("debug_rollout_only and debug_train_only cannot be set at the same time")
    args.use_critic = args.advantage_estimator == "ppo"
    world, shards = args.actor_num_gpus_per_node, args.context_parallel_size * args.tensor_model_parallel_size
    if world % shards:
        sys.exit(f"{world} GPUs cannot hold {shards} tensor- and context-parallel ranks")
    args.data_parallel_size = world // shards
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if samples % args.global_batch_size or args.global_batch_size % args.data_parallel_size:
        sys.exit(f"{samples} samples, global batch size {args.global_batch_size}, dp {args.data_parallel_size}")
    args.num_steps_per_rollout = samples // args.global_batch_size
