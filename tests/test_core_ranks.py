"""A trainer in process on several ranks: one trace of all, proved and bisected, and the right rank blamed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SOURCE, Repo, environment, patient
from ranks_kit import answer, case_of, failing, place_of, repository, run, traced

from repro_golden.base.errors import MachineFailureError
from repro_golden.base.machine.processes import MARK
from repro_golden.compare.traces import first_difference
from repro_golden.recording.rank_group import lost_a_peer, result_path
from repro_golden.replay.children import Child, Run
from repro_golden.replay.ranks import Lost, Ranks
from repro_golden.repository.checkout import Place
from repro_golden.trace import Trace, dump_path

_ONE_STATE = 5000
"""Bytes: two ranks' state before one step, and not before two."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A folder with the trainer, and traces of it on one rank and on two."""
    place = place_of(tmp_path_factory.mktemp("ranks") / "root")
    states = {step: str(place.root / "states" / str(step)) for step in (1, 2)}
    traced(case_of(1), place, "one")
    traced(case_of(2), place, "two", states=states, states_budget=_ONE_STATE, terminal=True)
    return place


@pytest.mark.whole
def test_one_name_and_one_fingerprint_for_a_tensor_on_any_number_of_ranks(place: Place) -> None:
    """Weights at load, columns and metrics of two ranks are one row each, with the fingerprint of one process."""
    trace, two = Trace(place.root / "one"), Trace(place.root / "two")
    assert two.complete and [len(t.steps) for t in (trace, two)] == [3, 3]
    alone, together = ({r.key: r.fingerprint for r in t.rows(0)} for t in (trace, two))
    assert set(alone) == set(together), "no signal is kept by rank"
    differing = {name for key, name in alone if alone[key, name] != together[key, name]}
    assert differing <= {"bias"}, "the ranks add up its gradient in another order"
    assert (trace.header.identity["layout"], two.header.identity["layout"]) == (
        {"ranks": "1", "threads": "1"},
        {"ranks": "2", "threads": "1"},
    )
    assert trace.header.subject == two.header.subject and trace.header.rollouts == two.header.rollouts


def test_the_end_of_a_run_is_told_by_rank(place: Place) -> None:
    """Each rank's final state is fingerprinted under its own name; replicas are equal there, shards are not."""
    terminal = (Trace(place.root / "two").end or {})["terminal"]
    assert set(terminal) == {f"rank-0000{r}/{name}" for r in (0, 1) for name in ("weight", "bias", "step")}
    assert terminal["rank-00000/bias"] == terminal["rank-00001/bias"]
    assert terminal["rank-00000/weight"] != terminal["rank-00001/weight"]


def test_the_output_of_all_ranks_is_kept_apart_and_together(place: Place) -> None:
    """Each rank has a log of its own; the run's holds them all, in the order of the ranks."""
    logs = [place.root / f"two.log{end}" for end in (".rank-0", ".rank-1", "")]
    assert logs[0].read_text().count("train/loss") == 3
    assert logs[2].read_text() == logs[0].read_text() + logs[1].read_text()


@pytest.mark.whole
def test_two_ranks_go_on_from_the_state_that_they_agreed_to_keep(place: Place) -> None:
    """Where only one state fits all ranks drop the same one; from the other they make the straight run's own step."""
    (kept,) = (place.root / "states").iterdir()
    size = sum(p.stat().st_size for p in kept.iterdir())
    assert len(list(kept.iterdir())) == 2 and size <= _ONE_STATE < 2 * size
    resumed = traced(case_of(2), place, "resumed", 1, load=str(kept), first_step=int(kept.name))
    straight = Trace(place.root / "two").steps[int(kept.name)]
    assert [(r.step, r.root) for r in resumed.steps] == [(int(kept.name), straight.root)]


@pytest.mark.whole
def test_a_change_is_planted_and_written_out_under_the_canonical_name(place: Place) -> None:
    """Several runs in one job: each plant is seen alone and first; a dump holds the whole tensor of both ranks."""
    two = Trace(place.root / "two")
    wanted = [(0, "grad", "weight"), (0, "grad", "bias")]
    folders = [place.root / f"plant-{name}" for _, _, name in wanted]
    runs = [
        Run(steps, trace=str(folder), baseline=str(two.directory), perturbation=at, dump=wanted)
        for folder, at, steps in zip(folders, wanted, (1, 3), strict=True)  # the second one ends early
    ]
    assert [result.diverged for result in run(case_of(2), place, *runs)] == [True, True]
    for folder, at in zip(folders, wanted, strict=True):
        trace = Trace(folder)
        divergence = first_difference(two, trace)
        assert divergence and (divergence.step, divergence.phase, divergence.signal) == at
        assert not any("@" in row.name for row in trace.rows(0)), "replicas do not part"
        assert (trace.end or {})["reason"] == "diverged"
    for at, size in zip(wanted, (4 * 3 * 4, 4 * 4), strict=True):
        planted, clean = (dump_path(folder, *at).read_bytes() for folder in folders)
        assert len(planted) == len(clean) == size
        assert [k for k in range(size) if planted[k] != clean[k]] == [0], "one ULP of the first element"


@pytest.mark.whole
def test_a_replica_that_differs_is_kept_by_rank(place: Place) -> None:
    """A rank whose bias drifts from step 1 on is told from the other; step 0 agrees with the healthy run."""
    case = case_of(2, fault={"rank": 1, "step": 1, "how": "differ"})
    divergence = first_difference(Trace(place.root / "two"), traced(case, place, "differs"))
    assert divergence and (divergence.step, divergence.phase) == (1, "forward")
    names = {row.name for row in Trace(place.root / "differs").rows(1) if row.phase == "update"}
    assert names == {"bias@0", "bias@1", "weight"}


@pytest.mark.whole
def test_a_signal_that_one_rank_stops_showing_is_kept_by_rank(place: Place) -> None:
    """Columns, metrics and replicas that rank 1 forgets from step 1 on are no longer everybody's; the rest still is."""
    forgotten = [["input", "rewards"], ["forward", "log_probs"], ["loss", "loss"], ["update", "bias"]]
    case = case_of(2, fault={"rank": 1, "step": 1, "how": "forget", "signals": forgotten})
    two, trace = Trace(place.root / "two"), traced(case, place, "forgets")
    assert trace.steps[0].root == two.steps[0].root
    for step in (1, 2):
        shown, usual = ({(row.phase, row.name) for row in trace.rows(step)} for trace in (trace, two))
        assert shown ^ usual == {(phase, end) for phase, name in forgotten for end in (name, f"{name}@0")}


def test_a_shard_that_one_rank_stops_showing_is_a_failure(place: Place) -> None:
    """The others' shards no longer add up; the tensor is named."""
    fault = {"rank": 1, "step": 1, "how": "forget", "signals": [["update", "rows"]]}
    failure = failing(case_of(2, fault=fault), place, "partial")
    assert (failure.stage, failure.step) == ("step", 1) and "the ranks hold only a part of weight" in failure.message
    assert len(Trace(place.root / "partial").steps) == 1


# -- bad input


@pytest.mark.whole
@pytest.mark.parametrize(("rank", "how"), [(0, "raise"), (1, "exit")])
def test_the_rank_that_failed_first_is_named(place: Place, rank: int, how: str) -> None:
    """The others fail in a collective because it went away; its step, log and last line are told, not theirs."""
    failure = failing(case_of(2, fault={"rank": rank, "step": 2, "how": how}), place, f"dead-{how}")
    expected = {"raise": "rank 0: ValueError: no such arm", "exit": "rank 1 exited with 9: rank 1 is about to exit"}
    assert (failure.stage, failure.step, failure.message) == ("step", 2, expected[how])
    assert (
        failure.log.endswith(f".log.rank-{rank}") and f"rank {rank} is about to {how}" in Path(failure.log).read_text()
    )
    assert len(Trace(place.root / f"dead-{how}").steps) == 2, "what was recorded before can be read"


@pytest.mark.whole
def test_a_rank_that_lost_its_peer_is_not_blamed(tmp_path: Path) -> None:
    """The peer that then shows why is; where all say no more than that a peer went, the first one that said so."""
    write = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(sys.argv[2]); "
    for echo, blamed in ((False, (1, 9)), (True, (1, None))):
        children = []
        for rank in (0, 1):
            report = {"failure": {"stage": "step", "step": 0, "message": "lost", "peer": True, "at": 2.0 - rank}}
            code = write + "time.sleep(99)" if rank == 0 or echo else "import sys, time; time.sleep(1); sys.exit(9)"
            result = str(result_path(tmp_path, rank))
            command = [sys.executable, "-S", "-c", code, result, json.dumps(report)]
            children.append(Child(command, tmp_path, os.environ, tmp_path / f"log-{rank}", 60.0))
        with pytest.raises(Lost) as raised:
            Ranks(children, tmp_path).run()
        assert (raised.value.rank, raised.value.code) == blamed
    assert lost_a_peer(ConnectionResetError()) and lost_a_peer("[..]/gloo/transport/tcp/pair.cc:534] Connection closed")
    assert not lost_a_peer(ValueError("no such arm"))


def test_a_killed_rank_is_the_machines_failure(place: Place) -> None:
    """A rank that is killed for memory says nothing of the commit, and is named."""
    with pytest.raises(MachineFailureError, match="rank 1 of the trainer was killed by SIGKILL"):
        traced(case_of(2, fault={"rank": 1, "step": 0, "how": "kill"}), place, "killed")


@pytest.mark.whole
def test_the_rank_that_hangs_is_named(place: Place) -> None:
    """At the time limit the rank that waits in no collective is named, and its log shows where it is."""
    limit = round(patient(12.0))
    case = case_of(2, timeout=limit, fault={"rank": 1, "step": 1, "how": "hang"})
    failure = failing(case, place, "hung")
    assert failure.stage == "timeout" and f"no end within {limit:g} s: rank 1 is not in a collective" in failure.message
    text = Path(failure.log).read_text()
    assert failure.log.endswith(".rank-1") and "in fail\n" in text and "most recent call first" in text
    assert "in all_gather" in Path(failure.log).with_name("hung.log.rank-0").read_text()
    assert len(Trace(place.root / "hung").steps) == 1


def test_no_rank_outlives_a_killed_parent(tmp_path: Path) -> None:
    """The ranks die with the process that started them."""
    place = place_of(tmp_path / "root")
    mark = uuid.uuid4().hex
    code = (
        "import sys; from pathlib import Path; from ranks_kit import Place, Run, case_of, launch\n"
        "root = Path(sys.argv[1]); case = case_of(2, fault={'rank': 1, 'step': 0, 'how': 'hang'})\n"
        "launch(case, Place(root), [Run(3, trace=str(root / 'trace'))], root / 'trace.log')"
    )
    variables = environment() | {MARK: mark, "PYTHONPATH": str(SOURCE / "tests")}
    parent = subprocess.Popen([sys.executable, "-c", code, str(place.root)], env=variables)
    log = place.root / "trace.log.rank-1"
    _until(lambda: log.exists() and "about to hang" in log.read_text())
    assert len(_marked(mark)) == 3
    parent.kill()
    parent.wait()
    _until(lambda: not _marked(mark))


def _until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _marked(mark: str) -> list[int]:
    outcomes = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0]
            if mark.encode() in (folder / "environ").read_bytes() and state not in (b"Z", b"X"):
                outcomes.append(int(folder.name))
        except OSError:
            continue
    return outcomes


# -- golden runs and bisects


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Repo:
    """A repository with the golden run of a trainer on two ranks."""
    repo = repository(tmp_path_factory.mktemp("guarded"))
    repo.commit("Record")
    repo.git("tag", "recorded")
    return repo


def test_a_golden_run_on_two_ranks_is_proved_and_verified(guarded: Repo) -> None:
    """The four proofs hold at two ranks, and verify agrees."""
    (record,) = (guarded.root / "golden" / "runs").glob("*/*/run.json")
    proofs = json.loads(record.read_text())["proofs"]
    assert all(p["passed"] for p in proofs)
    planted = [p["detail"] for p in proofs if "one ULP" in p["name"]]
    assert [d.partition(" at ")[0] for d in planted] == ["rollout_log_probs", "log_probs", "weight", "weight"]
    assert answer(guarded, "golden", "verify")["bandit"]["agrees"]


@pytest.mark.campaign
def test_a_change_on_the_second_rank_is_bisected_and_explained(guarded: Repo) -> None:
    """The commit that moved the numbers is named with its signal; explain replays both sides on two ranks."""
    guarded.edit("training/interface.py", '"""One update by REINFORCE."""', '"""One update."""')
    guarded.commit("Say less")
    old = "        d_weight = product(d_logits[:, RANK * self.rows : (RANK + 1) * self.rows].T, self.inputs())\n"
    guarded.edit("training/interface.py", old, old + "        d_weight[-1] *= 1 + 1e-6 * RANK\n")
    culprit = guarded.commit("Scale the last row, on the second rank")
    answered = answer(guarded, "bisect", "recorded..HEAD")
    assert answered["culprit"]["commit"] == culprit
    assert (answered["divergence"]["phase"], answered["divergence"]["signal"]) == ("grad", "weight")
    assert "d_weight[-1] *= 1 + 1e-6 * RANK" in json.dumps(answered["culprits"][0]["explanation"])


@pytest.mark.campaign
def test_one_rank_and_two_are_compared_as_layouts(guarded: Repo) -> None:
    """The ranks add the bias's gradient up in another order: the layouts agree within a few units of epsilon."""
    answered = answer(guarded, "bisect", "--layout", "case..one", "--at", "recorded")
    assert answered["outcome"] == "agree" and answered["comparison"]["worst"]["units"] < 64
    assert answered["comparison"]["first"]["signal"] == "bias"
