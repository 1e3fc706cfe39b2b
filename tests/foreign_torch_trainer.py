"""A trainer in slime's shape on torch: what a test repository holds as its train.py, where the recorder looks on.

It loads dumps and writes train dumps with torch itself, as slime does, in this process or, with --ray, in an actor.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import torch

SCALE = 1.0
VOCABULARY = 64


def parse_args() -> argparse.Namespace:
    """A parser for the debug flags, and one that keeps silent on what it does not know, as slime has."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--load-debug-rollout-data")
    early.add_argument("--debug-train-only", action="store_true")
    pre, _ = early.parse_known_args()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--dump-details")
    parser.add_argument("--num-rollout", type=int, default=50)
    parser.add_argument("--start-rollout-id", type=int, default=0)
    parser.add_argument("--deterministic-mode", action="store_true")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--save")
    parser.add_argument("--ray", action="store_true")
    args, _ = parser.parse_known_args()
    return argparse.Namespace(**{**vars(args), **vars(pre)})


def train(args: argparse.Namespace) -> list[str]:
    """Train on every rollout; what this process was told of determinism."""
    logging.basicConfig(
        level=logging.INFO, format="[%(asctime)s] %(filename)s:%(lineno)d - %(message)s", datefmt="%Y-%m-%d %H:%M:%S",
        force=True, stream=sys.stdout,
    )  # fmt: skip
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(args.deterministic_mode)
    torch.manual_seed(7)
    policy = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, VOCABULARY))
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr)
    assert args.load_debug_rollout_data, "nothing to train on"
    for rollout_id in range(args.start_rollout_id, args.num_rollout):
        path = args.load_debug_rollout_data.format(rollout_id=rollout_id)
        step(args, policy, optimizer, rollout_id, torch.load(path, weights_only=False)["samples"])
    if args.save:
        Path(args.save).mkdir(parents=True, exist_ok=True)
        torch.save(policy.state_dict(), Path(args.save) / "model.pt")
    return [os.environ.get("NCCL_ALGO", ""), os.environ.get("PYTHONHASHSEED", "")]


def step(
    args: argparse.Namespace, policy: torch.nn.Module, optimizer: torch.optim.Optimizer, rollout_id: int, samples: list
) -> None:
    """One rollout, one update; then its train dump."""
    rewards = torch.tensor([sample["reward"] for sample in samples])
    advantages = (rewards - rewards.mean()) * SCALE
    columns, loss = [], torch.zeros(())
    for sample, advantage in zip(samples, advantages, strict=True):
        tokens, length = torch.tensor(sample["tokens"]), sample["response_length"]
        logits = policy(tokens[:-1]).log_softmax(-1)
        log_probs = logits.gather(1, tokens[1:, None])[:, 0][-length:]
        loss = loss - (log_probs.mean() * advantage)
        columns.append((tokens, length, log_probs.detach(), advantage.expand(length).clone()))
    optimizer.zero_grad()
    (loss / len(samples)).backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    numbers = {
        "train/loss": loss.item() / len(samples),
        "train/ppo_kl": 0.0,
        "train/grad_norm": norm.item(),
        "train/step": rollout_id,
    }
    logging.info("step %d: %s", rollout_id, numbers)
    if args.dump_details:
        dump(Path(args.dump_details) / "train_data" / f"{rollout_id}.pt", rollout_id, samples, columns)


def dump(path: Path, rollout_id: int, samples: list, columns: list) -> None:
    """A train dump of slime's, format_version 2."""
    rows = [
        {
            "data_parallel_rank": 0, "sample_index": sample["index"], "rollout_position": at, "tokens": tokens,
            "response_lengths": length, "rewards": float(sample["reward"]), "truncated": 0,
            "total_lengths": len(tokens), "loss_masks": torch.ones(length, dtype=torch.int32),
            "rollout_log_probs": torch.tensor(sample["rollout_log_probs"]),
            "log_probs": log_probs, "ref_log_probs": log_probs, "advantages": advantage, "returns": advantage,
        }
        for at, (sample, (tokens, length, log_probs, advantage)) in enumerate(zip(samples, columns, strict=True))
    ]  # fmt: skip
    every = list(range(len(rows)))
    shard = {
        "rank": 0, "data_parallel_rank": 0, "sample_indices": [row["sample_index"] for row in rows],
        "partition": every, "global_batch_sizes": [len(rows)], "num_microbatches": [1],
        "micro_batch_indices": [[every]],
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"format_version": 2, "rollout_id": rollout_id, "rank": 0, "samples": rows, "dp_shards": [shard]}
    torch.save({**whole, "raw_reward": [row["rewards"] for row in rows]}, path)


def main() -> None:
    """In this process, or in an actor."""
    args = parse_args()
    if not args.ray:
        train(args)
        return
    import ray

    ray.init()
    told = ray.get(ray.remote(num_cpus=1)(train).remote(args))
    print("the actor was told", *told, flush=True)


if __name__ == "__main__":
    main()
