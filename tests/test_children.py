"""Children: nothing of one outlives it, and what the machine did to it is never said of a commit."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from repro_golden.base.errors import MachineFailureError
from repro_golden.base.files import scratch_folder
from repro_golden.base.machine.processes import MARK
from repro_golden.case.file import Case
from repro_golden.replay.children import (
    CancelledError,
    Child,
    ChildFailure,
    Run,
    blame_the_machine,
    blame_the_network,
)
from repro_golden.replay.output import last_line
from repro_golden.repository.checkout import Place
from repro_golden.subjects import exit_code, launch
from repro_golden.trace import Trace

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")

TRAIN = """\
import json, os, signal, sys, time
import torch
raw = json.loads(os.environ["REPRO_TRACE"])["out"] if "REPRO_TRACE" in os.environ else ""
BEFORE
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(STEPS):
    model(torch.ones(2, 3)).sum().backward()
    AT
    optimizer.step()
    optimizer.zero_grad()
"""


def text_of(before: str = "", at: str = "", steps: int = 6) -> str:
    """A program that trains."""
    return TRAIN.replace("BEFORE", before).replace("STEPS", str(steps)).replace("AT", at or "pass")


def case(root: Path, text: str = "", **subject: object) -> Case:
    """A case whose command is a program in `root`."""
    (root / "train.py").write_text(text or text_of())
    ranks = {"ranks": subject.pop("ranks", 1)}
    subject = {"kind": "command", "command": "{python} train.py", **subject}
    return Case.model_validate({"case": {"name": "toy", "steps": 3}, "subject": subject, "resources": ranks})


def run(root: Path, case: Case, asked: Run | None = None, home: Path | None = None) -> None:
    """One run, traced beside the program."""
    launch(case, Place(root, home=home), [asked or Run(3, trace=str(root / "trace"))], root / "log")


# -- nothing outlives it

STRAY = """\
import os, subprocess, sys, time
wait = [sys.executable, "-c", "import time; time.sleep(999)", sys.argv[1]]
subprocess.Popen(wait, start_new_session=True)  # as torchrun starts ranks
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:  # a daemon
        os.execv(wait[0], wait)
    os._exit(0)
bare = subprocess.Popen(wait, start_new_session=True, env={})  # without the mark
open("begun", "w").close()
if sys.argv[2] == "ends":
    bare.kill()
else:
    time.sleep(999)
"""


def left(token: str) -> list[int]:
    """The processes with a word in their command line that have not ended."""
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ended = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
            if not ended and token.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                lines.append(int(folder.name))
    return lines


def until(happened: Callable[[], object]) -> None:
    """Wait for what must come."""
    for _ in range(2000):
        if happened():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def child(folder: Path, *command: str, limit: float = 60.0) -> Child:
    """A process in a folder."""
    return Child(command, folder, dict(os.environ), folder / "log", limit)


@LINUX
@pytest.mark.parametrize("how", ["ends", "cancelled", "enough", "timeout"])
def test_nothing_outlives_a_child(tmp_path: Path, how: str) -> None:
    """However a child ends, its processes are gone: those in sessions of their own, daemons, and those without mark."""
    token, begun = uuid.uuid4().hex, tmp_path / "begun"
    stray = child(tmp_path, sys.executable, "-c", STRAY, token, how, limit=3.0 if how == "timeout" else 3600.0)
    cancel = threading.Event()
    if how == "ends":
        assert stray.run() == 0
    elif how == "enough":
        assert stray.run(enough=begun.exists) == -signal.SIGKILL
    elif how == "timeout":
        with pytest.raises(ChildFailure, match="no end within 3 s"):
            stray.run()
    else:
        threading.Thread(target=lambda: (until(begun.exists), cancel.set())).start()
        with pytest.raises(CancelledError):
            stray.run(cancel)
    assert begun.exists()
    assert left(token) == []


@LINUX
def test_marks_nest(tmp_path: Path) -> None:
    """A child has the marks of those it runs in, so that each ends with any of them; another child's processes stay."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(999)"], env={MARK: "another"})
    inner = f"""\
import os, sys
from pathlib import Path
from repro_golden.replay.children import Child
echo = ["/bin/sh", "-c", "echo ${MARK}"]
Child(echo, Path("."), dict(os.environ), Path("log"), 60.0).run()
print(os.environ["{MARK}"])
"""
    try:
        assert child(tmp_path, sys.executable, "-c", inner).run() == 0
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    inside, outside = (tmp_path / "log").read_text().split()
    assert inside.startswith(f"{outside}:")
    assert len(set(inside.split(":"))) == len(inside.split(":"))


OWNER = """\
import os, sys, threading
from pathlib import Path
from repro_golden.replay.children import Child
command = [sys.executable, "-c", "open('begun', 'w').close(); import time; time.sleep(999)", sys.argv[1]]
run = Child(command, Path("."), dict(os.environ), Path("log"), 999.0).run
threading.Thread(target=run).start()  # as probes are made, from a thread
"""


@LINUX
def test_a_killed_owner_takes_its_child_along(tmp_path: Path) -> None:
    """A SIGKILL of the process that started a child, which it cannot answer, ends the child too."""
    token = uuid.uuid4().hex
    owner = subprocess.Popen([sys.executable, "-c", OWNER, token], cwd=tmp_path)
    until((tmp_path / "begun").exists)
    time.sleep(0.5)
    assert len(left(token)) == 2
    owner.kill()
    owner.wait()
    until(lambda: not left(token))


def test_a_program_sees_what_was_asked_for(tmp_path: Path) -> None:
    """Arguments, variables, signals and open files of a child are as if nobody had started it for us."""
    told = (
        "import os, signal, sys; print(sys.argv[1:], signal.getsignal(signal.SIGXFSZ), sorted(os.listdir('/dev/fd')))"
    )
    words = ("a b", "", "-c", "ä", "\udcff")
    first, second = tmp_path / "one", tmp_path / "two"
    for folder, bound in ((first, True), (second, False)):
        folder.mkdir()
        variables = {"PATH": os.environ["PATH"], "LC_ALL": "C", "X": "1\n2=\udcff", "PYTHONHOME": "/nowhere", MARK: "x"}
        variables["PWD"] = "/"  # noqa: S105 - the folder, otherwise
        Child(["env", "-0"], folder, variables, folder / "log", 60.0, bound=bound).run()
        assert (folder / "log").read_bytes().count(b"\0") == len(variables)
        plain = {k: v for k, v in variables.items() if k != "PYTHONHOME"}
        Child([sys.executable, "-c", told, *words], folder, plain, folder / "log", 60.0, bound=bound).run()
    left, right = ((folder / "log").read_bytes().replace(b"\n", b"\0").split(b"\0") for folder in (first, second))
    assert [x for x in left if not x.startswith(MARK.encode())] == [x for x in right if not x.startswith(MARK.encode())]


# -- what the machine did


@pytest.mark.parametrize(
    "line",
    [
        "  exitcode  : -9 (pid: 17) (SIGKILL)",
        "E1 api.py:869] failed (exitcode: -9) local_rank: 1 (pid: 17) of binary: python",
        "  traceback : Signal 9 (SIGKILL) received by PID 17",
        "  traceback : Signal 7 (SIGBUS) received by PID 17",
        "[launch.py] [ERROR] Process 17 exits with return code = -9",
        "mpirun noticed that process rank 1 exited on signal 9 (Killed).",
        "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL",
        "RuntimeError: DataLoader worker (pid 17) is killed by signal: Bus error. It is possible that",
        "OSError: [Errno 28] No space left on device: 'x'",
        "OSError: [Errno 122] Disk quota exceeded",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any address. port: 29500, "
        "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
    ],
)
def test_what_a_launcher_says_of_the_machine(tmp_path: Path, line: str) -> None:
    """A killed rank, a full disk and a port in use are the machine's, also lines before the end; not long before."""
    log = tmp_path / "log"
    log.write_text(f"begin\n{line}\n" + "more\n" * 45)
    with pytest.raises(MachineFailureError):
        blame_the_machine(1, log)
    log.write_text(f"begin\n{line}\n" + "more\n" * 60)
    blame_the_machine(1, log)


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "  exitcode  : -11 (pid: 17)\n  traceback : Signal 11 (SIGSEGV) received by PID 17",
        "Sending process 17 closing signal SIGTERM",
        "  exitcode  : 1 (pid: 9)",
    ],
)
def test_what_is_the_commits_own(tmp_path: Path, line: str) -> None:
    """Memory of a device, a segmentation fault, and what a launcher ends itself are no failures of the machine."""
    (tmp_path / "log").write_text(line)
    for code in (1, -signal.SIGSEGV, 128 + signal.SIGABRT):
        blame_the_machine(code, tmp_path / "log")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGBUS])
def test_a_signal_from_outside(tmp_path: Path, number: signal.Signals) -> None:
    """A trainer, and one below a shell, that is killed or runs out of shared memory is the machine's failure."""
    # who starts the tests may ignore it, as nohup does, and what is ignored is inherited
    heed = "" if number == signal.SIGKILL else f"signal.signal({int(number)}, signal.SIG_DFL); "
    for shell in (False, True):
        code = f"import os, signal; {heed}os.kill(os.getpid(), {int(number)})"
        kill = f"{{python}} -c '{code}'{'; exit $?' if shell else ''}"
        with pytest.raises(MachineFailureError, match=number.name):
            exit_code(case(tmp_path, command=kill, shell=shell), Place(tmp_path), tmp_path / "log")


@pytest.mark.whole
def test_a_rank_that_was_killed(tmp_path: Path) -> None:
    """The launcher of a rank that was killed exits with 1, and still it is the machine's failure."""
    killed = text_of(at="if step == 4 and os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)")
    launcher = "{python} -m torch.distributed.run --standalone --nproc-per-node 2 train.py"
    with pytest.raises(MachineFailureError, match="a process of the trainer was killed by SIGKILL"):
        run(tmp_path, case(tmp_path, killed, command=launcher, ranks=2), Run(6, trace=str(tmp_path / "trace")))


@pytest.mark.whole
@pytest.mark.parametrize("when", ["while it trains", "at the end"])
def test_a_full_disk_under_the_trace(tmp_path: Path, when: str) -> None:
    """A disk that is full for the instrument (/dev/full) stops a search; it says nothing of the commit."""
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "steps.jsonl").symlink_to("/dev/full")
    last = (
        "time.sleep(999) if step == 4 else None" if when == "while it trains" else "os._exit(0) if step == 4 else None"
    )
    with pytest.raises(MachineFailureError, match="No space left on device"):
        run(tmp_path, case(tmp_path, text_of(at=last)), Run(6, trace=str(tmp_path / "trace")))


@pytest.mark.whole
@pytest.mark.parametrize("steps", [6, pytest.param(10**9, marks=pytest.mark.campaign)], ids=["it ends", "it goes on"])
def test_a_full_disk_under_the_recorder(tmp_path: Path, steps: int) -> None:
    """A disk that is full in the program's own process ends its recording alone, and still is the machine's failure."""
    fill = """
def fill():
    for n in range(3, 99):
        path = os.path.realpath(f'/proc/self/fd/{n}')
        if path.endswith('.log'):  # the recorder opens it anew where somebody has closed it
            os.close(n)
            os.rename(path, f'{path}-before')
            os.symlink('/dev/full', path)
"""
    full = text_of(fill, "step == 3 and fill()", steps)
    with pytest.raises(MachineFailureError, match="no space left"):
        run(tmp_path, case(tmp_path, full, timeout="40s"), Run(6, trace=str(tmp_path / "trace")))


@pytest.mark.parametrize(
    "line",
    [
        "curl: (6) Could not resolve host: pypi.org",
        "socket.gaierror: [Errno -2] Name or service not known",
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...)': /simple/torch/",
        "pip._vendor.urllib3.exceptions.ReadTimeoutError: HTTPSConnectionPool(host='x', port=443): Read timed out.",
        "requests.exceptions.ConnectionError: HTTPConnectionPool(host='x', port=80): Max retries exceeded with url: /",
        "('Connection aborted.', RemoteDisconnected('Remote end closed connection without response'))",
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "fatal: unable to access 'https://x/': Failed to connect to x port 443 after 7 ms: Couldn't connect to server",
        "error: RPC failed; HTTP 502 curl 22 The requested URL returned error: 502",
        "ERROR: HTTP error 503 while getting https://x/simple",
        "requests.exceptions.HTTPError: 504 Server Error: Gateway Time-out for url: https://x",
        "  Caused by: error sending request for url (https://pypi.org/simple/torch/)",
    ],
)
def test_a_network_that_fails_a_setup(tmp_path: Path, line: str) -> None:
    """A setup that shows that it found no network, or an index that was down, is the machine's failure."""
    (tmp_path / "log").write_text(f"{line}\nERROR: No matching distribution found for torch\n")
    with pytest.raises(MachineFailureError, match="run again"):
        blame_the_network("subject.setup", tmp_path / "log")
    (tmp_path / "log").write_text("ERROR: No matching distribution found for torch\nsrc/503.c:502: error\n")
    blame_the_network("subject.setup", tmp_path / "log")


def test_only_a_setup_is_excused_by_the_network(tmp_path: Path) -> None:
    """A port that nobody listens on fails a setup by the machine; the same words of a trainer are its own."""
    root = tmp_path / "w" / "tree"
    root.mkdir(parents=True)
    call = "{python} -c 'import socket; socket.create_connection((\"127.0.0.1\", 9))'"
    with pytest.raises(MachineFailureError, match="connection refused"):
        run(root, case(root, setup=call), home=tmp_path)
    assert not (root.parent / "set-up").exists()
    with pytest.raises(ChildFailure, match="Connection refused") as failure:
        run(root, case(root, command=call), home=tmp_path)
    assert failure.value.stage == "start"
    with pytest.raises(ChildFailure, match="exited with 3") as failure:
        run(root, case(root, setup="{python} -c 'raise SystemExit(3)'"), home=tmp_path)
    assert failure.value.stage == "build"


# -- where a child died


@pytest.mark.whole
@pytest.mark.parametrize(("at", "stage", "step"), [("", "import", -1), ("0", "start", 0), ("3", "step", 3)])
def test_where_a_replay_died(tmp_path: Path, at: str, stage: str, step: int) -> None:
    """A segmentation fault is said of the step it came in, which the trace tells; without a step it is told apart."""
    interface = (Path(__file__).parent / "interface_example.py").read_text()
    die = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    update = "        self.optimizer.step()\n"
    dying = (
        interface.replace(update, f"        if self.step == {at}:\n            {die}\n{update}") if at else f"{die}\n"
    )
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "interface.py").write_text(dying)
    raw = {
        "case": {"name": "bandit", "steps": 6, "rollouts": "rollouts"},
        "subject": {"module": "training.interface", "path": ".", "config": {"arms": 4, "seed": 3}},
        "first_step": {"check": False},
    }
    with pytest.raises(ChildFailure, match="exited with -11") as failure:
        run(tmp_path, Case.model_validate(raw), Run(6, trace=str(tmp_path / "trace")))
    assert (failure.value.stage, failure.value.step) == (stage, step)
    if at:
        assert len(Trace(tmp_path / "trace").steps) == step


# -- what is left on the disk

KILLED = """\
import sys
from pathlib import Path
from repro_golden.case.file import Case
from repro_golden.replay.children import Place
from repro_golden.subjects import exit_code
exit_code(Case.model_validate_json(sys.argv[1]), Place(Path(".").resolve()), Path("log"))
"""


@LINUX
def test_what_a_killed_run_leaves_is_swept(tmp_path: Path) -> None:
    """The folder of a command's run lies in the repository's state, where the next one removes a killed one's."""
    root = tmp_path / "fork"
    root.mkdir()
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    token = uuid.uuid4().hex
    slow = case(
        root, command=f'{{python}} -c \'open("begun", "w").write("{{out}}"); import time; time.sleep(999)\' {token}'
    )
    owner = subprocess.Popen([sys.executable, "-c", KILLED, slow.model_dump_json()], cwd=root)
    until(lambda: (root / "begun").exists() and (root / "begun").read_text())
    owner.kill()
    owner.wait()
    until(lambda: not left(token))
    folder, state = Path((root / "begun").read_text()), root / ".git" / "repro" / "tmp"
    assert folder.is_dir()
    assert folder.is_relative_to(state)
    with scratch_folder(state):
        assert not folder.exists()
    shutil.rmtree(root / ".git")
    assert exit_code(case(root, command="test -d {out}"), Place(root), root / "log") == 0


@pytest.mark.whole
def test_torchruns_first_failure_is_named(tmp_path: Path) -> None:
    """Of a torchrun whose second rank raises, the last line is that rank's error, not the frame of the summary."""
    program = tmp_path / "train.py"
    program.write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1:\n    raise RuntimeError('boom on one')\n"
        "dist.barrier()\n"
    )
    log = tmp_path / "log"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program)]
    assert Child(command, tmp_path, dict(os.environ), log, 120).run() == 1
    assert last_line(log) == "rank 1 failed first, with 1: RuntimeError: boom on one"


@pytest.mark.whole
def test_what_failed_before_ranks_were_known_is_named(tmp_path: Path) -> None:
    """Of a torchrun whose program does not import, the last line is that error: torch has marked no line of it."""
    program, log = tmp_path / "train.py", tmp_path / "log"
    program.write_text("import no_such_package\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", str(program)]
    assert Child(command, tmp_path, dict(os.environ), log, 120).run() == 1
    assert last_line(log) == "rank 0 failed first, with 1: ModuleNotFoundError: No module named 'no_such_package'"


BIG = """\
import resource, sys
from pathlib import Path
from repro_golden.replay.children import blame_the_machine, blame_the_network
from repro_golden.replay.output import last_line, tail
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
log = Path(sys.argv[1])
blame_the_machine(1, log)
blame_the_network("x", log)
assert last_line(log) == "ValueError: the end", last_line(log)
assert tail(log, log.stat().st_size - 4) == "end\\n"
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize("line", [128, 1 << 28], ids=["lines", "one line"])
def test_a_log_of_any_size_is_read_from_its_end(tmp_path: Path, line: int) -> None:
    """The failure of a child that printed 200 MB is told in memory that does not depend on it."""
    log = tmp_path / "log"
    piece = (b"x" * (line - 1) + b"\n") * ((1 << 20) // line) if line < 1 << 20 else b"x" * (1 << 20)
    with log.open("wb") as file:
        for _ in range(200):
            file.write(piece)
        file.write(b"\nValueError: the end\n")
    done = subprocess.run([sys.executable, "-c", BIG, str(log)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 50


@LINUX
def test_a_limit_on_file_sizes_is_the_machines(tmp_path: Path) -> None:
    """A program that met the limit which it was started under did not fail by itself; one that set its own did."""
    write = "open('big', 'wb').write(bytes(1 << 20))"
    limit = "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16)); "
    heed = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_DFL); "
    outer = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, resource.RLIM_INFINITY)); "
    ask = "from pathlib import Path; from repro_golden.case.file import Case; "
    ask += "from repro_golden.replay.children import Place; "
    ask += "from repro_golden.subjects import exit_code; "
    ask += "print(exit_code(Case.model_validate_json(sys.argv[1]), Place(Path('.').resolve()), Path('log')))"
    for program in (write, heed + write):
        limited = case(tmp_path, command=f'{{python}} -c "{program}"').model_dump_json()
        done = subprocess.run(
            [sys.executable, "-c", outer + ask, limited], cwd=tmp_path, capture_output=True, text=True
        )
        assert "MachineFailureError: the trainer met the limit on file sizes" in done.stderr, done.stdout + done.stderr
    assert exit_code(case(tmp_path, command=f'{{python}} -c "{limit}{write}"'), Place(tmp_path), tmp_path / "log") == 1
