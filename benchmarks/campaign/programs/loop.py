"""A plain training loop: two optimizers, BatchNorm, dropout, an average, sparse gradients, a schedule."""

import copy
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional

random.seed(1)
np.random.seed(2)
torch.manual_seed(3)


class Policy(nn.Module):
    """Scores the tokens of bags of words."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(20, 6, mode="sum", sparse=True)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 5)

    def forward(self, words):
        """Logits of the actions."""
        hidden = functional.gelu(self.norm(self.first(self.table(words))))
        return self.head(self.drop(hidden))


model = Policy()
ema = copy.deepcopy(model).requires_grad_(False)
decay = 0.9
dense = torch.optim.AdamW([p for n, p in model.named_parameters() if not n.startswith("table")], lr=0.01)
sparse = torch.optim.SparseAdam(model.table.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.ExponentialLR(dense, 0.8)
rollouts = [
    {
        "words": torch.randint(20, (6, 4)),
        "actions": torch.randint(5, (6,)),
        "advantages": torch.randn(6),
        "mask": torch.tensor([True, True, False, True, True, True]),
    }
    for _ in range(3)
]


def parts():
    """What there is to look at: modules by name, and optimizers in their order."""
    return {"": model, "ema": ema}, [dense, sparse]


def data():
    """What rollouts hold."""
    return [tensor for rollout in rollouts for tensor in rollout.values()]


def knobs():
    """Numbers that a change may move: whose attribute or item, and which."""
    return [(model.norm, "momentum"), (model.norm, "eps"), (model.drop, "p"), (schedule, "gamma"), (globals(), "decay")]


@torch.no_grad()
def average():
    for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
        mine.lerp_(theirs, 1 - decay)
    for mine, theirs in zip(ema.buffers(), model.buffers(), strict=True):
        mine.copy_(theirs)


for step, rollout in enumerate(rollouts):
    dense.zero_grad()
    sparse.zero_grad()
    log_probs = functional.log_softmax(model(rollout["words"]), dim=-1)
    taken = log_probs.gather(1, rollout["actions"][:, None]).squeeze(1)
    losses = torch.where(rollout["mask"], -taken * rollout["advantages"], 0.0)
    loss = losses.sum() / rollout["mask"].sum()
    loss.backward()
    norm = nn.utils.clip_grad_norm_([p for g in dense.param_groups for p in g["params"]], 0.5)
    dense.step()
    sparse.step()
    schedule.step()
    average()
    print(
        {"step": step, "loss": loss.item(), "norm": norm.item(), "entropy": -(log_probs.exp() * log_probs).sum().item()}
    )
