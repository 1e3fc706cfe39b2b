from __future__ import annotations

import math
from typing import Any

import torch

from repro_core.rl.first_step import first_step_checks

torch.set_num_threads(1)


def judged(**changes: Any) -> list[bool]:
    columns = {
        "log_probs": torch.tensor([-1.0, -2.0, math.nan]),
        "ref_log_probs": torch.tensor([-1.0, -2.0, 5.0]),
        "kl": torch.tensor([0.0, -0.0, math.inf]),
        "loss_mask": torch.tensor([1, 1, 0]),
    }
    metrics = {"kl_loss": 0.0, "grad_norm": 0.5}
    for name, value in changes.items():
        if name in columns:
            columns[name] = value
        else:
            metrics[name] = value
    return [result.passed for result in first_step_checks(columns, metrics)]


def test_first_step_checks_pass_and_fail_where_they_should() -> None:
    """Bits and not tolerance, two-sided, NaN fails, a KL of -0.0 counts as 0, masked tokens are not looked at."""
    assert judged() == [True, True, True]
    one_ulp = torch.nextafter(torch.tensor(-2.0), torch.tensor(0.0))
    assert judged(log_probs=torch.tensor([-1.0, float(one_ulp), 0.0])) == [False, True, True]
    nan = torch.tensor([math.nan, -2.0, 0.0])
    assert judged(log_probs=nan, ref_log_probs=nan) == [False, True, True]
    for kl in (1e-30, -1e-30, math.nan):
        assert judged(kl=torch.tensor([0.0, kl, 0.0])) == [True, False, True]
    for kl_loss in (1e-12, -1e-12, math.nan):
        assert judged(kl_loss=kl_loss) == [True, False, True]
    for grad_norm in (101.0, math.nan, math.inf, -1.0):
        assert judged(grad_norm=grad_norm) == [True, True, False]
    assert judged(loss_mask=torch.zeros(3)) == [False, False, True]


def test_first_step_checks_print_their_bound() -> None:
    """The name of the last check holds the bound it was given; without a bound, the norm must still be finite."""
    columns = {name: torch.zeros(1) for name in ("log_probs", "ref_log_probs", "kl")} | {"loss_mask": torch.ones(1)}
    assert not first_step_checks(columns, {"kl_loss": 0.0, "grad_norm": math.inf}, grad_norm_bound=math.inf)[-1].passed
    last = first_step_checks(columns, {"kl_loss": 0.0, "grad_norm": 3.0}, grad_norm_bound=2.5)[-1]
    assert last.name == "grad_norm <= 2.5" and not last.passed and "3.0" in last.detail


def test_first_step_checks_cast_nothing() -> None:
    """What fp64 columns differ by fails, below fp32's resolution too; other dtypes on both sides are not one number."""
    a = torch.tensor([-1.0, -2.0, 0.0], dtype=torch.float64)
    b = a + torch.tensor([0.0, 2.0**-40, 0.0], dtype=torch.float64)
    assert judged(log_probs=a, ref_log_probs=a) == [True, True, True]
    assert judged(log_probs=a, ref_log_probs=b) == judged(log_probs=b, ref_log_probs=a) == [False, True, True]
    assert judged(log_probs=a) == [False, True, True]
    for dtype in (torch.bfloat16, torch.float16):
        assert judged(log_probs=a.to(dtype), ref_log_probs=a.to(dtype)) == [True, True, True]
    tiny = torch.tensor([0.0, 1e-60, 0.0], dtype=torch.float64)
    assert judged(kl=tiny) == judged(kl=-tiny) == [True, False, True]


def test_first_step_checks_want_finite_log_probs_and_every_kl() -> None:
    """A token without probability on both sides is no agreement, nor are zeros of two signs; ppo_kl counts."""
    never = torch.tensor([-math.inf, -2.0, 0.0])
    assert judged(log_probs=never, ref_log_probs=never) == [False, True, True]
    zero = torch.tensor([0.0, -2.0, 0.0])
    assert judged(log_probs=zero, ref_log_probs=-zero * torch.tensor([1.0, -1.0, 1.0])) == [False, True, True]
    for ppo_kl in (1e-12, -1e-12, math.nan):
        assert judged(ppo_kl=ppo_kl) == [True, False, True]
    assert judged(ppo_kl=-0.0) == [True, True, True]
