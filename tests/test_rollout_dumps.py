"""Rollout dumps of slime, Miles and Relax: every form of their history is read or refused by name, and written back."""

from __future__ import annotations

import enum
import pickle
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollout_dump_kit import ADAPTER, full_dump, plain_dump

from repro_golden.base.errors import ReproError
from repro_golden.base.systems import SYSTEMS, System
from repro_golden.dumps.archive.pickling import write_archive
from repro_golden.dumps.rollout.fields import FIELDS, NAMES, ONLY, defaults, form_of, refuse
from repro_golden.dumps.rollout.files import RolloutDump, dump_files, form_text, read_rollout_dump, write_rollout_dump
from repro_golden.dumps.values import Tensor, same
from repro_golden.store.rollouts import DumpFiles, RolloutFiles, open_rollouts

torch.set_num_threads(1)


def saved(path: Path, samples: list[dict[str, Any]], **head: Any) -> Path:
    """What a trainer's own torch.save writes."""
    torch.save({"rollout_id": 3, **head, "samples": samples}, path)
    return path


def plain_sample(**fields: Any) -> dict[str, Any]:
    """A sample as slime's dumps of 2025-07-23 had it."""
    made = {"index": 0, "prompt": "p", "tokens": [1, 2, 3], "response": "r", "response_length": 2, "label": None,
            "reward": 1.0, "loss_mask": None, "status": "completed", "metadata": {}}  # fmt: skip
    return made | fields


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_dump_with_every_field_is_read_as_it_was_written(system: System, tmp_path: Path) -> None:
    """Written and read again, every field of every sample has its type and bits, and the system tells itself."""
    dump = full_dump(system)
    unset = defaults(system)
    assert not [f.name for f in FIELDS[system] if same(dump.samples[0][f.name], unset[f.name])]
    write_rollout_dump(tmp_path / "3.pt", dump)
    again = read_rollout_dump(tmp_path / "3.pt")
    assert again.system == system and again.rollout_id == 3 and not again.evaluation
    assert same(again.samples, dump.samples) and same(again.metadata, dump.metadata)
    assert again.missing == [frozenset()] * 4 and not again.unknown_fields
    write_rollout_dump(tmp_path / "4.pt", again)
    assert (tmp_path / "3.pt").read_bytes() == (tmp_path / "4.pt").read_bytes()


@pytest.mark.parametrize("system", SYSTEMS)
def test_torch_loads_what_is_written(system: System, tmp_path: Path) -> None:
    """torch.load, which the three loaders call, gives the values that were written; Miles' file has its metadata."""
    dump = plain_dump(system)
    write_rollout_dump(tmp_path / "3.pt", dump)
    loaded = torch.load(tmp_path / "3.pt", weights_only=True)
    assert loaded["rollout_id"] == 3 and ("metadata" in loaded) == (system == "miles")
    assert same(loaded["samples"], dump.samples)


def test_tables_tell_the_systems_apart() -> None:
    """Each system has names of its own, as many fields as its class, and no name twice."""
    counts = {"slime": 30, "miles": 29, "relax": 45}
    for system in SYSTEMS:
        fields = [f.name for f in FIELDS[system] if not f.added]
        assert len(fields) == len(set(fields)) == counts[system] and ONLY[system]
        assert all(not (NAMES[other] & ONLY[system]) for other in SYSTEMS if other != system)


def test_missing_fields_get_defaults_and_are_not_invented(tmp_path: Path) -> None:
    """An old dump's sample is whole when read, with fresh containers, and is written back with its own fields alone."""
    samples = [plain_sample(), plain_sample(index=1)]
    path = saved(tmp_path / "3.pt", samples)
    dump = read_rollout_dump(path)
    assert dump.system == "slime" and dump.samples[0]["spec_info"]["spec_verify_ct"] == 0
    dump.samples[0]["weight_versions"].append("1")
    assert dump.samples[1]["weight_versions"] == []
    stored = dump.stored()
    assert stored[0].keys() == samples[0].keys() | {"weight_versions"}
    assert same(stored[1], samples[1])
    write_rollout_dump(tmp_path / "4.pt", read_rollout_dump(path))
    assert same(torch.load(tmp_path / "4.pt", weights_only=True), torch.load(path, weights_only=True))


def test_former_names_are_read_and_kept(tmp_path: Path) -> None:
    """`group_id` of 2026-05-30 is today's `rollout_id`, Miles' `session_id` is `routing_key`; both are written back."""
    old = read_rollout_dump(saved(tmp_path / "3.pt", [plain_sample(group_id=5)]))
    assert old.samples[0]["rollout_id"] == 5 and "group_id" not in old.samples[0] and not old.unknown_fields
    assert old.stored()[0]["group_id"] == 5 and "rollout_id" not in old.stored()[0]
    assert "group_id" in form_text(old)
    miles = read_rollout_dump(saved(tmp_path / "5.pt", [plain_sample(session_id="s")], metadata={}))
    assert miles.system == "miles" and miles.samples[0]["routing_key"] == "s"
    assert miles.stored()[0]["session_id"] == "s"
    both = read_rollout_dump(saved(tmp_path / "6.pt", [plain_sample(group_id=5, rollout_id=6)]))
    assert both.samples[0]["rollout_id"] == 6 and both.unknown_fields == {"group_id"}


def test_unknown_fields_and_keys_are_kept(tmp_path: Path) -> None:
    """What a fork adds to samples and to the file is read, told, and written back."""
    path = saved(tmp_path / "3.pt", [plain_sample(of_a_fork=[1, 2])], extra={"a": 1})
    dump = read_rollout_dump(path)
    assert dump.unknown_fields == {"of_a_fork"} and dump.extra == {"extra": {"a": 1}}
    assert same(dump.content(), torch.load(path, weights_only=True))


@pytest.mark.parametrize(
    ("fields", "head", "system"),
    [
        ({}, {}, "slime"),
        ({}, {"metadata": {}}, "miles"),
        ({"routing_key": None}, {}, "miles"),
        ({"rollout_indexer_topk": None}, {}, "miles"),
        ({"decoded_tokens": []}, {}, "relax"),
        ({"abort_count": 0, "session_id": None}, {}, "relax"),
        ({"custom_rm_path": None}, {}, "slime"),
        ({"session_id": None}, {}, "slime"),
        ({"custom_rm_path": None, "abort_count": 0, "rollout_tokens": []}, {}, "relax"),
    ],
)
def test_the_system_is_recognised(fields: dict[str, Any], head: dict[str, Any], system: str, tmp_path: Path) -> None:
    """By fields that one system alone has, by Miles' metadata, by the most of them, and else it is slime."""
    assert read_rollout_dump(saved(tmp_path / "3.pt", [plain_sample(**fields)], **head)).system == system


def test_a_caller_may_say_whose_it_is(tmp_path: Path) -> None:
    """A system that is given is taken, and a file's own key is not lost on the way."""
    path = saved(tmp_path / "3.pt", [plain_sample()], metadata={"a": 1})
    dump = read_rollout_dump(path, system="slime")
    assert dump.system == "slime" and same(dump.content(), torch.load(path, weights_only=True))


@pytest.mark.parametrize("name", ["eval_7.pt", "7.pt"])
def test_evaluations_are_known_by_their_name(name: str, tmp_path: Path) -> None:
    """`eval_N.pt` is an evaluation; files of a folder come by number, evaluations last or not at all."""
    assert read_rollout_dump(saved(tmp_path / name, [plain_sample()])).evaluation == name.startswith("eval")
    for other in ("10.pt", "2.pt", "eval_1.pt", "notes.txt"):
        (tmp_path / other).touch()
    numbers = [path.name for path in dump_files(tmp_path, evaluation=False)]
    assert numbers == [n for n in ("2.pt", "7.pt", "10.pt") if (tmp_path / n).exists()]
    assert [path.name for path in dump_files(tmp_path)][len(numbers)] == "eval_1.pt"


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{k: v for k, v in plain_sample().items() if k != "status"}], "sample 0 has no status"),
        ([plain_sample(), plain_sample(status="done")], "sample 1 has a status 'done'"),
        ([plain_sample(status=3)], "a status of type int"),
        ([plain_sample(tokens=None)], "tokens of sample 0 is a NoneType"),
        ([plain_sample(response_length="4")], "response_length of sample 0 is a str"),
        ([plain_sample(group_index=[1])], "group_index of sample 0 is a list"),
    ],
)
def test_samples_that_no_loader_takes_are_refused(samples: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    """A sample without a status, or with parts that are no numbers, is refused in one line that names it."""
    path = saved(tmp_path / "3.pt", samples)
    with pytest.raises(ReproError, match=message) as caught:
        read_rollout_dump(path)
    assert "\n" not in str(caught.value)


def test_what_no_loader_takes_is_not_written(tmp_path: Path) -> None:
    """Writing refuses a status that the loaders would refuse."""
    dump = plain_dump()
    dump.samples[1]["status"] = "finished"
    with pytest.raises(ReproError, match="sample 1"):
        write_rollout_dump(tmp_path / "3.pt", dump)
    assert not (tmp_path / "3.pt").exists()


@pytest.fixture
def slime_types() -> Any:
    """slime.utils.types of 2025-06-24 with a Status, importable as long as the test needs it to pickle."""
    made = {name: types.ModuleType(name) for name in ("slime", "slime.utils", "slime.utils.types")}
    status = enum.Enum("Status", {"COMPLETED": "completed"}, module="slime.utils.types")  # type: ignore[misc]
    made["slime.utils.types"].Status = status  # type: ignore[attr-defined]
    sys.modules.update(made)
    yield status
    for name in made:
        del sys.modules[name]


def test_a_pickled_list_of_2025_06_24_is_refused_by_name(slime_types: Any, tmp_path: Path) -> None:
    """Lists of `__dict__` with the enum inside, and of `to_dict`, are named with date and way out, and no flag."""
    for status in (slime_types.COMPLETED, "completed"):
        (tmp_path / "3.pt").write_bytes(pickle.dumps([plain_sample(status=status)]))
        with pytest.raises(ReproError, match=r"slime 1dc85516d \(2025-06-24\).*torch.save") as caught:
            read_rollout_dump(tmp_path / "3.pt")
        assert "--allow-pickle" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"tokens": [[1]], "response_lengths": [1], "rewards": [1.0], "loss_masks": [[1]]}, "2025-06-18"),
        ({"rollout_id": 0, "rank": 0, "rollout_data": {"tokens": []}}, "is a train dump"),
        ({"format_version": 2, "rollout_id": 0, "rank": 0, "samples": [{"sample_index": 0}]}, "is a train dump"),
        ({"rollout_id": 0, "rank": 0, "samples": [{"sample_index": 0, "tokens": [1]}]}, "is a train dump"),
        ({"rank": 0, "call": 0, "samples": [], "ppo_kl": 0.0, "pg_loss": 0.0}, "policy-loss dump of Miles"),
        (0.25, "single number"),
        ({"samples": 3}, "no dump of slime"),
        ({"samples": [{"a": 1}]}, "no dump of slime"),
        ({"samples": [{1: 1}]}, "no dump of slime"),
        ([1, 2], "no dump of slime"),
        ("text", "no dump of slime"),
    ],
)  # fmt: skip
def test_other_files_are_told_apart(value: Any, message: str, tmp_path: Path) -> None:
    """Forms of former days, train dumps and all else are named in one line that says what to give instead."""
    torch.save(value, tmp_path / "3.pt")
    with pytest.raises(ReproError, match=message) as caught:
        read_rollout_dump(tmp_path / "3.pt")
    assert "\n" not in str(caught.value) and "--save-debug-rollout-data" in str(caught.value)


def test_a_rollout_dump_is_no_train_dump(tmp_path: Path) -> None:
    """Asked for a train dump, a rollout dump is named, and where the other lies."""
    content = plain_dump().content()
    assert form_of(content) == "rollout"
    with pytest.raises(ReproError, match="is a rollout dump: give the train dump"):
        refuse(content, tmp_path / "3.pt", "train")


def test_classes_of_miles_are_read_and_others_refused(tmp_path: Path) -> None:
    """AdapterRef is read without a flag; another class is refused with its name, and read as fields with the flag."""
    dump = plain_dump("miles")
    dump.samples[0]["adapter"] = ADAPTER
    torch.save(
        {"rollout_id": 3, "metadata": {}, "samples": [plain_sample(metadata={"c": Thing(3)})]}, tmp_path / "3.pt"
    )
    with pytest.raises(ReproError, match=f"--allow-pickle {Thing.__module__}.Thing"):
        read_rollout_dump(tmp_path / "3.pt")
    allowed = read_rollout_dump(tmp_path / "3.pt", allow=[f"{Thing.__module__}.Thing"])
    assert allowed.samples[0]["metadata"]["c"].state == {"size": 3}
    write_rollout_dump(tmp_path / "4.pt", dump)
    assert same(read_rollout_dump(tmp_path / "4.pt").samples[0]["adapter"], ADAPTER)


@dataclass
class Thing:
    """A user's own class in a sample's metadata."""

    size: int


def test_miles_dumps_with_numpy_and_tensors_are_read(tmp_path: Path) -> None:
    """int32 experts as torch.save of numpy arrays writes them, and multimodal tensors in bfloat16."""
    experts = np.arange(8, dtype=np.int32).reshape(2, 2, 2)
    pixels = torch.tensor([1.5, float("nan")], dtype=torch.bfloat16)
    raw = plain_sample(rollout_routed_experts=experts, multimodal_train_inputs={"pixel_values": pixels})
    sample = read_rollout_dump(saved(tmp_path / "3.pt", [raw], metadata={})).samples[0]
    assert same(np.array(sample["rollout_routed_experts"]), experts)
    assert same(sample["multimodal_train_inputs"]["pixel_values"], Tensor.of(pixels))


def test_form_says_which_revision_fits() -> None:
    """The newest field that all samples have dates the form."""
    assert "d495f61c2 2026-06-21" in form_text(plain_dump("slime"))
    assert form_text(RolloutDump("slime", 0, False, {}, [plain_sample()])) == "slime"
    old = RolloutDump("miles", 0, True, {}, [plain_sample()])
    assert form_text(old) == "miles evaluation, fields of e0540eb29 2026-07-10 or later"
    assert form_text(RolloutDump("miles", 0, False, {}, [plain_sample()], frozenset({"metadata"}))) == "miles"


def test_dump_files_have_a_digest_over_content(tmp_path: Path) -> None:
    """Bytes and evaluations do not count, values and numbers do; a command's files stay files."""
    dump = plain_dump("miles")
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    write_rollout_dump(tmp_path / "a" / "3.pt", dump)
    torch.save(dump.content(), tmp_path / "b" / "3.pt")
    (tmp_path / "b" / "eval_3.pt").write_text("not looked at")
    assert (tmp_path / "a" / "3.pt").read_bytes() != (tmp_path / "b" / "3.pt").read_bytes()
    a, b = (open_rollouts(tmp_path / folder, "miles") for folder in ("a", "b"))
    assert isinstance(a, DumpFiles) and isinstance(b, DumpFiles)
    assert a.digest == b.digest and len(b) == 1 and same(a.read(3).samples, dump.samples)
    dump.samples[0]["rollout_log_probs"][0] = -0.0
    write_rollout_dump(tmp_path / "c" / "3.pt", dump)
    assert open_rollouts(tmp_path / "c", "miles").digest != a.digest
    (tmp_path / "c" / "3.pt").rename(tmp_path / "c" / "4.pt")
    with pytest.raises(ReproError, match="no rollout dump"):
        DumpFiles(tmp_path / "c").read(3)
    files = open_rollouts(tmp_path / "a")
    assert type(files) is RolloutFiles and files.digest != a.digest


def test_a_limit_holds_while_an_old_form_is_recognised(tmp_path: Path) -> None:
    """What is too large to read is not read whole to say what it is."""
    write_archive(tmp_path / "0.pt", [plain_sample(tokens=list(range(100_000)))])
    with pytest.raises(ReproError, match="2025-06-24"):
        read_rollout_dump(tmp_path / "0.pt")
    with pytest.raises(ReproError, match="needs more than 10000 bytes"):
        read_rollout_dump(tmp_path / "0.pt", limit=10_000)


@pytest.mark.parametrize("field", [{"rollout_id": 2**70}, {"rollout_id": True}, {"response_length": 2**70}])
def test_counts_beyond_64_bits_are_refused(field: dict[str, Any], tmp_path: Path) -> None:
    """What is a size or stands in an index is a number of 64 bits."""
    head = {"rollout_id": 3} | {k: v for k, v in field.items() if k == "rollout_id"}
    fields = {k: v for k, v in field.items() if k != "rollout_id"}
    write_archive(tmp_path / "0.pt", head | {"samples": [plain_sample(**fields)]})
    with pytest.raises(ReproError, match=next(iter(field))):
        read_rollout_dump(tmp_path / "0.pt")


def test_damage_is_one_line(tmp_path: Path) -> None:
    """A file cut at any byte is refused in one line, and never a traceback."""
    write_rollout_dump(tmp_path / "3.pt", plain_dump())
    whole = (tmp_path / "3.pt").read_bytes()
    for size in range(0, len(whole), 97):
        (tmp_path / "3.pt").write_bytes(whole[:size])
        with pytest.raises(ReproError) as caught:
            read_rollout_dump(tmp_path / "3.pt")
        assert "\n" not in str(caught.value)


def test_a_file_without_a_number_takes_its_name(tmp_path: Path) -> None:
    """The loaders need no rollout_id, so neither is it needed here; it is not invented in writing."""
    write_archive(tmp_path / "8.pt", {"samples": [plain_sample()]})
    dump = read_rollout_dump(tmp_path / "8.pt")
    assert dump.rollout_id == 8 and "rollout_id" not in dump.content()
    (tmp_path / "8.pt").rename(tmp_path / "some.pt")
    with pytest.raises(ReproError, match="rollout_id"):
        read_rollout_dump(tmp_path / "some.pt")
