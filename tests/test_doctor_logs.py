"""Each rule of logs, on a log that has its symptom and on one that has not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_log_kit import (
    BACKWARD,
    LOADED,
    RULES,
    SCHEDULER,
    STAMP,
    arguments,
    clean,
    engine,
    found,
    read,
    step,
    trace,
)
from examples_kit import at_most
from findings_kit import PATIENTS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from repro.doctor.artefacts.launches.scripts import read_launch
from repro.doctor.examine import examine, look

DIED = [
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    "\tclass_name: MegatronTrainRayActor",
    "\tactor_id: 7a7e28706e933f93da5fe49701000000",
    "\tpid: 26103",
    "\tname: actor_rank=5",
    "\tnamespace: 0b6abfec",
    "\tip: 10.80.8.181",
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) The "
    "process is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called.",
]


COLOCATED = [*arguments(colocate=True, sglang_mem_fraction_static=0.8, load="/ckpt"), LOADED]


def lines_of(rule: str) -> list[str]:
    """A log in which a rule finds something."""
    return (PATIENTS / rule / "faulty" / "train.log").read_text().splitlines()


def test_clean_run_has_no_finding(tmp_path: Path) -> None:
    """A run in which nothing is wrong, whose samples quote every kind of error, gives no finding at all."""
    assert found(read(tmp_path, clean())) == {}


@pytest.mark.parametrize(
    "name", sorted({"illegal-memory-access", "port-collision", "rank-died", "segfault", "disk-full"})
)
def test_symptom_that_training_outlives_is_no_error(name: str, tmp_path: Path) -> None:
    """Where steps follow, a symptom that did not end the run is a warning; an illegal access stays what it is."""
    (first, *_) = found(read(tmp_path, [*lines_of(name), step(7), step(8)]), name)[name]
    assert (first.severity or "error") == ("error" if name == "illegal-memory-access" else "warning")


def test_a_pretraining_from_scratch_is_no_error(tmp_path: Path) -> None:
    """Random weights are right where nothing samples rollouts; they are wrong where the launch or the log says so."""
    plain = [line.partition("\x1b[0m ")[2] for line in lines_of("checkpoint-random-init")]
    for more, severity in (([], "note"), (arguments(rollout_batch_size=32), None)):
        (only,) = found(read(tmp_path, [*more, *plain]), "checkpoint-random-init")["checkpoint-random-init"]
        assert only.severity == severity


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-8-sig"])
def test_a_log_is_read_in_the_encoding_it_begins_with(tmp_path: Path, encoding: str) -> None:
    """As PowerShell writes what it redirects; the line that is shown is the log's."""
    lines = [f"[2026-01-01 00:00:00 rank0] model.py:107 - step {n}: {{'train/loss': {v}}}" for n, v in enumerate("1x")]
    path = tmp_path / "train.log"
    path.write_text("\n".join(lines).replace("x", "nan") + "\n", encoding=encoding)
    findings = examine(look([path])).findings
    assert ("loss-not-finite", 2) in {(finding.rule, finding.where.line) for finding in findings}


def test_ladder_skips_rungs_that_are_taken(tmp_path: Path) -> None:
    """The ladder of illegal accesses says what is done already, and begins with what is left."""
    words = ["an illegal memory access was encountered"]
    high = found(read(tmp_path, words))["illegal-memory-access"][0]
    assert "1. lower --sglang-mem-fraction-static to 0.7, then 0.6" in high.fix
    assert "already done" not in high.message
    assert "speculative decoding off, if it is on" in high.fix and "DeepEP off, if it is on" in high.fix
    args = arguments(sglang_mem_fraction_static=0.55, sglang_disable_cuda_graph=True, sglang_moe_a2a_backend="deepep")
    low = found(read(tmp_path, [*args, *words], "low.log"))["illegal-memory-access"][0]
    assert "already done: --sglang-mem-fraction-static 0.55, --sglang-disable-cuda-graph" in low.message
    assert "mem-fraction" not in low.fix
    assert "turn DeepEP off;" in low.fix and "speculative" not in low.fix
    server = engine(f"[{STAMP}] server_args=ServerArgs({'x' * 900}, mem_fraction_static=0.7, y=1)")
    assert "(now 0.7) to 0.6" in found(read(tmp_path, [server, *words], "mid.log"))["illegal-memory-access"][0].fix


def test_launch_says_what_the_log_does_not(tmp_path: Path) -> None:
    """With the launch script beside the log, findings know its flags and variables."""
    script = tmp_path / "run.sh"
    script.write_text(
        "#!/bin/bash\nexport CUDA_LAUNCH_BLOCKING=1\nexport NCCL_DEBUG=INFO\n"
        "python3 train.py --colocate --load /ckpt --sglang-mem-fraction-static 0.9 --use-fault-tolerance "
        "--rollout-num-gpus-per-engine 2 --actor-num-gpus-per-node 8\n"
    )
    launch = read_launch(script)
    accesses = [engine("CUDA error: an illegal memory access was encountered")]
    (only,) = RULES["illegal-memory-access"].check(read(tmp_path, accesses), launch)
    assert "already done: CUDA_LAUNCH_BLOCKING=1" in only.message
    assert "DeepEP" not in only.fix
    assert "(now 0.9) to 0.7, then 0.6" in only.fix
    (only,) = RULES["oom-first-step"].check(read(tmp_path, BACKWARD, "oom.log"), launch)
    assert "--sglang-mem-fraction-static is 0.9" in only.message
    assert not list(RULES["oom-training"].check(read(tmp_path, BACKWARD, "oom.log"), launch))
    (only,) = RULES["checkpoint-never-loaded"].check(read(tmp_path, [step(0)], "steps.log"), launch)
    assert only.certainty is None
    (only,) = RULES["port-collision"].check(read(tmp_path, lines_of("port-collision"), "port.log"), launch)
    assert "--rollout-num-gpus-per-engine 8 (now 2)" in only.fix
    (only,) = RULES["weight-sync-hang"].check(read(tmp_path, lines_of("weight-sync-hang"), "sync.log"), launch)
    assert "NCCL_DEBUG" not in only.fix


def test_memory_errors_are_told_apart(tmp_path: Path) -> None:
    """The same exception is the first step's, the second step's, training's or an engine's, by what stands before."""
    alone = [LOADED]
    expected = {
        "oom-first-step": [*COLOCATED, *BACKWARD],
        "oom-second-step": [*COLOCATED, step(0), *BACKWARD],
        "oom-training": [*alone, *BACKWARD],
        "oom-engine": [*alone, *SCHEDULER],
    }
    for name, lines in expected.items():
        assert [key for key in found(read(tmp_path, lines)) if key.startswith("oom")] == [name]


def test_dead_actors_are_told_once_each(tmp_path: Path) -> None:
    """The same death, told by every caller, is one finding; another process is another one."""
    other = [line.replace("26103", "26104").replace("rank=5", "rank=6") for line in DIED]
    messages = [hit.message for hit in found(read(tmp_path, [*DIED, *DIED, *other, *DIED]), "rank-died")["rank-died"]]
    assert len(messages) == 2
    assert "rank 5" in messages[0]
    assert "rank 6" in messages[1]


def test_actors_that_end_as_they_should_are_none_of_the_dead(tmp_path: Path) -> None:
    """Ray's own logs name each actor that ended; one that left by itself did not die."""
    lines = [
        "[2026-11-22 13:25:03,557 I 26987 26987] (gcs_server) gcs_actor_manager.cc:1515: Actor is failed on worker "
        "a477 at node 09fd, need_reschedule = 0, death context type = ActorDiedErrorContext, remaining_restarts = 0",
        *[line for line in DIED if "exit detail" not in line],
        "The actor is dead because its worker process has died. Worker exit type: INTENDED_USER_EXIT Worker exit "
        "detail: Worker exits by an user request. Worker exits with an exit code 0. exit_actor() is called.",
        DIED[0],
        "The actor is dead because its worker process has died. Worker exit type: INTENDED_USER_EXIT",
    ]  # fmt: skip
    assert "rank-died" not in found(read(tmp_path, lines))
    killed = [*DIED[:-1], "The actor is dead because it was killed by `ray.kill`."]
    assert "by ray.kill" in found(read(tmp_path, killed, "killed.log"))["rank-died"][0].message


def test_traceback_of_a_known_cause_is_left_to_its_rule(tmp_path: Path) -> None:
    """The generic rule is silent where another one explains the exception."""
    lines = trace("OSError: [Errno 28] No space left on device", '/root/x.py", line 1, in save')
    assert set(found(read(tmp_path, lines))) == {"disk-full"}
    lines = [f"[rank2]: {line}" for line in trace("ZeroDivisionError: division by zero")]
    (only,) = found(read(tmp_path, lines, "rank.log"))["traceback"]
    assert only.message == "an exception: ZeroDivisionError: division by zero"


@pytest.mark.whole
def test_a_real_timeout_of_gloo_is_seen(tmp_path: Path) -> None:
    """What torch prints where one rank never joins a collective is seen: the program's own stderr is the log."""
    program = (
        "import datetime, sys, time, torch, torch.distributed as d\n"
        "rank = int(sys.argv[1])\n"
        "d.init_process_group('gloo', init_method='file://' + sys.argv[2], rank=rank, world_size=2,"
        " timeout=datetime.timedelta(seconds=1))\n"
        "d.barrier()\n"
        "def update_weights_from_distributed(): d.all_reduce(torch.ones(1))\n"
        "update_weights_from_distributed() if rank == 0 else time.sleep(3)\n"
        "import os; os._exit(0)\n"
    )
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, str(tmp_path / "program.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "rank1.err").open("wb") as other, (tmp_path / "rank0.err").open("wb") as err:
        peer = subprocess.Popen([*command, "1", str(tmp_path / "store")], stderr=other, env=environment)
        try:
            subprocess.run([*command, "0", str(tmp_path / "store")], stderr=err, env=environment, timeout=60)
        finally:
            peer.wait(timeout=60)
    log = read(tmp_path, (tmp_path / "rank0.err").read_text().splitlines(), "rank0.err")
    (only,) = found(log)["weight-sync-hang"]
    assert "after 1 s" in only.message
    assert log.rank == 0


def test_a_real_port_in_use_is_seen(tmp_path: Path) -> None:
    """What torch's store says of a port that another process holds."""
    program = "import sys, torch.distributed as d; d.TCPStore('127.0.0.1', int(sys.argv[1]), 1, True)"
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        done = subprocess.run(
            [sys.executable, "-c", program, str(held.getsockname()[1])], capture_output=True, text=True, timeout=60
        )
    log = read(tmp_path, done.stderr.splitlines(), "store.err")
    (only,) = found(log)["port-collision"]
    assert (only.message.startswith("a port is already in use"), bool(log.hits["EADDRINUSE"])) == (True, True)
    assert set(found(log)) == {"port-collision"}


def test_a_real_crash_in_native_code_is_seen(tmp_path: Path) -> None:
    """What CPython's faulthandler writes when a process dereferences null."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", "import ctypes; ctypes.string_at(0)"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    (only,) = found(read(tmp_path, done.stderr.splitlines()))["segfault"]
    assert "string_at" in only.message


PIECES = sorted({phrase for rule in RULES.values() for phrase in rule.phrases})


@settings(at_most(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.sampled_from(PIECES),
            st.binary(max_size=30).map(lambda b: b.decode("latin-1")),
            st.sampled_from(
                ["\n", "\r\n", " ", "9" * 40, "nan", "'", "(X pid=1) ", "Timeout(ms)=", "step 0: {'a': 1}"]
            ),
            st.sampled_from(["\n" + path.read_text() for path in sorted(PATIENTS.glob("*/faulty/train.log"))]),
        ),
        max_size=25,
    )
)
def test_no_rule_raises_on_any_text(tmp_path: Path, pieces: list[str]) -> None:
    """Messages cut, mixed and repeated, with any bytes between them, raise in no rule."""
    for hits in found(read(tmp_path, ["".join(pieces)])).values():
        for hit in hits:
            assert hit.message
            assert hit.message.isprintable()
