"""Parameters outside modules, stepped by hand: there is no optimizer."""

import torch

torch.manual_seed(0)
weight = torch.randn(6, 3, requires_grad=True)
bias = torch.zeros(3, requires_grad=True)
rate = 0.1


def checkpoint():
    return {"weight": weight, "bias": bias}


for step in range(3):
    loss = (torch.randn(12, 6) @ weight + bias).square().mean()
    gradients = torch.autograd.grad(loss, [weight, bias])
    with torch.no_grad():
        for p, gradient in zip([weight, bias], gradients, strict=True):
            p -= rate * gradient
    print(f"step {step}: {{'loss': {loss.item()!r}}}")
