from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from repro_core.config import TrainConfig
from repro_core.engines.optimizer import MainOptimizer, clip_grads, global_norm

torch.set_num_threads(1)


def bits(value: Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_adamw_is_its_formula() -> None:
    """Two steps of one weight against Loshchilov and Hutter's update in double precision."""
    weight = torch.nn.Parameter(torch.tensor([0.5]))
    config = TrainConfig(lr=0.1, betas=(0.9, 0.99), adam_eps=1e-8, weight_decay=0.2)
    optimizer = MainOptimizer([("w", weight)], config)
    w, m, v = 0.5, 0.0, 0.0
    for step, gradient in enumerate((0.3, -0.1), start=1):
        optimizer.zero_grad()
        weight.grad = torch.tensor([gradient])
        optimizer.accumulate()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * gradient, 0.99 * v + 0.01 * gradient**2
        w = w * (1 - 0.1 * 0.2) - 0.1 * (m / (1 - 0.9**step)) / (math.sqrt(v / (1 - 0.99**step)) + 1e-8)
        assert float(weight.detach()) == pytest.approx(w, rel=1e-6)


def test_bf16_gradients_are_summed_in_fp32() -> None:
    """256 + 1 is lost in bf16 and kept in main_grad; a small update is lost in the bf16 weight and kept in the main."""
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = MainOptimizer([("w", weight), ("unused", torch.nn.Parameter(torch.ones(2)))], TrainConfig(lr=1e-4))
    optimizer.zero_grad()
    for gradient in (256.0, 1.0):
        weight.grad = torch.tensor([gradient], dtype=torch.bfloat16)
        optimizer.accumulate()
    assert optimizer.gradients()["w"].tolist() == [257.0]
    assert optimizer.gradients()["unused"].tolist() == [0.0, 0.0]
    optimizer.step()
    optimizer.publish()
    assert weight.tolist() == [1.0] and optimizer.main["w"].tolist() == pytest.approx([1 - 1e-4])


def test_clipping_scales_to_the_bound_and_returns_the_norm_before() -> None:
    """Norm 5 is scaled to 1; 0 turns clipping off; a small norm and a non-finite norm leave the bits alone."""
    grads = {"b": torch.tensor([3.0]), "a": torch.tensor([0.0, 4.0])}
    assert float(clip_grads(grads, 1.0)) == 5.0
    assert float(global_norm(grads)) == pytest.approx(1.0, abs=1e-6)
    for bound, values in ((0.0, [3.0]), (10.0, [3.0]), (1.0, [3.0, math.inf]), (1.0, [3.0, math.nan]), (1.0, [1e30])):
        gradients = {"w": torch.tensor(values)}
        before = bits(gradients["w"])
        norm = float(clip_grads(gradients, bound))
        assert bits(gradients["w"]) == before and (norm == 3.0 or not math.isfinite(norm))
    assert float(clip_grads({}, 1.0)) == 0.0


def test_the_norm_does_not_depend_on_the_order_of_the_mapping() -> None:
    """Per-parameter sums are added in ascending order of names."""
    # 2^24 + 1 rounds back to 2^24 in fp32, eight times over; 8 + 2^24 does not.
    grads = {"a": torch.tensor([4096.0])} | {f"b{i}": torch.ones(1) for i in range(8)}
    assert float(global_norm(grads)) == float(global_norm(dict(reversed(grads.items())))) == 4096.0
