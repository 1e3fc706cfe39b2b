"""What SGLang is asked, and what is made of its answers: pure."""

from __future__ import annotations

import base64
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang_kit import CONFIG, DENSE, EXPERTS

from repro_core.rollout.engine import EngineError, Sampling
from repro_core.rollout.sampler import sample_seeds
from repro_core.rollout.sglang.client import Asked, responses
from repro_core.rollout.sglang.flags import (
    check_version,
    command_line,
    engine_seeds,
    request,
    server_arguments,
    told_flags,
)

EOS = 258
PROMPTS = [[1, 2, 3], [4, 5]]
LENGTH = Sampling(4, 1.0, EOS)
finite = st.floats(-50, 0, width=32)
token = st.integers(0, 257)


def _asked(sampling: Sampling = LENGTH, model: Any = DENSE) -> Asked:
    return Asked(PROMPTS, sampling, "3", model, "SGLang")


def _answer(tokens: list[int], log_probs: list[Any], reason: str = "length", **meta: Any) -> dict[str, Any]:
    return {
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": reason},
            "weight_version": "3",
            "completion_tokens": len(tokens),
            "output_token_logprobs": [[value, each, None] for value, each in zip(log_probs, tokens, strict=True)],
            **meta,
        },
    }


GOOD = _answer([7, 8, 9, 10], [-1.0, -2.0, -3.0, -4.0])


@st.composite
def answers(draw: st.DrawFn) -> dict[str, Any]:
    """An answer that holds together: cut at 4 tokens, or ended by the end of sequence."""
    tokens = draw(st.lists(token, min_size=1, max_size=4))
    ended = len(tokens) < 4 or draw(st.booleans())
    if ended:
        tokens[-1] = EOS
    log_probs = draw(st.lists(finite, min_size=len(tokens), max_size=len(tokens)))
    return _answer(tokens, log_probs, "stop" if ended else "length")


@given(st.tuples(answers(), answers()))
def test_sound_answers_come_back_as_they_are(given_answers: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Tokens, log-probs, status and version of answers that hold together are kept, in order."""
    for answer, response in zip(given_answers, responses(list(given_answers), _asked()), strict=True):
        assert response.tokens == answer["output_ids"]
        assert response.log_probs == [pair[0] for pair in answer["meta_info"]["output_token_logprobs"]]
        assert (response.status == "completed") == (answer["meta_info"]["finish_reason"]["type"] == "stop")
        assert response.weight_version == "3"


@given(answers(), st.data())
def test_any_token_or_log_prob_too_few_is_an_error(answer: dict[str, Any], data: st.DataObject) -> None:
    """Wherever one token, or one log-prob, is missing or doubled, the whole batch is dropped."""
    where = data.draw(st.sampled_from(["output_ids", "output_token_logprobs"]))
    owner = answer if where == "output_ids" else answer["meta_info"]
    position = data.draw(st.integers(0, len(owner[where]) - 1))
    if data.draw(st.booleans()):
        owner[where] = [*owner[where], owner[where][position]]
    else:
        owner[where] = owner[where][:position] + owner[where][position + 1 :]
    with pytest.raises(EngineError, match=r"answer 1 has .*; the batch is dropped"):
        responses([GOOD, answer], _asked())


@given(answers(), st.sampled_from([None, math.nan, math.inf, -math.inf]), st.data())
def test_any_log_prob_that_is_not_finite_is_an_error(answer: dict[str, Any], bad: Any, data: st.DataObject) -> None:
    """NaN, infinity, and null (which a server writes for NaN) name the token."""
    pairs = answer["meta_info"]["output_token_logprobs"]
    position = data.draw(st.integers(0, len(pairs) - 1))
    pairs[position][0] = bad
    with pytest.raises(EngineError, match=f"answer 1 has log-prob .* at token {position}: "):
        responses([GOOD, answer], _asked())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "has no meta_info"),
        (_answer([7, 8, 9, 10], [-1.0] * 4, "abort"), "was aborted"),
        (_answer([7, 8, 9, 10], [-1.0] * 4, "tired"), "no known finish_reason"),
        (_answer([7, 8], [-1.0] * 2), "was cut at 2 tokens of 4"),
        (_answer([7, 8, 9, 10, 11], [-1.0] * 5), "5 tokens, more than 4"),
        (_answer([7, 8], [-1.0] * 2, "stop"), "stopped at token 8, which is not the end of sequence 258"),
        (_answer([], []), "no tokens with log-probs"),
        (_answer([7, 8, 9, 10], [-1.0] * 4, completion_tokens=3), "3 completion_tokens"),
        (_answer([7, 8, 9, -1], [-1.0] * 4), "no ids"),
        ({**GOOD, "output_ids": [7, 8, 9, 11]}, "other tokens than those"),
        (_answer([7, 8, 9, 10], [-1.0] * 4, weight_version="2"), "'2' in place of '3'"),
        (
            _answer([7, 8, 9, 10], [-1.0] * 4, weight_versions=[{"version": "2", "start": 0, "end": 1}]),
            "'2' in place of '3'",
        ),
    ],
)
def test_an_answer_that_does_not_hold_together_is_named(wrong: dict[str, Any], message: str) -> None:
    """Each kind of nonsense is an error of one line that names the answer."""
    with pytest.raises(EngineError, match=message) as error:
        responses([GOOD, wrong], _asked())
    assert "answer 1" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given_answers", [[], [GOOD], [GOOD] * 3, GOOD, "no", None])
def test_each_prompt_has_one_answer(given_answers: Any) -> None:
    """More or fewer answers than prompts, or no list, are an error."""
    with pytest.raises(EngineError, match="the batch is dropped"):
        responses(given_answers, _asked())


@given(st.integers(1, 4), st.sampled_from([4, 256, 257]), st.data())
def test_routed_experts_have_a_row_for_each_token(count: int, experts: int, data: st.DataObject) -> None:
    """int32 in base64 becomes [prompt + response, layers, top_k] with a last row of 0, in the dtype of the record."""
    from dataclasses import replace

    model = replace(EXPERTS, num_experts=experts)
    tokens, rows = list(range(10, 10 + count)), len(PROMPTS[0]) + count - 1
    shape = (rows, model.num_hidden_layers, model.num_experts_per_tok)
    values = data.draw(st.lists(st.integers(0, experts - 1), min_size=math.prod(shape), max_size=math.prod(shape)))
    sent = torch.tensor(values, dtype=torch.int32).reshape(shape)
    answer = _answer(tokens, [-1.0] * count, routed_experts=base64.b64encode(sent.numpy().tobytes()).decode())
    asked = Asked(PROMPTS[:1], Sampling(count, 1.0, EOS, routed_experts=True), "3", model, "SGLang")
    (response,) = responses(answer, asked)
    assert response.routed_experts is not None
    assert response.routed_experts.dtype is (torch.uint8 if experts <= 256 else torch.int16)
    assert torch.equal(response.routed_experts[:-1].int(), sent)
    assert not response.routed_experts[-1].any()


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (None, "no routed experts"),
        ("***", "no base64"),
        ("AAAA", "3 bytes of routed experts"),
        (base64.b64encode(torch.full((6, 2, 2), 4, dtype=torch.int32).numpy().tobytes()).decode(), "outside 0 to 3"),
    ],
)
def test_routed_experts_that_do_not_fit_are_named(sent: str | None, message: str) -> None:
    """Experts that are missing, of the wrong size, or beyond the model's are an error."""
    answer = _answer([7, 8, 9, 10], [-1.0] * 4, routed_experts=sent)
    asked = Asked(PROMPTS[:1], Sampling(4, 1.0, EOS, routed_experts=True), "3", EXPERTS, "SGLang")
    with pytest.raises(EngineError, match=message):
        responses([answer], asked)


def test_prompt_log_probs_begin_at_the_second_token() -> None:
    """SGLang gives none for the first token; they must be those of the prompt that was asked for."""
    sampling = Sampling(4, 1.0, EOS, prompt_log_probs=True)
    sent = [[None, 1, None], [-0.5, 2, None], [-0.25, 3, None]]
    asked = Asked(PROMPTS[:1], sampling, "3", DENSE, "SGLang")
    answer = _answer([7, 8, 9, 10], [-1.0] * 4, input_token_logprobs=sent)
    assert responses([answer], asked)[0].prompt_log_probs == [-0.5, -0.25]
    for wrong in (None, sent[1:], [*sent[:2], [-0.25, 4, None]], [*sent[:2], [-0.25, 0, None]]):
        bad = _answer([7, 8, 9, 10], [-1.0] * 4, input_token_logprobs=wrong)
        with pytest.raises(EngineError, match="log-probs of its prompt"):
            responses([bad], asked)


def test_the_last_id_of_the_vocabulary_is_shown_as_0() -> None:
    """SGLang does so in prompts: it is taken there, and for no other id."""
    prompt = [1, DENSE.vocab_size - 1]
    asked = Asked([prompt], Sampling(4, 1.0, EOS, prompt_log_probs=True), "3", DENSE, "SGLang")
    answer = _answer([7, 8, 9, 10], [-1.0] * 4, input_token_logprobs=[[None, 1, None], [-0.5, 0, None]])
    assert responses([answer], asked)[0].prompt_log_probs == [-0.5]


@given(st.lists(st.integers(0, 2**200)))
def test_seeds_fit_into_63_bits(seeds: list[int]) -> None:
    """Every seed becomes one that SGLang holds; those below 2**63 stay, and folding again changes nothing."""
    folded = engine_seeds(seeds)
    assert all(0 <= seed < 2**63 for seed in folded)
    assert [new for old, new in zip(seeds, folded, strict=True) if old < 2**63] == [
        seed for seed in seeds if seed < 2**63
    ]
    assert engine_seeds(folded) == folded


def test_the_samplers_own_seeds_stay_as_they_are() -> None:
    """What `sample_seeds` gives is what SGLang draws from, and a negative seed is refused."""
    seeds = sample_seeds(1, 2, 64)
    assert engine_seeds(seeds) == seeds
    with pytest.raises(EngineError, match="negative"):
        engine_seeds([1, -1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1]], Sampling(0, 1.0, EOS), [1], True), "max_response_len 0"),
        (([[1]], Sampling(1, -1.0, EOS), [1], True), "temperature -1.0"),
        (([[1]], Sampling(1, math.nan, EOS), [1], True), "temperature nan"),
        (([[1]], Sampling(1, 1e-9, EOS), [1], True), "too small for SGLang"),
        (([[1]], Sampling(1, 1.0, EOS), [1, 2], True), "1 prompts need as many seeds, not 2"),
        (([[1], []], Sampling(1, 1.0, EOS), None, True), "a prompt is empty"),
        (([[1]], Sampling(1, 1.0, EOS), [1], False), "SGLang ignores seeds"),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments: Any, message: str) -> None:
    """Arguments that do not fit together never reach SGLang, nor do seeds that it would ignore."""
    with pytest.raises(EngineError, match=message):
        request(*arguments)


def test_a_request_says_all_that_decides_a_response() -> None:
    """Length, temperature, end of sequence and seeds are in every request; greedy ones carry no seed."""
    body = request([[1], [2]], Sampling(5, 0.5, EOS, prompt_log_probs=True), [3, 4], True)
    assert body["sampling_params"] == [
        {"max_new_tokens": 5, "temperature": 0.5, "ignore_eos": False, "stop_token_ids": [EOS], "sampling_seed": seed}
        for seed in (3, 4)
    ]
    assert (body["return_logprob"], body["logprob_start_len"]) == (True, 0)
    greedy = request([[1]], Sampling(5, 0.0, EOS, ignore_eos=True), [3], False)
    assert greedy["sampling_params"] == [{"max_new_tokens": 5, "temperature": 0.0, "ignore_eos": True}]


def test_arguments_for_a_cpu_and_a_gpu() -> None:
    """Each device has its own attention; weights can be read back on both; the user's own arguments come last."""
    from dataclasses import replace

    cpu = server_arguments(CONFIG, DENSE, "/model", "fp32", "cpu")
    gpu = server_arguments(replace(CONFIG, args={"page_size": 4, "random_seed": 9}), EXPERTS, "/model", "bf16", "cuda")
    assert (cpu["attention_backend"], cpu["disable_cuda_graph"], cpu["dtype"]) == ("torch_native", True, "float32")
    assert (gpu["attention_backend"], gpu["dtype"], gpu["page_size"], gpu["random_seed"]) == (
        "triton", "bfloat16", 4, 9,
    )  # fmt: skip
    assert "disable_cuda_graph" not in gpu
    assert gpu["enable_return_routed_experts"] is True
    assert cpu["custom_weight_loader"] == gpu["custom_weight_loader"]
    words = command_line({**gpu, "json_model_override_args": {"a": 1}, "off": False, "none": None})
    assert words[words.index("--dtype") + 1] == "bfloat16"
    assert "--enable-deterministic-inference" in words
    assert '{"a": 1}' in words
    assert "--off" not in words
    assert "--none" not in words
    with pytest.raises(EngineError, match=r"sglang\.args\.device is set by the engine itself"):
        server_arguments(replace(CONFIG, args={"device": "cuda"}), DENSE, "/model", "fp32", "cpu")
    with pytest.raises(EngineError, match=r"set sglang\.tp_size"):
        server_arguments(replace(CONFIG, args={"tp_size": 2}), DENSE, "/model", "fp32", "cpu")
    for name in ("dp_size", "ep_size", "pp_size"):
        with pytest.raises(EngineError, match=rf"sglang\.args\.{name} is refused"):
            server_arguments(replace(CONFIG, args={name: 2}), DENSE, "/model", "fp32", "cpu")
    with pytest.raises(EngineError, match="tie_word_embeddings to false"):
        server_arguments(CONFIG, replace(EXPERTS, tie_word_embeddings=True), "/model", "fp32", "cuda")


def test_identity_tells_plain_flags_alone() -> None:
    """Paths, callables and unknown arguments of a server are not told."""
    assert told_flags(
        {"tp_size": 2, "dtype": "float32", "model_path": "/x", "page_size": None, "quantization": len}
    ) == {
        "tp_size": 2,
        "dtype": "float32",
    }


@pytest.mark.parametrize("version", ["0.5.15", "0.5.15.post1", "0.5.23", "0.5.99"])
def test_versions_that_are_supported(version: str) -> None:
    """From 0.5.15 on and before 0.6, on a GPU."""
    check_version(version, "it", "cuda")


@pytest.mark.parametrize(
    ("version", "device"),
    [("0.5.14", "cuda"), ("0.4.9.post2", "cuda"), ("0.6.0", "cuda"), ("1.0", "cuda"), ("0.5.22", "cpu"), ("x", "cuda")],
)
def test_versions_that_are_refused_by_name(version: str, device: str) -> None:
    """The message names the version and those that will do."""
    with pytest.raises(EngineError, match=rf"{version}.*must be"):
        check_version(version, "it", device)
