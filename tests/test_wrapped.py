"""A dict that is printed over several lines tells what the same dict in one line tells."""

from __future__ import annotations

import io
import json
import pprint
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from test_lines import NAMES, NUMBERS, OTHERS, bits

from repro_golden.base.printed.lines import metrics_of
from repro_golden.base.printed.wrapped import Whole, Wrapped

VALUES = st.dictionaries(NAMES, NUMBERS | OTHERS, min_size=1)
JSON = st.recursive(
    st.none() | st.booleans() | st.text() | NUMBERS,
    lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner),
    max_leaves=5,
)
HEADS = ("", "step 3: ", "(Actor pid=12) ", "[2026-11-20 15:38:50] train.py:135 - ", "INFO:root:")


def wholes(text: str, prefix: str = "") -> list[Whole]:
    """What the lines of a text end, each behind a prefix."""
    wrapped = Wrapped()
    return [whole for line in text.split("\n") if (whole := wrapped.add(prefix + line))]


def told(text: str, prefix: str = "") -> dict[str, bytes]:
    """The numbers of the only dict in a text, in whatever lines it is."""
    if "\n" not in text:
        return bits(metrics_of(prefix + text))
    (whole,) = wholes(text, prefix)
    assert len(whole.lines) == len(text.split("\n"))
    return bits(metrics_of(whole.text))


@given(st.dictionaries(NAMES, JSON, min_size=1), st.sampled_from([None, 0, 1, 4, "\t"]), st.sampled_from(HEADS[:4]))
def test_json_with_an_indent(values: dict[str, Any], indent: int | str | None, head: str) -> None:
    """Of any values, behind a label or a logging prefix in the first line, or Ray's in each."""
    lines = json.dumps(values, indent=indent)
    metrics = metrics_of(head + json.dumps(values))
    if head.startswith("("):
        assert told(lines, head) == bits(metrics)
    else:
        assert told(head + lines) == bits(metrics)


@given(VALUES, st.sampled_from([1, 20, 80]))
@example({"a": "a'b " * 40, "loss": 0.5}, 80)
@example({"a": b"it's" * 40, "loss": 0.5}, 80)
def test_pprint(values: dict[str, Any], width: int) -> None:
    """Of any values, also of long strings, which it breaks, and of bytes."""
    text = pprint.pformat(values, width=width, sort_dicts=False)
    assert told(text) == bits(metrics_of(repr(values)))


def of_rich(values: object, width: int = 80) -> str:
    """What `rich.print` writes where no terminal is."""
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(values)
    return stream.getvalue().removesuffix("\n")


@given(
    st.dictionaries(st.text("abc/_", min_size=1, max_size=12), st.floats() | st.text("ab {}[]()'\",:", max_size=300)),
    st.sampled_from([40, 80]),
)
@example({"loss": 0.5, "prompt": "some words that are too many for one line, and it's {not: [their end " * 3}, 80)
@example({"k" * 120: 3.0, "loss": 0.5}, 80)
def test_rich(values: dict[str, Any], width: int) -> None:
    """Which breaks texts that are longer than its line, between words and inside of them."""
    assert told(of_rich(values, width)) == bits(metrics_of(repr(values)))


def test_arrays_in_a_dict() -> None:
    """What they show in several lines, with blank ones between, parts no dict that is printed as it is."""
    values = {"loss": 0.5, "p": torch.zeros(2, 3, 4), "q": np.arange(40.0), "big": torch.ones(2000, 2000), "acc": 1}
    assert "\n\n" in str(values) and told(str(values)) == bits({"loss": 0.5, "acc": 1.0})


def test_lists_of_dicts_tell_nothing() -> None:
    """As in one line: the last one is none of its own."""
    values = [{"loss": 0.5, "acc": 1}, {"loss": 0.25, "acc": 2}]
    for text in (
        json.dumps(values, indent=2),
        "history: " + json.dumps(values, indent=2),
        pprint.pformat(values, width=9),
    ):
        assert [metrics_of(whole.text) for whole in wholes(text)] == [{}]


DICT = json.dumps({"loss": 0.5, "acc": 1}, indent=2)


@pytest.mark.parametrize(
    "before",
    [
        "{", "{'a': 1,", '{\n  "a": 2,', "weights {", "it {is user's", 'a {"b', "S(\n  (0): Tanh()\n)", "}", "{)",
        "{'a': 1,\nan open dict\nand other text", "{'a': [1,\nother text", "{'a': (1,]", "{" + "x" * 70_000,
        "{" + ",\n" * 70_000, "{'" + "\nx" * 70_000,
        "step 0 evaluates [", "it's a list (\n", "evaluates [\n  it,",
    ],
)  # fmt: skip
def test_other_text_breaks_off(before: str) -> None:
    """What is open and never ends takes no dict with it."""
    for prefix in ("", "(Actor pid=12) ", "\x1b[36m(Actor pid=12)\x1b[0m "):
        read = [metrics_of(whole.text) for whole in wholes(f"{before}\n{DICT}", prefix)]
        assert [numbers for numbers in read if numbers] == [{"loss": 0.5, "acc": 1.0}]


def test_lines_of_two_of_rays_workers() -> None:
    """Lines of each stand for themselves."""
    other = DICT.replace("0.5", "0.25")
    pairs = zip(DICT.split("\n"), other.split("\n"), strict=True)
    text = "\n".join(f"(A pid=1) {a}\n(A pid=2, ip=10.0.0.1) {b}" for a, b in pairs)
    assert [metrics_of(whole.text)["loss"] for whole in wholes(text)] == [0.5, 0.25]


@given(st.lists(st.text("{}[]()'\",:\\ab1\n \x1b[m", max_size=40), max_size=20))
def test_no_line_is_an_error(lines: list[str]) -> None:
    """Of any lines, and nothing longer than a line that is read is held."""
    wrapped = Wrapped()
    for line in lines:
        whole = wrapped.add(line)
        assert whole is None or all(type(value) is float for value in metrics_of(whole.text).values())
        assert all(held.length <= 65_536 and held.closers for held in wrapped._open.values())
