"""What logs say as runs end: noise of a shutdown, ports, syncs without an end, and who died."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_log_kit import SYNC_ENDS, SYNC_STARTS, actor, engine, found, read, step, trace

TIMEOUT = (
    "[rank3]:[E1120 15:47:01.426 ProcessGroupNCCL.cpp:629] [Rank 3] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=64214, OpType=BROADCAST, NumelIn=1, NumelOut=32, Timeout(ms)=600000) ran for 600081 milliseconds."
)
STEPS = [step(number) for number in range(5)]
SUCCEEDED = ["------------------", "Job 'raysubmit_x1' succeeded", "------------------"]
CLOSED = "recvValue failed on SocketImpl(fd=63, addr=[n1]:59812, remote=[n0]:4001): Connection closed by peer"
SIGQUIT = engine("Received sigquit from a child process. It usually means the child failed.")
WORKER_DIED = (
    "(raylet) A worker died or was killed while executing a task by an unexpected system error. Worker PID: 26103 "
    "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2."
)
REFUSED = engine(
    "requests.exceptions.ConnectionError: HTTPConnectionPool(host='10.0.0.9', port=15002): Max retries exceeded with "
    "url: /health_generate (Caused by NewConnectionError('[Errno 111] Connection refused'))"
)


@pytest.mark.parametrize(
    ("name", "last", "behind"),
    [
        ("engine-crash", SIGQUIT, SUCCEEDED), ("engine-crash", SIGQUIT, []), ("rank-died", WORKER_DIED, SUCCEEDED),
        ("rank-died", WORKER_DIED, []), ("port-collision", REFUSED, SUCCEEDED), ("nccl-error", f"[gloo] {CLOSED}", []),
        ("weight-sync-hang", TIMEOUT, [SYNC_ENDS, *SUCCEEDED]),
    ],
)  # fmt: skip
def test_what_a_finished_run_says_as_it_ends_is_no_error(
    name: str, last: str, behind: list[str], tmp_path: Path
) -> None:
    """Behind the last step a symptom is a warning, unless an exception or a failed job stands there too."""
    began = [SYNC_STARTS] if name == "weight-sync-hang" else []
    (only,) = found(read(tmp_path, [*STEPS, *began, last, *behind]), name)[name]
    assert only.severity == "warning"
    for failed in (trace("RuntimeError: boom"), ["Job 'raysubmit_x1' failed"]):
        (only,) = found(read(tmp_path, [*STEPS, *began, last, *failed]), name)[name]
        assert only.severity in (None, "error")


def test_closed_connections_and_chatter_of_nccl_are_no_failed_collective(tmp_path: Path) -> None:
    """A peer that closes counts beside gloo's name or an exception; lines of level INFO never do."""
    info = actor("n0:4242:4300 [0] NCCL INFO misc/socket.cc:64 Connection closed by peer, ncclSystemError: none")
    assert "nccl-error" not in found(read(tmp_path, [*STEPS, CLOSED, info]))
    assert "nccl-error" in found(read(tmp_path, [CLOSED, *trace("RuntimeError: boom")]))
    assert "nccl-error" in found(read(tmp_path, ["[third_party/gloo/gloo/transport/tcp/pair.cc:534] " + CLOSED]))


@pytest.mark.parametrize(
    ("line", "file", "severity"),
    [
        ("WARNING http_server_head.py:80 -- Address already in use, retry", "dashboard.log", ""),
        ("[E 1 1] grpc server: OSError: [Errno 98] Address already in use", "raylet.err", ""),
        ("[E 1 1] grpc server: OSError: [Errno 98] Address already in use", "gcs_server.out", ""),
        (engine("port 30000 Address already in use, trying 30001"), "train.log", "note"),
        ("prometheus: address already in use", "train.log", "warning"),
        (
            engine("ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 30000): address already "
                   "in use"),
            "train.log", "error",
        ),
    ],
)  # fmt: skip
def test_a_port_in_use_is_an_error_only_where_a_server_fails_for_it(
    line: str, file: str, severity: str, tmp_path: Path
) -> None:
    """Ray's own servers try again, others take the next port: only one that fails is an error."""
    hits = found(read(tmp_path, [line], file)).get("port-collision", [])
    assert [hit.severity for hit in hits] == [severity] * bool(severity)


def test_a_log_that_ends_in_a_weight_sync_may_hang_there(tmp_path: Path) -> None:
    """A sync that began after steps, with no end and nothing of the run behind it, is possibly stuck."""
    chatter = engine('INFO:     10.0.0.9:1 - "POST /update_weights_from_tensor HTTP/1.1" 200 OK')
    half = actor("Update weights:  50%|#####     | 6/12")
    (only,) = found(read(tmp_path, [*STEPS, SYNC_STARTS, half, chatter]), "weight-sync-hang")["weight-sync-hang"]
    assert (only.severity, only.certainty, only.where.line) == ("warning", "possible", 6)
    assert "the log ends in a weight sync" in only.message
    for lines in (
        [SYNC_STARTS, half], [*STEPS, SYNC_STARTS, half, SYNC_ENDS], [*STEPS, SYNC_STARTS, step(5)],
        [*STEPS, SYNC_STARTS, half, *trace("RuntimeError: boom")], [*STEPS, SYNC_STARTS, *SUCCEEDED], STEPS,
        [*STEPS, actor("Update weights: 100%|##########| 12/12 [00:01<00:00,  9.31it/s]")],
    ):  # fmt: skip
        assert "weight-sync-hang" not in found(read(tmp_path, lines))


def test_dead_processes_are_named_by_their_ranks(tmp_path: Path) -> None:
    """A rank is known by the prefix of its lines, also where only its pid stands in what Ray says."""
    hits = found(read(tmp_path, [f"[rank{n}]: ray.exceptions.RaySystemError: System error" for n in (5, 5, 6)]))
    assert [hit.message.partition(" died")[0] for hit in hits["rank-died"]] == [
        "a process of Ray's (rank 5)", "a process of Ray's (rank 6)",
    ]  # fmt: skip
    line = actor("[rank3]: RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:1", 26103)
    other = actor("[rank4]: RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:1", 2610)
    (only,) = found(read(tmp_path, [line, other, WORKER_DIED]))["rank-died"]
    assert "(rank 3, pid 26103)" in only.message


def test_a_consequence_names_its_cause(tmp_path: Path) -> None:
    """An engine and a rank that died of an illegal memory access are said to have, and not of memory that ran out."""
    access = engine("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")
    told = found(read(tmp_path, [engine("[TP0] Scheduler hit an exception: Traceback"), access, WORKER_DIED]))
    assert "after an illegal memory access" in told["engine-crash"][0].message
    assert "`illegal-memory-access`" in told["engine-crash"][0].fix
    node = "Memory on the node was 950GB / 1000GB, which exceeds the memory usage threshold of 0.95. SIGKILL due to OOM"
    killed = found(read(tmp_path, [f"{WORKER_DIED} {node}"], "killed.log"))
    assert "the node's memory was nearly full" in killed["rank-died"][0].message
