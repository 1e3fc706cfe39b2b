from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_kit import check_exact, line, problems

from repro_bisect.search.first_bad import Dag, Search


@given(problems(), st.integers(1, 3), st.data())
def test_costs_do_not_change_the_answer(
    problem: tuple[Dag[str], str, dict[str, str]], k: int, data: st.DataObject
) -> None:
    """Whatever probes cost, free or dear, the search ends with the exact set; equal costs change no probe."""
    dag, _, _ = problem
    cost = st.one_of(st.sampled_from([0, 1e-9, 0.5, 1, 1e6]), st.floats(0, 100))
    check_exact(problem, k, data.draw(st.dictionaries(st.sampled_from(dag.order), cost)))
    equal = dict.fromkeys(dag, data.draw(cost))
    assert Search(dag, "bad").next(k, costs=equal) == Search(dag, "bad").next(k)


def test_a_cheap_probe_is_worth_its_balance() -> None:
    """At half the cost a probe is chosen down to half the balance, and of free ones the best."""
    search = Search(Dag(line(100)), 99)
    assert search.next() == [49] and search.next(costs={39: 0.5}) == search.next(costs={39: 0.5, 9: 0.25}) == [39]
    assert search.next(costs={9: 0.5}) == [49] and search.next(costs={49: 3}) == [48]
    assert search.next(costs={9: 0, 19: 0, 98: 0, 500: 0}) == [19]
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a cost must be a finite number"):
            search.next(costs={3: wrong})


def expected_cost(search: Search[int], real: Mapping[int, float], told: Mapping[int, float] | None) -> float:
    """Mean cost over every culprit, each as likely as the others."""
    total, stack = 0.0, [search]
    while stack:
        search = stack.pop()
        if search.answer is None:
            (probe,) = search.next(costs=told)
            total += real.get(probe, 1) * len(search.suspects)
            stack += [search.with_verdict(probe, v) for v in ("GOOD", "BAD")]
    return total / len(search.dag)


@pytest.mark.parametrize("kind", ["known", "built", "spread"])
def test_costs_save_cost(kind: str) -> None:
    """On 30 random lines each, heeding the costs is cheaper on average, and on none of them dearer by a tenth."""
    saved = []
    for seed in range(30):
        rng = random.Random(seed)
        n = rng.randrange(20, 80)
        draw = {
            "known": lambda rng=rng: 0.0 if rng.random() < 0.1 else 1.0,
            "built": lambda rng=rng: 5.0 if rng.random() < 0.3 else 1.0,
            "spread": lambda rng=rng: rng.lognormvariate(0, 1),
        }[kind]
        costs, search = {i: draw() for i in range(n)}, Search(Dag(line(n)), n - 1)
        heeded, ignored = (expected_cost(search, costs, told) for told in (costs, None))
        assert heeded <= 1.1 * ignored
        saved.append(1 - heeded / ignored)
    assert sum(saved) / len(saved) > 0.05
