"""What a rank sees of an update, and scores over a vocabulary that is split among processes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st
from megatron_kit import launch, outputs
from torch import Tensor

from repro_core.engines.megatron.shares import Share, Slot, held_positions, packed, shares
from repro_core.rl.batching import Update, micro_batches, offsets
from repro_core.rl.loss import token_log_probs

torch.set_num_threads(1)
MULTIPLE = 16
EPS = 2.0**-23


def rollout(lengths: list[tuple[int, int]]) -> dict[str, Tensor]:
    """Samples of (prompt, response) tokens; every token, mask and expert is another number."""
    totals, responses = [p + r for p, r in lengths], [r for _, r in lengths]
    count = sum(totals)
    return {
        "tokens": torch.arange(1000, 1000 + count),
        "total_lengths": torch.tensor(totals, dtype=torch.int64),
        "response_lengths": torch.tensor(responses, dtype=torch.int64),
        "loss_mask": torch.arange(sum(responses)) % 3,
        "routed_experts": (torch.arange(count)[:, None, None] + torch.zeros(1, 2, 2)).to(torch.int16),
    }


def update_of(t: dict[str, Tensor], a: int, b: int, budget: int) -> Update:
    """The update of samples a to b."""
    totals, responses = t["total_lengths"].tolist(), t["response_lengths"].tolist()
    token, response = offsets(totals), offsets(responses)
    runs = [range(a + run.start, a + run.stop) for run in micro_batches(totals[a:b], budget)]
    return Update(slice(a, b), slice(token[a], token[b]), slice(response[a], response[b]), runs)


SAMPLES = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 14)), min_size=1, max_size=9)


@at_most(60)
@given(
    SAMPLES,
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 90),
    st.data(),
)
def test_every_response_token_is_once_in_all_shares(
    lengths: list[tuple[int, int]], dp: int, cp: int, rounds: int, budget: int, data: st.DataObject
) -> None:
    """Over all slots each response token is there once: with its target, mask, column, experts, and the row before."""
    t = rollout(lengths)
    a = data.draw(st.integers(0, len(lengths)))
    b = data.draw(st.integers(a, len(lengths)))
    update = update_of(t, a, b, budget)
    slots = [Slot(dp, d, cp, c, rounds) for d, c in itertools.product(range(dp), range(cp))]
    every = [shares(t, update, slot, MULTIPLE) for slot in slots]
    alone = shares(t, update, Slot(1, 0, 1, 0), MULTIPLE)
    rows, seq = alone[0].tokens.shape
    assert {len(batch) for batch in every} == {len(every[0])} and len(every[0]) % rounds == 0 and len(every[0]) > 0
    assert {s.tokens.shape for batch in every for s in batch} == {(rows, seq // cp)}, "one shape, whatever the layout"
    assert seq % MULTIPLE == 0 and seq - MULTIPLE < max([1, *t["total_lengths"][a:b].tolist()])
    last = 999 + t["total_lengths"].cumsum(0)
    tokens: dict[int, tuple[int, int, int]] = {}
    for share in itertools.chain(*every):
        flat, at, experts = share.tokens.flatten(), share.positions.flatten(), share.routing
        assert experts is not None and share.positions.dtype == torch.int64
        known = (share.tokens >= 1000) & ~torch.isin(share.tokens, last)
        assert torch.equal(experts[known][:, 1, 0], share.tokens[known] - 1000), "experts go with their tokens"
        assert not (experts[~known] != torch.arange(2)).any(), "nothing is recorded here, yet no expert is twice"
        for row, target, mask, column in zip(share.rows, share.targets, share.mask, share.columns, strict=True):
            assert int(column) not in tokens, "once"
            # tokens are numbered without a gap, so the one that predicts a target is the number before it
            assert int(flat[row]) == int(target) - 1
            tokens[int(column)] = (int(target), int(mask), int(at[row]))
    responses = t["response_lengths"][a:b].tolist()
    starts = offsets(t["total_lengths"].tolist())
    wanted: list[tuple[int, int, int]] = []
    for sample, response in zip(range(a, b), responses, strict=True):
        total = int(t["total_lengths"][sample])
        first = update.responses.start + len(wanted)
        masks = t["loss_mask"][first : first + response].tolist()
        places = range(total - response, total)
        wanted += [(1000 + starts[sample] + p, m, p - 1) for p, m in zip(places, masks, strict=True)]
    assert [tokens[k] for k in range(len(tokens))] == wanted


@at_most(60)
@given(SAMPLES, st.sampled_from([1, 2, 3]), st.integers(1, 90))
def test_packed_samples_lie_one_after_the_other(lengths: list[tuple[int, int]], dp: int, budget: int) -> None:
    """Packed, each token of a micro-batch is there once at its own position, and the rows that predict are found."""
    t = rollout(lengths)
    update = update_of(t, 0, len(lengths), budget)
    every = [packed(t, update, Slot(dp, rank, 1, 0), MULTIPLE) for rank in range(dp)]
    assert len({share.tokens.shape for batch in every for share in batch}) == 1
    seen: list[int] = []
    columns: list[int] = []
    for share in itertools.chain(*every):
        (tokens,), (positions,) = share.tokens, share.positions
        ends = [] if share.ends is None else share.ends.tolist()
        assert ends[0] == 0 and ends[-1] == len(tokens) and len(tokens) % MULTIPLE == 0
        assert positions.tolist() == [p for a, b in itertools.pairwise(ends) for p in range(b - a)]
        assert torch.equal(tokens[share.rows] + 1, share.targets), "tokens are numbered: the row before has the last"
        assert torch.equal(share.mask, t["loss_mask"][share.columns])
        seen += tokens[tokens >= 1000].tolist()
        columns += share.columns.tolist()
    assert seen == t["tokens"].tolist() and columns == list(range(len(t["loss_mask"])))


@at_most(60)
@given(SAMPLES, st.integers(1, 90))
def test_data_parallel_ranks_take_runs_of_what_one_process_has(lengths: list[tuple[int, int]], budget: int) -> None:
    """The micro-batches of two ranks one after the other are those of one process, and empty ones."""
    t = rollout(lengths)
    update = update_of(t, 0, len(lengths), budget)
    alone = shares(t, update, Slot(1, 0, 1, 0), MULTIPLE)
    both: list[Share] = [s for rank in (0, 1) for s in shares(t, update, Slot(2, rank, 1, 0), MULTIPLE)]
    full = [share for share in both if len(share.columns) or bool((share.tokens >= 1000).any())]
    real = [share for share in alone if len(share.columns) or bool((share.tokens >= 1000).any())]
    assert len(full) == len(real)
    for a, b in zip(full, real, strict=True):
        for name in ("tokens", "positions", "rows", "targets", "mask", "columns"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


@given(st.integers(1, 4), st.integers(1, 6))
def test_positions_are_held_once(size: int, chunk: int) -> None:
    """Of a sequence each position is on one rank; each rank has one chunk of either half; other lengths are refused."""
    length = 2 * size * chunk
    held = [held_positions(length, rank, size).tolist() for rank in range(size)]
    assert sorted(itertools.chain(*held)) == list(range(length))
    assert size == 1 or all(sum(at < length // 2 for at in part) == chunk for part in held)
    if size > 1:
        with pytest.raises(ValueError, match=r"equal chunks\Z"):
            held_positions(length + 1, 0, size)


def test_a_response_without_a_prompt_is_refused() -> None:
    """Nothing predicts its first token: the row before it would be another sample's."""
    t = rollout([(1, 2), (0, 3)])
    with pytest.raises(ValueError, match=r"\Aa sample of 3 tokens cannot hold a response of 3 after a prompt\Z"):
        shares(t, update_of(t, 0, 2, 90), Slot(1, 0, 1, 0), MULTIPLE)


CUT, VOCAB, TOKENS = 40, 67, 24  # the second of two ranks has fewer columns

PROGRAM = f"""
import sys
import torch
import torch.distributed as dist
from repro_core.engines.megatron.scoring import token_scores
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
cases, found = torch.load("cases.pt"), {{}}
for name, (logits, targets, mask, temperature, weights) in cases.items():
    own = logits[:, :{CUT}] if rank == 0 else logits[:, {CUT}:]
    own = own.clone().requires_grad_()
    columns = token_scores(own, targets, mask, temperature, rank * {CUT}, dist.group.WORLD)
    sum((column * weight).sum() for column, weight in zip(columns, weights)).backward()
    found[name] = [*(column.detach() for column in columns), own.grad]
torch.save(found, f"found{{rank}}.pt")
dist.destroy_process_group()  # without it gloo's threads may abort the exit
"""

Case = tuple[Tensor, Tensor, Tensor, float, tuple[Tensor, Tensor]]


def cases() -> dict[str, Case]:
    """Logits, targets, mask, temperature, and the gradients that reach log-probs and entropy."""
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(TOKENS, VOCAB, generator=generator) * 3
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    targets[:4] = torch.tensor([0, CUT - 1, CUT, VOCAB - 1])
    mask = torch.ones(TOKENS, dtype=torch.int64)
    weights = (torch.randn(TOKENS, generator=generator), torch.randn(TOKENS, generator=generator))
    masked = (torch.arange(TOKENS) % 3 != 0).long()
    poisoned, wild = logits.clone(), targets.clone()
    poisoned[masked == 0] = torch.tensor([math.nan, math.inf, -math.inf, 0.0])[torch.arange(8) % 4][:, None]
    wild[masked == 0] = 10**9
    barred = logits.clone()
    barred[:, 3] = barred[:, CUT + 3] = -math.inf
    barred[torch.arange(TOKENS), targets] = logits[torch.arange(TOKENS), targets]
    alone = torch.full_like(logits, -math.inf)
    alone[torch.arange(TOKENS), targets] = 2.0  # all the probability on one token, a whole rank without any
    return {
        "plain": (logits, targets, mask, 1.0, weights),
        "temperature": (logits, targets, mask, 0.7, weights),
        "bf16": (logits.bfloat16(), targets, mask, 1.0, weights),
        "large": (logits * 40, targets, mask, 1.0, weights),
        "masked": (logits, targets, masked, 1.0, weights),
        "poisoned": (poisoned, wild, masked, 1.0, weights),
        "barred": (barred, targets, mask, 1.0, weights),
        "alone": (alone, targets, mask, 1.0, weights),
    }


Scored = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scored]:
    """Log-probs, entropy and the logits' gradient of each case, over two processes."""
    cwd = tmp_path_factory.mktemp("scores")
    torch.save(cases(), cwd / "cases.pt")
    outputs(launch(PROGRAM, 2, cwd=cwd))
    first, second = (torch.load(cwd / f"found{rank}.pt") for rank in (0, 1))
    for name in first:
        for a, b in zip(first[name][:2], second[name][:2], strict=True):
            assert torch.equal(a, b), f"{name}: the columns differ between ranks"
    return {name: (*first[name][:2], torch.cat([first[name][2], second[name][2]], 1)) for name in first}


def exact(case: Case) -> Scored:
    """The same in double precision; what has no probability is left out of the entropy."""
    logits, targets, mask, temperature, weights = case
    kept = torch.nonzero(mask)[:, 0]
    leaf = logits.double()[kept].requires_grad_()
    log_p = torch.log_softmax(leaf / temperature, -1)
    chosen = log_p.gather(1, targets[kept][:, None])[:, 0]
    safe = log_p.masked_fill(log_p == -math.inf, 0.0)
    entropy = -(log_p.exp() * safe).sum(-1)
    (chosen * weights[0].double()[kept] + entropy * weights[1].double()[kept]).sum().backward()
    out = [torch.zeros(TOKENS, dtype=torch.float64) for _ in range(2)]
    gradient = torch.zeros(TOKENS, VOCAB, dtype=torch.float64)
    out[0][kept], out[1][kept] = chosen.detach(), entropy.detach()
    assert leaf.grad is not None
    gradient[kept] = leaf.grad
    return out[0], out[1], gradient


@pytest.mark.parametrize("name", [name for name in cases() if name != "poisoned"])
def test_a_split_vocabulary_scores_as_a_whole_one(name: str, scored: dict[str, Scored]) -> None:
    """Against double precision, as far off as `token_log_probs`: a few epsilons; at masked tokens exactly 0."""
    case = cases()[name]
    # the shift by the largest logit rounds in epsilons of the logits; a bf16 gradient is rounded to bf16
    scale = max(1.0, float(case[0].float().masked_fill(case[0] == -math.inf, 0.0).abs().max()) / case[3])
    eps = (EPS, EPS, 2.0**-8 if case[0].dtype == torch.bfloat16 else EPS)
    for got, wanted, bound in zip(scored[name], exact(case), eps, strict=True):
        assert bool(torch.isfinite(got).all())
        assert float((got.double() - wanted).abs().max()) <= 4 * bound * scale
        masked = case[2] == 0
        assert not got[masked].any() and not bool(torch.signbit(got[masked]).any() and got.ndim == 1)
    if name not in ("barred", "alone"):
        whole = case[0].clone().requires_grad_()
        columns = token_log_probs(whole, *case[1:4])
        sum((column * weight).sum() for column, weight in zip(columns, case[4], strict=True)).backward()  # type: ignore[union-attr]
        assert whole.grad is not None
        for got, ours, bound in zip(scored[name], (*columns, whole.grad), eps, strict=True):
            assert float((got.double() - ours.detach().double()).abs().max()) <= 4 * bound * scale


def test_poison_at_masked_tokens_moves_no_bit(scored: dict[str, Scored]) -> None:
    """NaN and infinite logits and targets that the vocabulary lacks: same columns, same gradients."""
    for got, wanted in zip(scored["poisoned"], scored["masked"], strict=True):
        assert torch.equal(got, wanted) and bool(torch.isfinite(got).all())


def test_a_certain_token_has_no_entropy(scored: dict[str, Scored]) -> None:
    """With all other logits at minus infinity log-prob, entropy and gradient are exactly 0, not NaN."""
    for got in scored["alone"]:
        assert not got.any()


@pytest.mark.parametrize("name", ["barred", "alone"])
def test_a_token_without_probability_adds_no_entropy_on_one_process(name: str) -> None:
    """`token_log_probs` leaves logits of minus infinity out too, forward and backward."""
    case = cases()[name]
    logits = case[0].clone().requires_grad_()
    columns = token_log_probs(logits, *case[1:4])
    sum((column * weight).sum() for column, weight in zip(columns, case[4], strict=True)).backward()  # type: ignore[union-attr]
    assert logits.grad is not None
    for got, wanted in zip((*columns, logits.grad), exact(case), strict=True):
        assert float((got.detach().double() - wanted).abs().max()) <= 4 * EPS * 20
