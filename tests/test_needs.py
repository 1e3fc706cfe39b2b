"""What moved packages need and the environment does not have, against what is simply left unmet."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from repro_golden.subjects.environments.needs import Packages, lacking, unmet

NAMES, NUMBERS = st.sampled_from("abcd"), st.integers(1, 3)
NEEDS = st.tuples(NAMES, st.sampled_from(["==", "!=", ">=", "<"]), NUMBERS, st.sampled_from(["", "x", "y", "no"]))
"""A name, a bound, and when it holds: always, for an extra, or never."""
INSTALLED = st.dictionaries(
    NAMES, st.tuples(NUMBERS, st.lists(st.tuples(NEEDS, st.sampled_from(["", "[x]", "[y]"])), max_size=3)), max_size=4
)
WHEN = {"": "", "x": "; extra == 'x'", "y": "; extra == 'y'", "no": "; python_version < '3'"}
Installed = dict[str, tuple[int, list[tuple[tuple[str, str, int, str], str]]]]


def listed(packages: Installed) -> Packages:
    """As an interpreter says it."""
    return {
        name: [name, str(has), False, [f"{n}{more}{op}{v}{WHEN[when]}" for (n, op, v, when), more in needs]]
        for name, (has, needs) in packages.items()
    }


def met(need: tuple[str, str, int, str], packages: Installed) -> bool:
    """Whether a requirement is met."""
    has, bound = packages.get(need[0], (0, []))[0], need[2]
    return has > 0 and {"==": has == bound, "!=": has != bound, ">=": has >= bound, "<": has < bound}[need[1]]


def test_a_version_that_is_none_is_taken_as_it_is() -> None:
    """What cannot be compared lacks nothing, since no installer could tell what to put in its place."""
    after: Packages = {"a": ["a", "1", False, ["b>1"]], "b": ["b", "of today", False, []]}
    assert unmet({}, after, ["a"], {"extra": ""}) == []
    assert unmet({}, {**after, "b": ["b", "1", False, []]}, ["a"], {"extra": ""}) == [
        "a 1 needs b>1, the environment has 1"
    ]


@given(INSTALLED, INSTALLED.filter(bool), st.sets(NAMES))
def test_what_is_lacking_is_what_is_unmet(before: Installed, packages: Installed, fixed: set[str]) -> None:
    """Something is asked for exactly where a moved package or an extra that it asks for is left without; by its name.

    Afterwards those lines stand first, then those of others that were content before. The base alone lacks nothing.
    """
    marks, after = {"extra": "", "python_version": "3.11"}, before | packages
    asked, needs = {(name, "") for name in packages}, set[tuple[str, tuple[str, str, int, str]]]()
    for _ in range(9):  # there are eight pairs of a name and an extra, and four of a name alone
        needed = [(k, n, more) for k, e in asked for n, more in after[k][1] if n[3] == e]
        needs |= {(k, n) for k, n, _ in needed}
        asked |= {(n[0], more.strip("[]")) for _, n, more in needed if more and n[0] in after}
    left = {n for _, n in needs if not met(n, after)}
    wanted, wishes = lacking(packages, fixed, listed(before), listed(after), marks)
    assert {text[0] for text in wanted} == {n[0] for n in left} - fixed
    assert set(wanted) == {f"{n}{op}{v}" for _, (n, op, v, _) in needs if n in {text[0] for text in wanted}}
    assert all(text[0] in {need[0] for need in wanted} for text in wishes)
    broken = [
        (k, n) for k in before.keys() - packages.keys() for n, _ in before[k][1]
        if n[3] == "" and n[0] in packages and met(n, before) and not met(n, after)
    ]  # fmt: skip
    lines = unmet(listed(before), listed(after), packages, marks)
    assert {tuple(line.split()[i] for i in (0, 3)) for line in lines} == {
        (k, f"{n}{op}{v},") for k, (n, op, v, _) in [*((k, n) for k, n in needs if n in left), *broken]
    }
    assert unmet(listed(before), listed(before), [], marks) == []
