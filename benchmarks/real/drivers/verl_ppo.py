"""verl: the functions of its PPO over a small policy and critic, three updates on random tokens.

    python verl_ppo.py policy seq-mean-token-sum    # GRPO's advantages, the clipped loss, a way to add it up
    python verl_ppo.py value                        # the critic: GAE's returns, the clipped loss of values
    python verl_ppo.py gae                          # GAE's advantages where a tool's answer lies inside the response
    python verl_ppo.py schedule                     # the clipped loss, under the constant schedule without warmup

The advantages and returns are made once, before the first update, as the trainer makes them.
"""

import sys

import numpy as np
import torch
from kit import norm_of, report, seed, upstream

upstream()
from verl.trainer.ppo import core_algos  # noqa: E402 - verl's, of the commit
from verl.utils import torch_functional  # noqa: E402

VOCABULARY, WIDTH, LENGTH, ROWS = 32, 16, 12, 4


def model(outputs: int) -> torch.nn.Module:
    """Of two layers: logits of the next token, or a value."""
    return torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(),
        torch.nn.Linear(WIDTH, outputs),
    )  # fmt: skip


def main() -> None:
    """Train."""
    kind, *more = sys.argv[1:]
    seed()
    actor, critic = model(VOCABULARY), model(1)
    trained = critic if kind == "value" else actor
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    schedule = None
    if kind == "schedule":
        schedule = torch_functional.get_constant_schedule_with_warmup(optimizer, num_warmup_steps=0)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1))
    lengths = torch.tensor([[3], [12], [7], [5]])
    mask = (torch.arange(LENGTH) < lengths).float()
    rewards = torch.zeros(ROWS, LENGTH).scatter(1, lengths - 1, torch.tensor([[1.0], [0.0], [0.5], [1.0]]))
    if kind == "gae":
        mask[1:, 2:4] = 0
    with torch.no_grad():
        old = torch_functional.logprobs_from_logits(actor(tokens[:, :-1]), tokens[:, 1:])
        values = critic(tokens[:, :-1]).squeeze(-1) * mask
    if kind in ("gae", "value"):
        advantages, returns = core_algos.compute_gae_advantage_return(rewards, values, mask, 0.99, 0.95)
    else:
        groups = np.array(["a", "a", "b", "b"], dtype=object)
        advantages, returns = core_algos.compute_grpo_outcome_advantage(rewards, mask, groups)
    for step in range(3):
        if kind == "value":
            predicted = critic(tokens[:, :-1]).squeeze(-1)
            loss = core_algos.compute_value_loss(predicted, returns, values, mask, 0.5)[0]
        else:
            now = torch_functional.logprobs_from_logits(actor(tokens[:, :-1]), tokens[:, 1:])
            ways = {"loss_agg_mode": more[0]} if more else {}
            loss = core_algos.compute_policy_loss(old, now, advantages, mask, 0.2, **ways)[0]
        loss.backward()
        norm = norm_of(trained.parameters())
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
        report(step, loss=loss.item(), grad_norm=norm)


main()
