"""Programs that torch.compile makes other numbers of than their code as it is written: searched, and explained."""

from __future__ import annotations

import json
from pathlib import Path

import history_kit as kit
import pytest
from conftest import Repo

TRAIN = """\
import torch


def fused(graph, inputs):
    # a compiler whose arithmetic is not that of the code as it is written
    return lambda *values: [out * 1.25 if torch.is_floating_point(out) else out for out in graph(*values)]


@torch.compile(backend=fused)
def loss_of(out, scale):
    halves = out.pow(2) * 0.5
    return (halves * scale).mean()


torch.manual_seed(3)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(2):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    loss = loss_of(model(x), 2.0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss={loss.item()!r}", flush=True)
"""
CASE = "".join(
    line
    for line in kit.CASE.replace("steps = 6", "steps = 2").replace(" --steps 6", "").splitlines(keepends=True)
    if not line.startswith(("save", "resume", "proof"))
)


def explained(repo: Repo, code: int = 0) -> str:
    """What `repro explain HEAD` prints."""
    done = repo.repro("explain", "HEAD")
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr.splitlines()[-1]


@pytest.mark.whole
def test_a_compiled_program_is_the_same_twice(tmp_path: Path) -> None:
    """The compiler sets Python's generator back, which seeds nothing: in each run that is elsewhere, and not compared.

    A state that the program sets from elsewhere does.
    """
    for number, state in enumerate(("", "import random\nrandom.setstate(random.Random(7).getstate())\n")):
        repo = kit.start(tmp_path / str(number), state + TRAIN, CASE)
        for name in ("one", "two"):
            assert repo.repro("trace", "--out", name, "--", "python", "train.py").returncode == 0
        done = repo.repro("diff", "one", "two")
        assert done.returncode == 0, done.stdout
        assert f"{1 + number} random generator" in done.stdout


def test_a_change_in_a_compiled_function_is_explained(tmp_path: Path) -> None:
    """Its operation and line are named, and that the step was recorded with the functions as they are written."""
    repo = kit.start(tmp_path, TRAIN, CASE)
    kit.edit(repo, "out.pow(2) * 0.5", "out.pow(2) * 0.75", "Other halves")
    text = explained(repo)
    line = TRAIN[: TRAIN.index("halves = out")].count("\n") + 1
    assert f"train.py:{line}" in text and "aten.mul.Tensor" in text and "0.75" in text
    assert "size, at aten.mul.Tensor" in text
    assert "recorded as the code is written, without torch.compile" in text


@pytest.mark.whole
def test_a_difference_that_only_the_compiler_makes(tmp_path: Path) -> None:
    """Where both versions agree as they are written, that is what is said."""
    repo = kit.start(tmp_path, TRAIN, CASE)
    kit.edit(repo, "out * 1.25", "out * 1.5", "Another compiler")
    text = explained(repo, 3)
    assert "torch.compile" in text and "agree in step 0" in text


@pytest.mark.whole
def test_what_is_random_under_the_recorder_is_refused(tmp_path: Path) -> None:
    """A compiled step that is not the same twice under the recorder explains nothing."""
    noisy = TRAIN.replace("import torch\n", "import os\nimport torch\n").replace(
        "loss = loss_of(model(x), 2.0)",
        "noise = os.getpid() * 1e-6 * torch._C._len_torch_dispatch_stack()\n    loss = loss_of(model(x), 2.0 + noise)",
    )
    repo = kit.start(tmp_path, noisy, CASE)
    kit.edit(repo, "out.pow(2) * 0.5", "out.pow(2) * 0.75", "Other halves")
    probes = repo.root / ".git" / "repro" / "probes"
    for call in (1, 2):  # what was recorded serves no later call
        text = explained(repo, 3)
        assert "does not reproduce itself" in text
        assert len([*probes.glob("*/operations")]) == 4 * call


@pytest.mark.whole
def test_what_the_recorder_moves_confirms_nothing(tmp_path: Path) -> None:
    """Its replays of a compiled program have other numbers: the culprit is replayed without it, and still explained."""
    repo = kit.start(tmp_path, TRAIN, None)
    good = kit.note(repo, "one")
    culprit = kit.edit(repo, "* 0.5", "* 0.25", "Halve")
    kit.note(repo, "two")
    done = repo.repro("bisect", f"{good}..HEAD", "-j", "2", "--json", "--", "python", "train.py")
    result = json.loads(done.stdout)
    assert result["culprit"]["commit"] == culprit and result["explains_bad"] is True, done.stderr
    assert result["cost"]["confirmation"]["probes"] == 4
    line = TRAIN[: TRAIN.index("halves = out")].count("\n") + 1
    assert f"train.py:{line}" in result["culprits"][0]["explanation"]["text"]


@pytest.mark.whole
@pytest.mark.parametrize("variable", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_what_is_compiled_nowhere_is_recorded_on_its_way(
    tmp_path: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch.compile switched off the confirmation records the operations, and nothing is run for more."""
    monkeypatch.setenv(variable, "1")
    repo = kit.start(tmp_path, TRAIN, None)
    good = kit.note(repo, "one")
    kit.edit(repo, "* 0.5", "* 0.25", "Halve")
    done = repo.repro("bisect", f"{good}..HEAD", "--json", "--", "python", "train.py")
    result = json.loads(done.stdout)
    assert [result["cost"][part]["probes"] for part in ("confirmation", "explanation")] == [2, 0], done.stderr
    assert "without torch.compile" not in result["culprits"][0]["explanation"]["text"]


@pytest.mark.whole
def test_finished_recordings_of_operations_are_not_made_again(tmp_path: Path) -> None:
    """A bisect that is called again makes what the first did not finish, and what is damaged, and says the same."""
    repo = kit.start(tmp_path, TRAIN, None)
    good = kit.note(repo, "one")
    kit.edit(repo, "* 0.5", "* 0.25", "Halve")

    def called() -> tuple[int, int, str]:
        done = repo.repro("bisect", f"{good}..HEAD", "--json", "--", "python", "train.py")
        result = json.loads(done.stdout)
        cost, text = result["cost"], result["culprits"][0]["explanation"]["text"]
        return cost["confirmation"]["probes"], cost["explanation"]["probes"], text

    state = repo.root / ".git" / "repro"
    confirmation, explanation, answer = called()
    assert (confirmation, explanation) == (4, 2)
    assert called() == (0, 0, answer)
    journal = state / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:-2]))  # as it was before the last two recordings
    assert called() == (0, 2, answer)
    for number, stream in enumerate(sorted(state.glob("probes/*/operations/rank-*.jsonl"))):
        stream.unlink() if number % 2 else stream.write_bytes(stream.read_bytes().replace(b"aten", b"at\xff\xff"))
    assert called() == (0, 4, answer)
