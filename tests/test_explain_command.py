"""`repro explain` as a user calls it: what it takes, what it prints and writes, how it ends."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import history_kit as kit
import pytest
from conftest import Repo

from repro_golden.repository.checkout import find_checkout
from repro_golden.trace import Trace

SCALE, OTHER = "scale = 1.0", "scale = 1.5"
CASE = (
    kit.CASE.replace("steps = 6", "steps = 2")
    .replace("proof_steps = 2", "proof_steps = 1")
    .replace("--steps 6", "--steps 2")
)
CASE = "".join(line for line in CASE.splitlines(keepends=True) if not line.startswith(("save", "resume")))
LINE = kit.TRAIN[: kit.TRAIN.index("loss = (model")].count("\n") + 1
PAIR = """
import torch
DECAY = 0.01
torch.manual_seed(0)
net = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 1)})
first = torch.optim.AdamW(net["b"].parameters(), lr=1e-1)
second = torch.optim.SGD(net["a"].parameters(), lr=1e-2)
for step in range(3):
    net["b"](torch.tanh(net["a"](torch.ones(8, 4)))).square().mean().backward()
    first.param_groups[0]["weight_decay"] = DECAY if step == 1 else 0.01
    first.step(), second.step()
    net.zero_grad()
"""
"""Two optimizers whose names come in another order than their steps."""


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    """A good commit, and one that scales what the model gives."""
    repo = kit.start(tmp_path, kit.TRAIN, CASE)
    kit.edit(repo, "model(x) * scale", "model(x) * scale * 1.001", "Scale more")
    return repo


def refused(repo: Repo, *arguments: str) -> str:
    """The one line with which a command is refused, with exit code 2."""
    done = repo.repro("explain", *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    return line


def test_a_commit_is_explained(repo: Repo, tmp_path: Path) -> None:
    """HEAD against its parent: JSON holds answer, operation and line, and so do both reports; exit code 0."""
    done = repo.repro("explain", "HEAD", "--json", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(done.stdout)
    after = data["after"]["explained"]
    assert (data["answer"], data["side"], data["before"]["point"]) == (
        "structure", "after", repo.git("rev-parse", "HEAD^")
    )  # fmt: skip
    assert (after["name"], after["arguments"], after["phase"]) == ("aten.mul.Tensor", "T0, 1.001", "forward")
    assert (after["place"]["file"], after["place"]["line"], after["place"]["touched"]) == ("train.py", LINE, True)
    assert "* scale * 1.001" in after["place"]["hunk"] and after["place"]["hunk"].startswith("@@ -")
    assert data["divergence"]["step"] == 0 and data["start"] is None
    assert data["size"]["magnitude"]["differing"] > 0
    assert data["reproduce"].startswith("repro explain ") and ".." in data["reproduce"]
    texts = [Path(path).read_text() for path in data["reports"]]
    assert [Path(path).name for path in data["reports"]] == ["report.md", "report.html"]
    for text in texts:
        assert f"train.py:{LINE}" in text and "aten.mul.Tensor" in text and "1.001" in text


@pytest.mark.campaign
def test_the_text_says_what_the_json_says(repo: Repo) -> None:
    """A..B, twice: the text's facts are those of the JSON, and the second call replays only what it records."""
    spec = f"{repo.git('rev-parse', 'HEAD^')}..HEAD"
    data = json.loads(repo.repro("explain", spec, "--json").stdout)
    done = repo.repro("explain", spec)
    assert done.returncode == 0 and max(map(len, done.stdout.splitlines())) < 400
    facts = [data["text"], f"train.py:{LINE} in", "(changed)", data["after"]["explained"]["name"]]
    facts += [f"{data['before']['operations']} and {data['after']['operations']} operations", "both ran from step 0"]
    facts += [f"reproduce with: {data['reproduce']}", *data["reports"]]
    facts += [f"looked at {data['looked_at']['text']}"]
    assert data["looked_at"]["metrics"] == 1 and "looked" not in data
    for text in facts:
        assert text in done.stdout, (text, done.stdout)
    if data["size"]:
        assert f"{data['size']['magnitude']['differing']} of" in done.stdout
        assert done.stdout.count(" ULP  ") == len(data["size"]["histogram"])
    assert sum(Path(path).is_file() for path in data["reports"]) == 2


@pytest.mark.campaign
def test_commits_that_agree(repo: Repo) -> None:
    """Where no number differs this is the answer, exit code 0, and the report says it too."""
    kit.note(repo, "nothing")
    done = repo.repro("explain", "HEAD", "--json")
    data = json.loads(done.stdout)
    assert (done.returncode, data["answer"], data["divergence"]) == (0, "agree", None)
    for path in data["reports"]:
        text = Path(path).read_text()
        assert "agree bit for bit over 2 steps" in text and f"Looked at {data['looked_at']['text']}." in text


@pytest.mark.campaign
def test_two_traces_are_explained(repo: Repo) -> None:
    """Traces that replays left behind: the commits that they were recorded from, and their case."""
    first = json.loads(repo.repro("explain", "HEAD", "--json").stdout)
    probes = sorted((repo.root / ".git" / "repro" / "probes").iterdir())
    headers = {json.loads((path / "header.json").read_text())["subject"]["commit"]: path for path in probes}
    before, after = (str(headers[first[side]["point"]]) for side in ("before", "after"))
    done = repo.repro("explain", before, after, "--json")
    assert done.returncode == 0, done.stderr
    second = json.loads(done.stdout)
    assert {**second, "reports": 0} == {**first, "reports": 0}
    assert "a trace: give the one to compare it with too" in refused(repo, before)


def test_traces_of_commands_are_explained(repo: Repo) -> None:
    """`repro trace` says whose commit's code ran, if it was one's: what it writes itself is no change of it."""
    program = ("--", "python", "train.py", "--steps", "2")
    for commit, name in (("HEAD", "after"), ("HEAD^", "before")):
        repo.git("checkout", "--quiet", commit)
        assert repo.repro("trace", "--out", f"golden/{name}", *program).returncode == 0
    done = repo.repro("explain", "golden/before", "golden/after", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["after"]["explained"]["place"]["line"] == LINE
    (repo.root / "more.py").write_text("")
    assert repo.repro("trace", "--out", "other", *program).returncode == 0
    assert "other is of no commit" in refused(repo, "golden/before", "other")


@pytest.mark.whole
def test_a_second_recording_that_makes_other_calls_is_refused(tmp_path: Path) -> None:
    """A program that calls torch once more from its third run on: what was read cannot be looked at again, exit 3."""
    runs = tmp_path / "runs"
    runs.mkdir()
    counted = f"""SEED = 1
runs = {str(runs)!r} + f"/{{SEED}}"
with open(runs, "a") as file:
    file.write("x")
for step in"""
    drawn = """    if os.path.getsize(runs) > 2:  # the trace and the first recording were made
        torch.zeros(1)
    x = x * torch.bernoulli(torch.full((8, 4), 0.5), generator=torch.Generator().manual_seed(SEED))
    scale = 1.0
"""
    train = kit.TRAIN.replace("for step in", counted).replace("    scale = 1.0\n", drawn)
    repo = kit.start(tmp_path, train, CASE)
    kit.edit(repo, "SEED = 1", "SEED = 2", "Another seed")
    done = repo.repro("explain", "HEAD")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "makes other calls than the first: what aten.bernoulli.default read could not be looked at" in done.stderr


@pytest.mark.whole
def test_a_round_of_optimizers_is_explained(tmp_path: Path) -> None:
    """The step that differs may stand behind another that was made after it: the operations of the round tell."""
    repo = kit.start(tmp_path, PAIR, CASE.replace("\nsteps = 2", "\nsteps = 4"))
    kit.edit(repo, "DECAY = 0.01", "DECAY = 0.02", "Decay more")
    done = repo.repro("explain", "HEAD", "--json")
    data = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (data["divergence"]["step"], data["divergence"]["signal"]) == (3, "optimizer.1/b.bias")
    assert data["after"]["explained"]["arguments"] == "T0, 0.998"


@pytest.mark.campaign
def test_what_no_operation_shows(tmp_path: Path) -> None:
    """Numbers that differ where no operation does: exit code 3, and the text says what that means."""
    train = kit.TRAIN.replace('print(f"step {step} loss={loss.item()!r}", flush=True)',
                              'print(f"step {step} loss={float(step) + 1.0!r}", flush=True)')  # fmt: skip
    repo = kit.start(tmp_path, train, f"{CASE}\n[observe]\nmetrics = ['loss=(?P<loss>\\S+)']\n")
    kit.edit(repo, "float(step) + 1.0", "float(step) + 2.0", "Say more")
    done = repo.repro("explain", "HEAD", "--json")
    data = json.loads(done.stdout)
    assert (done.returncode, data["answer"]) == (3, "unseen"), done.stdout + done.stderr
    assert "was not seen" in data["text"]


def test_what_is_refused(repo: Repo, tmp_path: Path) -> None:
    """The root commit, an unknown commit, a trace alone: one line each, exit code 2."""
    root = repo.git("rev-list", "--max-parents=0", "HEAD")
    assert root[:10] in refused(repo, root)
    assert "nowhere" in refused(repo, "nowhere")
    traces = [tmp_path / name for name in ("a", "b")]
    for trace in traces:
        trace.mkdir()
        (trace / "header.json").write_text("{}")
    assert f"{traces[0]} is a trace: give the one to compare it with too" in refused(repo, str(traces[0]))


@pytest.mark.whole
def test_traces_of_a_changed_checkout_are_refused(tmp_path: Path) -> None:
    """What was recorded from no commit has no source to name lines in; a trace that lies there is no such change.

    Code that lies beside a trace is: tracked and changed, or not tracked at all.
    """
    repo = kit.start(tmp_path, kit.TRAIN, None)
    for name, added in (("a", ""), ("b", ""), ("c", "# a change\n")):
        (repo.root / "train.py").write_text(kit.TRAIN + added)
        done = repo.repro("trace", "--out", name, "--", sys.executable, "train.py", "--steps", "1")
        assert done.returncode == 0, done.stderr
    assert Trace(repo.root / "b").header.subject["commit"] == repo.git("rev-parse", "HEAD")
    assert "c is of no commit: its checkout had changes" in refused(repo, "a", "c")
    (repo.root / "train.py").write_text(kit.TRAIN)
    checkout = find_checkout(repo.root)
    assert checkout.commit_without(repo.root / "d") is not None
    (repo.root / "a" / "more.py").write_text("")
    assert checkout.commit_without(repo.root / "d") is None
    repo.git("add", "a/more.py")
    repo.git("commit", "--quiet", "--message", "A file beside a trace")
    assert checkout.commit_without(repo.root / "d") is None  # and the trace beside it
    assert checkout.commit_without(repo.root / "a") is None
    shutil.rmtree(repo.root / "b")
    assert checkout.commit_without(repo.root / "d") is None


@pytest.mark.campaign
def test_a_bisect_ends_with_the_explanation(repo: Repo) -> None:
    """`repro bisect` names operation and line behind the culprit; --no-explain does without."""
    kit.note(repo, "later")
    good = repo.git("rev-list", "--max-parents=0", "HEAD")
    done = repo.repro("bisect", f"{good}..HEAD")
    assert done.returncode == 0 and f"train.py:{LINE}" in done.stdout and "aten.mul.Tensor" in done.stdout, done.stdout
    done = repo.repro("bisect", f"{good}..HEAD", "--no-explain")
    assert done.returncode == 0 and "aten.mul" not in done.stdout


HELPED = """\
import json, torch
from model import scaled
import report

scale = json.load(open("config.json"))["scale"]
torch.manual_seed(0)
m = torch.nn.Linear(4, 2)
o = torch.optim.SGD(m.parameters(), lr=0.1)
\x0c
def step(x):
    loss = scaled(m(x), 1.0).pow(2).mean() * scale
    loss.backward()
    o.step()
    o.zero_grad()
    report.line(loss.item())
for x in torch.ones(2, 3, 4):
    step(x)
"""
REPORT = "def line(loss):\n    loss = round(loss, 4)\n    return f'{loss}'\n"


@pytest.mark.parametrize("moved", [pytest.param("argument", marks=pytest.mark.whole), "file"])
def test_what_a_change_touched(tmp_path: Path, moved: str) -> None:
    """The line of a change, by its own number and text, with what it calls and what calls it; another line is not it.

    The file has a blank in its name and a form feed in its text. Beside a file that moved the numbers, a comment below
    a loop's head and a variable of a function that reads nothing of it are no lines of the change on the way.
    """
    folder = tmp_path / "my exp"
    folder.mkdir()
    (folder / "model.py").write_text("def scaled(x, by):\n    return x * by\n")
    (folder / "report.py").write_text(REPORT)
    (folder / "train.py").write_text(HELPED)
    (tmp_path / "config.json").write_text('{"scale": 1.0}')
    repo = Repo(tmp_path)
    repo.git("init", "--quiet", "--initial-branch=main")
    repo.commit("Start")
    if moved == "argument":
        (folder / "train.py").write_text(HELPED.replace("1.0)", "1.5)"))
    else:
        (tmp_path / "config.json").write_text('{"scale": 1.5}')
        (folder / "report.py").write_text(REPORT.replace("4)", "6)"))
        (folder / "train.py").write_text(HELPED.replace("4):\n", "4):\n    # a batch\n"))
    repo.commit("Change")
    done = repo.repro("explain", "HEAD", "--", sys.executable, "my exp/train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    line = HELPED[: HELPED.index("    loss = ")].count("\n") + 1
    assert "loss = scaled(m(x), 1." in done.stdout
    if moved == "argument":
        place = f"my exp/train.py:{line} in step (changed)"
        after = done.stdout[done.stdout.index("Change:") :]
        words = [place, "which calls my exp/model.py:2 in scaled", "called from my exp/train.py:17 in <module>"]
        assert [after.index(word) for word in words] == sorted(after.index(word) for word in words)
    else:
        assert "(changed)" not in done.stdout and "report.py:2" not in done.stdout


@pytest.mark.whole
@pytest.mark.parametrize(
    ("edit", "at", "named"),
    [
        (("* 0.5", "* (0.25 if step else 0.5)"), "step 1, grad", "given other arguments: (T0, 0.5) became (T0, 0.25)"),
        (("0.1 *", "(0.2 if step else 0.1) *"), "step 1, update", "given other arguments: (T0, 0.1) became (T0, 0.2)"),
    ],
)
def test_a_step_by_hand_is_explained(tmp_path: Path, edit: tuple[str, str], at: str, named: str) -> None:
    """The forward pass of a later step, which stands behind the update before, is among its operations, as its own."""
    repo = kit.start(tmp_path, BY_HAND, None)
    kit.edit(repo, *edit, "Change")
    done = repo.repro("explain", "HEAD", "--", "python", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"first signal that differs: {at}" in done.stdout and named in done.stdout.splitlines()[0]


BUFFER = """
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
net.register_buffer("scale", torch.tensor([[2.0]]))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
for step in range(2):
    (net(torch.ones(8, 4)) * net.scale).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.whole
def test_a_commit_that_changes_a_shape_alone_is_told_so(tmp_path: Path) -> None:
    """It is named, and that parameters and gradients are the same stands in text, report, JSON and the changelog."""
    repo = kit.start(tmp_path, BUFFER, None)
    kit.edit(repo, "[[2.0]]", "[2.0]", "Flatten")
    same = "trained parameters and gradients have the same bits in all 2 steps: only a shape changed"
    command = ("--out", str(tmp_path / "out"), "--", "python", "train.py")
    done = repo.repro("bisect", "HEAD~1..HEAD", *command)
    assert done.returncode == 0 and "but no bit of its trained parameters: first at step 0" in done.stdout, done.stderr
    assert done.stdout.splitlines().count(same) == 1 and "(float32 [1, 1] became float32 [1])" in done.stdout
    assert all(same in (tmp_path / "out" / f"report.{kind}").read_text() for kind in ("md", "html"))
    data = json.loads(repo.repro("bisect", "HEAD~1..HEAD", "--json", *command).stdout)
    assert [culprit["comparison"]["untouched"] for culprit in data["culprits"]] == [same]
    assert f"{same}." in " ".join(repo.repro("history", "HEAD~1..HEAD", *command).stdout.split())


BY_HAND = """\
import torch

torch.manual_seed(3)
weight = torch.randn(4, 2, requires_grad=True)
for step in range(2):
    loss = (torch.ones(8, 4) @ weight).pow(2).mean() * 0.5
    loss.backward()
    with torch.no_grad():
        weight -= 0.1 * weight.grad
    weight.grad = None
    print(f"step {step} loss={loss.item()!r}", flush=True)
"""


DROPOUT = """
import torch
FILL, DRAWN = 1.0, 0
torch.manual_seed(0)
net, drop = torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
for step in range(2):
    del_me = [torch.full((8, 4), FILL) for _ in range(64)]
    del del_me
    torch.rand(DRAWN)
    drop(net(torch.ones(8, 4))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.whole
def test_random_numbers_in_memory_that_nobody_wrote(tmp_path: Path) -> None:
    """Other numbers are drawn: that is said, whatever lay in the memory that they are written to."""
    repo = kit.start(tmp_path, DROPOUT, case=None)
    kit.edit(repo, "FILL, DRAWN = 1.0, 0", "FILL, DRAWN = 2.0, 1", "Draw one more")
    done = repo.repro("explain", "HEAD", "--json", "--", "python", "train.py")
    data = json.loads(done.stdout)
    assert data["answer"] == "random", data["text"]
    assert data["after"]["explained"]["name"] == "aten.bernoulli_.float"
