"""Checks of rollout dumps: every rule finds what it is for in a dump from a file, and nothing in one in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st
from rollout_dump_kit import drawn_dumps, plain_dump, tensor

from repro_golden.base.systems import SYSTEMS, System
from repro_golden.dumps.rollout.checks import RULES, Finding, check_dump
from repro_golden.dumps.rollout.files import RolloutDump, read_rollout_dump, write_rollout_dump

torch.set_num_threads(1)

NAN = float("nan")
Samples = list[dict[str, Any]]
Change = Callable[[Samples], Any]


def routed(samples: Samples) -> None:
    """Experts that are in order: 6 rows, 2 layers, top 2, none zero."""
    for sample in samples:
        sample["rollout_routed_experts"] = np.arange(1, 25, dtype=np.int32).reshape(6, 2, 2)


def experts(number: int, change: Callable[[np.ndarray[Any, Any]], Any]) -> Change:
    """Experts in order, but for a change in one sample."""

    def made(samples: Samples) -> None:
        routed(samples)
        change(samples[number]["rollout_routed_experts"])

    return made


def put(number: int, **fields: Any) -> Change:
    """Other fields in one sample."""
    return lambda samples: samples[number].update(fields)


def every(**fields: Any) -> Change:
    """Other fields in all samples."""
    return lambda samples: [sample.update(fields) for sample in samples]


def long_response(samples: Samples, zeros: int, masked: bool) -> None:
    """A response with a run of tokens whose log-probs are exactly 0, as tools' are."""
    mask = [1, 1] + [int(not masked)] * zeros + [1] * (14 - zeros)
    log_probs = [-0.5, -0.5] + [0.0] * zeros + [-0.25] * (14 - zeros)
    samples[2].update(tokens=[5] * 20, response_length=16, loss_mask=mask, rollout_log_probs=log_probs)


TOP_P = {"rollout_top_p_token_ids": tensor([1, 2, 3, 4, 5], "int32"), "rollout_top_p_token_offsets": [0, 1, 3, 3, 5]}

CASES: list[tuple[str, Change, Change | None, int | None]] = [
    # rule, what breaks it, what is near and in order, the sample that it must name
    ("no-samples", lambda samples: samples.clear(), None, None),
    ("response-length", put(1, response_length=8), put(1, response_length=0, loss_mask=[], rollout_log_probs=[]), 1),
    ("response-length", put(1, response_length=-1), None, 1),
    ("column-length", put(2, loss_mask=[1, 1, 1]), put(2, loss_mask=None), 2),
    ("column-length", put(2, rollout_log_probs=[-1.0] * 5), put(2, rollout_log_probs=[-1.0] * 4), 2),
    ("column-length", put(3, teacher_log_probs=tensor([0.0] * 3)), every(teacher_log_probs=tensor([-1.0] * 4)), 3),
    ("column-length", put(0, **TOP_P | {"rollout_top_p_token_offsets": [0, 1, 5]}), put(0, **TOP_P), 0),
    ("tokens", put(0, tokens=[5, -1, 7, 10, 11, 12, 2]), put(0, tokens=tensor([5, 0, 7, 10, 11, 12, 2], "int64")), 0),
    ("tokens", put(0, tokens=[5, 6, 7, 10, 11, 12, 2.0]), None, 0),
    ("mask-values", put(1, loss_mask=[1, 2, 1, 1]), put(1, loss_mask=tensor([1, 0, 1, 1], "int32")), 1),
    ("mask-values", put(1, loss_mask=[1, True, 1, 1]), None, 1),
    ("top-p-offsets", put(0, **TOP_P | {"rollout_top_p_token_offsets": [0, 3, 1, 3, 5]}), put(0, **TOP_P), 0),
    ("top-p-offsets", put(0, **TOP_P | {"rollout_top_p_token_offsets": [0, 1, 2, 3, 4]}), None, 0),
    ("top-p-offsets", put(0, **TOP_P | {"rollout_top_p_token_offsets": [1, 1, 2, 3, 5]}), None, 0),
    ("top-p-offsets", put(0, rollout_top_p_token_ids=[1]), None, 0),
    ("log-probs-finite", put(3, rollout_log_probs=[-1.0, NAN, -1.0, -1.0]),
     put(3, rollout_log_probs=[-1, -0.5, -9.0, -0.0]), 3),
    ("log-probs-finite", put(3, rollout_log_probs=[-1.0, float("-inf"), -1.0, -1.0]), None, 3),
    ("log-probs-finite", put(3, rollout_log_probs=[-1.0, None, -1.0, -1.0]), None, 3),
    ("log-probs-finite", put(3, teacher_log_probs=tensor([-1.0, NAN, -1.0, -1.0])), None, 3),
    # masked tokens count as well: 0 * NaN is NaN
    ("log-probs-finite", put(3, loss_mask=[1, 0, 1, 1], rollout_log_probs=[-1.0, NAN, -1.0, -1.0]), None, 3),
    ("log-probs-positive", put(0, rollout_log_probs=[-1.0, -1.0, 0.5, -1.0]),
     put(0, rollout_log_probs=[-1.0, 1e-8, 0.0, -1.0]), 0),
    ("column-in-some", put(1, rollout_log_probs=None), every(rollout_log_probs=None), 1),
    ("column-in-some", put(1, teacher_log_probs=[-1.0] * 4), every(teacher_log_probs=[-1.0] * 4), 0),
    ("log-probs-missing", every(rollout_log_probs=None), put(1, rollout_log_probs=None), None),
    ("mask-all-zero", put(1, loss_mask=[0, 0, 0, 0]), put(1, loss_mask=[0, 0, 0, 0], remove_sample=True), 1),
    ("tool-tokens", lambda s: long_response(s, 8, masked=False), lambda s: long_response(s, 8, masked=True), 2),
    ("tool-tokens", lambda s: long_response(s, 14, masked=False), lambda s: long_response(s, 7, masked=False), 2),
    ("reward-missing", put(2, reward=None), put(2, reward=0), 2),
    ("reward-missing", put(2, reward="0.5"), put(2, reward={"acc": 0.5, "label": "right"}), 2),
    ("reward-missing", put(2, reward={}), None, 2),
    ("reward-finite", put(2, reward=NAN), put(2, reward=-1e30), 2),
    ("reward-finite", put(2, reward={"acc": 1.0, "style": float("inf")}), put(2, reward={"acc": 1.0}), 2),
    ("reward-equal", every(reward=1.0), put(0, reward=0.5), None),
    ("reward-equal", every(reward={"acc": 0.0}), None, None),
    ("duplicated-index", put(3, group_index=1, index=14), put(3, group_index=1, index=15), 3),
    ("duplicated-index", lambda s: (put(0, index=None)(s), put(3, group_index=1, index=14)(s)), None, 3),
    # siblings of one execution share everything but their tokens
    ("duplicated-index", every(group_index=0, index=5, rollout_id=5, tokens=[1] * 7),
     lambda s: [x.update(group_index=0, index=5, rollout_id=5, tokens=[k] * 7) for k, x in enumerate(s)], 1),
    ("group-sizes", put(3, group_index=0), every(group_index=None), None),
    ("scattered-group", lambda s: [x.update(group_index=k % 2) for k, x in enumerate(s)], None, 2),
    ("versions-in-sample", put(1, weight_versions=["7", "8"]), put(1, weight_versions=["7", "7"]), 1),
    ("versions-in-batch", put(1, weight_versions=["8"]), put(1, weight_versions=[]), None),
    ("unfinished", put(1, status="aborted"), put(1, status="truncated"), 1),
    ("unfinished", put(1, status="failed", remove_sample=True), None, 1),
    ("truncated", lambda s: [x.update(status="truncated") for x in s[:3]],
     lambda s: [x.update(status="truncated") for x in s[:2]], None),
    ("empty-response", put(0, response_length=0, loss_mask=[], rollout_log_probs=[]), None, 0),
    ("removed", put(0, remove_sample=True), None, None),
    ("experts-shape", lambda s: (routed(s), s[1].update(rollout_routed_experts=np.ones((5, 2, 2), np.int32))),
     routed, 1),
    ("experts-shape", lambda s: (routed(s), s[1].update(rollout_routed_experts=[[1, 2]] * 6)), None, 1),
    ("experts-shape", lambda s: (routed(s), s[1].update(rollout_routed_experts=[[[1.0, 2.0]] * 2] * 6)), None, 1),
    ("experts-negative", experts(1, lambda a: a.__setitem__((0, 1, 0), -1)), routed, 1),
    ("experts-layer-lost", experts(1, lambda a: a.__setitem__((slice(None), 1), 0)),
     experts(1, lambda a: a.__setitem__(0, 0)), 1),
    ("experts-layer-zero", lambda s: (routed(s), [x["rollout_routed_experts"][:, 0].fill(0) for x in s]),
     lambda s: [x.update(rollout_routed_experts=[[[0]] * 2] * 6) for x in s], None),
]  # fmt: skip


def checked(tmp_path: Path, change: Change, system: System = "slime", **sizes: int) -> list[Finding]:
    """What is found in a changed dump, through a file."""
    dump = plain_dump(system)
    change(dump.samples)
    made = RolloutDump(system, dump.rollout_id, False, {}, dump.samples)
    write_rollout_dump(tmp_path / "3.pt", made)
    return check_dump(read_rollout_dump(tmp_path / "3.pt", system=system), **sizes)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda k: f"{CASES[k][0]}-{k}")
def test_each_rule_finds_what_it_is_for(number: int, tmp_path: Path) -> None:
    """A dump that breaks a rule is found, with the sample; one near it that is in order is not."""
    rule, broken, near, sample = CASES[number]
    severity = next(r.severity for r in RULES if r.id == rule)
    findings = [f for f in checked(tmp_path, broken) if f.rule == rule]
    assert findings and findings[0].severity == severity and findings[0].where.sample == sample, findings
    assert "\n" not in findings[0].message
    if near is not None:
        assert rule not in {f.rule for f in checked(tmp_path, near)}


def test_every_rule_is_tested() -> None:
    """Each rule of the table breaks somewhere here; ids are unique, and each says why and what to do."""
    ids = [rule.id for rule in RULES]
    assert len(ids) == len(set(ids)) and all(rule.why and rule.fix for rule in RULES)
    assert set(ids) == {case[0] for case in CASES} | {"group-size", "experts-missing"}


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_dump_in_order_has_no_findings(system: System, tmp_path: Path) -> None:
    """Nothing is found in a plain dump of each system, with experts as each holds them."""
    assert checked(tmp_path, lambda _: None, system, group_size=2) == []
    assert checked(tmp_path, routed, system, group_size=2, layers=2, topk=2) == []


def test_known_sizes_are_held_against_the_dump(tmp_path: Path) -> None:
    """Other sizes of groups, layers or top-k than the caller's are errors, and so are experts that are missing."""
    assert [(f.rule, f.where.sample) for f in checked(tmp_path, lambda _: None, group_size=4)] == [
        ("group-size", 0),
        ("group-size", 2),
    ]
    assert {f.rule for f in checked(tmp_path, routed, layers=3)} == {"experts-shape"}
    assert {f.rule for f in checked(tmp_path, routed, topk=4)} == {"experts-shape"}
    assert [f.rule for f in checked(tmp_path, lambda _: None, topk=2)] == ["experts-missing"] * 4


def test_executions_count_once_in_a_group(tmp_path: Path) -> None:
    """Samples that share a rollout_id are one execution: a group of two executions with three samples is in order."""

    def siblings(samples: Samples) -> None:
        for number, sample in enumerate(samples):
            sample.update(group_index=0, rollout_id=max(number, 1))

    assert checked(tmp_path, siblings, group_size=3) == []


def test_images_expand_experts_in_miles(tmp_path: Path) -> None:
    """Rows for the patches of an image are in order; rows for other numbers are not."""
    for rows, expected in ((8, []), (9, ["experts-shape"])):

        def expanded(samples: Samples, rows: int = rows) -> None:
            routed(samples)
            inputs = {"mm_vision_num_patches": tensor([3], "int64")}
            more = np.ones((rows, 2, 2), dtype=np.int32)
            samples[0].update(multimodal_train_inputs=inputs, rollout_routed_experts=more)

        assert [f.rule for f in checked(tmp_path, expanded, "miles")] == expected


def test_evaluations_are_not_held_to_what_training_needs(tmp_path: Path) -> None:
    """In eval dumps indices start anew with each data set, and rewards may be equal; finiteness still counts."""
    dump = plain_dump()
    for sample in dump.samples:
        sample.update(index=0, group_index=None, reward=1.0, rollout_log_probs=[NAN] * 4)
    write_rollout_dump(tmp_path / "eval_3.pt", dump)
    assert {f.rule for f in check_dump(read_rollout_dump(tmp_path / "eval_3.pt"))} == {"log-probs-finite"}


@at_most(60)
@given(data=st.data(), system=st.sampled_from(SYSTEMS))
def test_checks_never_fail(data: st.DataObject, system: System) -> None:
    """Whatever a readable dump holds, the checks end, each finding with its own sample and one line."""
    dump = data.draw(drawn_dumps(system))
    odd = st.none() | st.text(max_size=3) | st.lists(st.none() | st.floats(), max_size=3) | st.just({"a": 10**400})
    fields = ("rollout_log_probs", "loss_mask", "reward", "rollout_routed_experts", "multimodal_train_inputs")
    for name in data.draw(st.sets(st.sampled_from(fields))):
        dump.samples[0][name] = data.draw(odd)
    for finding in check_dump(dump, group_size=2, layers=2, topk=2):
        assert "\n" not in finding.message and (
            finding.where.sample is None or 0 <= finding.where.sample < len(dump.samples)
        )
