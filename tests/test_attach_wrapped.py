"""Dicts that a program prints over several lines tell what they tell in one."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_attach_told import HEAD, traces

from repro_golden.compare.traces import compare, first_difference

PRINTS = {
    "json": "print(json.dumps(numbers, indent=2 if V else None))",
    "pprint": "import pprint; pprint.pprint(numbers, width=30 if V else 1000)",
    "rich": "from rich.console import Console; Console(width=40 if V else 1000).print(numbers)",
    "array": "print(numbers | {'p': torch.zeros(2, 2)} if V else numbers)",
    "label": "print(f'step {i}:', pprint.pformat(numbers, width=1 if V else 1000))",
    "logger": "print('INFO train.py] metrics:', json.dumps(numbers, indent=2 if V else None))",
}
NUMBERS = "{'loss': 2.0**i, 'acc': i / 7, 'lr': 0.5, 'eval': {'acc': i * FACTOR}, 'ok': i == 2, 'note': 'it is so'}"
TELL = """\
import pprint
def show(i):
    numbers = NUMBERS
    PRINT
"""
BEHIND = "for i in range(3):\n    backward(); optimizer.step(); show(i)\n"
BEFORE = "for i in range(3):\n    show(i); backward(); optimizer.step()\n"
INSIDE = "for i in range(3):\n    show(i); backward(); show(i + 0.5); backward(); optimizer.step()\n"


def program(loop: str, how: str = "json", factor: str = "1") -> str:
    """One that shows its numbers in several lines if it is given an argument."""
    return HEAD + TELL.replace("NUMBERS", NUMBERS.replace("FACTOR", factor)).replace("PRINT", PRINTS[how]) + loop


@pytest.mark.parametrize(
    ("how", "loop"),
    [*((how, BEHIND) for how in PRINTS), ("json", BEFORE), ("pprint", INSIDE)],
    ids=[*PRINTS, "before-its-pass", "inside-of-a-step"],
)
def test_a_dict_over_several_lines_tells_what_it_tells_in_one(tmp_path: Path, how: str, loop: str) -> None:
    """Each number in the step in which it stands in one line; inner ones, bools and a logger's are shown."""
    first, other = traces(tmp_path, program(loop, how))
    assert "loss" in first.steps[0].metrics
    for step, wrapped in zip(first.steps, other.steps, strict=True):
        assert step.metrics == wrapped.metrics and {*step.shown} == {*wrapped.shown}
    assert compare(first, other).equal


def test_what_differs_in_several_lines_is_named(tmp_path: Path) -> None:
    """By bits, as in one line."""
    tell = "print(json.dumps({'loss': 2.0**i + V * (i == 2), 'acc': 1}, indent=2))"
    loop = f"for i in range(3):\n    backward(); optimizer.step(); {tell}\n"
    divergence = first_difference(*traces(tmp_path, HEAD + loop))
    assert divergence is not None and (divergence.step, divergence.name, divergence.kind) == (2, "loss", "value")


def test_patterns_go_first_in_several_lines_too(tmp_path: Path) -> None:
    """What one reads in a line is the number, and the dict tells the others."""
    first, other = traces(tmp_path, program(BEHIND), options=("--metric", r"'?\"?lr'?\"?: (?P<lr>0)"))
    assert [step.metrics["lr#logged"] for step in other.steps] == [0.0] * 3
    assert [step.metrics for step in first.steps] == [step.metrics for step in other.steps]


@pytest.mark.parametrize("steps", [(), ("--steps", "3")], ids=["to-its-end", "stopped"])
@pytest.mark.parametrize(
    "loop",
    [
        "for i in range(4):\n    wide(r=i + 0.25, n=8); backward(); optimizer.step(); tell(loss=i, r=i + 0.5)\n",
        "for i in range(4):\n    backward(); wide(r=i + 0.25); optimizer.step(); tell(loss=i, r=i + 0.5)\n",
        "wide(loss=9, r=9)\nfor i in range(4): backward(); optimizer.step(); tell(loss=i, r=i + 0.5)\n",
    ],
    ids=["before-its-pass", "inside-of-a-step", "before-all-steps"],
)
def test_it_moves_no_number_of_another_line(tmp_path: Path, loop: str, steps: tuple[str, ...]) -> None:
    """What a golden run holds that lacks such dicts stands in the steps in which it stood."""
    wide = "def wide(**numbers):\n    if V: print(json.dumps(numbers, indent=2))\n"
    first, other = traces(tmp_path, HEAD + wide + loop, options=steps)
    compared = compare(first, other)
    assert compared.equal and "r once more" in str(compared.looked), (compared.divergence, compared.looked)


@pytest.mark.parametrize("last", ["1", "i"])
def test_settings_over_several_lines_are_no_results(tmp_path: Path, last: str) -> None:
    """A program that prints them, with names of its numbers among them, tells these as it did without."""
    settings = "if V: print(json.dumps({'workers': 4, 'acc': 9, 'seed': 7}, indent=2))\n"
    loop = f"for i in range(3):\n    backward(); optimizer.step(); tell(acc={last}, step=i)\n"
    first, other = traces(tmp_path, HEAD + settings + loop)
    assert [step.metrics for step in first.steps] == [step.metrics for step in other.steps]
    assert compare(first, other).equal
