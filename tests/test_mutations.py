import ast
import collections
import random

import pytest
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st
from mutations_kit import (
    CONFIG,
    DISTANT,
    KINDS,
    PACKAGE,
    Mutation,
    catalogue,
    effective,
    moves,
    mutations,
    rollouts,
    verdicts,
)

from repro_core.config import TrainConfig

MANY = 1 << 16  # more than there are


def rebuilt(mutation: Mutation) -> str:
    """`after`, made of `before` and nothing but the lines that the ranges name."""
    old, new = mutation.before.splitlines(keepends=True), mutation.after.splitlines(keepends=True)
    out: list[str] = []
    at = 1
    for removed, added in zip(mutation.removed, mutation.added, strict=True):
        out += old[at - 1 : removed.start - 1]
        out += new[added.start - 1 : added.stop - 1]
        at = removed.stop
    return "".join(out + old[at - 1 :])


def test_the_catalogue_is_wide():
    """At least 25 operators find at least 80 distinct changes of today's files; each of 500 compiles."""
    every = catalogue()
    assert len({m.kind for m in every} - set(DISTANT)) >= 25 and len(every) >= 80
    assert {m.kind for m in every} == set(KINDS), "an operator finds nothing any more"
    assert len({(m.path, m.after) for m in every}) == len(every)
    for m in every:
        assert m.before == (PACKAGE / m.path).read_text()
    for m in random.Random(0).sample(every, 500):
        ast.parse(m.after)


def test_a_seed_is_a_draw():
    """The same seed gives the same changes in the same order, other seeds others; a long draw begins with a short."""
    drawn = mutations(1, 60)
    assert drawn == mutations(1, 60) and len(set(drawn)) == 60
    assert mutations(1, 20) == drawn[:20]
    assert len({tuple(mutations(seed, 20)) for seed in range(20)}) == 20


def test_a_draw_is_spread_over_kinds():
    """As many changes as there are kinds contain each kind once; distant ones come only when asked for."""
    near = [kind for kind in KINDS if kind not in DISTANT]
    assert sorted(m.kind for m in mutations(3, len(near))) == sorted(near)
    assert not any(m.distant for m in mutations(3, MANY))
    asked = mutations(3, 12, kinds=["constant", "epsilon"])
    assert collections.Counter((m.kind, m.distant) for m in asked) == {("constant", True): 6, ("epsilon", False): 6}


@given(seed=st.integers(0, 2**32), count=st.integers(1, 30))
@at_most(20)
def test_ranges_are_the_change(seed: int, count: int):
    """`before` with its removed lines replaced by the added ones is `after`; all other lines are byte-equal."""
    for m in mutations(seed, count, kinds=KINDS):
        assert rebuilt(m) == m.after != m.before
        changed = [line[1:] for line in m.diff.splitlines()[2:] if line[0] in "+-"]
        old, new = m.before.splitlines(), m.after.splitlines()
        named = [old[i - 1] for r in m.removed for i in r] + [new[i - 1] for r in m.added for i in r]
        assert sorted(changed) == sorted(named)


@given(seed=st.integers(0, 2**32))
@at_most(20)
def test_a_change_stays_in_one_statement(seed: int):
    """The changed lines lie in one simple statement of the function that the change names, before and after."""
    for m in mutations(seed, 10):
        for text, ranges in ((m.before, m.removed), (m.after, m.added)):
            inside = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.stmt) and not hasattr(n, "body")]
            assert any(all(n.lineno <= r.start and r.stop - 1 <= (n.end_lineno or 0) for r in ranges) for n in inside)


def test_the_run_has_something_to_do():
    """The configuration is accepted; masks, several lengths, equal and unequal rewards all occur."""
    config = TrainConfig.from_mapping(CONFIG)
    for rollout in rollouts():
        t = rollout.tensors
        assert len(t["rewards"]) == config.global_batch_size * config.num_steps_per_rollout
        assert int(t["total_lengths"].sum()) == len(t["tokens"])
        assert int(t["response_lengths"].sum()) == len(t["loss_mask"]) == len(t["rollout_log_probs"])
        assert len(set(t["total_lengths"].tolist())) > 2 and set(t["loss_mask"].tolist()) == {0, 1}
        parts = t["loss_mask"].split(t["response_lengths"].tolist())
        assert [bool(part.any()) for part in parts].count(False) < len(parts), "nothing would be trained"
        per_group = t["rewards"].view(-1, config.n_samples_per_prompt).tolist()
        assert {len(set(group)) > 1 for group in per_group} == {False, True}


@pytest.mark.whole
def test_effective_changes_move():
    """Those that `effective` draws move a number, keep the order of the draw, and are the same the next time."""
    drawn = effective(7, 8)
    assert verdicts(drawn) == ["moved"] * 8 and moves(drawn[0])
    assert drawn == [m for m in mutations(7, MANY) if m in set(drawn)] == effective(7, 8)


def test_what_moves_nothing_is_told():
    """A change of no number, a trainer that raises and one that trains on nothing but NaN have own verdicts."""
    mutation = mutations(0, 1)[0]
    source = (PACKAGE / "rl/kl.py").read_text()
    line = "    keep = loss_mask != 0\n"

    def changed(text: str) -> Mutation:
        return Mutation(mutation.kind, "rl/kl.py", "kl_per_token", source, source.replace(line, line + text, 1))

    texts = ["    # a remark\n", "    raise KeyError(3)\n", "    log_probs = log_probs * float('nan')\n"]
    assert verdicts([changed(text) for text in texts]) == ["still", "failed: KeyError: 3", "nan"]


@pytest.mark.campaign
def test_most_of_a_long_draw_moves():
    """Of 120 drawn changes more than half move a number; no verdict is forgotten or doubled."""
    drawn = mutations(11, 120)
    counted = collections.Counter(verdict.partition(":")[0] for verdict in verdicts(drawn))
    assert counted["moved"] > 60 and sum(counted.values()) == 120
