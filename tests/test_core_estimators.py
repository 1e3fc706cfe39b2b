"""The other estimators: each against a loop written independently here, in exact fractions where that is possible.

Where a test says "exactly", its inputs are multiples of 1/8 and its factors powers of two, so that no operation rounds
in fp32 and the fraction is the only right answer.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple, get_args

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from repro_core.config import ConfigError, Estimator, TrainConfig
from repro_core.rl.advantages import Estimate, advantages, baseline, estimate, whiten
from repro_core.rl.values import discounted_sums, gae, token_rewards, value_loss

torch.set_num_threads(1)

NAMES = get_args(Estimator)
U = 2.0**-24  # half the distance from 1 to the next fp32 number: the largest relative error of one rounding
TINY = 2.0**-149  # an underflow is off by less than this

eighths = st.integers(-64, 64).map(lambda n: n / 8)
halves = st.sampled_from([0.0, 0.5, 1.0])
floats = st.floats(-8.0, 8.0, width=32)


def column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


class Case(NamedTuple):
    """A small rollout: per sample a reward and a group, per token a mask, a KL and a value."""

    rewards: list[float]
    groups: list[int]
    masks: list[list[int]]
    kls: list[list[float]]
    values: list[list[float]]

    def flat(self, parts: list[list[Any]]) -> list[Any]:
        """All tokens' values, packed."""
        return [value for part in parts for value in part]

    @property
    def mask(self) -> Tensor:
        """Packed, int64 [tokens]."""
        return torch.tensor(self.flat(self.masks), dtype=torch.int64)

    @property
    def lengths(self) -> Tensor:
        """Of the responses, int64 [samples]."""
        return torch.tensor([len(part) for part in self.masks], dtype=torch.int64)

    def estimate(self, config: TrainConfig) -> Estimate:
        """What is tested here, on the case's columns."""
        return estimate(
            config,
            rewards=column(self.rewards),
            group_index=torch.tensor(self.groups, dtype=torch.int64),
            loss_mask=self.mask,
            response_lengths=self.lengths,
            kl=column(self.flat(self.kls)),
            values=column(self.flat(self.values)),
        )

    def kept(self, parts: list[list[Any]]) -> list[list[Any]]:
        """Without the masked tokens."""
        pairs = zip(parts, self.masks, strict=True)
        return [[value for value, keep in zip(part, mask, strict=True) if keep] for part, mask in pairs]

    def without_masked_tokens(self) -> Case:
        """The rollout in which they were never sampled."""
        return self._replace(masks=self.kept(self.masks), kls=self.kept(self.kls), values=self.kept(self.values))


@st.composite
def cases(draw: st.DrawFn, number: st.SearchStrategy[float] = eighths, most: int = 4) -> Case:
    samples = draw(st.integers(0, 4))
    lengths = [draw(st.integers(0, most)) for _ in range(samples)]

    def columns(strategy: st.SearchStrategy[Any]) -> list[list[Any]]:
        return [draw(st.lists(strategy, min_size=n, max_size=n)) for n in lengths]

    return Case(
        rewards=draw(st.lists(number, min_size=samples, max_size=samples)),
        groups=draw(st.lists(st.integers(0, 1), min_size=samples, max_size=samples)),
        masks=columns(st.sampled_from([0, 1, 1])),
        kls=columns(number),
        values=columns(number),
    )


def fractions(parts: list[list[float]]) -> list[list[Fraction]]:
    return [[Fraction(value) for value in part] for part in parts]


def exact_rewards(case: Case, kl_coef: float) -> list[list[Fraction]]:
    """Token rewards of each sample's unmasked tokens."""
    out = [[-Fraction(kl_coef) * kl for kl in kls] for kls in fractions(case.kept(case.kls))]
    for rewards, reward in zip(out, case.rewards, strict=True):
        if rewards:
            rewards[-1] += Fraction(reward)
    return out


def exact_sums(numbers: list[Fraction], decay: Fraction) -> list[Fraction]:
    """The definition: at t, the sum over all u >= t of decay^(u - t) * number_u."""
    size = len(numbers)
    return [sum((decay ** (u - t) * numbers[u] for u in range(t, size)), Fraction(0)) for t in range(size)]


def exact_gae(rewards: list[Fraction], values: list[Fraction], gamma: float, lambd: float) -> list[Fraction]:
    """A_t = sum over l of (gamma * lambda)^l * delta_(t + l)."""
    after = [*values, Fraction(0)][1:] if values else []
    delta = [r + Fraction(gamma) * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return exact_sums(delta, Fraction(gamma) * Fraction(lambd))


def unmasked(case: Case, packed: Tensor) -> list[list[Fraction]]:
    """A column's unmasked tokens by sample; masked ones must be 0."""
    assert packed.dtype == torch.float32 and not packed.requires_grad
    assert not packed[case.mask == 0].any()
    parts = torch.split(packed, case.lengths.tolist()) if case.masks else []
    return fractions(case.kept([part.tolist() for part in parts]))


# Estimators


@given(cases(), st.sampled_from(["grpo", "gspo", "cispo"]), st.booleans(), st.booleans(), st.sampled_from([0.0, 0.1]))
def test_grpo_is_the_composition_of_its_parts(case: Case, name: Any, std: bool, whitened: bool, kl_coef: float) -> None:
    """`estimate` gives the bits of baseline, advantages and whiten called one after the other; gspo and cispo too."""
    config = TrainConfig(
        advantage_estimator=name, grpo_std_normalization=std, whiten_advantages=whitened, kl_coef=kl_coef
    )
    estimated = case.estimate(config)
    base = baseline(
        column(case.rewards),
        torch.tensor(case.groups, dtype=torch.int64),
        case.mask,
        case.lengths,
        kl=column(case.flat(case.kls)),
        kl_coef=kl_coef,
        std_normalization=std,
    )
    wanted = advantages(base, case.mask)
    wanted = whiten(wanted, case.mask) if whitened else wanted
    assert [bits(c) for c in estimated] == [bits(c) for c in (base.returns, base.values, wanted)]


@given(cases(), halves, st.sampled_from([0.0, 0.25]))
def test_reinforce_plus_plus_sums_what_follows(case: Case, gamma: float, kl_coef: float) -> None:
    """Exactly: returns are the discounted sums of token rewards, values 0, advantages the whitened returns."""
    config = TrainConfig(advantage_estimator="reinforce_plus_plus", gamma=gamma, kl_coef=kl_coef)
    estimated = case.estimate(config)
    wanted = [exact_sums(rewards, Fraction(gamma)) for rewards in exact_rewards(case, kl_coef)]
    assert unmasked(case, estimated.returns) == wanted
    assert not estimated.values.any()
    assert bits(estimated.advantages) == bits(whiten(estimated.returns, case.mask))


@given(cases(floats))
def test_without_kl_or_discount_each_token_earns_the_reward(case: Case) -> None:
    """Whatever the reward, reinforce_plus_plus with gamma 1 puts it on every unmasked token unrounded."""
    estimated = case.estimate(TrainConfig(advantage_estimator="reinforce_plus_plus"))
    wanted = [[Fraction(reward)] * sum(mask) for reward, mask in zip(case.rewards, case.masks, strict=True)]
    assert unmasked(case, estimated.returns) == wanted


@given(cases(), st.sampled_from([0.0, 0.25]))
def test_reinforce_plus_plus_baseline_takes_the_groups_mean_off(case: Case, kl_coef: float) -> None:
    """The mean is over counted samples and has no KL in it; every token pays its own KL; the result is whitened."""
    estimated = case.estimate(TrainConfig(advantage_estimator="reinforce_plus_plus_baseline", kl_coef=kl_coef))
    counted = [any(mask) for mask in case.masks]
    raw = []
    for sample, mask in enumerate(case.masks):
        group = [
            r for r, g, c in zip(case.rewards, case.groups, counted, strict=True) if c and g == case.groups[sample]
        ]
        # The mean is the one number here that need not be an fp32: a correctly rounded division.
        mean = float(torch.tensor(sum(group) / len(group))) if group else 0.0
        for kl, keep in zip(case.kls[sample], mask, strict=True):
            raw.append(float(column([case.rewards[sample] - mean]) - kl_coef * kl) if keep else 0.0)
    assert bits(estimated.advantages) == bits(whiten(column(raw), case.mask))
    kls = fractions(case.kept(case.kls))
    earned = [[Fraction(r) - Fraction(kl_coef) * kl for kl in k] for r, k in zip(case.rewards, kls, strict=True)]
    assert unmasked(case, estimated.returns) == earned


@given(cases(), halves, halves, st.sampled_from([0.0, 0.25]), st.booleans())
def test_gae_is_its_definition(case: Case, gamma: float, lambd: float, kl_coef: float, whitened: bool) -> None:
    """Exactly the double sum of the definition; returns are advantages plus values; whitening only where asked for."""
    config = TrainConfig(
        advantage_estimator="ppo", gamma=gamma, lambd=lambd, kl_coef=kl_coef, whiten_advantages=whitened
    )
    estimated = case.estimate(config)
    values = fractions(case.kept(case.values))
    wanted = [exact_gae(r, v, gamma, lambd) for r, v in zip(exact_rewards(case, kl_coef), values, strict=True)]
    assert unmasked(case, estimated.values) == values
    assert unmasked(case, estimated.returns) == [
        [a + v for a, v in zip(advantage, value, strict=True)] for advantage, value in zip(wanted, values, strict=True)
    ]
    plain = case.estimate(replace(config, whiten_advantages=False)).advantages
    assert unmasked(case, plain) == wanted
    assert bits(estimated.advantages) == bits(whiten(plain, case.mask) if whitened else plain)


@given(cases(floats, most=6), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_gae_of_any_numbers_is_right_up_to_its_roundings(case: Case, gamma: float, lambd: float) -> None:
    """The error stays below what the roundings on a term's way can add up to; lambda 1, gamma 1 is return less value.

    A term of delta meets at most 4 roundings (gamma, product, two sums); each step down the recursion adds 4 (the decay
    as double and as fp32, the product, the sum). So a term that lies `ahead` of t is off by (1 + U)^(4 + 4 * ahead).
    What underflows is off by less than TINY once per operation. A return adds one sum to its advantage.
    """
    for g, lam in ((gamma, lambd), (1.0, 1.0)):
        estimated = case.estimate(TrainConfig(advantage_estimator="ppo", gamma=g, lambd=lam))
        columns = (exact_rewards(case, 0.0), fractions(case.kept(case.values)))
        for rewards, values, got, returns in zip(
            *columns, unmasked(case, estimated.advantages), unmasked(case, estimated.returns), strict=True
        ):
            wanted = exact_gae(rewards, values, g, lam)
            if g == lam == 1.0:
                assert wanted == [sum(rewards[t:]) - value for t, value in enumerate(values)]
            sizes = [
                abs(r) + abs(v) + abs(n) for r, v, n in zip(rewards, values, [*values, Fraction(0)][1:], strict=False)
            ]
            for t, (exact, value) in enumerate(zip(wanted, values, strict=True)):
                growth = [Fraction((1 + U) ** (4 + 4 * ahead) - 1) for ahead in range(len(values) - t)]
                bound = sum(g * size for g, size in zip(growth, sizes[t:], strict=True)) + 8 * len(values) * Fraction(
                    TINY
                )
                assert abs(got[t] - exact) <= bound
                assert abs(returns[t] - (got[t] + value)) <= Fraction(U) * abs(got[t] + value)


@given(cases(floats), st.sampled_from(NAMES), st.sampled_from([0.0, 0.1]), st.booleans())
def test_a_masked_token_is_skipped(case: Case, name: Any, kl_coef: float, whitened: bool) -> None:
    """With masked tokens, wherever they stand, and without them: the same bits at the unmasked ones."""
    config = TrainConfig(advantage_estimator=name, gamma=0.9, lambd=0.7, kl_coef=kl_coef, whiten_advantages=whitened)
    whole, short = case.estimate(config), case.without_masked_tokens().estimate(config)
    for with_holes, without in zip(whole, short, strict=True):
        assert bits(with_holes[case.mask != 0]) == bits(without)


@given(cases(floats), st.integers(0, 3))
def test_samples_do_not_read_one_another(case: Case, sample: int) -> None:
    """A sample's GAE has the same bits alone and among others, longer ones and shorter ones."""
    assume(sample < len(case.masks))
    packed = column(case.flat(case.kls))
    together = gae(packed, column(case.flat(case.values)), case.mask, case.lengths, gamma=0.9, lambd=0.7)
    mask, value = torch.tensor(case.masks[sample], dtype=torch.int64), torch.tensor([len(case.masks[sample])])
    alone = gae(column(case.kls[sample]), column(case.values[sample]), mask, value, gamma=0.9, lambd=0.7)
    start = sum(len(m) for m in case.masks[:sample])
    for a, b in zip(together, alone, strict=True):
        assert bits(a[start : start + len(mask)]) == bits(b)


@pytest.mark.parametrize("whitened", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_no_tokens_no_estimate(name: Any, whitened: bool) -> None:
    """No samples, samples without tokens and samples that are masked whole give zeros and no NaN."""
    config = TrainConfig(advantage_estimator=name, whiten_advantages=whitened, kl_coef=0.1)
    nan = math.nan
    for case in (
        Case([], [], [], [], []),
        Case([1.0, 2.0], [0, 0], [[], []], [[], []], [[], []]),
        Case([nan, 2.0], [0, 0], [[0, 0], []], [[nan, nan], []], [[nan, nan], []]),
    ):
        for out in case.estimate(config):
            assert out.dtype == torch.float32 and out.tolist() == [0.0] * int(case.lengths.sum())


def test_a_single_token() -> None:
    """One token of one sample: no contrast in its group, nothing to whiten, and GAE is reward less value."""
    case = Case([0.75], [0], [[1]], [[0.5]], [[0.25]])
    estimates = {
        name: case.estimate(TrainConfig(advantage_estimator=name, kl_coef=0.5, kl_loss_coef=0.0)) for name in NAMES
    }
    got = {name: tuple(float(c) for c in e) for name, e in estimates.items()}
    assert got == {
        "grpo": (0.5, 0.5, 0.0),
        "gspo": (0.5, 0.5, 0.0),
        "cispo": (0.5, 0.5, 0.0),
        "reinforce_plus_plus": (0.5, 0.0, 0.0),
        "reinforce_plus_plus_baseline": (0.5, 0.75, 0.0),
        "ppo": (0.5, 0.25, 0.25),
    }


@pytest.mark.parametrize("reward", [0.0, 1.0, -2.5, 0.1])
def test_equal_rewards(reward: float) -> None:
    """Without contrast a group's mean leaves exactly 0; the rollout's mean leaves 0 up to its own rounding."""
    lengths = [2, 1, 3, 1]
    case = Case(
        [reward] * 4,
        [0, 0, 1, 1],
        [[1] * n for n in lengths],
        [[0.0] * n for n in lengths],
        [[0.0] * n for n in lengths],
    )
    for name in ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"):
        assert not case.estimate(TrainConfig(advantage_estimator=name)).advantages.any()  # type: ignore[arg-type]
    got = case.estimate(TrainConfig(advantage_estimator="reinforce_plus_plus")).advantages
    # The sum of n equal numbers is off by n - 1 roundings and the quotient by one; whitening divides by 1e-4 at least.
    assert float(got.abs().max()) <= 7 * U * 7 / 6 * abs(reward) * 1e4 * (1 + 8 * U)
    if reward in (0.0, 1.0, -2.5):
        assert not got.any()


def test_whitened_returns_of_known_numbers() -> None:
    """Two samples that earn 1 and 3 lie half a root of two to either side, masked ones elsewhere."""
    case = Case([1.0, 3.0, 9.0], [0, 1, 1], [[1], [1], [0]], [[0.0]] * 3, [[0.0]] * 3)
    for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"):
        changed = case._replace(groups=[0, 0, 1])
        estimated = changed.estimate(TrainConfig(advantage_estimator=name, whiten_advantages=True))  # type: ignore[arg-type]
        assert estimated.advantages.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5), 0.0], rel=4 * U + 5e-9)


def test_ppo_needs_values() -> None:
    """Without a critic's values there is no GAE; what does not exist is refused as well."""
    case = Case([1.0], [0], [[1]], [[0.0]], [[0.0]])
    inputs = {
        "rewards": column(case.rewards), "group_index": torch.tensor([0]), "loss_mask": case.mask,
        "response_lengths": case.lengths, "kl": torch.zeros(1), "values": None,
    }  # fmt: skip
    with pytest.raises(ValueError, match="needs the critic's values"):
        estimate(TrainConfig(advantage_estimator="ppo"), **inputs)  # type: ignore[arg-type]
    for name in NAMES[:-1]:
        estimate(TrainConfig(advantage_estimator=name), **inputs)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown advantage estimator 'other'"):
        estimate(TrainConfig(advantage_estimator="other"), **inputs)  # type: ignore[arg-type]


def test_a_broken_number_is_passed_on() -> None:
    """NaN in a counted reward, value or KL reaches the returns of its own sample, and none of another's."""
    good = Case([1.0, 0.5], [0, 1], [[1, 1], [1, 1]], [[0.0, 0.0]] * 2, [[0.0, 0.0]] * 2)
    for broken in (
        good._replace(rewards=[math.nan, 0.5]),
        good._replace(kls=[[0.0, math.nan], [0.0, 0.0]]),
        good._replace(values=[[0.0, math.nan], [0.0, 0.0]]),
    ):
        names = ["ppo"] if broken.values != good.values else ["ppo", "reinforce_plus_plus"]
        for name in names:
            estimated = broken.estimate(TrainConfig(advantage_estimator=name, kl_coef=0.5))  # type: ignore[arg-type]
            assert estimated.returns.isnan().tolist() == [True, True, False, False]


def test_token_rewards_and_sums_by_hand() -> None:
    """The reward lies at the last unmasked token, KL at each; sums skip the hole."""
    mask, lengths = torch.tensor([1, 0, 1, 0, 0, 1]), torch.tensor([4, 1, 1])
    kl = column([2.0, math.nan, 4.0, math.inf, math.nan, 8.0])
    rewards = token_rewards(column([1.0, math.nan, -1.0]), mask, lengths, kl=kl, kl_coef=0.25)
    assert rewards.tolist() == [-0.5, 0.0, 0.0, 0.0, 0.0, -3.0]
    sums = discounted_sums(column([1.0, math.nan, 2.0, math.inf, math.nan, 4.0]), mask, lengths, 0.5)
    assert sums.tolist() == [2.0, 0.0, 2.0, 0.0, 0.0, 4.0]


# The critic's loss


@st.composite
def value_columns(draw: st.DrawFn) -> tuple[list[float], list[float], list[float], list[int], list[float]]:
    size = draw(st.integers(0, 6))

    def drawn(strategy: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(strategy, min_size=size, max_size=size))

    weights = st.integers(0, 16).map(lambda n: n / 16)
    return drawn(eighths), drawn(eighths), drawn(eighths), drawn(st.integers(0, 1)), drawn(weights)


@given(value_columns(), st.sampled_from([0.25, 1.0, 4.0]))
def test_the_value_loss_is_its_formula(
    drawn: tuple[list[float], list[float], list[float], list[int], list[float]], clip: float
) -> None:
    """Exactly, loss, share and gradient: the worse of plain and clipped squared error, halved, weighed and summed."""
    values, old, returns, mask, weights = drawn
    ours = column(values).requires_grad_()
    loss, metrics = value_loss(ours, column(old), column(returns), torch.tensor(mask).long(), column(weights), clip)
    total, share, slopes = Fraction(0), Fraction(0), []
    for v, o, r, keep, w in zip(values, old, returns, mask, weights, strict=True):
        bounded = min(max(v, o - clip), o + clip)
        plain, clipped = Fraction(v - r) ** 2, Fraction(bounded - r) ** 2
        total += keep * Fraction(w) * max(plain, clipped) / 2
        share += keep * Fraction(w) * (clipped > plain)
        # Outside the bounds an equal error is a kink, between slope 0 and v - r: half of it, as torch does.
        slope = 1.0 if plain > clipped or bounded == v else 0.5 if plain == clipped else 0.0
        slopes.append(keep * w * (v - r) * slope)
    (gradient,) = torch.autograd.grad(loss, ours)
    assert Fraction(float(loss.detach())) == Fraction(float(metrics["value_loss"])) == total
    assert Fraction(float(metrics["value_clipfrac"])) == share
    assert gradient.tolist() == slopes
    assert not any(metric.requires_grad for metric in metrics.values())


def test_a_value_inside_the_clip_range_stays_itself() -> None:
    """The form old + (v - old) would be another number here, off the target; nothing counts as clipped."""
    v, old, target = column([0.1]).requires_grad_(), column([16.3]), column([0.1])
    assert float((old + (v.detach() - old)) - v.detach()) != 0.0
    loss, metrics = value_loss(v, old, target, torch.ones(1).long(), torch.ones(1), 20.0)
    assert float(loss.detach()) == 0.0 and float(metrics["value_clipfrac"]) == 0.0


def test_gradients_of_the_value_loss_flow_to_the_values_alone() -> None:
    """Old values and returns get none, even if they ask for it."""
    v, old, target = (column([x]).requires_grad_() for x in (2.0, 1.0, 0.0))
    loss, _ = value_loss(v, old, target, torch.ones(1).long(), torch.ones(1), 0.5)
    assert torch.autograd.grad(loss, (v, old, target), allow_unused=True)[1:] == (None, None)


# Settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gamma": 1.5}, r"gamma 1\.5 must be in \[0, 1\]"),
        ({"gamma": math.nan}, r"gamma nan must be finite"),
        ({"lambd": -0.1}, r"lambd -0\.1 must be in \[0, 1\]"),
        ({"value_clip": 0.0}, r"value_clip 0\.0 must be greater than 0"),
        ({"num_critic_only_steps": -1, "advantage_estimator": "ppo"}, r"num_critic_only_steps -1 must be at least 0"),
        ({"num_critic_only_steps": 2}, r"num_critic_only_steps 2 needs a critic.*'ppo', not 'grpo'"),
        ({"advantage_estimator": "cispo", "eps_clip_c": 3.0}, r"eps_clip_c 3\.0 .*'cispo'"),
        ({"advantage_estimator": "vpg"}, r"advantage_estimator must be one of 'grpo', .*'ppo', not 'vpg'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(values: dict[str, Any], message: str) -> None:
    """In one line that names both sides."""
    with pytest.raises(ConfigError, match=message) as refused:
        TrainConfig.from_mapping(values)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", NAMES)
def test_settings_that_do_nothing_are_allowed(name: str) -> None:
    """The edges of the ranges, the critic's keys without a critic, and flags that an estimator does not read."""
    values = {"gamma": 0, "lambd": 1, "critic_lr": 0.5, "value_clip": 9, "grpo_std_normalization": False}
    config = TrainConfig.from_mapping(values | {"advantage_estimator": name, "whiten_advantages": True})
    assert config.advantage_estimator == name
