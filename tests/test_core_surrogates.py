"""The surrogates of gspo and cispo, each against a loop written independently here, and what all estimators share."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from repro_core.config import Estimator, TrainConfig
from repro_core.rl.loss import Columns, LossTerms, policy_loss, token_weights

torch.set_num_threads(1)

NAMES = get_args(Estimator)
U = 2.0**-24  # half the distance from 1 to the next fp32 number: the largest relative error of one rounding
TINY = 2.0**-149  # an underflow is off by less than this

Masks = list[list[int]]
Batch = tuple[Masks, list[float], list[float], list[float]]
"""By sample the mask; by token the new log-prob, the old one and the advantage."""

PLAIN = TrainConfig(kl_loss_coef=0.0)
GSPO = replace(PLAIN, advantage_estimator="gspo")
CISPO = replace(PLAIN, advantage_estimator="cispo")
log_probs = st.floats(-4.0, 0.0, width=32)
floats = st.floats(-8.0, 8.0, width=32)


def column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def packed(masks: Masks) -> tuple[Tensor, Tensor]:
    """Mask and response lengths."""
    mask = torch.tensor([keep for mask in masks for keep in mask], dtype=torch.int64)
    return mask, torch.tensor([len(mask) for mask in masks], dtype=torch.int64)


def columns_of(masks: Masks, ours: Tensor, old: list[float], adv: list[float]) -> Columns:
    zeros = torch.zeros(len(ours))
    mask, lengths = packed(masks)
    return Columns(
        log_probs=ours,
        entropy=zeros,
        kl=zeros,
        old_log_probs=column(old),
        rollout_log_probs=column(old),
        advantages=column(adv),
        loss_mask=mask,
        response_lengths=lengths,
    )


def terms_of(
    masks: Masks, new: list[float], old: list[float], adv: list[float], config: TrainConfig, how: Any = "sample"
) -> tuple[LossTerms, Tensor]:
    """The loss and the gradient of the new log-probs."""
    ours = column(new).requires_grad_()
    terms = policy_loss(columns_of(masks, ours, old, adv), token_weights(*packed(masks), how), config)
    (gradient,) = torch.autograd.grad(terms.loss, ours)
    return terms, gradient


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    masks = draw(st.lists(st.lists(st.sampled_from([0, 1, 1]), max_size=4), max_size=4))
    size = sum(map(len, masks))

    def drawn(strategy: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(strategy, min_size=size, max_size=size))

    return masks, drawn(log_probs), drawn(log_probs), drawn(floats)


@given(st.lists(st.tuples(log_probs, log_probs, floats, st.integers(0, 1)), max_size=6), st.booleans(), st.booleans())
def test_gspo_of_single_tokens_is_grpo(rows: list[tuple[float, float, float, int]], dual: bool, tis: bool) -> None:
    """Where every response is one token, value, metrics and gradient are those of the token-level loss."""
    masks = [[mask] for *_, mask in rows]
    new, old, adv = ([row[i] for row in rows] for i in range(3))
    settings_: dict[str, Any] = {"eps_clip_c": 1.5 if dual else None, "use_tis": tis}
    (a, slope_a), (b, slope_b) = (
        terms_of(masks, new, old, adv, replace(config, **settings_)) for config in (PLAIN, GSPO)
    )
    assert a.sums == b.sums and slope_a.tolist() == slope_b.tolist()
    assert float(a.loss.detach()) == float(b.loss.detach())


UNDERFLOWS: Batch = (
    [[0], [0] * 4, [0, 0, 0, 1], [0, 0, 1]], [0.0] * 12, [0.0] * 8 + [-1.0] + [0.0] * 3,
    [0.0] * 8 + [-8.449829739878647e-43] + [0.0] * 3,
)  # fmt: skip


@example(UNDERFLOWS, None, "token")
@given(batches(), st.sampled_from([None, 1.5]), st.sampled_from(["token", "sample"]))
def test_gspo_is_its_formula(batch: Batch, dual: float | None, how: Any) -> None:
    """Value and gradient against a loop over samples in double precision.

    The mean log-ratio of n <= 4 numbers of at most 4 is off by (1 + n) roundings of 4 (each difference, n - 1 sums, the
    quotient), its exp relatively by that and two more, and a handful of products and sums follow: 64 * U covers them
    with the largest ratio, advantage and weight below as scale. A product that underflows is off by half of the
    smallest number, and there are 3 in each of n terms of a gradient: 8 of it cover them. At the edges of the clip
    range fp32 may decide otherwise: there only the value is compared.
    """
    masks, new, old, adv = batch
    config = replace(GSPO, eps_clip_c=dual)
    terms, gradient = terms_of(masks, new, old, adv, config, how)
    tokens = sum(map(sum, masks))
    samples = sum(any(mask) for mask in masks)
    at, wanted, scale = 0, 0.0, 0.0
    for mask in masks:
        indices = [at + i for i, keep in enumerate(mask) if keep]
        masked = [at + i for i, keep in enumerate(mask) if not keep]
        at += len(mask)
        assert not gradient[masked].any()
        if not indices:
            continue
        ratio = math.exp(sum(new[i] - old[i] for i in indices) / len(indices))
        bounded = min(max(ratio, 1 - config.eps_clip), 1 + config.eps_clip_high)
        weight = 1 / tokens if how == "token" else 1 / (samples * len(indices))
        edges = [1 - config.eps_clip, 1 + config.eps_clip_high, *([dual] if dual else [])]
        for i in indices:
            plain, clipped = -adv[i] * ratio, -adv[i] * bounded
            worse, slope = max(plain, clipped), -adv[i] * ratio if plain >= clipped else 0.0
            if dual is not None and adv[i] < 0 and -adv[i] * dual < worse:
                worse, slope = -adv[i] * dual, 0.0
            wanted += weight * worse
            scale += weight * abs(adv[i]) * max(ratio, 1.0)
            if all(abs(ratio - edge) > 1e-4 for edge in edges):
                assert abs(float(gradient[i]) - weight * slope) <= 64 * U * weight * abs(slope) + 8 * TINY
    assert abs(float(terms.loss.detach()) - wanted) <= 64 * U * scale + TINY * (1 + tokens)


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "moves"),
    [
        ([1.0, -1.0], 1.0, True),  # both tokens far outside the range, the sequence at ratio 1
        ([1.0, -1.0], -1.0, True),
        ([1.5, -0.5], 1.0, False),  # the sequence at e^0.5, above the range: the unlikelier token stops too
        ([1.5, -0.5], -1.0, True),
        ([-1.5, 0.5], -1.0, False),  # below the range
        ([-1.5, 0.5], 1.0, True),
    ],
)
def test_gspo_clips_the_sequence(log_ratios: list[float], advantage: float, moves: bool) -> None:
    """All of a sample's tokens move by the same amount or none does; the next sample's ratio is its own."""
    masks = [[1, 1], [1, 1]]
    new = [*(r - 2.0 for r in log_ratios), -2.0, -2.0]
    terms, gradient = terms_of(masks, new, [-2.0] * 4, [advantage] * 4, GSPO)
    level = float(torch.exp(torch.tensor(sum(log_ratios) / 2))) if moves else 0.0
    assert gradient.tolist() == [-advantage * level / 4] * 2 + [-advantage / 4] * 2
    assert float(terms.sums["pg_clipfrac"]) == (0.0 if moves else 0.5)


def test_gspo_counts_unmasked_tokens() -> None:
    """The mean is over the unmasked tokens: a hole changes neither divisor nor sum."""
    short, long = [[1, 1]], [[1, 0, 1, 0]]
    _, wanted = terms_of(short, [-1.0, -2.25], [-1.25, -2.0], [1.0, 1.0], GSPO)
    for junk in (math.nan, math.inf, -1e38):
        _, got = terms_of(long, [-1.0, junk, -2.25, junk], [-1.25, junk, -2.0, 1.0], [1.0, junk, 1.0, junk], GSPO)
        assert bits(got[[0, 2]]) == bits(wanted) and got[[1, 3]].tolist() == [0.0, 0.0]


@given(batches(), st.sampled_from(NAMES))
def test_a_hole_is_no_token_of_the_loss(batch: Batch, name: Any) -> None:
    """For every estimator's loss: with masked tokens and without them, the same bits of value, metrics and gradient."""
    masks, *rest = batch
    config, keep = replace(PLAIN, advantage_estimator=name), packed(masks)[0] != 0
    new, old, adv = ([value for value, flag in zip(values, keep.tolist(), strict=True) if flag] for values in rest)
    a, slope_a = terms_of(*batch, config)
    b, slope_b = terms_of([[1] * sum(mask) for mask in masks], new, old, adv, config)
    assert bits(slope_a[keep]) == bits(slope_b) and bits(a.loss) == bits(b.loss)
    assert {k: bits(v) for k, v in a.sums.items()} == {k: bits(v) for k, v in b.sums.items()}


@given(batches(), st.integers(0, 4), st.sampled_from(["gspo", "cispo"]))
def test_whole_samples_of_an_update_add_up(batch: Batch, cut: int, name: Any) -> None:
    """Cut between samples, every token's gradient has the same bits as in the whole update."""
    masks, new, old, adv = batch
    config = replace(PLAIN, advantage_estimator=name)
    ours = column(new).requires_grad_()
    mask, lengths = packed(masks)
    columns, weights = columns_of(masks, ours, old, adv), token_weights(mask, lengths, "sample")
    (wanted,) = torch.autograd.grad(policy_loss(columns, weights, config).loss, ours)
    at, losses = int(lengths[:cut].sum()), []
    for tokens, samples in ((slice(0, at), slice(0, cut)), (slice(at, None), slice(cut, None))):
        parts = {k: getattr(columns, k)[tokens] for k in Columns.__dataclass_fields__ if k != "response_lengths"}
        part = Columns(**parts, response_lengths=lengths[samples])
        losses.append(policy_loss(part, weights[tokens], config).loss)
    (got,) = torch.autograd.grad(losses, ours)
    assert bits(got) == bits(wanted)


@given(batches(), st.sampled_from([0.2, 1.0]), st.sampled_from([0.28, 4.0]), st.sampled_from(["token", "sample"]))
def test_cispo_weighs_log_probs(batch: Batch, low: float, high: float, how: Any) -> None:
    """The gradient is exactly -w * (advantage * clamped ratio), clipped tokens included; the value weighs log_probs."""
    masks, new, old, adv = batch
    config = replace(CISPO, eps_clip=low, eps_clip_high=high)
    terms, gradient = terms_of(masks, new, old, adv, config, how)
    mask, lengths = packed(masks)
    keep = mask != 0
    ratio = torch.exp((column(new) - column(old))[keep])
    clamped = torch.minimum(torch.maximum(ratio, torch.tensor(1 - low)), torch.tensor(1 + high))
    weights = token_weights(mask, lengths, how)[keep]
    assert gradient[keep].tolist() == (-weights * (column(adv)[keep] * clamped)).tolist()
    assert not gradient[~keep].any()
    wanted, scale, clipped = 0.0, 0.0, 0.0
    for i in torch.nonzero(keep)[:, 0].tolist():
        exact = math.exp(float(column([new[i]]) - column([old[i]])))
        weight = 1 / int(keep.sum()) if how == "token" else float(token_weights(mask, lengths, how)[i])
        term = weight * -adv[i] * min(max(exact, 1 - low), 1 + high) * new[i]
        wanted, scale = wanted + term, scale + abs(term)
        clipped += weight * (not 1 - low <= exact <= 1 + high)
    # exp, three products, the weight's division and at most 16 sums: each a rounding, exp two
    assert abs(float(terms.sums["pg_loss"]) - wanted) <= 32 * U * scale + 32 * TINY
    if all(abs(float(r) - edge) > 1e-6 for r in ratio for edge in (1 - low, 1 + high)):
        assert float(terms.sums["pg_clipfrac"]) == pytest.approx(clipped, abs=32 * U)


def test_cispo_keeps_a_gradient_where_ppo_has_none() -> None:
    """A token far outside the range still moves, by the bound of its weight."""
    masks = [[1]]
    for log_ratio, weight in ((3.0, float(torch.tensor(1.28))), (-3.0, float(torch.tensor(0.8)))):
        for advantage in (1.0, -1.0):
            assert terms_of(masks, [log_ratio - 4.0], [-4.0], [advantage], CISPO)[1].tolist() == [-advantage * weight]
    for new in (0.0, -2000.0):  # a hopeless token: finite, as in the other losses
        _, gradient = terms_of(masks, [new], [-1000.0], [1.0], CISPO)
        assert math.isfinite(float(gradient))


def test_gspo_of_hopeless_tokens_is_finite() -> None:
    """A mean log-ratio of +-500 leaves loss and gradient finite; an empty update is 0."""
    masks = [[1, 1]]
    for gap in (1000.0, -1000.0):
        for advantage in (1.0, -1.0):
            terms, gradient = terms_of(masks, [gap, 0.0], [0.0, 0.0], [advantage] * 2, GSPO)
            assert math.isfinite(float(terms.loss.detach())) and bool(torch.isfinite(gradient).all())
    nothing: list[Masks] = [[], [[]], [[0, 0]]]
    for empty in nothing:
        zeros = [0.0] * sum(map(len, empty))
        for config in (GSPO, CISPO):
            terms, gradient = terms_of(empty, zeros, zeros, zeros, config)
            assert float(terms.loss.detach()) == 0.0 and gradient.tolist() == zeros


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"])
@given(batch=batches())
def test_the_others_share_grpos_surrogate(name: Any, batch: Batch) -> None:
    """The same columns give the same bits under grpo, reinforce_plus_plus, its baseline and ppo."""
    (a, slope_a), (b, slope_b) = (
        terms_of(*batch, config) for config in (PLAIN, replace(PLAIN, advantage_estimator=name))
    )
    assert bits(a.loss) == bits(b.loss) and bits(slope_a) == bits(slope_b)
