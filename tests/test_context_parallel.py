from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_dump_kit import cut

from repro_golden.base.errors import ReproError
from repro_golden.dumps.train.context_parallel import Held, held, joined, padded_lengths, ranges
from repro_golden.dumps.values import Tensor, same


@st.composite
def lengths(draw: st.DrawFn) -> tuple[int, int, int, int | None]:
    """Total and response length, ranks, and the padded length or None."""
    prompt, response = draw(st.integers(1, 40)), draw(st.integers(0, 40))
    padded = draw(st.none() | st.integers(prompt + response, 130))
    return prompt + response, response, draw(st.integers(1, 8)), padded


def slices_of_the_trainers(total: int, response: int, rank: int, size: int, padded: int | None) -> list[int]:
    """By the trainers' definition: the tokens that a rank's two chunks of logits predict, one at a time."""
    chunk = -(-(total if padded is None else padded) // (2 * size))
    ps = [p for k in (rank, 2 * size - 1 - rank) for p in range(k * chunk, (k + 1) * chunk)]
    return [p + 1 - (total - response) for p in ps if total - response - 1 <= p < total - 1]


@given(lengths())
def test_every_token_lies_with_the_rank_whose_chunks_predict_it(case) -> None:
    """`ranges` agrees with the definition for any lengths, 1 to 8 ranks, padded or not."""
    total, response, size, padded = case
    for rank in range(size if size > 1 else 0):
        indices = [i for start, stop in ranges(total, response, rank, size, padded) for i in range(start, stop)]
        assert indices == slices_of_the_trainers(total, response, rank, size, padded)
        assert held(total, response, rank, size, padded) == len(indices)


@given(lengths(), st.sampled_from(["list", "array", "tensor", "bfloat16"]))
def test_joining_is_the_inverse_of_cutting(case, kind: str) -> None:
    """Lists, arrays and tensors come back bit for bit, for short responses and empty parts, too."""
    total, response, size, padded = case
    numbers = np.arange(response, dtype="<f4") - 3.5
    values = {
        "list": numbers.tolist(),
        "array": np.stack([numbers, -numbers], axis=1),
        "tensor": Tensor("float32", numbers),
        "bfloat16": Tensor("bfloat16", np.arange(response, dtype="<u2")),
    }[kind]
    parts = [cut(values, total, response, rank, size, padded=padded) for rank in range(size)]
    assert same(joined(parts, total, response, padded=padded), values)


@given(lengths(), st.data())
def test_a_part_of_another_length_is_refused_by_rank_and_sample(case, data) -> None:
    """The message names the trainer's rank and the sample, and nothing is put together."""
    total, response, size, padded = case
    parts = [cut(list(range(response)), total, response, rank, size, padded=padded) for rank in range(size)]
    bad = data.draw(st.integers(0, size - 1))
    parts[bad] = [*parts[bad], 7]
    with pytest.raises(ReproError, match=rf"sample 5: rank {40 + bad} holds {len(parts[bad])} values"):
        joined(parts, total, response, padded=padded, what="sample 5", ranks=range(40, 40 + size))


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=6), st.integers(2, 4), st.data()
)
def test_a_padded_length_is_found_by_what_the_ranks_hold(samples, size: int, data) -> None:
    """Among the lengths found is one that cuts as the true one does."""
    sizes = [(prompt + response, response) for prompt, response in samples]
    padded = data.draw(st.integers(max(total for total, _ in sizes), 60))
    shown = [Held(t, r, rank, held(t, r, rank, size, padded)) for t, r in sizes for rank in range(size)]
    lengths = padded_lengths(shown, size)
    cuts = [
        [ranges(sample.total, sample.response, sample.rank, size, p) for sample in shown] for p in (padded, *lengths)
    ]
    assert cuts[0] in cuts[1:]
    wrong = [sample._replace(tokens=sample.tokens + 1) for sample in shown]
    assert padded_lengths(wrong, size) == []


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ((4, 4, 0, 2, None), "needs a token before it"),
        ((4, 5, 0, 2, None), "cannot be cut"),
        ((4, 2, 2, 2, None), "rank 2 of 2 does not exist"),
        ((9, 2, 0, 2, 8), "does not fit the 8"),
    ],
)
def test_lengths_that_no_trainer_can_have_cut_are_refused(case, message: str) -> None:
    """A response without a prompt, longer than its sequence, a rank outside of the group, too short a padding."""
    with pytest.raises(ReproError, match=message):
        ranges(*case)


def test_a_single_rank_holds_everything() -> None:
    """Without context parallelism a response may even be the whole sequence."""
    assert joined([cut([1, 2, 3], 3, 3, 0, 1)], 3, 3) == [1, 2, 3]
    with pytest.raises(ReproError, match="2 values for a response of 3 tokens"):
        cut([1, 2], 5, 3, 0, 1)
