from __future__ import annotations

import json
import math
import random
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from repro_core import Rollout
from repro_core.config import ModelConfig
from repro_core.data.rollout_file import FORMAT, RolloutError, read_rollout, write_rollout
from repro_core.model.decoder import Policy, init_weights
from repro_core.rollout.engine import Response
from repro_core.rollout.sampler import _draw, sample, sample_seeds

torch.set_num_threads(1)

EOS = 12
CONFIG = ModelConfig(
    vocab_size=13,
    hidden_size=32,
    intermediate_size=48,
    max_position_embeddings=40,
    initializer_range=0.3,
    tie_word_embeddings=False,
)


def make(seed: int = 0) -> Policy:
    policy = Policy(CONFIG)
    init_weights(policy, seed)
    return policy


POLICY = make()
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11, 2], [3, 3, 3, 3]]


def run(prompts: list[list[int]], seeds: list[int], temperature: float = 1.0, length: int = 12) -> list[Response]:
    return sample(POLICY, prompts, max_response_len=length, temperature=temperature, seeds=seeds, eos_id=EOS)


def test_same_seeds_give_the_same_bits() -> None:
    """Two calls agree in tokens and log-prob bits, whatever the global generator did; other seeds give others."""
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = run(PROMPTS, [1, 2, 3, 4, 5])
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert run(PROMPTS, [1, 2, 3, 4, 5]) == first != run(PROMPTS, [1, 2, 3, 4, 6])


@at_most(20)
@given(
    rows=st.lists(st.tuples(st.sampled_from(PROMPTS), st.integers(0, 2**62)), min_size=1, max_size=5),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    length=st.integers(1, 10),
)
def test_log_probs_equal_a_full_forward(rows: list[tuple[list[int], int]], temperature: float, length: int) -> None:
    """Each log-prob is that of an uncached forward over prompt and response, within 1e-5 of logits / temperature."""
    prompts, seeds = [row[0] for row in rows], [row[1] for row in rows]
    for prompt, response in zip(prompts, run(prompts, seeds, temperature, length), strict=True):
        assert 1 <= len(response.tokens) == len(response.log_probs) <= length
        with torch.no_grad():
            logits = POLICY(torch.tensor([prompt + response.tokens]))[0, len(prompt) - 1 : -1]
        wanted = torch.log_softmax(logits.float() / temperature, dim=-1)
        wanted = wanted.gather(1, torch.tensor(response.tokens)[:, None])[:, 0]
        bound = 1e-5 / min(temperature, 1.0)  # a low temperature magnifies the rounding of logits
        torch.testing.assert_close(torch.tensor(response.log_probs), wanted, rtol=0, atol=bound)


def test_tokens_are_the_inverse_cdf_of_the_documented_uniforms() -> None:
    """Token t is the first id whose cumulative probability exceeds uniform t of random.Random(seed)."""
    for prompt, seed, response in zip(PROMPTS, range(5), run(PROMPTS, list(range(5)), 0.8), strict=True):
        rng, tokens = random.Random(seed), list(prompt)
        for token in response.tokens:
            with torch.no_grad():
                probabilities = torch.softmax(POLICY(torch.tensor([tokens]))[0, -1].double() / 0.8, dim=-1)
            uniform = rng.random()
            assert token == int((probabilities.cumsum(0) <= uniform).sum())
            tokens.append(token)


def test_ids_of_probability_zero_are_never_drawn() -> None:
    """At both ends of [0, 1) the draw passes over ids whose probability underflows to 0."""
    logits = torch.tensor([[-1e4, 0.0, -1e4, 0.3, -1e4]]).expand(2, 5)
    uniforms = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    tokens, log_probs = _draw(logits, 1.0, uniforms, torch.tensor([True, True]))
    assert tokens.tolist() == [1, 3] and bool(log_probs.isfinite().all())


def test_rows_stop_at_the_end_of_sequence() -> None:
    """A completed row ends with its only eos; a truncated one has the full length and none; both kinds occur."""
    responses = run(PROMPTS * 8, list(range(40)))
    for response in responses:
        completed = response.status == "completed"
        assert (EOS in response.tokens) == completed and EOS not in response.tokens[:-1]
        assert completed or len(response.tokens) == 12
    assert {response.status for response in responses} == {"completed", "truncated"}


@at_most(20)
@given(order=st.permutations(range(5)), count=st.integers(1, 5))
def test_a_row_does_not_depend_on_its_neighbours(order: list[int], count: int) -> None:
    """In any order and company a row gets its own tokens, and its log-probs within rounding."""
    seeds = [11, 22, 33, 44, 55]
    alone = run(PROMPTS, seeds)
    chosen = order[:count]
    for index, response in zip(chosen, run([PROMPTS[i] for i in chosen], [seeds[i] for i in chosen]), strict=True):
        assert response.tokens == alone[index].tokens and response.status == alone[index].status
        assert response.log_probs == pytest.approx(alone[index].log_probs, abs=1e-5)


def test_a_longer_limit_extends_the_same_responses() -> None:
    """The uniform of token t does not depend on the limit: a shorter run is a prefix of a longer one."""
    for short, long in zip(run(PROMPTS, [1, 2, 3, 4, 5], length=3), run(PROMPTS, [1, 2, 3, 4, 5]), strict=True):
        assert long.tokens[:3] == short.tokens


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_distribution(temperature: float) -> None:
    """Over 6000 seeds the counts of the first token pass a chi-squared test against the softmax (p > 1e-4)."""
    count = 6000
    responses = run([[1, 2, 3]] * count, sample_seeds(0, 0, count), temperature, length=1)
    with torch.no_grad():
        logits = POLICY(torch.tensor([[1, 2, 3]]))[0, -1].double()
    expected = torch.softmax(logits / temperature, dim=-1) * count
    counts = Counter(response.tokens[0] for response in responses)
    observed = torch.tensor([counts[token] for token in range(CONFIG.vocab_size)]).double()
    assert float(((observed - expected) ** 2 / expected).sum()) < 39.1  # 12 degrees of freedom


def test_nearly_zero_temperature_is_greedy() -> None:
    """At a tiny temperature each token is the argmax and its log-prob is 0: ids of probability 0 are never drawn."""
    for prompt, response in zip(PROMPTS, run(PROMPTS, [0, 1, 2, 3, 4], temperature=1e-4), strict=True):
        with torch.no_grad():
            logits = POLICY(torch.tensor([prompt + response.tokens]))[0, len(prompt) - 1 : -1]
        assert response.tokens == logits.argmax(-1).tolist() and max(map(abs, response.log_probs)) < 1e-6


def test_the_policy_is_left_as_it_was() -> None:
    """Sampling leaves the training mode as found, gradients unset, and no response asks for gradients."""
    policy = make()
    for mode in (True, False):
        policy.train(mode)
        sample(policy, [[1]], max_response_len=2, temperature=1.0, seeds=[0], eos_id=EOS)
        assert policy.training is mode and all(parameter.grad is None for parameter in policy.parameters())


def test_a_diverged_policy_is_refused() -> None:
    """NaN or infinite logits raise instead of giving some token."""
    for value in (math.nan, math.inf):
        policy = make()
        with torch.no_grad():
            policy.lm_head.weight[5] = value
        with pytest.raises(ValueError, match="weights have diverged"):
            sample(policy, [[1]], max_response_len=2, temperature=1.0, seeds=[0], eos_id=EOS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_response_len": 0}, "at least 1"),
        ({"temperature": -0.5}, "not negative"),
        ({"temperature": math.nan}, "not negative"),
        ({"seeds": [1]}, "as many seeds"),
        ({"seeds": [1, -1]}, "negative"),
        ({"prompts": [[1], []]}, "empty"),
        ({"max_response_len": 40}, "max_position_embeddings"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    """Every wrong argument raises before the policy runs."""
    good = {"prompts": [[1], [2]], "max_response_len": 2, "temperature": 1.0, "seeds": [1, 2], "eos_id": EOS}
    with pytest.raises(ValueError, match=message):
        sample(POLICY, **{**good, **changes})


def test_no_prompts_give_no_responses() -> None:
    """An empty batch is an empty list."""
    assert run([], []) == []


def test_sample_seeds_differ_by_each_argument() -> None:
    """Seeds are distinct over rollouts, indices and run seeds, and do not depend on how many are asked for."""
    seeds = [s for run_seed in range(3) for rollout in range(5) for s in sample_seeds(run_seed, rollout, 50)]
    assert len(set(seeds)) == len(seeds) and sample_seeds(1, 2, 3) == sample_seeds(1, 2, 9)[:3]


# ---- the rollout's file


def make_rollout() -> Rollout:
    return Rollout(
        meta={
            "rollout_id": 3,
            "prompts": ["1+2=", "4+4="],
            "labels": ["3", "\u0668"],
            "statuses": ["completed", "truncated"],
            "sampling": {"temperature": 1.0, "seed": 2**53 + 1, "z": None, "a": -0.0},
        },
        tensors={
            "tokens": torch.tensor([257, 1, 2, 258, 257, 5, 6]),
            "total_lengths": torch.tensor([4, 3]),
            "response_lengths": torch.tensor([2, 1]),
            "loss_mask": torch.tensor([1, 1, 1]),
            "rollout_log_probs": torch.tensor([-0.5, -0.0, math.nan]),
            "rewards": torch.tensor([1.0, 0.25]),
            "group_index": torch.tensor([0, 0]),
        },
    )


def refused(path: Path, message: str) -> None:
    with pytest.raises(RolloutError, match=message) as caught:
        read_rollout(path)
    assert "\n" not in str(caught.value)


def test_rollouts_round_trip_bit_for_bit(tmp_path: Path) -> None:
    """Meta comes back equal and tensors with all their bits, NaN and -0.0 included."""
    rollout = make_rollout()
    write_rollout(tmp_path / "3.safetensors", rollout)
    again = read_rollout(tmp_path / "3.safetensors")
    assert again.meta == rollout.meta and math.copysign(1.0, again.meta["sampling"]["a"]) == -1.0
    assert again.tensors.keys() == rollout.tensors.keys()
    for name, tensor in rollout.tensors.items():
        assert again.tensors[name].dtype == tensor.dtype
        assert torch.equal(again.tensors[name].view(torch.uint8), tensor.view(torch.uint8))
    assert [path.name for path in tmp_path.iterdir()] == ["3.safetensors"]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_recorded_experts_round_trip(dtype: torch.dtype, tmp_path: Path) -> None:
    """A rollout may hold the experts of each token; one without them keeps its bytes, and both are read."""
    plain = make_rollout()
    experts = torch.arange(7 * 2 * 3).view(7, 2, 3).to(dtype)
    routed = replace(plain, tensors={**plain.tensors, "routed_experts": experts})
    for name, rollout in (("plain", plain), ("routed", routed)):
        write_rollout(tmp_path / name, rollout)
        again = read_rollout(tmp_path / name)
        assert again.tensors.keys() == rollout.tensors.keys()
    assert again.tensors["routed_experts"].dtype == dtype
    assert torch.equal(again.tensors["routed_experts"], experts)
    assert b"routed" not in (tmp_path / "plain").read_bytes()


@at_most(20)
@given(data=st.data())
def test_equal_content_gives_equal_bytes(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Neither insertion order (at any depth), nor strides, nor the file's name or age leaves a trace in the bytes."""
    directory = tmp_path_factory.mktemp("bytes")
    rollout = make_rollout()
    sampling = dict(data.draw(st.permutations(list(rollout.meta["sampling"].items()))))
    meta = dict(data.draw(st.permutations(list({**rollout.meta, "sampling": sampling}.items()))))
    tensors = dict(data.draw(st.permutations(list(rollout.tensors.items()))))
    tensors["tokens"] = torch.stack([tensors["tokens"]] * 2, dim=1)[:, 0]  # the same values, strided
    write_rollout(directory / "a", rollout)
    write_rollout(directory / "another-name", Rollout(meta, tensors))
    assert (directory / "a").read_bytes() == (directory / "another-name").read_bytes()


def test_other_content_gives_other_bytes(tmp_path: Path) -> None:
    """A sign of zero, one meta value or one more tensor changes the bytes."""
    base = make_rollout()
    flipped = base.tensors["rollout_log_probs"].clone()
    flipped[1] = 0.0
    variants = [
        base,
        replace(base, tensors={**base.tensors, "rollout_log_probs": flipped}),
        replace(base, tensors={**base.tensors, "values": torch.zeros(3)}),
        replace(base, meta={**base.meta, "rollout_id": 4}),
    ]
    for number, rollout in enumerate(variants):
        write_rollout(tmp_path / str(number), rollout)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == len(variants)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", None, "tensor 'tokens' is missing"),
        ("rewards", torch.zeros(2, dtype=torch.float64), "must be torch.float32"),
        ("tokens", torch.zeros(7, 1, dtype=torch.int64), "with one dimension"),
        ("tokens", torch.zeros(8, dtype=torch.int64), "the sum of total_lengths"),
        ("loss_mask", torch.ones(4, dtype=torch.int64), "the sum of response_lengths"),
        ("group_index", torch.zeros(3, dtype=torch.int64), "one per sample"),
        ("response_lengths", torch.tensor([4, -1]), "between 0 and total_lengths"),
        ("response_lengths", torch.tensor([3]), "one per sample"),
        ("routed_experts", torch.zeros(7, 2, dtype=torch.uint8), "must be uint8 or int16"),
        ("routed_experts", torch.zeros(7, 2, 1, dtype=torch.int64), "must be uint8 or int16"),
        ("routed_experts", torch.zeros(7, 2, 0, dtype=torch.uint8), "must be uint8 or int16"),
        ("routed_experts", torch.zeros(3, 2, 1, dtype=torch.uint8), "the sum of total_lengths"),
        ("routed_experts", torch.full((7, 2, 1), -1, dtype=torch.int16), "negative"),
    ],
)
def test_tensors_that_do_not_add_up_are_refused(
    name: str, value: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    """A broken layout is refused when written (and nothing is written) and when read."""
    rollout = make_rollout()
    tensors = {**rollout.tensors, name: value}
    if value is None:
        del tensors[name]
    broken = replace(rollout, tensors=tensors)
    with pytest.raises(RolloutError, match=message):
        write_rollout(tmp_path / "broken", broken)
    assert not list(tmp_path.iterdir())
    save_file(broken.tensors, tmp_path / "broken", {"rollout": json.dumps({"format": 1, **broken.meta})})
    refused(tmp_path / "broken", message)


def test_foreign_truncated_and_newer_files_are_refused(tmp_path: Path) -> None:
    """Missing, foreign, truncated and newer files, and metadata that is none of ours, are refused in one line."""
    rollout, path = make_rollout(), tmp_path / "r"
    refused(path, "cannot read")
    write_rollout(path, rollout)
    whole = path.read_bytes()
    for cut in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        refused(path, "truncated or no safetensors file")
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    refused(path, "no safetensors file")
    save_file(rollout.tensors, path)
    refused(path, "no 'rollout' metadata")
    for text, message in (
        ("{", "is no JSON"),
        ("[]", "no format number"),
        (json.dumps(rollout.meta), "no format number"),
        (json.dumps({**rollout.meta, "format": FORMAT + 1}), "install a newer"),
        (json.dumps({"format": 1, "rollout_id": 3}), "meta lacks 'prompts'"),
    ):
        save_file(rollout.tensors, path, {"rollout": text})
        refused(path, message)


@pytest.mark.parametrize("value", [math.nan, math.inf, (1, 2), {1: 2}, b"x", torch.zeros(1), "\ud800"])
def test_meta_outside_json_is_refused(value: object, tmp_path: Path) -> None:
    """What JSON has no spelling for, or would give back as something else, is refused and nothing is written."""
    rollout = make_rollout()
    with pytest.raises(RolloutError, match="JSON"):
        write_rollout(tmp_path / "r", replace(rollout, meta={**rollout.meta, "sampling": value}))
    assert not list(tmp_path.iterdir())


def test_a_rewrite_is_whole_and_the_header_is_one_key(tmp_path: Path) -> None:
    """Rewriting replaces the old file, and the header's metadata is the single key that keeps the bytes canonical."""
    path = tmp_path / "r"
    path.write_bytes(b"old" * 10_000)
    write_rollout(path, make_rollout())
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    assert list(header["__metadata__"]) == ["rollout"]
    assert json.loads(header["__metadata__"]["rollout"])["format"] == FORMAT
    assert load_file(path).keys() == make_rollout().tensors.keys()


def test_temperature_zero_takes_the_most_probable_token() -> None:
    """At temperature 0 every token is the argmax of the logits, with its log-prob at temperature 1; seeds are idle."""
    done = run(PROMPTS, [1, 2, 3, 4, 5], 0.0, 6)
    assert done == run(PROMPTS, [6, 7, 8, 9, 10], 0.0, 6)
    for prompt, response in zip(PROMPTS, done, strict=True):
        with torch.no_grad():
            logits = POLICY(torch.tensor([prompt + response.tokens]))[0, len(prompt) - 1 : -1]
        assert response.tokens == logits.argmax(-1).tolist()
        wanted = torch.log_softmax(logits.float(), dim=-1).gather(1, torch.tensor(response.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(response.log_probs), wanted, rtol=0, atol=1e-5)


def test_rows_go_on_without_an_end_of_sequence() -> None:
    """Without an eos_id every response has the full length, beginning with the tokens that it has with one."""
    stopped = run(PROMPTS, [1, 2, 3, 4, 5], 1.0, 30)
    free = sample(POLICY, PROMPTS, max_response_len=30, temperature=1.0, seeds=[1, 2, 3, 4, 5], eos_id=None)
    assert any(response.status == "completed" for response in stopped)
    for short, long in zip(stopped, free, strict=True):
        assert long.status == "truncated" and len(long.tokens) == 30
        assert (
            long.tokens[: len(short.tokens)] == short.tokens and long.log_probs[: len(short.tokens)] == short.log_probs
        )


def test_prompts_have_log_probs_where_asked_for() -> None:
    """They are those of a full forward over the prompt alone, for every token but the first."""
    samples = sample(
        POLICY, PROMPTS, max_response_len=2, temperature=1.0, seeds=[0] * 5, eos_id=EOS, prompt_log_probs=True
    )
    for prompt, response in zip(PROMPTS, samples, strict=True):
        assert response.prompt_log_probs is not None
        with torch.no_grad():
            wanted = torch.log_softmax(POLICY(torch.tensor([prompt]))[0, :-1].float(), dim=-1)
        wanted = wanted.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(response.prompt_log_probs), wanted, rtol=0, atol=1e-5)
