"""A language model whose input and output share their weights."""

import torch
from torch import nn


class Language(nn.Module):
    """Predicts the next of 20 words."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words):
        return self.head(self.embed(words))


torch.manual_seed(0)
model = Language()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def checkpoint():
    return {"model": model.state_dict()}


for step in range(3):
    words = torch.randint(20, (6, 5))
    optimizer.zero_grad()
    logits = model(words[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
