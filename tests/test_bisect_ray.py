"""Probes on a Ray cluster: the answers of this machine, whatever becomes of workers, and nothing left on a node."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Repo
from history_kit import TRAIN, edit, note, start
from ray_kit import INSTALLED, Node, cluster, until, variables

from repro_bisect.axes.commits import History
from repro_bisect.probe.executors.bundles import commits_of, held, node_folder, pack_commits, unpack_commits
from repro_bisect.probe.executors.cluster import Cluster
from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.case.file import find_case
from repro_golden.repository.checkout import find_checkout

needs_ray = pytest.mark.skipif(not INSTALLED, reason="Ray is not installed")

CASE = """\
[case]
name = "toy"
steps = 3
proof_steps = 2

[subject]
kind = "command"
command = "{python} train.py --steps 3"
path = "train.py"
timeout = "10m"
"""

SLOW = TRAIN.replace("    x = torch.randn", "    time.sleep(0.4)\n    x = torch.randn").replace(
    "import os\n", "import os\nimport time\n"
)

SAME = (
    "outcome", "good", "bad", "culprit", "divergence", "comparison", "verdicts", "skips", "explains_bad", "commits",
    "git_probes", "machine", "one_step", "order",
)  # fmt: skip
"""What two executors must agree on: all of an answer but what it cost and where its reports lie."""

PROBES = """\
import json, os, sys, threading, time
import ray
from pathlib import Path
from repro_bisect.axes.commits import History
from repro_bisect.probe.executors import Task
from repro_bisect.probe.executors.cluster import Cluster
from repro_golden.case.file import find_case
from repro_golden.repository.checkout import find_checkout
from repro_golden.replay.children import CancelledError

address, folder = sys.argv[1], Path(sys.argv[2])
checkout = find_checkout(Path.cwd())
case = find_case(checkout.root, None)
history = History(checkout, "HEAD~1..HEAD", ["train.py"])
before = dict(os.environ)
cluster = Cluster(address, checkout, case, history, None, None)
task = Task(history.bad, history.tree(history.bad), 6)
said = {"slots": cluster.slots, "steps": [], "left": dict(os.environ) == before}
try:
    (folder / "whole").mkdir()
    cluster.run(task, folder / "whole", threading.Event(), said["steps"].append)
    cancel = threading.Event()
    (folder / "cancelled").mkdir()
    try:
        cluster.run(task, folder / "cancelled", cancel, lambda made: cancel.set())
    except CancelledError:
        said["cancelled"] = True
finally:
    cluster.close()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """A cluster with two processors."""
    with cluster() as made:
        yield made


@contextlib.contextmanager
def bisecting(repo: Repo, tmp_path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`repro bisect --json` under way."""
    process = subprocess.Popen(
        [sys.executable, "-m", "repro", "bisect", "--json", "--no-explain", *arguments],
        cwd=repo.root, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=variables(tmp_path),
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def planted(tmp_path: Path, node: Node) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A bisect of two commits under way on a cluster, GOOD and the culprit."""
    repo = start(tmp_path, TRAIN, CASE)
    good = repo.git("rev-parse", "HEAD")
    culprit = edit(repo, "scale = 1.0", "scale = 1.0 + 1e-6 * (step >= 1)", "Scale")
    with bisecting(repo, tmp_path, f"{good}..HEAD", "--ray", node.address) as process:
        yield process, good, culprit


def answer(repo: Repo, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """What `repro bisect --json` prints, which is nothing else."""
    with bisecting(repo, tmp_path, *arguments) as process:
        return said(process)


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The answer of a bisect, once it ends."""
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    assert "ray" not in err.lower(), err
    data: dict[str, Any] = json.loads(out)
    return data


def state_of(repo: Repo) -> list[str]:
    """All of a checkout that a bisect must not change."""
    files = [f"{p} {p.read_bytes()!r}" for p in sorted(repo.root.rglob("*")) if p.is_file() and ".git" not in p.parts]
    return [*files, *(repo.git(*ask) for ask in (("status", "--porcelain"), ("for-each-ref",), ("worktree", "list")))]


def agree(here: dict[str, Any], there: dict[str, Any]) -> None:
    """Two answers are the same."""
    assert {name: there[name] for name in SAME} == {name: here[name] for name in SAME}


@pytest.mark.whole
@needs_ray
def test_same_answers(tmp_path: Path, node: Node) -> None:
    """Both executors say the same of the same range; the repository is on the node once, and nothing else is left."""
    repo = start(tmp_path, TRAIN, CASE)
    good = repo.git("rev-parse", "HEAD")
    note(repo, "a")
    culprit = edit(repo, "scale = 1.0", "scale = 1.0 + 1e-6 * (step >= 1)", "Scale")
    copy = Repo(tmp_path / "copy")  # without the first one's journal
    shutil.copytree(repo.root, copy.root)
    (repo.root / "train.py").write_text("my own changes\n")
    before = state_of(repo)
    with ThreadPoolExecutor() as both:
        here = both.submit(answer, copy, tmp_path, f"{good}..HEAD")
        there = answer(repo, tmp_path, f"{good}..HEAD", "--ray", node.address)
    agree(here.result(), there)
    assert there["culprit"]["commit"] == culprit
    assert set(there["verdicts"].values()) == {"GOOD", "BAD"}
    assert state_of(repo) == before
    assert until(lambda: not node.left()), node.left()
    assert len(node.bundles(".git")) == 1
    assert there["cost"]["probes"] > 3
    again = answer(repo, tmp_path, f"{good}..HEAD", "--ray", node.address)
    assert again["cost"]["probes"] == 0 and again["cost"]["reused"] > 0 and again["culprit"] == there["culprit"]


@pytest.mark.whole
@needs_ray
def test_killed_worker(tmp_path: Path, node: Node) -> None:
    """A probe whose worker is killed is made again: no commit is judged or skipped for it, no trainer is left over."""
    with planted(tmp_path, node) as (process, good, culprit):
        assert until(node.trainers)
        trainer = node.trainers()[0]
        worker = next(process for process in trainer.parents() if process.name().startswith("ray::"))
        worker.kill()
        assert until(lambda: not trainer.is_running())
        answer = said(process)
    assert answer["culprit"]["commit"] == culprit
    assert answer["verdicts"] == {good: "GOOD", culprit: "BAD"}
    assert answer["skips"] == {}
    assert until(lambda: not node.left()), node.left()


@pytest.mark.whole
@needs_ray
def test_terminated_bisect(tmp_path: Path, node: Node) -> None:
    """A bisect that is ended ends its trainers on the nodes first, exits as everywhere and says nothing of Ray."""
    with planted(tmp_path, node) as (process, *_):
        assert until(node.trainers)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), err
    assert err.splitlines()[-1].startswith("repro: interrupted"), err
    assert not node.trainers()
    assert until(lambda: not node.left())  # a worker that ends with us is cleaned up after


@pytest.mark.whole
@needs_ray
def test_killed_driver(tmp_path: Path, node: Node) -> None:
    """Nothing of a probe outlives the driver, even where that had no time to say anything."""
    with planted(tmp_path, node) as (process, *_):
        assert until(node.trainers)
        process.kill()
    assert until(lambda: not node.trainers())
    assert until(lambda: not list((node.folder / "probes").iterdir()))


@needs_ray
def test_killed_while_a_probe_starts(tmp_path: Path, node: Node) -> None:
    """A worker that is killed as soon as it has made its folder leaves nothing either."""
    with planted(tmp_path, node) as (process, *_):
        workers: list[psutil.Process] = []
        assert until(lambda: workers.extend(node.starting()) or workers, every=0.001)
        process.kill()  # first, or it has the probe made again
        for worker in workers:
            assert worker.is_running()
            worker.kill()
    assert until(lambda: not node.left(), 20), node.left()


WORKER = """\
import sys, time
from pathlib import Path
from repro_bisect.probe.executors import node
from repro_golden.repository.checkout import find_checkout
from repro_golden.repository.worktrees import Worktrees
probes, repository = map(Path, sys.argv[1:3])
with node._watched_over(probes, repository):
    worktrees = Worktrees(find_checkout(repository))
    print("begun", flush=True)
    with worktrees.at(sys.argv[3], None):
        time.sleep(99)
"""


def test_killed_while_git_fills_the_worktree(tmp_path: Path) -> None:
    """Git does not outlive a worker that is killed, and what it wrote goes with the folder."""
    repo = start(tmp_path, TRAIN, CASE)
    (repo.root / "files").mkdir()
    for k in range(2000):
        (repo.root / "files" / f"f{k}").write_text(f"{k}" * 50)
    commit, probes = repo.commit("files"), tmp_path / "probes"
    for trial in range(3):
        command = [sys.executable, "-c", WORKER, str(probes), str(repo.root), commit]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
            assert worker.stdout is not None
            worker.stdout.readline()
            time.sleep(0.03 * (trial + 1))
            worker.kill()
        assert until(lambda: not [*probes.glob("*"), *repo.worktrees], 20), trial


SLOW_TO_DIE = """\
import os, sys, time
from pathlib import Path
from repro_bisect.probe.executors import node
probes, repository = map(Path, sys.argv[1:3])
with node._watched_over(probes, repository) as (folder, _):
    if not os.fork():  # shares the lock, and nothing else
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        open_files = {os.path.realpath(path): int(path.name) for path in Path("/proc/self/fd").iterdir()}
        lock = open_files[os.path.realpath(folder / "lock")]
        os.closerange(3, lock)
        os.closerange(lock + 1, 1000)
        time.sleep(1)
        os._exit(0)
    print("begun", flush=True)
    time.sleep(99)
"""


def test_killed_and_slow_to_die(tmp_path: Path) -> None:
    """The lock of a killed worker is let go after its pipe: on a busy machine, much later."""
    repo, probes = start(tmp_path, TRAIN, CASE), tmp_path / "probes"
    command = [sys.executable, "-c", SLOW_TO_DIE, str(probes), str(repo.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        worker.kill()
    assert until(lambda: not any(probes.iterdir()), 20)


@pytest.mark.whole
@needs_ray
def test_progress_and_cancelling(tmp_path: Path, node: Node) -> None:
    """Steps are told while a probe runs, and a cancelled one has ended on its node when that is said.

    Our own variables are as they were, too.
    """
    repo = start(tmp_path, SLOW, CASE.replace("teps = 3", "teps = 6").replace("--steps 3", "--steps 6"))
    note(repo, "a")
    (tmp_path / "probes.py").write_text(PROBES)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "probes.py"), node.address, str(tmp_path)],
        cwd=repo.root, capture_output=True, text=True, timeout=200, check=False, env=variables(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["slots"] == 2
    assert told["cancelled"] and told["left"]
    assert len(told["steps"]) > 1
    assert told["steps"] == sorted(set(told["steps"]))
    assert [p.name for p in (tmp_path / "whole").iterdir()] == ["trace"]
    assert not list((tmp_path / "cancelled").iterdir())
    assert not node.trainers()
    assert until(lambda: not node.left()), node.left()  # one that was killed, as on a busy node, is cleaned up after


@pytest.mark.whole
@needs_ray
def test_a_golden_run_of_this_machine_is_no_replay_on_a_node(tmp_path: Path, node: Node) -> None:
    """What it was recorded with is not what nodes have: it is not used, and the answer names the cluster."""
    repo = start(tmp_path, TRAIN, CASE)
    for command in (["init", "--remote", str(tmp_path / "remote")], ["golden", "record", "toy"]):
        done = subprocess.run([sys.executable, "-m", "repro", *command], cwd=repo.root, env=variables(tmp_path),
                              capture_output=True, text=True, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
    good = repo.commit("Record")
    culprit = edit(repo, "scale = 1.0", "scale = 1.0 + 1e-6 * (step >= 1)", "Scale")
    with bisecting(repo, tmp_path, f"{good}..HEAD", "--ray", node.address) as process:
        out, err = process.communicate(timeout=200)
    assert "the golden run of GOOD is not used: it was recorded here, and nodes have variables" in err
    answer = json.loads(out)
    assert answer["culprit"]["commit"] == culprit
    assert f"--ray {node.address}" in answer["reproduce"]


@pytest.mark.campaign
@needs_ray
def test_same_answers_of_the_built_in_trainer(recorded: Repo, tmp_path: Path, node: Node) -> None:
    """Rollouts and saved states reach the nodes, and both executors say the same."""
    good = recorded.git("rev-parse", "HEAD")
    note(recorded, "a", "core/notes.py")
    recorded.edit(
        "core/repro_core/rl/loss.py", "rows.float() / temperature, dim", "rows.float() / temperature * 1.001, dim"
    )
    culprit = recorded.commit("Dull the policy")
    copy = Repo(tmp_path / "copy")
    shutil.copytree(recorded.root, copy.root, symlinks=True)
    there = answer(recorded, tmp_path, f"{good}..HEAD", "--ray", node.address)
    agree(answer(copy, tmp_path, f"{good}..HEAD"), there)
    assert there["culprit"]["commit"] == culprit
    assert until(lambda: not node.left()), node.left()


# -- what is refused


@needs_ray
def test_more_than_the_cluster_has(tmp_path: Path, node: Node) -> None:
    """A case that no node can serve is refused in one line, rather than waited for."""
    repo = start(tmp_path, TRAIN, CASE + "\n[resources]\ncpus = 3\n")
    note(repo, "a")
    with bisecting(repo, tmp_path, "HEAD~1..HEAD", "--ray", node.address) as process:
        _, err = process.communicate(timeout=100)
    assert process.returncode == 2
    assert err.splitlines()[-1].startswith("repro: toy asks for 3 CPUs on one node, and those of the Ray cluster have")


def refusal(repo: Repo, address: str) -> str:
    """Why there is no executor."""
    checkout = find_checkout(repo.root)
    case, history = find_case(repo.root, None), History(checkout, "HEAD~1..HEAD", ["train.py"])
    with pytest.raises(ReproError) as refused:
        Cluster(address, checkout, case, history, None, None)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@needs_ray
def test_no_cluster(tmp_path: Path) -> None:
    """An address where nothing answers, or that is none, is refused at once, and Ray says nothing."""
    repo = start(tmp_path, TRAIN, CASE)
    note(repo, "a")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        assert "`ray start --head` starts one" in refusal(repo, f"127.0.0.1:{port}")
    assert "is no address" in refusal(repo, "nonsense")
    assert "give HOST:PORT" in refusal(repo, "ray://127.0.0.1:10001")
    assert "give HOST:PORT" in refusal(repo, "local")


def test_what_is_not_shipped(tmp_path: Path) -> None:
    """A command that reads the user's own checkout, submodules and files of Git LFS are refused in one line."""
    repo = start(tmp_path, TRAIN, CASE)
    note(repo, "a")
    (repo.root / ".git" / "lfs" / "objects").mkdir(parents=True)
    assert "Git LFS" in refusal(repo, "nowhere:1")
    (repo.root / ".gitmodules").write_text("")
    repo.commit("A submodule")
    assert "submodules are not shipped" in refusal(repo, "nowhere:1")
    case = repo.root / "golden" / "cases" / "toy.toml"
    case.write_text(CASE.replace("[subject]", '[subject]\nlink = ["data"]'))
    assert "--link names your own checkout" in refusal(repo, "nowhere:1")
    case.write_text(CASE.replace("--steps 3", "--steps 3 --data {root}/data"))
    assert "{root}" in refusal(repo, "nowhere:1")


# -- parcels on a node


def test_commits_without_history(tmp_path: Path) -> None:
    """A pack of commits makes a repository of these alone, whole to git, in which each can be checked out."""
    repo = start(tmp_path, TRAIN, CASE)
    ids = [repo.git("rev-parse", "HEAD"), *(note(repo, name) for name in "abcd")]
    checkout = find_checkout(repo.root)
    kept = commits_of(checkout, ids[2:4])
    assert sorted(kept) == sorted(ids[1:4])  # c, b and the parent of b
    made = Repo(tmp_path / "made")
    made.root.mkdir()
    unpack_commits(pack_commits(checkout, kept), made.root)
    made.git("fsck", "--full", "--strict")
    assert made.git("rev-list", "--count", ids[3]) == "1"
    for commit in kept:
        made.git("worktree", "add", "--quiet", "--detach", str(tmp_path / commit), commit)
        assert (tmp_path / commit / "train.py").read_text() == repo.git("show", f"{commit}:train.py") + "\n"
    with pytest.raises(subprocess.CalledProcessError):
        made.git("cat-file", "-e", ids[0])


def test_parcel_is_made_once(tmp_path: Path) -> None:
    """However many probes ask for a parcel at once, one makes it, and all hold it at the same time."""
    home, made, together = node_folder(tmp_path), list[str](), threading.Barrier(8)

    def make(folder: Path) -> None:
        made.append(folder.name)
        (folder / "file").write_text("whole")

    def use(_: int) -> str:
        with held(home, "k", make) as folder:
            together.wait(timeout=60)
            return (folder / "file").read_text()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(use, range(8))) == ["whole"] * 8
    assert len(made) == 1


def test_parcel_half_made(tmp_path: Path) -> None:
    """What a process left that was killed over a parcel, or could not make it, is never taken for the parcel."""
    home = node_folder(tmp_path)

    def fails(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError

    with pytest.raises(OSError), held(home, "k", fails):  # noqa: PT011 - one without a number
        pass
    (home / ".new-k").mkdir()
    (home / ".new-k" / "half").touch()
    with held(home, "k", lambda folder: (folder / "file").touch()) as folder:
        assert [path.name for path in folder.iterdir()] == ["file"]
    assert not (home / ".new-k").exists()


def test_old_parcels(tmp_path: Path) -> None:
    """Parcels that nobody has used for days go when another is made, unless somebody holds them."""
    home, long_ago = node_folder(tmp_path), time.time() - 30 * 24 * 3600

    def make(folder: Path) -> None:
        (folder / "file").touch()

    with held(home, "held", make) as kept:
        for key in ("old", "new"):
            with held(home, key, make):
                pass
        for path in (kept, home / "old"):
            os.utime(path, (long_ago, long_ago))
        with held(home, "another", make):
            assert {p.name for p in home.iterdir() if p.is_dir()} == {"held", "new", "another"}
            assert not list(home.glob("old*"))
        assert not (home / "old.lock").exists()
    with (home / "held.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_folder_of_somebody_else(tmp_path: Path) -> None:
    """A folder that others can write to, or a link that waits at our name, is not used."""
    folder = node_folder(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(MachineFailureError):
        node_folder(tmp_path)
    folder.rmdir()
    folder.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(MachineFailureError):
        node_folder(tmp_path)
