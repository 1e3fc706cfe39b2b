"""The cases of real regressions: each says what is searched, where that is said, and by which driver."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import SOURCE, Repo

HERE = SOURCE / "benchmarks" / "real"
CASES = sorted((HERE / "cases").glob("*.toml"))
KINDS = ("regression", "fix", "silent change", "revert", "release")


@pytest.fixture(scope="module")
def real() -> ModuleType:
    """The script."""
    spec = importlib.util.spec_from_file_location("real", HERE / "real.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_case_says_what_it_is(path: Path, real: ModuleType) -> None:
    """Two ends, the culprit, a page of upstream's that names it, and a driver that parses."""
    case = real.read(path)
    assert {"good", "bad", "culprit", "kind", "what", "says", "driver"} <= case.keys()
    assert ("repository" in case) != ("package" in case)
    assert case["kind"].startswith(KINDS)
    assert case["says"].startswith("https://")
    tree = ast.parse((HERE / "drivers" / case["driver"]).read_text())
    assert ast.get_docstring(tree)


def test_a_driver_starts_in_the_environment_that_is_named(real: ModuleType, tmp_path: Path) -> None:
    """By its interpreter, or by its launcher where it has one."""
    python = str(tmp_path / "python")
    assert real.launcher({}, python) == [python]
    case = {"launch": ["torchrun", "--nproc-per-node", "2"]}
    assert real.launcher(case, python) == ["torchrun", "--nproc-per-node", "2"]
    (tmp_path / "torchrun").touch()
    assert real.launcher(case, python) == [str(tmp_path / "torchrun"), "--nproc-per-node", "2"]


def test_a_page_holds_what_was_measured(real: ModuleType) -> None:
    """Right, wrong and failed alike; a release has no rival in git."""
    cases = {path.stem: real.read(path) for path in CASES[:3]}
    about = {"date": "2026-11-25", "commit": "abc", "machine": "a machine", "torch": "2"}
    ours = {"outcome": "found", "culprit": "f" * 40, "right": True, "first": [0, "loss", "loss"], "processes": 9,
            "steps": 20, "seconds": 30.0, "commits": 5, "text": "a | b", "line": "a.py:1"}  # fmt: skip
    git = {"outcome": "found", "culprit": "e" * 40, "right": False, "processes": 4, "steps": 8, "seconds": 10.0}
    measured = [{"ours": ours, "git": git}, {"ours": ours}, {"ours": {"outcome": "error", "error": "it broke"}}]
    kept = {name: {"about": about, **result} for name, result in zip(cases, measured, strict=True)}
    page = real.page(cases, kept)
    assert "named the right one in 2" in page and "right in 0 of 1" in page
    assert "ffffffffff (right)" in page and "eeeeeeeeee (wrong): 4, 8, 10" in page and "error: it broke" in page
    assert "a \\| b" in page and "| processes | 9 | 4 |" in page


GPT = """
from dataclasses import dataclass
import torch

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_embd: int

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = torch.nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = torch.nn.Embedding(config.block_size, config.n_embd)
        self.head = torch.nn.Linear(config.n_embd, config.vocab_size)
    def forward(self, tokens, targets):
        logits = self.head(self.wte(tokens) + self.wpe.weight[: tokens.shape[1]])
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    def configure_optimizers(self, weight_decay, learning_rate, betas):
        decayed = {id(m.weight) for m in self.modules() if isinstance(m, torch.nn.Linear)}
        groups = [
            {"params": [p for p in self.parameters() if id(p) in decayed], "weight_decay": weight_decay},
            {"params": [p for p in self.parameters() if id(p) not in decayed], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)
"""
SIMPLER = ("if isinstance(m, torch.nn.Linear)}", "if hasattr(m, 'weight')}")
FREE = """
import torch

class AdamWScheduleFree(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "k": 0})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                state = self.state[p].setdefault("exp_avg_sq", torch.zeros_like(p))
                state.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                corrected = 1 - 0.999 ** group["k"]
                p.sub_(p.grad / state.sqrt().add_(1e-8) * (group["lr"] * corrected**0.5))
"""
STABLER = (
    'p.sub_(p.grad / state.sqrt().add_(1e-8) * (group["lr"] * corrected**0.5))',
    'p.sub_(p.grad / (state / corrected).sqrt().add_(1e-8) * group["lr"])',
)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("driver", "arguments", "file", "code", "change", "named"),
    [
        ("nanogpt.py", [], "model.py", GPT, SIMPLER, "drivers/nanogpt.py"),
        ("schedule_free.py", ["AdamWScheduleFree", '{"lr": 0.01}'], "schedulefree/__init__.py", FREE, STABLER, None),
    ],
    ids=["decay reaches the embeddings", "bias correction moved"],
)
def test_a_case_of_the_same_shape(
    driver: str,
    arguments: list[str],
    file: str,
    code: str,
    change: tuple[str, str],
    named: str | None,
    real: ModuleType,
    tmp_path: Path,
) -> None:
    """Both searches of a made history in which a commit does not import. What Python decided shows where it is used."""
    repo = Repo(tmp_path / "made" / "upstream")
    repo.root.mkdir(parents=True)
    repo.git("init", "--quiet")
    (repo.root / file).parent.mkdir(exist_ok=True)
    changed = code.replace(*change)
    assert changed != code
    commits = []
    for number, text in enumerate([code, f"import nowhere\n{code}", f"{code}\n", changed, f"{changed}\n"]):
        (repo.root / file).write_text(text)
        commits.append(repo.commit(f"Version {number}"))
    repo.git("clone", "--quiet", "--bare", str(repo.root), str(tmp_path / "OWNER+NAME" / "repo"))
    case = {"repository": "OWNER/NAME", "good": commits[0], "bad": commits[-1], "culprit": commits[3],
            "driver": driver, "arguments": arguments}  # fmt: skip
    options = argparse.Namespace(repositories=tmp_path, python=sys.executable, jobs=2)
    folder = tmp_path / "work"
    folder.mkdir()
    measurements = real.measured(case, folder, options)
    assert (measurements["ours"]["right"], measurements["git"]["right"]) == (True, True), measurements
    assert measurements["ours"]["skips"] <= 1
    assert f"{named or file}:" in measurements["ours"]["text"], measurements
