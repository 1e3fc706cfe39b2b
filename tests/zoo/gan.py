"""Two models with an optimizer each, in turn."""

import torch
from torch import nn

torch.manual_seed(0)
maker = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
judge = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
critic = nn.Linear(4, 1)
makes = torch.optim.Adam(maker.parameters(), lr=0.01)
judges = torch.optim.Adam(judge.parameters(), lr=0.01)
critics = torch.optim.SGD(critic.parameters(), lr=0.1)


def checkpoint():
    return {"maker": maker.state_dict(), "judge": judge.state_dict(), "critic": critic.state_dict()}


for step in range(3):
    noise, real = torch.randn(8, 2), torch.randn(8, 4)
    judges.zero_grad()
    judged = judge(maker(noise).detach()).mean() - judge(real).mean()
    judged.backward()
    judges.step()
    makes.zero_grad()
    made = -judge(maker(noise)).mean()
    made.backward()
    makes.step()
    if step == 2:
        (critic(real) - 1).square().mean().backward()
        critics.step()
    print(f"step {step}: {{'judged': {judged.item()!r}, 'made': {made.item()!r}}}")
