"""`repro trace` on programs of Ray: clusters that they start, clusters that were there before, and submitted jobs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray_kit

import repro_golden
from repro_golden.trace import Trace
from repro_golden.trace.families import family
from repro_golden.trace.model import root

pytestmark = pytest.mark.skipif(not ray_kit.INSTALLED, reason="Ray is not installed")

TRACE = [sys.executable, "-m", "repro", "trace", "--out", "trace", "--"]

TRAIN = """\
import os, sys
import torch
torch.set_num_threads(1)

def train(steps):
    # gives back how often the user's own sitecustomize has run
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).pow(2).sum().backward()
        optimizer.step()
    return getattr(sys, "theirs", 0)
"""

ACTORS = (
    "import ray\n"
    + TRAIN
    + """
@ray.remote
class Trainer:
    def __init__(self, rank=0, store=None):
        if store:
            torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def train(self):
        return train(3)

    async def train_async(self):
        return self.train()

    def package(self):
        return sys.modules["repro_golden"].__file__

env = {"env_vars": {"PYTHONPATH": os.environ["THEIRS"]}}
before = str(env)
"""
)

LOCAL = (
    ACTORS
    + """
ray.init(num_cpus=1, include_dashboard=False, object_store_memory=STORE, _temp_dir=sys.argv[1])
assert ray.get(Trainer.options(runtime_env=env).remote().train.remote()) == 1
"""
)

# two actors of one job, one of them with an environment of its own
RANKS = (
    ACTORS
    + """
ray.init()
first = Trainer.options(runtime_env=env).remote(0, sys.argv[1])
second = Trainer.remote(1, sys.argv[1])
assert ray.get([first.train.remote(), second.train_async.remote()]) == [1, 0]
assert str(env) == before, env
"""
)

# the folder that the driver's recorder came from is away while workers start and train, and the user leaves out files
# that are called like ours
AWAY = (
    ACTORS
    + """
job = {"env_vars": {"OWN": "1"}, "excludes": ["trace", "attach", "*.py"]}
ray.init(runtime_env=job)
assert job == {"env_vars": {"OWN": "1"}, "excludes": ["trace", "attach", "*.py"]}, job
folder = os.environ["REPRO_INSTRUMENT"]
os.rename(folder, folder + ".away")
try:
    actor = Trainer.options(runtime_env=env).remote()
    theirs, package = ray.get([actor.train.remote(), actor.package.remote()])
finally:
    os.rename(folder + ".away", folder)
assert theirs == 1 and "py_modules_files" in package, (theirs, package)
"""
)

# a task, in a job that has a folder of modules of its own
DRIVER = (
    TRAIN
    + """
import ray

@ray.remote
def work():
    import its_module
    return train(3), its_module.__file__, os.getcwd()

ray.init(runtime_env={"py_modules": [os.environ["ITS_MODULE"]]})
theirs, file, folder = ray.get(work.remote())
assert theirs == 1 and "py_modules_files" in file and "working_dir_files" in folder, (theirs, file, folder)
"""
)

SUBMIT = """\
import asyncio, os, sys, tempfile
import ray
from ray._private.runtime_env.py_modules import upload_py_modules_if_needed
from ray._private.runtime_env.working_dir import upload_working_dir_if_needed
from ray.dashboard.modules.job.job_manager import JobManager

async def submit(entrypoint, env, logs):
    manager = JobManager(ray._private.worker.global_worker.gcs_client, logs)
    job = await manager.submit_job(entrypoint=entrypoint, runtime_env=env)
    while not (status := await manager.get_job_status(job)).is_terminal():
        await asyncio.sleep(0.1)
    print(manager.get_job_logs(job))
    return status

ray.init()
driver, folder, module = sys.argv[1:]
env = {"env_vars": {"PYTHONPATH": os.environ["THEIRS"], "ITS_MODULE": module}, "working_dir": folder}
with tempfile.TemporaryDirectory() as scratch:
    for upload in (upload_working_dir_if_needed, upload_py_modules_if_needed):  # as JobSubmissionClient does
        upload(env, include_gitignore=True, scratch_dir=scratch, upload_fn=None)
    status = asyncio.run(submit(f"{sys.executable} {driver}", env, scratch))
assert status == "SUCCEEDED", status
"""


def traced(folder: Path, program: str, *arguments: str, **variables: str) -> list[str]:
    """The roots of a program's steps, recorded in `folder`."""
    folder.mkdir()
    (folder / "program.py").write_text(program.replace("STORE", str(ray_kit.STORE)))
    (folder / "theirs").mkdir()
    (folder / "theirs" / "sitecustomize.py").write_text("import sys\nsys.theirs = getattr(sys, 'theirs', 0) + 1\n")
    variables["THEIRS"] = str(folder / "theirs")
    command = [*TRACE, sys.executable, "program.py", *arguments]
    with ray_kit.running(command, cwd=folder, env=ray_kit.variables() | variables) as process:
        out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    assert "repro: 3 steps of" in out, out
    assert "incomplete" not in out, out
    trace = Trace(folder / "trace")
    assert trace.complete
    assert all(trace.rows(k) for k in range(len(trace.steps)))
    # Ray ends its workers before they could say what they ended with
    return [root([r for r in trace.rows(k) if family(r.phase, r.name) != "end"]) for k in range(len(trace.steps))]


@pytest.fixture(scope="module")
def short() -> Iterator[Path]:
    """A folder with a short name, because sockets are made in it."""
    with ray_kit.short() as folder:
        yield folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The roots of three steps of the program without Ray."""
    return traced(tmp_path_factory.mktemp("plain") / "run", TRAIN + "train(3)")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster that was started by somebody else."""
    with ray_kit.cluster() as node:
        yield node.address


def test_workers_with_a_path_of_their_own_find_the_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an actor or a task sets PYTHONPATH the recorder's own folder, which is there, is put before it."""
    from repro_golden.recording.attach.ray_workers import _with_path

    monkeypatch.setenv("REPRO_INSTRUMENT", str(Path(repro_golden.__file__).parent))
    first, second = _with_path({"PYTHONPATH": "theirs"})["PYTHONPATH"].split(os.pathsep)
    assert (Path(first) / "sitecustomize.py").is_file() and second == "theirs"


@pytest.mark.whole
def test_own_cluster(tmp_path: Path, short: Path, plain: list[str]) -> None:
    """An actor of a cluster that the program starts, with a PYTHONPATH of its own, is recorded like a plain process."""
    assert traced(tmp_path / "run", LOCAL, str(short)) == plain


@pytest.mark.whole
def test_running_cluster(tmp_path: Path, cluster: str, plain: list[str]) -> None:
    """Two actors of a cluster that runs already are recorded as two ranks; the user's objects stay as they are."""
    assert traced(tmp_path / "run", RANKS, str(tmp_path / "store"), RAY_ADDRESS=cluster) == plain
    end = Trace(tmp_path / "run" / "trace").end
    assert end is not None and end["ranks"] == 2


@pytest.mark.whole
def test_nodes_without_the_recorder(tmp_path: Path, cluster: str, plain: list[str]) -> None:
    """Where the recorder's folder does not exist, workers use the copy that the job brought along, which is whole."""
    copy = tmp_path / "copy" / "repro_golden"
    shutil.copytree(Path(repro_golden.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert traced(tmp_path / "run", AWAY, RAY_ADDRESS=cluster, PYTHONPATH=str(copy.parent)) == plain


@pytest.mark.whole
def test_submitted_job(tmp_path: Path, cluster: str, plain: list[str]) -> None:
    """A job that Ray's job manager starts is recorded, and the driver may still bring modules of its own.

    What the job client sends over HTTP is handed to the manager here: the server needs more packages than Ray itself.
    """
    (tmp_path / "its_module").mkdir()
    (tmp_path / "its_module" / "__init__.py").touch()
    (tmp_path / "working").mkdir()
    (tmp_path / "working" / "data.txt").touch()
    (tmp_path / "driver.py").write_text(DRIVER)
    arguments = [str(tmp_path / name) for name in ("driver.py", "working", "its_module")]
    assert traced(tmp_path / "run", SUBMIT, *arguments, RAY_ADDRESS=cluster) == plain
