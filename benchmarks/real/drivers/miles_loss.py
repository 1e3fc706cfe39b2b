"""Miles: its advantages and its losses, three updates of a tiny actor (and critic) on one rollout of random tokens.

    python miles_loss.py '{"advantage_estimator": "ppo"}' pg_loss ppo_kl

The first argument are settings of Miles as JSON; the others name metrics of its loss functions to print. Beside Miles'
own settings there are: `tools`: of each response these tokens are a tool's; `far`: how far the rollout's policy is from
the trained one; `cp`: the ranks, started by torchrun, share each sequence (context parallelism); `rollouts`: which
rollout each response is of, where Miles' own conversion of samples makes the rewards.
"""

import dataclasses
import json
import os
import sys
import typing
from argparse import Namespace

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # no compiler
import torch
import torch.distributed as dist
from kit import norm_of, report, seed, upstream

upstream()
from miles.backends.training_utils import loss as losses  # noqa: E402 - Miles', of the commit
from miles.backends.training_utils import parallel  # noqa: E402
from miles.backends.training_utils.cp_utils import slice_log_prob_with_cp, slice_with_cp  # noqa: E402

VOCABULARY, WIDTH = 32, 16
DEFAULTS = {
    "advantage_estimator": "grpo", "loss_type": "policy_loss", "qkv_format": "thd", "true_on_policy_mode": False,
    "rollout_temperature": 1.0, "log_probs_chunk_size": -1, "allgather_cp": False, "use_rollout_logprobs": False,
    "kl_coef": 0.0, "kl_loss_type": "k1", "use_kl_loss": False, "kl_loss_coef": 0.0, "use_unbiased_kl": False,
    "gamma": 0.99, "lambd": 0.9, "normalize_advantages": False, "use_opd": False, "use_opsm": False, "use_tis": False,
    "opd_kl_coef": 0.0, "eps_clip": 0.2, "eps_clip_high": 0.2, "eps_clip_c": None, "value_clip": 0.2,
    "entropy_coef": 0.0, "observe_training_entropy": False, "get_mismatch_metrics": False,
    "calculate_per_token_loss": False, "recompute_loss_function": False, "use_dynamic_global_batch_size": False,
    "custom_tis_function_path": None, "custom_pg_loss_reducer_function_path": None, "skip_actor_forward_only": False,
    "bf16": False, "fp16": False, "dump_details": None, "global_batch_size": 4, "rewards_normalization": True,
    "grpo_std_normalization": True, "n_samples_per_prompt": 4, "rollout_batch_size": 1, "reward_key": None,
}  # fmt: skip
PROMPTS, RESPONSES = (3, 2, 4, 3), (6, 6, 9, 5)


def parallel_state(shared: bool) -> None:
    """Tell Miles of the ranks: all in one context-parallel group if `shared`, else all data-parallel."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    everybody = dist.group.WORLD
    together = ("cp" if shared else "intra_dp", "intra_dp_cp")
    hints = typing.get_type_hints(parallel.ParallelState)
    groups = {}
    for field in dataclasses.fields(parallel.ParallelState):
        kind = hints[field.name]
        if getattr(kind, "__name__", "") == "GroupInfo":
            group = everybody if field.name in together else alone
            groups[field.name] = kind(dist.get_rank(group), dist.get_world_size(group), group, group)
    parallel.set_parallel_state(parallel.ParallelState(**groups))


def model(width: int) -> torch.nn.Module:
    """Token by token, so that a part of a sequence gives the same numbers as the whole."""
    hidden = torch.nn.Linear(WIDTH, WIDTH)
    return torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, WIDTH), hidden, torch.nn.Tanh(), torch.nn.Linear(WIDTH, width)
    )


def converted(args: Namespace, batch: dict, rollouts: list[int]) -> list[float]:
    """Rewards, as Miles makes them of samples."""
    from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data
    from miles.utils.types import Sample

    known = {field.name for field in dataclasses.fields(Sample)}
    samples = [
        Sample(
            group_index=0, index=index, tokens=tokens.tolist(), response_length=len(mask), reward=reward,
            loss_mask=mask.tolist(), **{"rollout_id": rollout} if "rollout_id" in known else {},
        )
        for index, (tokens, mask, reward, rollout) in enumerate(
            zip(batch["tokens"], batch["loss_masks"], batch["rewards"], rollouts, strict=True)
        )
    ]  # fmt: skip
    return convert_samples_to_train_data(args, samples, {}, None, None)["rewards"]


def main() -> None:
    """Train."""
    settings, shown = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}, sys.argv[2:]
    tools, far, shared = settings.pop("tools", []), settings.pop("far", 0.1), settings.pop("cp", False)
    rollouts = settings.pop("rollouts", None)
    args = Namespace(**DEFAULTS | settings)
    seed()
    parallel_state(shared)
    actor, reference, critic = model(VOCABULARY), model(VOCABULARY), model(1)
    lengths = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    tokens = [torch.randint(VOCABULARY, (length,)) for length in lengths]
    masks = [torch.ones(response, dtype=torch.int) for response in RESPONSES]
    for mask in masks:
        mask[[token for token in tools if token < len(mask)]] = 0
    longest = 16 if args.qkv_format == "bshd" else None
    batch = {
        "unconcat_tokens": tokens, "tokens": tokens, "total_lengths": lengths, "response_lengths": list(RESPONSES),
        "loss_masks": masks, "rewards": [1.0, -0.5, 0.25, -1.0],
    }  # fmt: skip
    if rollouts:
        batch["rewards"] = [batch["rewards"][rollout] for rollout in rollouts]  # one of each rollout
        batch["rewards"] = converted(args, batch, rollouts)
    where = {"args": args, **{key: batch[key] for key in ("unconcat_tokens", "total_lengths", "response_lengths")}}
    if longest:
        batch["max_seq_lens"] = where["max_seq_lens"] = [longest] * len(tokens)
    parts = [slice_with_cp(sample, 0, args.qkv_format, longest) for sample in tokens]
    fed = torch.stack(parts) if longest else torch.cat(parts)[None]
    with torch.no_grad():
        batch["log_probs"] = losses.get_log_probs_and_entropy(actor(fed), **where)["log_probs"]
        batch["ref_log_probs"] = losses.get_log_probs_and_entropy(reference(fed), **where)["log_probs"]
        away = [far * torch.randn(response) for response in RESPONSES]
        batch["rollout_log_probs"] = [
            known + slice_log_prob_with_cp(noise, total, response, args.qkv_format, longest)
            for known, noise, total, response in zip(batch["log_probs"], away, lengths, RESPONSES, strict=True)
        ]
        if args.advantage_estimator == "ppo":
            batch["values"] = losses.get_values(critic(fed), **where)["values"]
    losses.compute_advantages_and_returns(args, batch)
    trained = [*actor.parameters(), *(critic.parameters() if args.advantage_estimator == "ppo" else [])]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for step in range(3):
        loss, _, log = losses.loss_function(args, batch, 1, actor(fed))
        metrics = dict(zip(log["keys"], log["values"][1:], strict=True))
        if args.advantage_estimator == "ppo":
            critic_args = Namespace(**vars(args) | {"loss_type": "value_loss"})
            value_loss, _, log = losses.loss_function(critic_args, batch, 1, critic(fed))
            metrics |= dict(zip(log["keys"], log["values"][1:], strict=True))
            loss = loss + value_loss
        loss.backward()
        for parameter in trained if dist.get_world_size() > 1 else []:
            dist.all_reduce(parameter.grad)
        norm = norm_of(trained)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if dist.get_rank() == 0:
            report(step, loss=loss.item(), grad_norm=norm, **{name: metrics[name].item() for name in shown})
    dist.destroy_process_group()


main()
