from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from repro_core.config import TrainConfig
from repro_core.rl.advantages import STD_EPS, advantages, baseline, whiten
from repro_core.rl.batching import make_micro_batch, micro_batches, offsets, pack, pad, plan_updates
from repro_core.rl.kl import kl_per_token
from repro_core.rl.loss import Columns, LossTerms, policy_loss, token_log_probs, token_weights

torch.set_num_threads(1)

ESTIMATORS = ("k1", "k2", "k3", "low_var")
log_probs = st.floats(-12.0, 0.0, width=32)
finite = st.floats(-8.0, 8.0, width=32)


def column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


# KL


@given(st.lists(st.tuples(log_probs, log_probs), min_size=1, max_size=8))
def test_each_estimator_is_its_formula(pairs: list[tuple[float, float]]) -> None:
    """k1, k2, k3 and low_var agree with their definitions in double precision."""
    ours, theirs = column([a for a, _ in pairs]), column([b for _, b in pairs])
    ones = torch.ones(len(pairs), dtype=torch.int64)
    gap = ours.double() - theirs.double()
    k3 = torch.expm1(-gap) + gap
    wanted = {"k1": gap, "k2": gap**2 / 2, "k3": k3, "low_var": k3.clamp(-10, 10)}
    for name in ESTIMATORS:
        got = kl_per_token(ours, theirs, ones, name)  # type: ignore[arg-type]
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), wanted[name], rtol=2e-6, atol=1e-6)


@given(st.lists(finite, min_size=2, max_size=6), st.data())
def test_k1_and_k3_are_unbiased(logits: list[float], data: st.DataObject) -> None:
    """Their expectation over a whole vocabulary is the exact KL divergence."""
    other = data.draw(st.lists(finite, min_size=len(logits), max_size=len(logits)))
    p, q = torch.log_softmax(column(logits), 0), torch.log_softmax(column(other), 0)
    exact = float((p.double().exp() * (p.double() - q.double())).sum())
    ones = torch.ones(len(logits), dtype=torch.int64)
    for name in ("k1", "k3"):
        mean = float((p.double().exp() * kl_per_token(p, q, ones, name).double()).sum())  # type: ignore[arg-type]
        assert mean == pytest.approx(exact, rel=1e-4, abs=1e-4)


@given(st.lists(log_probs, min_size=1, max_size=8))
def test_equal_log_probs_give_exactly_zero(values: list[float]) -> None:
    """KL of a policy with itself is 0 to the bit, with every estimator."""
    ones = torch.ones(len(values), dtype=torch.int64)
    for name in ESTIMATORS:
        assert kl_per_token(column(values), column(values), ones, name).tolist() == [0.0] * len(values)  # type: ignore[arg-type]


@given(log_probs, log_probs)
def test_k3_is_not_negative(ours: float, theirs: float) -> None:
    """Neither cancellation nor clamping makes k3 more negative than one rounding of the log-ratio."""
    value = float(kl_per_token(column([ours]), column([theirs]), torch.ones(1, dtype=torch.int64), "k3"))
    assert value >= -(2.0**-23) * abs(ours - theirs)


@pytest.mark.parametrize(("name", "expected"), [("k3", math.expm1(20.0) - 20.0), ("low_var", 10.0)])
def test_a_token_that_is_ruled_out_is_far_from_the_reference(name: str, expected: float) -> None:
    """A log-prob of minus infinity, or as good as that, is the largest KL there is, and no reward."""
    ours = column([-math.inf, -1e10])
    values = kl_per_token(ours, column([-1.0, -1.0]), torch.ones(2, dtype=torch.int64), name)  # type: ignore[arg-type]
    assert values.tolist() == pytest.approx([expected] * 2)


def test_a_hopeless_token_does_not_overflow() -> None:
    """A log-ratio of a thousand leaves value and gradient finite; NaN stays NaN."""
    ours = column([-1000.0, 0.0]).requires_grad_()
    for name in ESTIMATORS:
        value = kl_per_token(ours, column([0.0, -1000.0]), torch.ones(2, dtype=torch.int64), name)  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(value.sum(), ours)
        assert bool(torch.isfinite(value).all() and torch.isfinite(gradient).all())
        nan = kl_per_token(column([math.nan]), column([0.0]), torch.ones(1, dtype=torch.int64), name)  # type: ignore[arg-type]
        assert math.isnan(float(nan))


# Advantages


def group_columns(
    rewards: list[float], groups: list[int], lengths: list[int], *, std: bool = True, mask: list[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Values and advantages of a rollout without KL."""
    loss_mask = torch.ones(sum(lengths), dtype=torch.int64) if mask is None else torch.tensor(mask)
    base = baseline(
        column(rewards),
        torch.tensor(groups),
        loss_mask,
        torch.tensor(lengths),
        kl=torch.zeros(sum(lengths)),
        kl_coef=0.0,
        std_normalization=std,
    )
    return base.values, advantages(base, loss_mask)


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 9))
def test_equal_rewards_give_exactly_zero_advantages(reward: float, size: int) -> None:
    """A group without contrast pushes nowhere: 0 to the bit, whatever n x reward / n rounds to."""
    for std in (True, False):
        _, column_ = group_columns([reward] * size, [3] * size, [1] * size, std=std)
        assert column_.tolist() == [0.0] * size


def test_group_statistics_match_their_formula() -> None:
    """GRPO divides by the Bessel-corrected deviation of the own group; Dr. GRPO only centres."""
    rewards, groups, lengths = [1.0, 0.0, 0.5, 4.0, 2.0, 2.5], [0, 0, 0, 7, 7, 7], [1, 2, 1, 1, 1, 1]
    values, scaled = group_columns(rewards, groups, lengths)
    _, centred = group_columns(rewards, groups, lengths, std=False)
    first, second = torch.tensor(rewards[:3]), torch.tensor(rewards[3:])
    wanted = torch.cat([first - first.mean(), second - second.mean()]).repeat_interleave(torch.tensor(lengths))
    deviation = torch.stack([first.std(), second.std()]).repeat_interleave(torch.tensor([4, 3]))
    torch.testing.assert_close(values, torch.tensor([0.5] * 4 + [8.5 / 3] * 3))
    torch.testing.assert_close(centred, wanted)
    torch.testing.assert_close(scaled, wanted / (deviation + STD_EPS))


def test_kl_is_taken_off_the_reward() -> None:
    """kl_coef times the sum of a sample's unmasked KL lowers its return, and the group's mean with it."""
    mask = torch.tensor([1, 1, 0, 1])
    base = baseline(
        column([1.0, 0.0]),
        torch.tensor([0, 0]),
        mask,
        torch.tensor([3, 1]),
        kl=column([0.5, 0.25, math.nan, 2.0]),
        kl_coef=0.5,
        std_normalization=False,
    )
    assert base.returns.tolist() == [0.625, 0.625, 0.0, -1.0]
    assert base.values.tolist() == [-0.1875, -0.1875, 0.0, -0.1875]
    assert advantages(base, mask).tolist() == [0.8125, 0.8125, 0.0, -0.8125]


def test_a_broken_reward_is_passed_on() -> None:
    """NaN and infinite rewards reach the advantages of their own group and no other: nothing hides them."""
    for broken in (math.nan, math.inf):
        _, column_ = group_columns([broken, broken, 1.0, 0.0], [0, 0, 1, 1], [1] * 4)
        assert column_[:2].isnan().all() and torch.isfinite(column_[2:]).all()


def test_whitening_has_mean_zero_and_deviation_one() -> None:
    """Over the unmasked tokens; one token or none is no error."""
    mask = torch.tensor([1, 0, 1, 1, 1])
    out = whiten(column([1.0, math.nan, 2.0, 3.0, 10.0]), mask)
    assert float(out[mask != 0].mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(out[mask != 0].std()) == pytest.approx(1.0, abs=1e-6)
    assert out[1] == 0.0
    assert whiten(column([5.0, 7.0]), torch.tensor([0, 1])).tolist() == [0.0, 0.0]
    assert whiten(column([5.0]), torch.tensor([0])).tolist() == [0.0]


# Loss


@st.composite
def columns_of(draw: st.DrawFn) -> Columns:
    size = draw(st.integers(1, 6))

    def values(strategy: st.SearchStrategy[float]) -> Tensor:
        return column(draw(st.lists(strategy, min_size=size, max_size=size)))

    return Columns(
        log_probs=values(log_probs).requires_grad_(),
        entropy=values(st.floats(0.0, 6.0, width=32)).requires_grad_(),
        kl=values(finite),
        old_log_probs=values(log_probs),
        rollout_log_probs=values(log_probs),
        advantages=values(finite),
        loss_mask=torch.tensor(draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))),
        response_lengths=torch.tensor([size]),
    )


def reference_pg(log_ratio: float, advantage: float, gap: float, config: TrainConfig) -> float:
    """The surrogate of one token, in double precision and in words: the worse of plain and clipped, bounded below."""
    ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
    clipped = min(max(ratio, 1 - config.eps_clip), 1 + config.eps_clip_high)
    loss = max(-advantage * ratio, -advantage * clipped)
    if config.eps_clip_c is not None and advantage < 0:
        loss = min(loss, -advantage * config.eps_clip_c)
    if config.use_tis:
        loss *= min(max(math.exp(gap), config.tis_clip_low), config.tis_clip)
    return loss


@given(columns_of(), st.sampled_from([None, 1.5, 3.0]), st.booleans(), st.sampled_from(["token", "sample"]))
def test_the_loss_is_its_formula(columns: Columns, dual: float | None, tis: bool, aggregation: str) -> None:
    """Clip low and high, dual clip, TIS, entropy bonus, KL loss: loss and metrics equal a scalar reference."""
    config = TrainConfig(eps_clip_c=dual, use_tis=tis, tis_clip_low=0.1, entropy_coef=0.5, kl_loss_coef=0.25)
    weights = token_weights(columns.loss_mask, torch.tensor([len(columns.loss_mask)]), aggregation)  # type: ignore[arg-type]
    terms = policy_loss(columns, weights, config)
    rows = [
        [float(value[i].detach()) for value in (columns.log_probs, columns.old_log_probs, columns.rollout_log_probs)]
        + [float(value[i].detach()) for value in (columns.advantages, columns.kl, columns.entropy)]
        for i in range(len(columns.loss_mask))
        if columns.loss_mask[i]
    ]
    count = max(len(rows), 1)
    pg = sum(reference_pg(new - old, adv, old - engine, config) for new, old, engine, adv, _, _ in rows) / count
    kl, entropy = sum(r[4] for r in rows) / count, sum(r[5] for r in rows) / count
    gaps = [abs(r[1] - r[2]) for r in rows]
    close = {"rel": 1e-4, "abs": 1e-4}
    assert float(terms.sums["pg_loss"]) == pytest.approx(pg, **close)
    assert float(terms.loss.detach()) == pytest.approx(pg - 0.5 * entropy + 0.25 * kl, **close)
    assert float(terms.sums["ppo_kl"]) == pytest.approx(sum(r[1] - r[0] for r in rows) / count, **close)
    assert float(terms.sums["train_rollout_logprob_abs_diff"]) == pytest.approx(sum(gaps) / count, **close)
    assert float(terms.abs_diff_max) == pytest.approx(max(gaps, default=0.0), **close)
    assert ("tis" in terms.sums) == tis


def one_token(log_ratio: float, advantage: float, config: TrainConfig, gap: float = 0.0) -> tuple[LossTerms, float]:
    """The terms of a single token, and the gradient of its log-prob."""
    ours = column([-3.0 + log_ratio]).requires_grad_()
    old = column([-3.0])
    zeros = torch.zeros(1)
    ones = torch.ones(1, dtype=torch.int64)
    columns = Columns(ours, zeros, zeros, old, old - gap, column([advantage]), ones, ones)
    terms = policy_loss(columns, torch.ones(1), config)
    (gradient,) = torch.autograd.grad(terms.loss, ours)
    return terms, float(gradient)


def test_the_gradient_at_ratio_one_is_minus_the_advantage() -> None:
    """On policy, both sides of the clip tie; the gradient is that of the plain policy gradient, bit for bit."""
    for advantage in (1.7, -0.3):
        assert one_token(0.0, advantage, TrainConfig(kl_loss_coef=0.0))[1] == -float(torch.tensor(advantage))


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "dual", "moves", "clipped"),
    [
        (0.5, 1.0, None, False, 1.0),  # above 1 + eps_clip_high, would gain more: stopped
        (0.22, 1.0, None, True, 0.0),  # inside clip-higher (1.246 < 1.28)
        (-0.5, -1.0, None, False, 1.0),  # below 1 - eps_clip, would gain more: stopped
        (0.5, -1.0, None, True, 0.0),  # a worse action became likelier: always pushed back
        (-0.5, 1.0, None, True, 0.0),
        (2.0, -1.0, 3.0, False, 0.0),  # dual clip: ratio 7.4 > 3 and a negative advantage
        (1.0, -1.0, 3.0, True, 0.0),
        (2.0, 1.0, 3.0, False, 1.0),
    ],
)
def test_clipping_stops_the_gradient_where_ppo_says(
    log_ratio: float, advantage: float, dual: float | None, moves: bool, clipped: float
) -> None:
    """A token moves exactly on the unclipped side of eps_clip, eps_clip_high and eps_clip_c."""
    terms, gradient = one_token(log_ratio, advantage, TrainConfig(eps_clip_c=dual, kl_loss_coef=0.0))
    assert (gradient != 0.0) == moves
    assert float(terms.sums["pg_clipfrac"]) == clipped


def test_extreme_ratios_stay_finite() -> None:
    """A log-ratio of +-1000 gives a finite loss and a finite gradient on either side of the clip."""
    for log_ratio in (1000.0, -1000.0):
        for advantage in (1.0, -1.0):
            terms, gradient = one_token(log_ratio, advantage, TrainConfig(kl_loss_coef=0.0))
            assert math.isfinite(float(terms.loss.detach())) and math.isfinite(gradient)


def test_tis_truncates_the_importance_weight() -> None:
    """The weight exp(old - rollout) scales the gradient, is clamped on both sides, and inf is clamped too."""
    config = TrainConfig(use_tis=True, tis_clip=2.0, tis_clip_low=0.5, kl_loss_coef=0.0)
    for gap, weight, clipped in ((0.0, 1.0, 0.0), (5.0, 2.0, 1.0), (-5.0, 0.5, 1.0), (1000.0, 2.0, 1.0)):
        terms, gradient = one_token(0.0, 1.0, config, gap)
        assert gradient == -weight
        assert float(terms.sums["tis_clipfrac"]) == clipped


@given(columns_of(), st.data())
def test_parts_of_an_update_add_up(columns: Columns, data: st.DataObject) -> None:
    """Cut anywhere, the parts' losses and metrics sum to the whole's, and every token's gradient has the same bits."""
    size = len(columns.loss_mask)
    cut = data.draw(st.integers(0, size))
    config = TrainConfig(use_tis=True, entropy_coef=0.5)
    weights = token_weights(columns.loss_mask, torch.tensor([size]), "token")
    whole = policy_loss(columns, weights, config)
    wanted = torch.autograd.grad(whole.loss, (columns.log_probs, columns.entropy))
    parts, losses = [], []
    for part in (slice(0, cut), slice(cut, size)):
        cuts = {name: getattr(columns, name)[part] for name in Columns.__dataclass_fields__}
        piece = Columns(**cuts | {"response_lengths": torch.tensor([len(cuts["loss_mask"])])})
        parts.append(policy_loss(piece, weights[part], config))
        losses.append(parts[-1].loss)
    got = torch.autograd.grad(losses, (columns.log_probs, columns.entropy))
    assert [bytes(g.view(torch.uint8).tolist()) for g in got] == [bytes(g.view(torch.uint8).tolist()) for g in wanted]
    for name, value in whole.sums.items():
        # One rounding per token of the larger part: a sum in another order is another sum.
        assert float(parts[0].sums[name] + parts[1].sums[name]) == pytest.approx(float(value), rel=1e-5, abs=1e-5)
    assert float(torch.maximum(parts[0].abs_diff_max, parts[1].abs_diff_max)) == float(whole.abs_diff_max)


def test_weights_are_means_over_tokens_or_samples() -> None:
    """Token weights, sample weights, masked tokens and a wholly masked sample, by hand."""
    mask, lengths = torch.tensor([1, 1, 0, 1, 0, 0, 1]), torch.tensor([3, 1, 2, 1])
    quarter, third, sixth = 0.25, float(torch.tensor(1 / 3)), float(torch.tensor(1 / 6))
    assert token_weights(mask, lengths, "token").tolist() == [quarter, quarter, 0.0, quarter, 0.0, 0.0, quarter]
    assert token_weights(mask, lengths, "sample").tolist() == [sixth, sixth, 0.0, third, 0.0, 0.0, third]
    nothing = torch.zeros(7, dtype=torch.int64)
    assert token_weights(nothing, lengths, "sample").tolist() == [0.0] * 7
    with pytest.raises(ValueError, match="known: token, sample"):
        token_weights(mask, lengths, "batch")  # type: ignore[arg-type]


def test_an_update_without_tokens_is_zero() -> None:
    """All tokens masked: loss 0 with gradient 0, metrics 0, no NaN from 0 / 0."""
    nothing, two = torch.zeros(2).long(), torch.tensor([2])
    columns = Columns(*[torch.zeros(2, requires_grad=i < 2) for i in range(6)], loss_mask=nothing, response_lengths=two)
    terms = policy_loss(columns, token_weights(columns.loss_mask, torch.tensor([2]), "sample"), TrainConfig())
    (gradient,) = torch.autograd.grad(terms.loss, columns.log_probs)
    assert float(terms.loss.detach()) == 0.0 and gradient.tolist() == [0.0, 0.0]
    assert {float(value) for value in (*terms.sums.values(), terms.abs_diff_max)} == {0.0}


def test_log_probs_and_entropy_of_known_distributions() -> None:
    """Uniform logits have entropy log V; a temperature divides the logits; bf16 logits are widened first."""
    ones = torch.ones(1, dtype=torch.int64)
    chosen, entropy = token_log_probs(torch.zeros(1, 8), torch.tensor([3]), ones, 1.0)
    assert float(entropy) == pytest.approx(math.log(8)) and float(chosen) == pytest.approx(-math.log(8))
    logits = torch.tensor([[0.5, -1.0, 2.0]])
    got, _ = token_log_probs(logits, torch.tensor([2]), ones, 0.5)
    assert float(got) == float(torch.log_softmax(logits * 2, -1)[0, 2])
    narrow, _ = token_log_probs(logits.bfloat16(), torch.tensor([2]), ones, 1.0)
    assert narrow.dtype == torch.float32 and float(narrow) == float(torch.log_softmax(logits, -1)[0, 2])


# Batching


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 64))
def test_micro_batches_cover_in_order_and_within_budget(lengths: list[int], budget: int) -> None:
    """Every sample once, in order; within the budget unless a sample alone exceeds it; no run could be longer."""
    runs = micro_batches(lengths, budget)
    assert [index for run in runs for index in run] == list(range(len(lengths)))
    for run in runs:
        assert len(run) * max(lengths[i] for i in run) <= budget or len(run) == 1
    for run in runs[:-1]:
        assert (len(run) + 1) * max(lengths[i] for i in range(run.start, run.stop + 1)) > budget


@given(st.lists(st.integers(0, 5), max_size=6))
def test_pack_undoes_pad(lengths: list[int]) -> None:
    """Packed -> padded -> packed is the identity, empty samples and no samples included."""
    packed = torch.arange(sum(lengths))
    assert torch.equal(pack(pad(packed, lengths, -1), lengths), packed)
    assert offsets(lengths)[-1] == len(packed)


def test_pad_refuses_lengths_that_do_not_add_up() -> None:
    """A column of another length is an error and not a silent cut."""
    with pytest.raises(ValueError, match="add up to 3"):
        pad(torch.arange(4), [1, 2], 0)


def test_each_target_is_predicted_by_the_position_before_it() -> None:
    """In the flattened padded batch, the prediction row stands one before its response token."""
    tokens = torch.tensor([10, 11, 12, 20, 21, 22, 23, 30])
    batch = make_micro_batch(tokens, [3, 4, 1], [1, 3, 0], pad_id=0)
    assert batch.tokens.tolist() == [[10, 11, 12, 0], [20, 21, 22, 23], [30, 0, 0, 0]]
    assert batch.targets.tolist() == [12, 21, 22, 23]
    assert batch.tokens.reshape(-1)[batch.predictions].tolist() == [11, 20, 21, 22]
    with pytest.raises(ValueError, match="after a prompt"):
        make_micro_batch(tokens[:3], [3], [3], pad_id=0)


def test_updates_are_contiguous_shares_of_the_rollout() -> None:
    """Samples, tokens and response tokens of each update follow one another without gap or overlap."""
    tensors = {"total_lengths": torch.tensor([3, 4, 5, 2]), "response_lengths": torch.tensor([1, 2, 3, 1])}
    first, second = plan_updates(tensors, 2, 8)
    assert (first.samples, first.tokens, first.responses) == (slice(0, 2), slice(0, 7), slice(0, 3))
    assert (second.samples, second.tokens, second.responses) == (slice(2, 4), slice(7, 14), slice(3, 7))
    assert first.runs == [range(2)] and second.runs == [range(2, 3), range(3, 4)]
    assert (second.of("tokens"), second.of("loss_mask"), second.of("rewards")) == (
        second.tokens,
        second.responses,
        second.samples,
    )


def test_terms_without_weight_cannot_break_the_loss() -> None:
    """With coefficient 0 an infinite KL or entropy stays a metric and does not turn the loss into NaN."""
    config = TrainConfig(kl_loss_coef=0.0, entropy_coef=0.0)
    ones = torch.ones(1).long()
    columns = Columns(*[torch.zeros(1) for _ in range(6)], loss_mask=ones, response_lengths=ones)
    columns = replace(columns, kl=column([math.inf]), entropy=column([math.nan]))
    terms = policy_loss(columns, torch.ones(1), config)
    assert float(terms.loss) == 0.0 and math.isinf(float(terms.sums["kl_loss"]))
