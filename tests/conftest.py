"""Repositories to try the tool on: real git, real DVC, the real trainer, made once and copied."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import warm_kit
from examples_kit import FAST
from hypothesis import settings
from once_kit import once

from repro_golden.repository.checkout import find_checkout
from repro_golden.repository.worktrees import folder_for
from repro_golden.store.dvc import Dvc

SOURCE = Path(__file__).parent.parent

# as where the environment is activated: a command's program runs in the Python that PATH has first
os.environ["PATH"] = os.pathsep.join(dict.fromkeys([str(Path(sys.executable).parent), *os.get_exec_path()]))

settings.load_profile(FAST)  # `make test-all` names the other

MINI = """\
[case]
name = "mini"
steps = 3
proof_steps = 1
rollouts = "golden/rollouts/mini"
states = [1]

[subject]
module = "repro_core"
path = "core"
timeout = "3m"

[subject.config]
rollout_batch_size = 2
n_samples_per_prompt = 4
global_batch_size = 8

[subject.config.model]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
"""


@dataclass(frozen=True)
class Repo:
    """A scratch repository and the ways to use it."""

    root: Path

    def git(self, *arguments: str) -> str:
        """One git command; its output."""
        identity = ("-c", "user.name=Test", "-c", "user.email=test@example.invalid", "-c", "commit.gpgsign=false")
        done = subprocess.run(
            ["git", *identity, *arguments], cwd=self.root, check=True, capture_output=True, text=True, env=environment()
        )
        return done.stdout.strip()

    def commit(self, message: str) -> str:
        """Commit everything; the commit's id."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)
        return self.git("rev-parse", "HEAD")

    def edit(self, path: str, old: str, new: str) -> None:
        """Replace one piece of text that must occur exactly once."""
        file = self.root / path
        text = file.read_text()
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {path}"
        file.write_text(text.replace(old, new))

    @property
    def worktrees(self) -> list[Path]:
        """What is left of worktrees of ours: their folders, and git's notes on any."""
        return [*folder_for(find_checkout(self.root)).glob("*"), *(self.root / ".git" / "worktrees").glob("*")]

    def repro(self, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """One repro command, as a user runs it, in a process that begins warm."""
        return warm_kit.run([sys.executable, "-m", "repro", *arguments], self.root, environment(), timeout)

    def cold(
        self, *arguments: str, flags: Sequence[str] = (), timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """The same in a process that begins as a user's does; `flags` are Python's."""
        return subprocess.run(
            [sys.executable, *flags, "-m", "repro", *arguments],
            cwd=self.root, capture_output=True, text=True, timeout=timeout, env=environment(), check=False,
        )  # fmt: skip


_LEFT_OUT = ("GIT_", "DVC_", "PYTHONPATH", "PYTEST_")
"""Beginnings of variables that would make a test depend on who runs it, such as which worker of pytest one is."""
_SET_BY_IMPORTS = {
    "CUDA_CACHE_PATH", "FLASHINFER_WORKSPACE_BASE", "PYTORCH_NVML_BASED_CUDA_CHECK", "RAY_CLIENT_MODE",
    "TILELANG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
}  # fmt: skip
"""What Lightning, Ray and SGLang set where a test before this one imported them. They count in a probe's key."""


def environment() -> dict[str, str]:
    """The user's environment without what would make tests depend on it."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith(_LEFT_OUT) and k not in _SET_BY_IMPORTS}
    ours = {"DVC_NO_ANALYTICS": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    return keep | ours | {"PYTHONHASHSEED": warm_kit.SEED}


@pytest.fixture
def warm_dvc(monkeypatch: pytest.MonkeyPatch) -> None:
    """DVC begins warm, also where the tests' own process asks for it."""
    monkeypatch.setattr(Dvc, "run", warm_kit.called(Dvc.run))


def patient(seconds: float) -> float:
    """A time limit that an idle machine needs, as many times longer as this one is overloaded."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.fixture(autouse=True)
def _as_before_imports() -> None:
    """What a test does in its own process sees the variables that its children see."""
    for name in (*_SET_BY_IMPORTS, "PYTEST_ADDOPTS"):
        os.environ.pop(name, None)


def _bare(folder: Path) -> None:
    """A fork that guards the built-in trainer: its code, one case, nothing recorded."""
    root = folder / "fork"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SOURCE / "core", root / "core", ignore=ignore)
    (root / "golden" / "cases").mkdir(parents=True)
    (root / "golden" / "cases" / "mini.toml").write_text(MINI)
    (root / ".gitignore").write_text("__pycache__/\n")
    repo = Repo(root)
    repo.git("init", "--quiet", "--initial-branch=main")
    done = repo.repro("init", "--remote", str(folder / "remote"))
    assert done.returncode == 0, done.stderr
    repo.commit("Start")


def _set_remote(repo: Repo, remote: Path) -> None:
    """Point the copied repository's DVC at a remote of its own."""
    config = repo.root / ".dvc" / "config"
    config.write_text(re.sub(r"url = .*", f"url = {remote}", config.read_text()))


def _recorded(folder: Path, bare: Path) -> None:
    """The same with its golden run recorded and committed."""
    shutil.copytree(bare / "fork", folder / "fork", symlinks=True)
    repo = Repo(folder / "fork")
    _set_remote(repo, folder / "remote")
    done = repo.repro("golden", "record")
    assert done.returncode == 0, done.stdout + done.stderr
    repo.commit("Record the golden run")


@pytest.fixture(scope="session")
def _bare_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "bare", _bare)


@pytest.fixture(scope="session")
def _recorded_template(tmp_path_factory: pytest.TempPathFactory, _bare_template: Path) -> Path:
    return once(tmp_path_factory, "recorded", lambda folder: _recorded(folder, _bare_template))


@pytest.fixture
def fork(tmp_path: Path, _bare_template: Path) -> Repo:
    """A fork with a case and DVC, nothing recorded yet."""
    shutil.copytree(_bare_template / "fork", tmp_path / "fork", symlinks=True)
    return Repo(tmp_path / "fork")


@pytest.fixture
def recorded(tmp_path: Path, _recorded_template: Path) -> Repo:
    """A fork whose golden run is recorded and committed."""
    shutil.copytree(_recorded_template / "fork", tmp_path / "fork", symlinks=True)
    repo = Repo(tmp_path / "fork")
    _set_remote(repo, tmp_path / "remote")
    repo.commit("Use a remote of its own")
    return repo
