"""Dumps become our rollouts and come back the same; what another form cannot hold is listed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st
from rollout_dump_kit import ADAPTER, drawn_dumps, full_dump, plain_dump, tensor

from repro_core.config import TrainConfig
from repro_core.data.rollout_file import read_rollout as core_read
from repro_core.train.trainer import Trainer
from repro_golden.base.errors import ReproError
from repro_golden.base.systems import SYSTEMS, System
from repro_golden.dumps.rollout.arrays import numbers
from repro_golden.dumps.rollout.columns import Loss, translate
from repro_golden.dumps.rollout.fields import NAMES, defaults
from repro_golden.dumps.rollout.files import RolloutDump, content_digest, read_rollout_dump, write_rollout_dump
from repro_golden.dumps.rollout.typed_json import Decoder, Encoder
from repro_golden.dumps.values import same
from repro_golden.fingerprint import fingerprint
from repro_golden.store.dump_conversion import from_rollout, to_rollout
from repro_golden.store.rollout_file import RolloutData, read_rollout, write_rollout

torch.set_num_threads(1)

SYSTEM = st.sampled_from(SYSTEMS)


def parts(dump: RolloutDump) -> tuple[Any, ...]:
    """All that a dump is."""
    return dump.system, dump.evaluation, dump.content(), dump.samples


def back(dump: RolloutDump, reward_key: str | None = None) -> RolloutDump:
    """There and back, with nothing listed as lost."""
    made, losses = from_rollout(to_rollout(dump, reward_key=reward_key), dump.system)
    assert losses == []
    return made


@at_most(60)
@given(data=st.data(), system=SYSTEM)
def test_there_and_back_is_the_same(data: st.DataObject, system: System) -> None:
    """Any dump comes back from our form with the same bits and types, fields that it lacked still lacking."""
    dump = data.draw(drawn_dumps(system))
    assert same(parts(back(dump, "acc")), parts(dump))


@at_most(60)
@given(data=st.data(), system=SYSTEM)
def test_there_and_back_through_files(
    data: st.DataObject, system: System, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same through a file of ours, and equal content is an equal digest."""
    dump = data.draw(drawn_dumps(system))
    path = tmp_path_factory.getbasetemp() / "0.safetensors"
    write_rollout(path, to_rollout(dump, reward_key="acc"))
    made, _ = from_rollout(read_rollout(path), system)
    assert same(parts(made), parts(dump)) and content_digest(made) == content_digest(dump)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_field_survives_a_file(system: System, tmp_path: Path) -> None:
    """A dump with every field set goes into a file of ours, and its dump from there has the same bytes."""
    dump = full_dump(system)
    write_rollout_dump(tmp_path / "a.pt", dump)
    write_rollout(tmp_path / "0.safetensors", to_rollout(dump))
    core_read(tmp_path / "0.safetensors")  # the trainer takes it too
    made, losses = from_rollout(read_rollout(tmp_path / "0.safetensors"), system)
    write_rollout_dump(tmp_path / "b.pt", made)
    assert losses == [] and (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_columns_are_what_is_trained_on() -> None:
    """Masks that are not there are ones, removed samples are masked, missing log-probs and rewards are NaN."""
    dump = plain_dump()
    dump.samples[0]["loss_mask"] = None
    dump.samples[1]["remove_sample"] = True
    dump.samples[2]["rollout_log_probs"] = None
    dump.samples[3]["reward"] = None
    dump.samples[3]["group_index"] = None
    t = to_rollout(dump).tensors
    assert t["tokens"].tolist() == [token for sample in dump.samples for token in sample["tokens"]]
    assert t["loss_mask"].tolist() == [1] * 4 + [0] * 4 + [1] * 8
    assert t["rollout_log_probs"][8:12].isnan().all() and not t["rollout_log_probs"][:8].isnan().any()
    assert t["rewards"][:3].tolist() == [0.0, 1.0, 0.0] and t["rewards"][3].isnan()
    assert t["group_index"].tolist()[:3] == [0, 0, 1] and t["group_index"][3] not in (0, 1)
    meta = to_rollout(dump).meta
    assert meta["prompts"] == ["0 + 1 =", "1 + 1 =", "1 + 1 ="] and meta["weight_version"] == "7"
    assert meta["statuses"] == ["completed"] * 4 and meta["labels"] == ["1", "2", "2"]


def test_a_sample_without_a_group_is_in_nobodys() -> None:
    """Its number is none of those that groups have, wherever it stands."""
    dump = plain_dump("slime", groups=2)
    for number, sample in enumerate(dump.samples):
        sample["group_index"] = None if number == 3 else 3
    assert to_rollout(dump).tensors["group_index"].tolist()[:3] == [3, 3, 3]
    assert to_rollout(dump).tensors["group_index"][3] != 3


@pytest.mark.parametrize("group", [2**62, 2**63 - 1, 2**63, 2**70, -(2**63) - 1])
def test_a_group_beyond_64_bits_is_a_group_with_a_number_of_its_own(group: int, tmp_path: Path) -> None:
    """The column has another number for it, the same for all of its samples, and the dump comes back as it was."""
    dump = plain_dump("slime", groups=3)
    for sample, number in zip(dump.samples, (0, 0, group, group, None, -group), strict=True):
        sample["group_index"] = number
    write_rollout(tmp_path / "0.safetensors", to_rollout(dump))
    kept = read_rollout(tmp_path / "0.safetensors")
    groups = kept.tensors["group_index"].tolist()
    assert groups[:2] == [0, 0] and groups[2] == groups[3] and len(set(groups)) == 4
    back, losses = from_rollout(kept, "slime")
    assert not losses and same(back.content(), dump.content())


def test_plain_dumps_need_little_beside_the_columns() -> None:
    """What the columns say is not kept twice: log-probs of fp32, masks, rewards, groups and indices."""
    rollout = to_rollout(plain_dump())
    kept = {key for sample in rollout.meta["dump"]["samples"] for key, _ in sample["items"]}
    assert kept == {"response"} and "dump" not in rollout.tensors


def test_float64_is_kept_exactly() -> None:
    """Log-probs and rewards that fp32 cannot hold come back to the last bit, and so do -0.0 and NaN's payload."""
    dump = plain_dump()
    odd = np.frombuffer(np.uint64(0x7FF8000000000123).tobytes(), dtype=np.float64)[0]
    dump.samples[0]["rollout_log_probs"] = [-0.1, -0.0, float(odd), -1e-300]
    dump.samples[0]["reward"] = 0.1
    dump.samples[1]["reward"] = float("-inf")
    assert same(parts(back(dump)), parts(dump))


@pytest.mark.parametrize("held", ["list", "int64", "int32", "ndarray"])
def test_experts_are_a_column_however_they_are_held(held: str) -> None:
    """Lists, tensors and arrays of experts make one canonical column, and come back as they were."""
    dump, experts = plain_dump(), np.arange(24).reshape(6, 2, 2)
    forms = {"list": experts.tolist(), "ndarray": experts.astype(np.int32)}
    for sample in dump.samples:
        sample["rollout_routed_experts"] = (
            forms.get(held) or tensor(experts, held) if held != "ndarray" else forms[held]
        )
    rollout = to_rollout(dump)
    routed = rollout.tensors["routed_experts"]
    assert routed.dtype == torch.uint8 and routed.shape == (28, 2, 2)
    assert routed[:6].tolist() == experts.tolist() and not routed[6].any()
    assert "dump" not in rollout.tensors, "held twice"
    assert same(parts(back(dump)), parts(dump))


def test_several_rewards_need_a_key() -> None:
    """Dict rewards are refused without a key and with a wrong one; with it, its reward is the column."""
    dump = plain_dump()
    for sample in dump.samples:
        sample["reward"] = {"acc": 0.5, "style": 2.0}
    with pytest.raises(ReproError, match="--reward-key"):
        to_rollout(dump)
    with pytest.raises(ReproError, match="has no reward 'speed'"):
        to_rollout(dump, reward_key="speed")
    assert to_rollout(dump, reward_key="style").tensors["rewards"].tolist() == [2.0] * 4
    assert same(parts(back(dump, "acc")), parts(dump))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_length": 9}, "response_length is 9, and there are 7 tokens"),
        ({"response_length": -1}, "response_length is -1"),
        ({"loss_mask": [1]}, "loss_mask has 1 entries"),
        ({"rollout_log_probs": [0.0] * 5}, "rollout_log_probs has 5 entries"),
        ({"tokens": [1, 2, 3, 4, 5, 6, "a"]}, "no list of whole numbers"),
        ({"rollout_log_probs": [None] * 4}, "no list of numbers"),
        ({"reward": "good"}, "reward is a str"),
        ({"reward": 10**400}, "reward is a int"),
    ],
)
def test_what_no_column_holds_is_refused(fields: dict[str, Any], message: str) -> None:
    """Lengths that do not add up, and values that are no numbers, are refused with the rollout and the sample."""
    dump = plain_dump()
    dump.samples[1].update(fields)
    with pytest.raises(ReproError, match=f"rollout 3, sample 1.*{message}"):
        to_rollout(dump)


def test_changed_columns_are_not_overruled() -> None:
    """What lies beside columns that were changed is refused rather than written in their place."""
    rollout = to_rollout(full_dump("slime"))
    changed = RolloutData(rollout.meta, {**rollout.tensors, "rewards": rollout.tensors["rewards"] + 1})
    with pytest.raises(ReproError, match="its column rewards was changed"):
        from_rollout(changed, "slime")


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2}, {"system": "verl"}, {"samples": []}, {"layout": [9, 9, 9, 9]}, {"keys": 3},
        {"metadata": {"x": 1}},
        {"samples": [{"items": [["reward", {"tensor": ["float32", [10**9], 0]}]]}] * 4},
        {"experts": ["tensor odd"] * 4}, {"experts": ["array O"] * 4},
    ],
)  # fmt: skip
def test_damage_beside_the_columns_is_one_line(change: dict[str, Any]) -> None:
    """Anything but what was written there is refused in one line."""
    rollout = to_rollout(full_dump("slime"))
    meta = copy.deepcopy(dict(rollout.meta))
    meta["dump"].update(change)
    with pytest.raises(ReproError) as caught:
        from_rollout(RolloutData(meta, rollout.tensors), "slime")
    assert "\n" not in str(caught.value)


@at_most(60)
@given(data=st.data(), pair=st.permutations(SYSTEMS))
def test_another_form_loses_what_is_listed_and_nothing_else(data: st.DataObject, pair: list[System]) -> None:
    """Into another system's form and back, each field is the same, or is named in the list, as often as it is lost."""
    first, second = pair[:2]
    dump = data.draw(drawn_dumps(first))
    there, losses = translate(dump, second)
    again, more = translate(there, first)
    assert (there.rollout_id, there.evaluation, len(there.samples)) == (
        dump.rollout_id,
        dump.evaluation,
        len(dump.samples),
    )
    listed = {loss.what.split()[0]: loss.samples for loss in losses}
    for name in {name for sample in dump.samples for name in sample}:
        lost = sum(
            not same(a.get(name), b[name]) for a, b in zip(again.samples, dump.samples, strict=True) if name in b
        )
        if name == "rollout_routed_experts":
            assert lost <= listed.get(name, 0) + sum(loss.samples for loss in more)
            pairs = zip(again.samples, dump.samples, strict=True)
            held = [(numbers(a.get(name)), numbers(b.get(name))) for a, b in pairs]
            # a list of no rows has no layers either
            assert all(same(a, b) or (b is not None and not b.size) for a, b in held)
        else:
            assert lost == listed.get(name, 0), name
    assert not dump.metadata or Loss("'metadata' of the file", 0) in losses
    assert again.unknown_fields == dump.unknown_fields


def test_slime_to_miles_names_what_is_lost() -> None:
    """A full dump of slime, with what Miles has no place for; the session goes where Miles' router looks."""
    dump = full_dump("slime")
    there, losses = translate(dump, "miles")
    names = {loss.what.split()[0] for loss in losses}
    kept_otherwise = {"session_id"}
    assert names == NAMES["slime"] - NAMES["miles"] - kept_otherwise | {"rollout_routed_experts"}
    assert all(loss.samples == 4 for loss in losses)
    assert there.samples[0]["routing_key"] == "s-1"
    experts = there.samples[0]["rollout_routed_experts"]
    assert isinstance(experts, np.ndarray) and experts.dtype == np.int32 and experts.shape == (6, 2, 2)
    assert translate(dump, "slime") == (dump, [])


@pytest.mark.parametrize("systems", [("slime", "miles"), ("miles", "slime")])
def test_a_stray_field_does_not_take_the_place_of_another(systems: tuple[System, System]) -> None:
    """A field that its own system does not know, called as the other calls the session, is lost, and listed."""
    here, other = systems
    dump = full_dump(here)
    session, stray = ("session_id", "routing_key") if here == "slime" else ("routing_key", "session_id")
    for sample in dump.samples:
        sample[stray] = "stray"
    there, losses = translate(dump, other)
    assert [sample[stray] for sample in there.samples] == [sample[session] for sample in dump.samples]
    assert Loss(f"{stray}, whose place is that of {session}", len(dump.samples)) in losses


def test_miles_to_slime_names_what_is_lost() -> None:
    """Adapters, reward specs, Miles' metadata and its own columns are listed; experts become a tensor."""
    dump = full_dump("miles")
    there, losses = translate(dump, "slime")
    named = {loss.what.split()[0] for loss in losses}
    assert named >= {"adapter", "reward_spec", "opd_reverse_kl", "rollout_indexer_topk", "'metadata'"}
    assert same(there.samples[0]["rollout_routed_experts"], tensor(dump.samples[0]["rollout_routed_experts"], "int32"))
    assert ADAPTER not in there.samples[0].values() and there.samples[0]["session_id"] == "r-1"


@pytest.fixture(scope="module")
def captured() -> list[RolloutData]:
    """Two rollouts of the built-in trainer, one with experts."""
    refused = []
    model = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    for extra in ({}, {"model": model, "use_rollout_routing_replay": True}):
        config = TrainConfig.from_mapping(
            {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "global_batch_size": 4, "max_response_len": 5, **extra}
        )
        rollout = Trainer(config).sample(0)
        tensors = dict(rollout.tensors)
        if extra:
            shape = (len(tensors["tokens"]), 2, 2)
            routed = torch.arange(shape[0] * 4, dtype=torch.int64).remainder(4).to(torch.uint8).view(shape)
            ends = tensors["total_lengths"].cumsum(0) - 1
            routed[ends] = 0
            tensors["routed_experts"] = routed
        refused.append(RolloutData(rollout.meta, tensors))
    return refused


@pytest.mark.parametrize("system", SYSTEMS)
def test_captured_rollouts_come_back_from_every_form(
    system: System, captured: list[RolloutData], tmp_path: Path
) -> None:
    """The built-in trainer's rollouts, written as dumps and read again, have the same canonical tensors."""
    for rollout in captured:
        dump, losses = from_rollout(rollout, system)
        assert [loss.what for loss in losses] == ["sampling of the rollout"]
        write_rollout_dump(tmp_path / "0.pt", dump)
        again = to_rollout(read_rollout_dump(tmp_path / "0.pt", system=system))
        for name, value in rollout.tensors.items():
            assert fingerprint(again.tensors[name]) == fingerprint(value), name
        for key in ("rollout_id", "prompts", "labels", "statuses"):
            assert again.meta[key] == rollout.meta[key]


def test_what_a_dump_cannot_hold_of_ours_is_listed(captured: list[RolloutData]) -> None:
    """Engine, seeds and columns without a place, and a dtype that numbers cannot tell, are listed."""
    rollout = captured[1]
    wide = {**rollout.tensors, "routed_experts": rollout.tensors["routed_experts"].to(torch.int16)}
    fields = {"engine": {"name": "sglang"}, "seeds": [1, 2, 3, 4], "prompts": ["a"]}
    made = RolloutData({**rollout.meta, **fields}, {**wide, "extra": torch.zeros(2)})
    _, losses = from_rollout(made, "slime")
    assert [str(loss) for loss in losses] == [
        "engine of the rollout", "prompts of the rollout", "sampling of the rollout", "seeds of the rollout",
        "the column extra", "bits of the column routed_experts, which is read back as uint8",
    ]  # fmt: skip


def test_a_digest_is_over_content_alone() -> None:
    """Equal values are an equal digest, whatever the order of keys; types, bits and missing fields count."""
    dump = plain_dump()
    turned = RolloutDump("slime", 3, False, {}, [dict(reversed(sample.items())) for sample in dump.stored()])
    assert content_digest(turned) == content_digest(dump)
    inside = {"b": tensor([1.0, 2.0]), "a": tensor([3.0]), "c": {"z": {1, 2}, "y": b"0" * 40}}
    for rollout, metadata in (
        (dump, inside),
        (turned, {**dict(reversed(inside.items())), "c": dict(reversed(inside["c"].items()))}),
    ):
        rollout.samples[0]["metadata"] = metadata
    assert content_digest(turned) == content_digest(dump)
    dump.samples[0]["metadata"] = {}
    changes: list[dict[str, Any]] = [
        {"reward": 0},
        {"reward": -0.0},
        {"loss_mask": None},
        {"label": "2"},
        {"new": None},
    ]
    for change in changes:
        other = plain_dump()
        other.samples[0].update(change)
        assert content_digest(other) != content_digest(dump), change
    fewer = RolloutDump(
        "slime", 3, False, {}, [{k: v for k, v in s.items() if k != "session_id"} for s in dump.stored()]
    )
    assert same(fewer.samples, dump.samples) and content_digest(fewer) != content_digest(dump)


@at_most(60)
@given(data=st.data())
def test_typed_json_keeps_everything(data: st.DataObject) -> None:
    """Any value through JSON text and back is the same: types, bits, lone surrogates, huge numbers, dicts like tags."""
    from rollout_dump_kit import _VALUES

    from repro_golden.base.canonical import canonical_json

    value = data.draw(_VALUES | st.just({"dict": {"tensor": 1}}) | st.lists(st.integers(), min_size=20, max_size=30))
    value = [value, "\ud800", 10**5000, [[1, 2]] * 9, [True] * 20, [-0.0] * 20, {"\udfff": 1}, {1, 2}, 2 + 0j]
    encoder = Encoder()
    text = canonical_json(encoder.encode(value))
    text.encode()
    import json

    assert same(Decoder(bytes(encoder.block)).decode(json.loads(text)), value)


def test_a_value_that_is_not_plain_is_refused() -> None:
    """What no dump holds has no JSON."""
    with pytest.raises(ReproError, match="cannot be kept"):
        Encoder().encode({"a": object()})
    assert same(defaults("slime"), defaults("slime"))
