"""Files of trainers with one field out of order: a value or one line, whatever the field holds and wherever it is."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rollout_dump_kit import full_dump, plain_dump
from run_folder_kit import Run, checksum_event, event, f32, i64, sha

from repro.cli import cli
from repro_golden.base.errors import ReproError
from repro_golden.base.systems import SYSTEMS, System
from repro_golden.dumps.archive.pickling import write_archive
from repro_golden.dumps.rollout.checks import check_dump
from repro_golden.dumps.rollout.files import content_digest, read_rollout_dump
from repro_golden.dumps.run.imported import trace_of_folder
from repro_golden.dumps.values import Tensor, same
from repro_golden.store.dump_conversion import from_rollout, to_rollout
from repro_golden.store.rollout_file import read_rollout, write_rollout

SETTINGS = settings(
    max_examples=max(4, settings().max_examples // 8),  # each makes some thirty dumps
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip

NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 7, 10**9, 10**18, 2**31, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1, 2**70, -(2**70)]
)
FLOATS = st.sampled_from([0.5, -0.0, float("nan"), float("inf"), -float("inf"), 1e300, 5e-324])
TEXTS = st.sampled_from(["", "a", "abc", "3", "a\nb", "<script>", "\x1b[31m", "é", "\u2028", "thd", "bshd"])
PLAIN = st.none() | st.booleans() | NUMBERS | FLOATS | TEXTS
JSON = st.recursive(
    PLAIN | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=4,
)


HUGE = 1 << 8000
"""A number of nearly as many bits as a dump may hold."""


def _tensors() -> Iterator[Any]:
    """Tensors and arrays of dtypes and shapes that no such field has."""
    for shape in ((), (0,), (1,), (3,), (2, 2), (3, 1, 2), (10**12, 0), (0, 10**12)):
        count = int(np.prod(shape))
        yield Tensor("int64", np.arange(count, dtype="<i8").reshape(shape))
        yield Tensor("bfloat16", np.full(shape, 0x7FC0, "<u2"))
        yield np.full(shape, -0.5, "<f4")
    for dtype, bits in (
        ("float8_e4m3fn", "|u1"), ("bool", "|b1"), ("complex64", "<c8"), ("uint64", "<u8"), ("float16", "<f2"),
        ("int8", "|i1"), ("float64", "<f8"), ("uint16", "<u2"),
    ):  # fmt: skip
        yield Tensor(dtype, np.ones(3, bits))
    yield np.array(["a", "bc", "d"])
    yield np.array([None, 1, "x"], dtype=object)
    yield np.zeros(0, bool)
    yield np.array(2**64 - 1, np.uint64)
    yield from (np.float32("nan"), np.int64(-1), np.uint64(2**64 - 1), np.complex64(1j), np.bool_(True))


LEAVES = PLAIN | st.sampled_from(list(_tensors())) | st.sampled_from([2j, b"x", HUGE, "\ud800", {1, 2}])
ODD = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(TEXTS | st.integers(-1, 3) | st.just(HUGE), inner, max_size=3)
    ),
    max_leaves=4,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a value, at any depth."""
    if isinstance(value, dict):
        inner: Any = value.items()
    elif isinstance(value, (list, tuple)):
        inner = enumerate(value)
    else:
        return
    for key, item in inner:
        yield (*path, key)
        yield from _places(item, (*path, key))


def changes(odd: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """One to three changes: which place, whether among the upper levels alone, what to do, and with what."""
    kinds = st.sampled_from(["replace", "replace", "replace", "remove", "add", "resize"])
    change = st.tuples(st.integers(0, 10_000), st.booleans(), kinds, TEXTS, st.integers(0, 3), odd)
    return st.lists(change, min_size=1, max_size=3)


def mutated(value: Any, many: list[Any]) -> Any:
    """A value with some of its parts replaced, removed, doubled, or cut."""
    mutated = copy.deepcopy(value)
    for number, upper, kind, name, count, odd in many:
        # few fields are single ones: choose among the upper levels as often as among all
        places = [path for path in _places(mutated) if not upper or len(path) <= 3]
        if not places:
            break
        *path, key = places[number % len(places)]
        within = mutated
        for step in path:
            within = within[step]
        if isinstance(within, tuple):
            continue
        if kind == "replace":
            within[key] = odd
        elif kind == "remove":
            del within[key]
        elif kind == "add" and isinstance(within, dict):
            within[name] = odd
        elif kind == "add":
            within.insert(0, odd)
        else:
            within[key] = _resized(within[key], count)
    return mutated


def _resized(value: Any, count: int) -> Any:
    if isinstance(value, Tensor) and value.array.ndim:
        return Tensor(value.dtype, np.resize(value.array, (count, *value.array.shape[1:])))
    return value[:count] if isinstance(value, (list, str)) else [value] * count


def outcome(make: Callable[[], Any]) -> Any:
    """What comes of it: a value, or None for one line; anything else, warnings among it, fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return make()
        except ReproError as error:
            message = str(error)
            assert message and len(message.splitlines()) == 1, message
            assert len(message) < 4000
            message.encode()
            return None


def traced(folder: Path, out: Path, **how: Any) -> Any:
    """The trace of a folder, made anew."""
    shutil.rmtree(out, ignore_errors=True)
    return outcome(lambda: trace_of_folder(folder, out, **how))


RUNS = {
    "slime": Run("slime", count=3, dp=2),
    "miles": Run("miles", count=3, cp=2),
    "bshd": Run("miles", count=3, cp=2, qkv_format="bshd"),
    "old": Run("old", count=3, cp=2),
    "relax": Run("relax", count=3, cp=2),
}


@pytest.mark.parametrize("name", list(RUNS))
@SETTINGS
@given(many=changes(ODD), at=st.integers(0, 9))
def test_a_train_dump_with_any_fields_is_a_trace_or_one_line(tmp_path: Path, name: str, many: Any, at: int) -> None:
    """Of each of the trainers, one file of several, beside a rollout dump that is in order."""
    run, folder = RUNS[name], tmp_path / "run"
    if not folder.exists():
        run.write(folder)
    files = list(run.files(1))
    file, value = files[at % len(files)]
    write_archive(folder / "train_data" / file, mutated(value, many))
    traced(folder, tmp_path / "out", system="slime" if name == "old" else run.system)


@pytest.mark.parametrize("system", ["miles", "relax"])
@SETTINGS
@given(many=changes(ODD))
def test_a_rollout_dump_beside_train_dumps_may_hold_anything(tmp_path: Path, system: str, many: Any) -> None:
    """It says the order of samples, or it does not."""
    run, folder = RUNS[system], tmp_path / "run"
    if not folder.exists():
        run.write(folder)
    write_archive(folder / "rollout_data" / "0.pt", mutated(run.rollout_dump(0), many))
    traced(folder, tmp_path / "out")


def records(run: Run) -> dict[str, Any]:
    """What Miles leaves beside its dumps, each as the value that its file holds; JSON lines as lists."""
    whole = run.columns(0)
    samples = [
        {
            "index": i, "total_length": whole["total_lengths"][i], "response_length": whole["response_lengths"][i],
            "train_log_probs": whole["log_probs"][i], "advantages": whole["advantages"][i],
            "rollout_log_probs": whole["rollout_log_probs"][i],
        }
        for i in range(run.count)
    ]  # fmt: skip
    flat = f32(np.arange(sum(whole["response_lengths"])))
    lines = [
        event("metric", 0, attempt=0, metrics=run.metrics(0)),
        event("metric", 0, attempt=0, metrics={"rollout/step": 0, "rollout/raw_reward": 0.25}),
        checksum_event(0),
        event("inference_engine_weight_checksum", None, engine_checksums=[{"w": sha("e")}, {"w": "other"}]),
        event("train_advantage_computation", 0, advantages=[[0.5, None], []], witness_ids=[[9, 9], [2]]),
    ]
    return {
        "grad_norm-actor-0-0.pt": f32([0.25]),
        "policy_loss_debug/rank_0_call_0.pt": {"rank": 0, "call": 0, "samples": samples, "ppo_kl": flat},
        "events/actor_cell0_rank0.jsonl": [json.loads(line) for line in lines],
        f"gate/7-{'a' * 32}.jsonl": [{"metric": "train/grad_norm", "series": [[0, 0.25], [1, "NaN"], [None, 1.0]]}],
        "ckpt/iter_0000000/model_hash_tp0_pp0_dp0_cp0.json": {"layer_0000": sha("h"), "other": sha("i")},
        "train/5.jsonl": [{"sample_index": i, "tokens": [1, 2], "response_length": 1, "reward": 0.5} for i in (1, 0)],
    }


def put(path: Path, value: Any) -> None:
    """Write a record in its form."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".pt":
        write_archive(path, value)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(line) + "\n" for line in (value if isinstance(value, list) else [value])))
    else:
        path.write_text(json.dumps(value))


SIDE = Run("miles", count=3, rollouts=1)


@pytest.mark.parametrize("name", list(records(SIDE)))
@pytest.mark.parametrize("alone", [False, True])
@SETTINGS
@given(changed=changes(ODD), of_json=changes(JSON), whole=JSON)
def test_records_with_any_fields_are_a_trace_or_one_line(
    tmp_path: Path, name: str, alone: bool, changed: Any, of_json: Any, whole: Any
) -> None:
    """Gradient norms, policy losses, events, CI history, hashes and results, beside train dumps and without them."""
    folder, every = tmp_path / "run", records(SIDE)
    if not folder.exists():
        if not alone:
            SIDE.write(folder)
        for other, value in every.items():
            put(folder / other, value)
    value = every[name]
    if isinstance(value, (dict, list)):
        value = mutated(value, changed if name.endswith(".pt") else of_json)
    else:
        value = changed[0][-1]
    put(folder / name, value if value else whole)
    traced(folder, tmp_path / "out", system="miles")


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("full", [False, True])
@SETTINGS
@given(many=changes(ODD))
def test_a_rollout_dump_with_any_fields_goes_there_and_back_or_is_one_line(
    tmp_path: Path, system: System, full: bool, many: Any
) -> None:
    """Read, checked, shown, digested; as a rollout of ours in a file it is the same dump again, and another's too."""
    whole = full_dump(system) if full else plain_dump(system)
    path = tmp_path / "3.pt"
    write_archive(path, mutated(whole.content(), many))
    dump = outcome(lambda: read_rollout_dump(path, system=system))
    if dump is None:
        return
    outcome(lambda: cli.main(["rollout", "show", str(path), "--system", system], standalone_mode=False))
    outcome(lambda: check_dump(dump, group_size=2, layers=2, topk=2))
    outcome(lambda: content_digest(dump))
    rollout = outcome(lambda: to_rollout(dump, reward_key="acc"))
    if rollout is None:
        return
    kept = tmp_path / "0.safetensors"
    outcome(lambda: write_rollout(kept, rollout))
    back, losses = from_rollout(read_rollout(kept), system)
    assert not losses
    assert same(back.content(), dump.content())
    for other in SYSTEMS:
        outcome(lambda other=other: from_rollout(rollout, other))


BOMBS = {
    "rank": lambda dump: dump | {"rank": 2**70},
    "rank below 2**70": lambda dump: dump | {"rank": 10**15},
    "cp_size": lambda dump: dump | {"cp_size": 10**9},
    "cp_rank": lambda dump: dump | {"cp_rank": 10**9, "cp_size": 2**16},
    "bool": lambda dump: dump | {"rank": True},
    "rollout_id": lambda dump: dump | {"rollout_id": 2**70},
    "lengths": lambda dump: (
        dump | {"rollout_data": {"response_lengths": [2**39], "total_lengths": [2**39], "log_probs": [f32([0.5])]}}
    ),
    "no bytes": lambda dump: dump | {"rollout_data": {"response_lengths": i64(np.zeros((10**12, 0)))}},
    "raw_reward": lambda dump: dump | {"rollout_data": dump["rollout_data"] | {"raw_reward": 0.5}},
}


@pytest.mark.parametrize("bomb", list(BOMBS))
def test_numbers_of_a_file_are_never_a_size(tmp_path: Path, bomb: str) -> None:
    """What would be a loop or memory beyond all bounds is one line."""
    run = Run("miles", rollouts=1)
    ((name, value),) = run.files(0)
    write_archive(tmp_path / "train_data" / name, BOMBS[bomb](value))
    with pytest.raises(ReproError):
        trace_of_folder(tmp_path, tmp_path / "out")
