from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folder_kit import Run, checksum_event, event, f32, i64, sha

from repro_golden.base.errors import ReproError
from repro_golden.dumps.archive.pickling import write_archive
from repro_golden.dumps.run.events import EventLog, checksums, engine_checksums, witness_advantages
from repro_golden.dumps.run.imported import trace_of_folder
from repro_golden.dumps.run.losses import calls_of, loss_name, read_loss_call, with_losses
from repro_golden.dumps.run.records import (
    GradNorm,
    ci_history,
    dashboard_columns,
    grad_norm_name,
    model_hash_name,
    model_hashes,
    read_grad_norm,
    rollout_results,
)
from repro_golden.dumps.train.files import read_train_dump
from repro_golden.dumps.values import Tensor
from repro_golden.trace.tensor_difference import decode, measure, ulp_histogram
from repro_golden.trace.writer import digest_row


@pytest.mark.parametrize(
    ("name", "template", "expected"),
    [
        ("grad_norm-actor-3-1.pt", None, GradNorm("actor", 3, 1)),
        ("grad_norm_critic_0_12.pth", None, GradNorm("critic", 0, 12)),
        ("grad-norms-7-0.pt", None, GradNorm("actor", 7, 0)),
        ("run2_grad_norm_4_0.pt", None, GradNorm("actor", 4, 0)),
        ("grad_norms-5.pt", None, None),
        ("0_1.pt", None, None),
        ("gn.critic.2.0.pt", "gn.{role}.{rollout_id}.{step_id}.pt", GradNorm("critic", 2, 0)),
        ("a+4.pt", "a+{rollout_id}.pt", GradNorm("actor", 4, 0)),
        ("aa4.pt", "a+{rollout_id}.pt", None),
    ],
)
def test_names_of_gradient_norms_say_role_rollout_and_update(name: str, template: str | None, expected) -> None:
    """By what the flag was given, or by the name's last two numbers."""
    assert grad_norm_name(name, template) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.25, 0.25), (3, 3.0), (f32([0.5]), 0.5), (Tensor("bfloat16", np.array(0x3F80, "<u2")), 1.0),
        (np.float64(0.75), 0.75), (math.inf, math.inf), (math.nan, math.nan),
    ],
)  # fmt: skip
def test_a_gradient_norm_is_a_float_or_a_tensor_of_one(tmp_path: Path, value: Any, expected: float) -> None:
    """Also where it is not finite, which is what one wants to see."""
    write_archive(tmp_path / "g.pt", value)
    assert struct.pack("<d", read_grad_norm(tmp_path / "g.pt")) == struct.pack("<d", expected)


@pytest.mark.parametrize("value", [True, "0.5", None, f32([1.0, 2.0]), [0.5], {"grad_norm": 1.0}])
def test_what_is_no_gradient_norm_is_refused(tmp_path: Path, value: Any) -> None:
    """A bool, text, two numbers or a container."""
    write_archive(tmp_path / "g.pt", value)
    with pytest.raises(ReproError, match="no gradient norm"):
        read_grad_norm(tmp_path / "g.pt")


def test_model_hashes_are_by_iteration_rank_and_layer(tmp_path: Path) -> None:
    """The file's folder says the rollout, its name the rank, its content the layers."""
    path = tmp_path / "iter_0000004" / "model_hash_tp1_pp0_dp2_cp0.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"layer_0000": sha("a"), "non_layer": sha("b")}))
    assert model_hash_name(path) == (4, (1, 0, 2, 0))
    assert model_hash_name(tmp_path / "model_hash_tp1_pp0_dp2_cp0.json") is None
    assert model_hashes(path) == {"layer_0000": bytes.fromhex(sha("a")), "non_layer": bytes.fromhex(sha("b"))}
    for bad in ("{}", "[]", '{"layer": 5}', '{"layer": "zz"}', '{"layer": "' + sha("a")[:40], "\x00", "[" * 100_000):
        path.write_text(bad)
        with pytest.raises(ReproError):
            model_hashes(path)


def test_ci_history_keeps_what_is_not_finite(tmp_path: Path) -> None:
    """The markers are numbers again; a point without a step is of no update."""
    path = tmp_path / "7-a.jsonl"
    path.write_text(
        '{"metric": "train/grad_norm", "series": [[0, 0.25], [1, "NaN"], [2, "-Infinity"], [null, 3.0]]}\n'
        '{"metric": "train/ppo_kl", "series": [[1, "Infinity"]]}\n\n'
    )
    history = ci_history(path)
    assert [step for step, _ in history["train/grad_norm"]] == [0, 1, 2]
    assert math.isnan(history["train/grad_norm"][1][1])
    assert history["train/grad_norm"][2] == (2, -math.inf)
    assert history["train/ppo_kl"] == [(1, math.inf)]
    points = [f'{{"metric": "a", "series": [{point}]}}' for point in ('[0, "x"]', "1", "[0, true]", "[0.5, 1]")]
    for bad in ('{"metric": 1, "series": []}', *points, "{", "5"):
        path.write_text(bad)
        with pytest.raises(ReproError, match="line 1"):
            ci_history(path)


def test_dashboard_columns_come_from_parquet(tmp_path: Path) -> None:
    """And what is no Parquet file is one line."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "rollout_0.parquet"
    pq.write_table(pa.table({"sample_index": [1, 0], "tokens": [[1, 2], [3]], "loss_mask": [None, [1]]}), path)
    assert dashboard_columns(path) == {"sample_index": [1, 0], "tokens": [[1, 2], [3]], "loss_mask": [None, [1]]}
    raw = path.read_bytes()
    for bad in (b"", b"PAR1", raw[:-9], raw[: len(raw) // 2] + raw[len(raw) // 2 + 1 :]):
        path.write_bytes(bad)
        with pytest.raises(ReproError, match=r"rollout_0\.parquet"):
            dashboard_columns(path)


def test_a_small_parquet_file_that_repeats_is_not_unpacked(tmp_path: Path) -> None:
    """What its values take counts, not what the file takes; columns that nobody needs, and texts, are left out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "rollout_0.parquet"
    tokens = pa.array([[0] * 200_000] * 20)
    pq.write_table(pa.table({"sample_index": list(range(20)), "tokens": tokens, "text": ["x" * 99] * 20}), path)
    assert path.stat().st_size < 100_000
    with pytest.raises(ReproError, match=r"rollout_0\.parquet needs more than 1000000 bytes of memory"):
        dashboard_columns(path, 1_000_000)
    assert dashboard_columns(path, 1_000_000, names=["sample_index", "text"]) == {"sample_index": list(range(20))}
    assert len(dashboard_columns(path)["tokens"][19]) == 200_000
    folder = tmp_path / "run"
    (folder / "dashboard_columns").mkdir(parents=True)
    path.rename(folder / "dashboard_columns" / path.name)
    with pytest.raises(ReproError, match="needs more than"):
        trace_of_folder(folder, tmp_path / "out", limit=1_000_000)


@pytest.mark.parametrize(
    "name",
    [
        "run.log", "events/e.jsonl", f"7-{'a' * 32}.jsonl", "train/0.jsonl", "dashboard_columns/rollout_0.parquet",
        "iter_0000000/model_hash_tp0_pp0_dp0_cp0.json", "grad_norm-actor-0-0.pt", "train_data/0_0.pt",
        "rollout_data/0.pt", "policy_loss_debug/rank_0_call_0.pt",
    ],
)  # fmt: skip
def test_a_pipe_in_the_place_of_a_file_is_one_line(tmp_path: Path, name: str) -> None:
    """Whoever opens it to read would wait for ever."""
    path = tmp_path / name
    if not name.startswith(("train/", "dashboard", "events")):
        Run("miles", rollouts=1).write(tmp_path)
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    log = path if name == "run.log" else None
    if name == "rollout_data/0.pt":  # it is of use where train dumps lack something, which Miles' do not
        assert trace_of_folder(tmp_path, tmp_path / "out", system="miles")[1]
        return
    with pytest.raises(ReproError, match=name.rsplit("/", 1)[-1]):
        trace_of_folder(tmp_path, tmp_path / "out", system="miles", log=log)


def test_rollout_results_are_json_objects(tmp_path: Path) -> None:
    """One a line, NaN as Python writes it included."""
    path = tmp_path / "0.jsonl"
    path.write_text('{"sample_index": 0, "reward": NaN}\n{"sample_index": 1, "reward": 1.0}\n')
    assert math.isnan(rollout_results(path)[0]["reward"])
    path.write_text("[1]\n")
    with pytest.raises(ReproError, match="line 1 is no sample"):
        rollout_results(path)


def write_events(folder: Path, *lines: str, name: str = "actor_cell0_rank0.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a") as file:
        file.write("".join(lines))
    return folder / name


def test_events_give_metrics_checksums_and_optimizer_state_by_name(tmp_path: Path) -> None:
    """Optimizer hashes stand under the parameter's name; null is a number that was not finite; others are skipped."""
    metrics = {"train/step": 3, "train/grad_norm": None, "train/loss": 0.5, "train/note": "x", "train/flag": True}
    write_events(
        tmp_path,
        event("metric", 1, attempt=0, metrics=metrics),
        event("metric", 1, attempt=0, metrics={"rollout/step": 1, "rollout/raw_reward": 0.25}),
        event("train_group_step_end", 1, cell_outcomes={}),
        event("a_new_kind", 1),
        checksum_event(1),
        event("inference_engine_weight_checksum", None, engine_checksums=[{"w": sha("e")}, {"w": "other"}]),
        event("train_advantage_computation", 1, advantages=[[0.5, None], []], witness_ids=[[9, 9], [2]]),
    )
    log = EventLog(tmp_path)
    log.read()
    assert set(log.steps[3]) == {"train/step", "train/grad_norm", "train/loss"}
    assert math.isnan(log.steps[3]["train/grad_norm"])
    assert log.rollouts[1]["rollout/raw_reward"] == 0.25
    assert log.problems == ["actor_cell0_rank0.jsonl has events of type 'a_new_kind', which are not read"]
    (measured,) = log.of("train_engine_local_weight_checksum", 1)
    sums = checksums(measured)
    assert set(sums) == {"pp0.w", "buffer/pp0.b", "pp0.w/step", "pp0.w/exp_avg", "optimizer.0/param_groups"}
    assert sums["pp0.w"] == bytes.fromhex(sha("w1"))
    assert sums["pp0.w/exp_avg"] == bytes.fromhex(sha("m1"))
    (engines,) = log.of("inference_engine_weight_checksum", None)
    assert [set(engine) for engine in engine_checksums(engines)] == [{"w"}, {"w"}]
    ((source, samples),) = witness_advantages(log.of("train_advantage_computation", 1)).items()
    assert source == ("actor", 0, 0)
    assert [number for number, _ in samples] == [9, 2]
    assert math.isnan(samples[0][1][1])


def test_events_are_read_as_they_grow_and_a_torn_line_waits(tmp_path: Path) -> None:
    """A line without its end is not read, is not an error, and is read once it is whole; nothing is read twice."""
    log = EventLog(tmp_path / "events")
    log.read()  # the folder is not there yet
    line = checksum_event(0)
    path = write_events(tmp_path / "events", checksum_event(5), line[:40])
    log.read()
    assert [event.rollout for event in log.events] == [5]
    assert log.torn == [path]
    write_events(tmp_path / "events", line[40:])
    log.read()
    log.read()
    assert [event.rollout for event in log.events] == [5, 0]
    assert log.torn == []
    assert checksums(log.events[1])["pp0.w"] == bytes.fromhex(sha("w0"))


def test_a_log_that_was_put_back_is_read_anew(tmp_path: Path) -> None:
    """A run that resumes from a checkpoint restores its event log and writes on from there."""
    path = write_events(tmp_path, checksum_event(0), checksum_event(1))
    log = EventLog(tmp_path)
    log.read()
    path.write_text(checksum_event(7))
    log.read()
    assert [event.rollout for event in log.events] == [7]
    assert checksums(log.events[0])["pp0.w"] == bytes.fromhex(sha("w7"))


@pytest.mark.parametrize("kind", ["metric", "train_engine_local_weight_checksum"])
@pytest.mark.parametrize("field", [{"attempt": "abc"}, {"attempt": [None]}, {"attempt": {}}, {"rollout_id": 2**70}])
def test_events_whose_counts_are_none_are_refused(tmp_path: Path, kind: str, field: dict[str, Any]) -> None:
    """Those of metrics as all others."""
    line = json.loads(event(kind, 0, metrics={"train/step": 0, "train/loss": 1.0})) | field
    write_events(tmp_path, json.dumps(line) + "\n")
    with pytest.raises(ReproError, match=rf"line 1: {next(iter(field))} is .*, no count"):
        EventLog(tmp_path).read()


def test_of_several_attempts_the_last_counts(tmp_path: Path) -> None:
    """Training that was started again after a fault leaves the events of both."""
    again = checksum_event(0, weight="again").replace('"attempt": 0', '"attempt": 1')
    metric = {"train/step": 0, "train/loss": 1.0}
    write_events(
        tmp_path,
        checksum_event(0), event("metric", 0, attempt=0, metrics=metric | {"train/old": 1.0}),
        again, event("metric", 0, attempt=1, metrics=metric | {"train/loss": 2.0}),
    )  # fmt: skip
    log = EventLog(tmp_path)
    log.read()
    (measured,) = log.of("train_engine_local_weight_checksum", 0)
    assert checksums(measured)["pp0.w"] == bytes.fromhex(sha("again0"))
    assert log.steps[0] == {"train/step": 0.0, "train/loss": 2.0}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
KEYS = ["state", "metrics", "engine_checksums", "advantages", "witness_ids", "rollout_id", "attempt", "source"]


@given(
    st.sampled_from(
        [
            "metric",
            "train_engine_local_weight_checksum",
            "inference_engine_weight_checksum",
            "train_advantage_computation",
        ]
    ),
    st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4),
    st.dictionaries(st.sampled_from(["param_hashes", "optimizer_hashes", "buffer_hashes"]), JSON, max_size=3),
)
def test_whatever_an_event_holds_reading_ends_in_values_or_one_line(tmp_path_factory, kind: str, more, state) -> None:
    """No JSON makes the reader raise anything but a ReproError."""
    folder = tmp_path_factory.getbasetemp() / "any"
    folder.mkdir(exist_ok=True)
    value = {"type": kind, "rollout_id": 0, "state": state, **more}
    (folder / "e.jsonl").write_text(json.dumps(value) + "\n")
    try:
        log = EventLog(folder)
        log.read()
        for event in log.events:
            read = {
                "train_engine_local_weight_checksum": checksums,
                "inference_engine_weight_checksum": engine_checksums,
            }
            read.get(event.kind, lambda single: witness_advantages([single]))(event)
    except ReproError as error:
        message = str(error)
        assert "\n" not in message


@given(st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
def test_arbitrary_bytes_are_one_line_in_every_reader(tmp_path_factory, raw: bytes) -> None:
    """Files that are no records at all."""
    path = tmp_path_factory.getbasetemp() / "any.bin"
    path.write_bytes(raw)
    for reader in (read_grad_norm, model_hashes, ci_history, rollout_results, read_loss_call):
        try:
            reader(path)
        except ReproError as error:
            message = str(error)
            assert "\n" not in message


def loss_call(rank: int, call: int, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A file of the policy loss."""
    count = sum(len(sample["train_log_probs"].array) for sample in samples)
    flat = f32(np.arange(count))
    return {"rank": rank, "call": call, "samples": samples, "ppo_kl": flat, "pg_loss": flat, "finite": {}}


def test_policy_loss_samples_are_found_among_those_of_the_train_dump(tmp_path: Path) -> None:
    """By lengths, log-probs and advantages, whatever their order; flat columns are cut to the samples."""
    run = Run("miles")
    ((name, value),) = run.files(0)
    write_archive(tmp_path / name, value)
    dump = read_train_dump(tmp_path / name)
    order = [3, 0, 5, 1, 4, 2]
    for call, indices in enumerate((order[:4], order[4:])):
        samples = [
            {
                "index": k,
                "total_length": dump.samples[i]["total_lengths"],
                "response_length": dump.samples[i]["response_lengths"],
                "train_log_probs": dump.samples[i]["log_probs"],
                "advantages": dump.samples[i]["advantages"],
                "rollout_log_probs": dump.samples[i]["rollout_log_probs"],
            }
            for k, i in enumerate(indices)
        ]
        write_archive(tmp_path / f"rank_0_call_{call}.pt", loss_call(0, call, samples))
    calls = [read_loss_call(tmp_path / f"rank_0_call_{call}.pt") for call in (0, 1)]
    assert with_losses(dump, [calls])
    for sample in dump.samples:
        assert sample["policy_loss/0/train_log_probs"].array.tolist() == sample["log_probs"].array.tolist()
        assert len(sample["policy_loss/0/ppo_kl"].array) == sample["response_lengths"]
    other = read_train_dump(tmp_path / name)
    other.samples[2]["advantages"] = f32(other.samples[2]["advantages"].array + 1)
    given_before = [dict(sample) for sample in other.samples]
    assert not with_losses(other, [calls])
    assert [set(sample) for sample in other.samples] == [set(sample) for sample in given_before]


def test_calls_are_counted_off_against_the_samples_of_each_update() -> None:
    """Micro-batches follow each other; a call that lies in two updates is refused, a missing one is waited for."""
    assert loss_name("rank_3_call_12.pt") == (3, 12)
    assert loss_name("rank_3_call_12.pt.tmp") is None
    assert calls_of([(0, 4), (1, 3)], {0: 2, 1: 2, 2: 3}) == {0: [0, 1], 1: [2]}
    assert calls_of([(0, 4), (1, 3)], {0: 2, 1: 2}) == {0: [0, 1]}
    assert calls_of([(0, 4)], {1: 4}) == {}
    with pytest.raises(ReproError, match="call 1 of the policy loss has 3 samples, and 2"):
        calls_of([(0, 4)], {0: 2, 1: 3})
    with pytest.raises(ReproError, match="has 0 samples"):
        calls_of([(0, 4)], {0: 0})


def test_what_is_no_dump_of_the_policy_loss_is_refused(tmp_path: Path) -> None:
    """No samples, no rank, no log-probs."""
    for value in (
        [1],
        {"samples": [{}], "rank": 0, "call": 0},
        {"samples": [], "rank": "0", "call": 0},
        {"samples": 3},
    ):
        write_archive(tmp_path / "x.pt", value)
        with pytest.raises(ReproError, match=r"x\.pt"):
            read_loss_call(tmp_path / "x.pt")


def test_digests_are_compared_but_never_measured() -> None:
    """A row of a digest differs when its bytes do; there is no size, no order and no histogram of it."""
    a, b = (digest_row("update", "w", bytes.fromhex(sha(text))) for text in "ab")
    assert a.fingerprint != b.fingerprint
    assert a.fingerprint == digest_row("update", "w", bytes.fromhex(sha("a"))).fingerprint
    size = measure("sha256", a.values or b"", b.values or b"", 1)
    assert (size.elements, str(size)) == (0, "not measured")
    assert ulp_histogram("sha256", a.values or b"", b.values or b"") == []
    with pytest.raises(ValueError, match="no order"):
        decode("sha256", a.values or b"")
    assert i64([1]).numel == 1
