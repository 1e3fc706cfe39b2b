"""slime: its advantages, its masks and its loss for Megatron, three updates of a tiny model; a rank or two.

    python slime_loss.py '{"loss_type": "value_loss", "rollout_temperature": 0.7}'

The argument are settings of slime's command line, as JSON. Under torchrun the ranks share the context: each holds its
part of every sequence, as slime cuts it. The samples are random, of lengths that differ, with turns that are masked.
"""

import inspect
import json
import os
import sys
from argparse import Namespace

os.environ["TORCHDYNAMO_DISABLE"] = "1"
import torch
import torch.distributed as dist
from kit import norm_of, report, seed, upstream
from torch import nn
from torch.nn.parallel import DistributedDataParallel

upstream()
from megatron.core import mpu  # noqa: E402
from slime.backends.megatron_utils import loss as slime  # noqa: E402 - slime's, of the commit
from slime.backends.megatron_utils.cp_utils import slice_with_cp  # noqa: E402

WORDS, WIDTH, SIZES = 32, 16, [(12, 7), (20, 15), (9, 4), (16, 10)]
"""Tokens that there are, width of the model, and the tokens of each sample and of its response."""
SETTINGS = {
    "loss_type": "policy_loss", "advantage_estimator": "grpo", "global_batch_size": len(SIZES), "eps_clip": 0.2,
    "eps_clip_high": 0.2, "eps_clip_c": None, "entropy_coef": 0.0, "kl_coef": 0.0, "kl_loss_coef": 0.0,
    "kl_loss_type": "k1", "use_kl_loss": False, "gamma": 1.0, "lambd": 1.0, "value_clip": 0.2,
    "normalize_advantages": False, "rollout_temperature": 1.0, "rollout_top_p": 1.0, "calculate_per_token_loss": False,
    "recompute_loss_function": False, "log_probs_chunk_size": -1, "qkv_format": "thd", "allgather_cp": False,
    "use_rollout_logprobs": False, "use_tis": False, "get_mismatch_metrics": False, "use_opsm": False, "use_opd": False,
    "use_unbiased_kl": False, "custom_tis_function_path": None, "custom_advantage_function_path": None,
    "custom_pg_loss_reducer_function_path": None,
}  # fmt: skip


def main() -> None:
    """Train."""
    args = Namespace(**SETTINGS | json.loads(sys.argv[1] if len(sys.argv) > 1 else "{}"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mpu.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    seed()
    critic = args.loss_type == "value_loss"
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 1 if critic else WORDS))
    tokens = [torch.randint(WORDS, (total,)) for total, _ in SIZES]
    masks = [torch.ones(response) for _, response in SIZES]
    for mask in masks:
        mask[len(mask) // 2 : len(mask) // 2 + 2] = 0  # what a tool said in between
    local = torch.cat([slice_with_cp(sample, 0) for sample in tokens])
    batch = {
        "unconcat_tokens": tokens, "total_lengths": [total for total, _ in SIZES], "loss_masks": masks,
        "response_lengths": [response for _, response in SIZES], "rewards": [1.0, -0.5, 0.25, -1.5],
        "group_mask_sums": [mask.sum() for mask in masks], "rollout_mask_sums": [mask.sum() for mask in masks],
    }  # fmt: skip

    def known(key: str) -> list[torch.Tensor]:
        """Of every response token what the model says of it, by slime's own function."""
        given = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
        with torch.no_grad():
            output = model(local).unsqueeze(0)
            result = {"log_probs": slime.get_log_probs_and_entropy, "values": slime.get_values}[key](
                output, args=args, **given
            )
        return (result[1] if isinstance(result, tuple) else result)[key]

    if critic:
        batch["values"] = known("values")
    else:
        for name in ("log_probs", "ref_log_probs"):
            batch[name] = [x + torch.randn(x.shape) / 2 for x in known("log_probs")]
    slime.compute_advantages_and_returns(args, batch)
    trained = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    more = {"step_global_batch_size": len(SIZES)}
    wanted = inspect.signature(slime.loss_function).parameters
    for step in range(3):
        logits = trained(local).unsqueeze(0)
        loss, _, _ = slime.loss_function(
            args=args, batch=batch, num_microbatches=1, logits=logits, **{n: more[n] for n in more if n in wanted}
        )
        loss.backward()
        norm = norm_of(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            report(step, loss=loss.item(), grad_norm=norm)
    dist.barrier()


main()
