from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_kit import SHAPES, dags, history, plain_ancestors

from repro_bisect.search.first_bad import Dag, Search


@pytest.mark.parametrize("seed", range(12))
def test_the_rule_by_its_definition(seed: int) -> None:
    """On a few hundred commits each probe is the oldest with the best weighted balance, counted set by set."""
    rng = random.Random(seed)
    dag = history(rng)
    search, culprit = Search(dag, dag.order[-1]), rng.choice(dag.order)
    reach = [{i for i in range(len(dag)) if mask >> i & 1} for mask in dag.ancestors]
    while search.answer is None:
        left = {dag.index[c] for c in search.suspects}
        cuts = [min(len(r & left), len(left - r)) * (3 if i in left else 2) for i, r in enumerate(reach)]
        assert search.next() == [dag.order[cuts.index(max(cuts))]]
        probe = search.next()[0]
        search = search.with_verdict(probe, "BAD" if dag.index[culprit] in reach[dag.index[probe]] else "GOOD")


@given(dags(40), st.data())
def test_sets_are_what_they_say(dag: Dag[str], data: st.DataObject) -> None:
    """Ancestors, descendants and counts, kept as gaps, agree with the definition."""
    plain = [{dag.index[p] for p in plain_ancestors(dag.parents, c)} for c in dag]
    chosen = data.draw(st.sets(st.integers(0, len(dag) - 1), min_size=1))
    pool = sorted(data.draw(st.sets(st.integers(0, len(dag) - 1))))
    assert dag.count(sum(1 << i for i in chosen), pool) == [len(plain[i] & chosen) for i in pool]
    for i in range(len(dag)):
        assert dag.ancestors[i] == sum(1 << j for j in plain[i]) and dag.ancestors[i - len(dag)] == dag.ancestors[i]
        assert dag.descendants(i) == sum(1 << j for j in range(len(dag)) if i in plain[j])


@pytest.mark.parametrize("shape", ["line", "pull requests"])
def test_memory_grows_with_the_length(shape: str) -> None:
    """Ancestors take under 32 bytes a commit, at any length, where branches are merged within 50 merges."""
    sizes = [sum(m.bit_length() for _, m in Dag(SHAPES[shape](n)).ancestors.gaps) / 8 for n in (5_000, 20_000)]
    assert sizes[1] <= 32 * 20_000 and sizes[1] <= 5 * sizes[0]


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_next_probe_within_50_ms(shape: str) -> None:
    """At 10,000 commits a verdict is taken and the next probe chosen in under 50 ms, with and without skips nearby."""
    dag = Dag(SHAPES[shape](10_000))
    search = Search(dag, dag.order[-1])
    for verdict in ("SKIP", "SKIP", "GOOD"):
        probe, times = search.next()[0], []
        for _ in range(5):
            start = time.process_time()
            after = search.with_verdict(probe, verdict, "build")
            assert after.answer is None and after.suspects and after.next()
            times.append(time.process_time() - start)
        assert min(times) < 0.05
        search = after
