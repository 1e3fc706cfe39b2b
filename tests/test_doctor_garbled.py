"""Garbled responses told from text: measures that know no language, held against real text, and the rules on them."""

# ruff: noqa: RUF001

from __future__ import annotations

import argparse
import base64
import decimal
import doctest
import functools
import inspect
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from doctor_dump_kit import found
from doctor_run_kit import launch, log, rollout, samples, severities
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from repro.doctor.catalogue import catalogue
from repro.doctor.facts.samples.texts import (
    FRESH_WINDOW,
    broken_share,
    compression,
    fresh_share,
    judge,
    loop_share,
    scripts_mixed,
)  # fmt: skip

_CHINESE = (
    "人工智能是计算机科学的一个分支，它企图了解智能的实质，并生产出一种新的能以人类智能相似的方式做出反应的智能机器。"
    "该领域的研究包括机器人、语言识别、图像识别、自然语言处理和专家系统等。"
    "我们用 Python 3 写一个函数来求 x² + y² = z² 的整数解，"
    "然后证明：如果 n > 2，那么方程没有正整数解。首先设 α = 3，β = 4，于是 α² + β² = 25，所以答案是 5。"
)
_RUSSIAN = (
    "Докажем, что сумма первых n нечётных чисел равна n². При n = 1 утверждение верно. Пусть оно верно для n = k; "
    "тогда сумма первых k + 1 нечётных чисел равна k² + 2k + 1 = (k + 1)², что и требовалось доказать. Ответ: 49."
)


@functools.cache
def prose() -> tuple[str, ...]:
    """Documentation in English, in pieces of 3000 characters."""
    return tuple(text[k : k + 3000] for text in topics.values() for k in range(0, len(text) - 3000, 3000))


@functools.cache
def source() -> tuple[str, ...]:
    """Python, in pieces of 3000 characters."""
    texts = [inspect.getsource(module) for module in (argparse, tarfile, inspect, doctest)]
    return tuple(text[k : k + 3000] for text in texts for k in range(0, len(text) - 3000, 3000))


@functools.cache
def tokenizer() -> Tokenizer:
    """A byte-level BPE of both."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        (*prose(), *source()), trainers.BpeTrainer(vocab_size=12_000, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def _mathematics(seed: int) -> str:
    draw = random.Random(seed)
    lines = [
        f"Step {i}: from \\(x_{{{i}}} = \\frac{{{draw.randint(1, 99)}}}{{{draw.randint(2, 99)}}}\\) follows "
        f"$\\alpha^{{{i}}} \\le \\beta \\cdot {draw.randint(2, 9)}$."
        for i in range(40)
    ]
    return "\n".join(lines)


def _json(seed: int) -> str:
    draw = random.Random(seed)
    return json.dumps([{"id": i, "name": f"user{draw.randint(0, 99)}", "ok": True} for i in range(80)], indent=1)


def _multiplication() -> str:
    return "\n".join("| " + " | ".join(str(i * j) for j in range(1, 13)) + " |" for i in range(1, 60))


TEXTS: dict[str, Callable[[], tuple[str, ...]]] = {
    "prose": prose,
    "short prose": lambda: tuple(text[:400] for text in prose()),
    "source": source,
    "docstrings": lambda: tuple(
        doc for _, member in inspect.getmembers(decimal.Decimal) if (doc := inspect.getdoc(member)) and len(doc) > 40
    ),
    "mathematics": lambda: tuple(_mathematics(seed) for seed in range(8)),
    "JSON": lambda: tuple(_json(seed) for seed in range(8)),
    "tables": lambda: (_multiplication(),),
    "base64": lambda: tuple(base64.b64encode(random.Random(seed).randbytes(2000)).decode() for seed in range(8)),
    "Chinese": lambda: (_CHINESE, _CHINESE * 3),
    "Russian with English": lambda: (_RUSSIAN + prose()[0][:500] + _RUSSIAN,),
    "decimal numbers": lambda: (" ".join(str(i * i) for i in range(900)),),
    "greetings": lambda: (
        "English: hello. Russian: Привет. Arabic: مرحبا. Hebrew: שלום. Chinese: 你好. Korean: 안녕하세요. "
        "Thai: สวัสดี. Hindi: नमस्ते. Greek: Γειά σου.",
    ),
    "numbers of a toy policy": lambda: ("37 11 1", "19 41 60 30 32 52 7 8 9 61 2 4"),
    "one word": lambda: ("42", "", "Yes.", "1111", "-" * 15, "10" * 20, "|---|---|---|\n| 1 | 2 | 3 |"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_not_garbled(name: str) -> None:
    """Prose, source, mathematics, JSON, tables, base64, Chinese, mixtures, and answers of one word are in order."""
    for text in TEXTS[name]():
        verdict = judge(text, tokenizer().encode(text).ids)
        assert verdict is None or verdict.reason == "", text[:200]
        assert (judge(text, None) or ("",))[0] == ""


def _soup(seed: int) -> str:
    """Tokens of a multilingual vocabulary by chance, as weights that were not loaded write them."""
    draw = random.Random(seed)
    parts = ("foo(", "การ", "你", "мет", "لل", "שה", "Carb", "입", "_usin", "{}", "的是", "ного", "نا", " iter")
    return "".join(draw.choice(parts) for _ in range(400))


BROKEN: dict[str, Callable[[int], tuple[str, list[int] | None]]] = {
    "bytes that are no characters": lambda seed: (
        random.Random(seed).randbytes(600).decode("utf-8", "replace"), None,
    ),
    "many scripts": lambda seed: (_soup(seed), None),
    "one token for ever": lambda _: ("!" * 1500, [7] * 1500),
    "one character, and soon cut": lambda _: ("!" * 100, [0] * 100),
    "one character with blanks": lambda _: ("! " * 16, None),
    "one token that is a word": lambda _: ("foo" * 20, [7] * 20),
    "one token without its text": lambda _: ("", [0] * 16),
    "a loop of words": lambda _: ("the answer is " * 300, None),
    "a loop of tokens": lambda _: ("", [3, 1, 4, 1, 5] * 100),
    "tokens by chance": lambda seed: (
        tokenizer().decode(ids := np.random.default_rng(seed).integers(256, 12_000, 600).tolist()), ids,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_no_text_is_garbled(name: str, seed: int) -> None:
    """Each way in which broken weights write is seen, with its reason."""
    text, ids = BROKEN[name](seed)
    verdict = judge(text, ids)
    assert verdict is not None
    assert verdict.reason


_TEXT = st.text(max_size=300)
_IDS = st.lists(st.integers(0, 50), max_size=400)


@given(_TEXT, st.none() | _IDS)
def test_measures_are_shares(text: str, ids: list[int] | None) -> None:
    """Every measure lies in 0 to 1 for any text, lone surrogates among it, and judging raises nothing."""
    assert 0 <= broken_share(text) <= 1
    assert 0 < compression(text) <= 1
    families, switches, letters = scripts_mixed(text)
    assert families <= letters <= len(text)
    assert switches <= max(letters - 1, 0)
    if ids is not None:
        assert 0 <= loop_share(ids) < 1
        assert fresh_share(ids) is None or 0 < (fresh_share(ids) or 0) <= 1
    judge(text, ids)


@given(st.text(st.characters(categories=["Cs", "Cn", "Co", "Cc"], exclude_characters="\n\r\t\f\v"), min_size=16))
def test_what_is_no_character_counts_as_none(text: str) -> None:
    """Of control characters, surrogates and unassigned code points alone, all is broken."""
    assert broken_share(text) == 1
    verdict = judge(text, None)
    assert verdict is not None
    assert verdict.by_text


@given(_IDS, st.integers(1, 1000))
def test_names_of_tokens_do_not_matter(ids: list[int], shift: int) -> None:
    """Another numbering of the vocabulary changes no measure."""
    renamed = [shift + 7 * token for token in ids]
    assert loop_share(renamed) == loop_share(ids)
    assert fresh_share(renamed) == fresh_share(ids)


@given(_IDS, st.integers(2, 6))
def test_repeating_makes_it_more_of_a_loop(ids: list[int], times: int) -> None:
    """What is written again and again is never less of a loop, and at most one part in `times` of it is new."""
    assert loop_share(ids * times) >= loop_share(ids) - 1e-12
    if len(ids) > 8:
        assert 1 - loop_share(ids * times) <= len(ids) / (len(ids) * times - 7) + 1e-12


@given(st.permutations(range(FRESH_WINDOW)))
def test_order_within_a_window_does_not_matter(order: list[int]) -> None:
    """Distinct tokens of a window are counted, in any order."""
    assert fresh_share(order) == 1
    assert fresh_share([number % 64 for number in order]) == 0.25


# -- the rules


def _with(texts: list[tuple[str, list[int] | None]]) -> list[dict[str, object]]:
    made = samples(len(texts))
    for sample, (text, ids) in zip(made, texts, strict=True):
        ids = tokenizer().encode(text).ids if ids is None else ids
        sample |= {"response": text, "tokens": [1, 2, *ids], "response_length": len(ids), "rollout_log_probs": None}
    return made


def _good(count: int = 8) -> list[tuple[str, list[int] | None]]:
    return [(text, None) for text in (*prose()[:count], *source()[:count])][:count]


def _bad(name: str, count: int = 8) -> list[tuple[str, list[int] | None]]:
    return [BROKEN[name](seed) for seed in range(count)]


def test_garbled_from_the_first_rollout_on(tmp_path: Path) -> None:
    """`garbled-first-rollout`: an error where the text of most responses shows it, with the sample and its words."""
    name = "garbled-first-rollout"
    findings = found(name, rollout(tmp_path / "a", _with(_bad("many scripts"))))
    assert [finding.severity for finding in findings] == ["error"]
    assert findings[0].message.startswith("8 of 8 responses are garbled")
    assert findings[0].where.item == "sample 0 response"
    assert findings[0].where.value
    assert found("garbled-first-rollout", rollout(tmp_path / "b", _with(_good()))) == []
    assert "--load" in catalogue()[name].fix


@pytest.mark.parametrize(("bad", "severity"), [(0, []), (1, ["warning"]), (3, ["warning"]), (8, ["error"])])
def test_a_few_garbled_responses_are_no_error(bad: int, severity: list[str], tmp_path: Path) -> None:
    """Of eight, one or three are a warning; none is silence."""
    made = _with([*_bad("many scripts", bad), *_good(8 - bad)])
    assert severities("garbled-first-rollout", rollout(tmp_path / "run", made)) == severity


def test_one_character_in_short_responses(tmp_path: Path) -> None:
    """`garbled-first-rollout` says what 16 responses of `!` are, and `never-eos` offers no stop tokens for them."""
    made = _with([("!" * 100, [0] * 100)] * 16)
    for sample in made:
        sample["status"] = "truncated"
    run = rollout(tmp_path / "run", made)
    (finding,) = found("garbled-first-rollout", run)
    assert finding.severity == "error"
    assert finding.message == "16 of 16 responses are garbled; of the first one, 100% of its characters are '!'"
    assert found("never-eos", run) == []


def test_one_character_among_short_answers(tmp_path: Path) -> None:
    """Answers too short to be judged count where some are one character: a line of dashes among them is no finding."""
    dashes, answers = ("-" * 40, [5] * 10), ("42", [3, 4])
    few = rollout(tmp_path / "few", _with([dashes, *[answers] * 15]))
    some = rollout(tmp_path / "some", _with([dashes] * 4 + [answers] * 12))
    assert found("garbled-first-rollout", few) == []
    (finding,) = found("garbled-first-rollout", some)
    assert finding.severity == "warning"
    assert finding.message.startswith("4 of 16 ")


def test_padding_is_not_one_token() -> None:
    """A short answer with a long tail of the same token is padded, which another rule says."""
    assert judge("42", [19, *[0] * 100]) is None


def test_short_responses_that_become_one_character(tmp_path: Path) -> None:
    """`later-divergence` sees them too."""
    for number, texts in enumerate((_good(), [("!" * 100, [0] * 100)] * 8)):
        rollout(tmp_path / "run", _with(texts), number)
    assert len(found("later-divergence", tmp_path / "run")) == 1


def test_tokens_alone_are_never_an_error(tmp_path: Path) -> None:
    """Tokens as if by chance, of which there is no text, are a warning: a toy's are so, too."""
    ids = [np.random.default_rng(seed).integers(0, 30_000, 400).tolist() for seed in range(8)]
    made = rollout(tmp_path / "run", _with([("", text) for text in ids]))
    assert severities("garbled-first-rollout", made) == ["warning"]


def test_short_responses_are_judged_together(tmp_path: Path) -> None:
    """Responses of 60 tokens are too short for the measure of distinct tokens; all of them together are not."""
    by_chance = [np.random.default_rng(seed).integers(0, 30_000, 60).tolist() for seed in range(32)]
    texts = [tokenizer().encode(text).ids[:60] for text in prose()[:32]]
    bad = found("garbled-first-rollout", rollout(tmp_path / "a", _with([("", text) for text in by_chance])))
    assert [hit.certainty for hit in bad] == ["possible"]
    assert "as if drawn by chance" in bad[0].message
    assert found("garbled-first-rollout", rollout(tmp_path / "b", _with([("", text) for text in texts]))) == []


def test_divergence_begins_where_it_begins(tmp_path: Path) -> None:
    """`later-divergence`: sound first, garbled from rollout 2 on: said once, of rollout 2; the first is in order."""
    for number, texts in enumerate((_good(), _good(), _bad("a loop of words"), _bad("a loop of words"))):
        rollout(tmp_path / "run", _with(texts), number)
    findings = found("later-divergence", tmp_path / "run")
    assert [Path(finding.where.path).name for finding in findings] == ["2.pt"]
    assert "8 of 8 responses of rollout 2" in findings[0].message
    assert found("garbled-first-rollout", tmp_path / "run") == []


def test_a_run_that_began_garbled_has_not_diverged(tmp_path: Path) -> None:
    """The two are told apart: what was garbled from the start is said of the first rollout alone."""
    for number, texts in enumerate((_bad("many scripts"), _good(), _bad("many scripts"))):
        rollout(tmp_path / "run", _with(texts), number)
    assert found("later-divergence", tmp_path / "run") == []
    assert len(found("garbled-first-rollout", tmp_path / "run")) == 1


def test_a_later_file_alone_says_that_it_does_not_know(tmp_path: Path) -> None:
    """A dump of rollout 57 without the others may have diverged before: a warning that says so."""
    folder = rollout(tmp_path / "run", _with(_bad("many scripts")), 57)
    findings = found("garbled-first-rollout", folder / "rollout_data" / "57.pt")
    assert [finding.severity for finding in findings] == ["warning"]
    assert "before 57" in findings[0].message


def _line(text: str, form: str) -> str:
    if form == "slime":
        return f"Finish rollout: {[text]}, label: 4, reward: 0.0"
    shown = text.replace("\n", "\\n")[:512]
    return f"First rollout sample: text_preview={shown}...<truncated chars=9>, label=4, reward_summary=0"


@pytest.mark.parametrize("form", ["slime", "Miles"])
def test_samples_that_logs_show(form: str, tmp_path: Path) -> None:
    """`garbled-log`: the line of a garbled sample is named, in both trainers' forms; a sound one is silence."""
    bad = log(tmp_path / "bad.log", more=[_line(prose()[0], form), _line(_soup(1), form)])
    good = log(tmp_path / "good.log", more=[_line(prose()[0], form), _line(source()[0], form), "Finish rollout: ["])
    findings = found("garbled-log", bad)
    assert [finding.where.line for finding in findings] == [2]
    assert "number 2" in findings[0].message
    assert found("garbled-log", good) == []


@pytest.mark.parametrize("form", ["slime", "Miles"])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("!" * 200, "100% of its characters are '!'"),
        (_RUSSIAN[:190] + "!" * 200, "100% of its last 128 characters are '!'"),
        (_RUSSIAN[:190] + "-" * 80, ""),
        ("1111", ""),
    ],
)
def test_one_character_in_a_log(form: str, text: str, reason: str, tmp_path: Path) -> None:
    """`garbled-log`: a short line of one character, the prompt before it or not."""
    findings = found("garbled-log", log(tmp_path / "a.log", more=[_line(text, form)]))
    assert len(findings) == bool(reason)
    assert reason in "".join(finding.message for finding in findings)


# -- ends of responses


def _cut(ids: list[int] | None = None, **fields: object) -> list[dict[str, object]]:
    tokens = [9, 8, *(ids or [10, 11, 12, 13])]
    return samples(status="truncated", tokens=tokens, response_length=len(tokens) - 2, rollout_log_probs=None, **fields)


def test_no_response_ends(tmp_path: Path) -> None:
    """`never-eos`: all responses cut, and none of them ends; one that ended makes it `truncated-ratio`."""
    findings = found(
        "never-eos", rollout(tmp_path / "a", _cut()), launch(tmp_path / "a.sh", "--rollout-max-response-len 4")
    )
    assert [finding.severity for finding in findings] == ["warning"]
    assert "8 of 8" in findings[0].message
    assert "--rollout-max-response-len 4" in findings[0].where.value
    made = _cut()
    made[3]["status"] = "completed"
    assert found("never-eos", rollout(tmp_path / "b", made)) == []
    assert len(found("truncated-ratio", tmp_path / "b")) == 1
    assert found("truncated-ratio", tmp_path / "a") == []


def test_going_on_after_the_end_names_the_ids(tmp_path: Path) -> None:
    """With a tokenizer, an end token in the middle of responses shows that stop tokens are wrong, and which to set."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [77, 78]}')
    findings = found("never-eos", rollout(tmp_path / "run", _cut([10, 77, 12, 13])), folder)
    assert "8 of them went on after an end token" in findings[0].message
    assert "--rollout-stop-token-ids 77 78" in findings[0].fix
    turns = _cut([10, 77, 12, 13], loss_mask=[1, 1, 0, 1])
    assert "went on" not in found("never-eos", rollout(tmp_path / "turns", turns), folder)[0].message
    assert found("never-eos", rollout(tmp_path / "ended", _cut([10, 11, 12, 77])), folder) == []
