"""Explanations of real changes in real repositories: the operation, the line, the size, or why there is none."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import history_kit as kit
import mutations_kit
import pytest
import torch
from conftest import Repo
from explain_kit import explained, explainer, wrong
from test_environments import requirements
from test_environments import start as locked

from repro.report.explain import explain_text
from repro_bisect.explain.driver import explain
from repro_bisect.explain.result import Explanation
from repro_golden.base.errors import NotVerifiableError

TRAIN = """\
import argparse
import os
import torch
from repro_golden import observe

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--load")
parser.add_argument("--save")
parser.add_argument("--save-step", type=int, default=-1)
options = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(3)


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        found = grad.clone()
        found.numpy()[:] *= 1.0
        return found


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 2)

    def forward(self, x, powers):
        hidden = torch.tanh(self.first(x))
        residual = hidden * 3.0
        scaled = powers * 2.0
        return self.second(Passed.apply(hidden) + residual + scaled)


model = Net()
model.second.load_state_dict(torch.load("second.pt"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
first = 0
if options.load:
    state = torch.load(options.load + "/state.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]
powers = torch.tensor([1.0, 2.0, 4.0, -8.0])
for step in range(first, options.steps):
    order = [0, 1, 2, 3, 4, 5]
    late = 1.0
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))[order]
    observe("x", x.flatten(), "input")
    loss = (model(x, powers) * late).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    optimizer.step()
    print(f"step {step} loss={loss.item()!r}", flush=True)
    if step + 1 == options.save_step:
        os.makedirs(options.save, exist_ok=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1},
                   options.save + "/state.pt")
"""
CASE = kit.CASE.replace("steps = 6", "steps = 3").replace("--steps 6", "--steps 3").replace('"train.py"', '"."')
UNSAVED = "".join(line for line in CASE.splitlines(keepends=True) if not line.startswith(("save", "resume")))
CHANGES = {
    "forward": ("hidden * 3.0", "hidden * 3.001"),
    "one ULP": ("powers * 2.0", f"powers * {2 + 2**-22!r}"),
    "backward": ("self.second(Passed.apply(hidden)", "self.second(Passed.apply(hidden.detach())"),
    "gradients": ("grad.mul_(0.5)", "grad.mul_(0.25)"),
    "optimizer": ("lr=0.01", "lr=0.0101"),
    "seed": ("torch.manual_seed(3)", "torch.manual_seed(4)"),
    "order": ("[0, 1, 2, 3, 4, 5]", "[5, 4, 3, 2, 1, 0]"),
    "load": ('torch.load("second.pt"))', '{k: v.bfloat16().float() for k, v in torch.load("second.pt").items()})'),
    "numpy": ("*= 1.0", "*= 1.5"),
    "late": ("late = 1.0", "late = 1.0 if step < 2 else 1.5"),
    "remark": ("late = 1.0\n", "late = 1.0  # no number\n"),
}


def line_of(text: str, piece: str) -> int:
    """The number of the line that holds a piece of text."""
    return text[: text.index(piece)].count("\n") + 1


@dataclass(frozen=True)
class Planted:
    """A repository with all of `CHANGES`, each with its way back behind it.

    Attributes:
        repo: It.
        commits: Before and after each.
    """

    repo: Repo
    commits: Mapping[str, tuple[str, str]]

    def explain(self, name: str) -> Explanation:
        """What is said of a change."""
        before, after = self.commits[name]
        with explainer(self.repo, f"{before}..{after}") as (scheduler, checkout):
            return explain(scheduler, checkout, before, after)


def plant(folder: Path, case: str = CASE, train: str = TRAIN) -> Planted:
    """The repository."""
    repo = kit.start(folder, train, case)
    torch.manual_seed(11)
    torch.save(torch.nn.Linear(4, 2).state_dict(), repo.root / "second.pt")
    repo.commit("Weights")
    commits = {}
    for name, (old, new) in CHANGES.items():
        before = repo.git("rev-parse", "HEAD")
        commits[name] = (before, kit.edit(repo, old, new, name))
        kit.edit(repo, new, old, f"No {name}")
    return Planted(repo, commits)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """The repository, with what replays found before."""
    return plant(tmp_path_factory.mktemp("planted"))


def changed(name: str) -> int:
    """The line of the trainer that a change touches."""
    return line_of(TRAIN, CHANGES[name][0])


def names_the_line(explanation: Explanation, name: str) -> bool:
    """Whether the answer stands on the changed line, which the change touched, and shows its hunk."""
    place = explanation.named.place if explanation.named else None
    hunk = bool(place and place.hunk.count(CHANGES[name][0]) and place.hunk.count(CHANGES[name][1]))
    return bool(place) and (place.file, place.line, place.touched, hunk) == ("train.py", changed(name), True, True)


# -- changes of the built-in trainer


@pytest.mark.whole
def test_a_planted_change_is_named(tmp_path: Path) -> None:
    """A change drawn by a seed: operation and line."""
    assert wrong(list(explained(mutations_kit.effective(2, 1), tmp_path))) == []


@pytest.mark.campaign
@pytest.mark.parametrize("seed", [101, 202, 303])
def test_many_planted_changes_are_named(tmp_path: Path, seed: int) -> None:
    """Twenty changes each of three seeds, spread over all kinds: operation and line of all of them."""
    explanations = list(explained(mutations_kit.effective(seed, 20), tmp_path))
    assert len({change.kind for change, _ in explanations}) == 20
    assert wrong(explanations) == []


# -- a program of somebody else


@pytest.mark.whole
def test_a_late_change_starts_from_the_saved_state(planted: Planted) -> None:
    """Both versions start from the first one's state before the step that differs; a number is an argument."""
    explanation = planted.explain("late")
    assert explanation.divergence is not None and (
        explanation.divergence.step,
        explanation.start,
        explanation.answer,
    ) == (2, 2, "arguments")
    assert explanation.named is not None and (explanation.named.name, explanation.named.arguments) == (
        "aten.mul.Tensor",
        "T0, 1.5",
    )
    assert explanation.named.place is not None and explanation.named.place.line == line_of(TRAIN, "loss = (model")
    assert [(place.line, place.touched) for place in explanation.mentions] == [(changed("late"), True)] * 2
    assert (
        explanation.size is not None and explanation.size.magnitude.exact and explanation.size.magnitude.differing == 12
    )
    rows = explanation.to_mapping()
    assert rows["answer"] == "arguments" and rows["after"]["explained"]["phase"] == "forward"


PLAN = """\
def order(step):
    drawn = [0, 1, 2, 3, 4, 5]
    return drawn


def unused(step):
    return [5, 4, 3, 2, 1, 0]
"""
BESIDE = """\
def test_order():
    x = [0, 1]
    assert x
"""


@pytest.mark.whole
def test_lines_that_ran_are_named_where_no_operation_is_made(tmp_path: Path) -> None:
    """A list made in another file: no stack holds it, no line reads its name, but it ran. What did not is not named."""
    train = TRAIN.replace("import torch\n", "import plan\nimport torch\n", 1)
    drawn = "verbose = 0\n    order = plan.order(step)"
    repo = kit.start(tmp_path, train.replace("order = [0, 1, 2, 3, 4, 5]", drawn), CASE)
    torch.save(torch.nn.Linear(4, 2).state_dict(), repo.root / "second.pt")
    (repo.root / "plan.py").write_text(PLAN)
    (repo.root / "test_plan.py").write_text(BESIDE)
    before = repo.commit("Weights and a plan")
    changed = PLAN.replace("drawn = [0, 1, 2,", "drawn = [0, 2, 1,").replace("[5, 4,", "[4, 5,")
    (repo.root / "plan.py").write_text(changed)
    (repo.root / "test_plan.py").write_text(BESIDE.replace("[0, 1]", "[0, 2]"))
    repo.edit("train.py", "verbose = 0", "verbose = 1")
    (repo.root / "data").mkdir()
    for number in range(3000):  # more names than a variable holds
        (repo.root / "data" / f"{number:064d}.txt").write_text("")
    after = repo.commit("Another order")
    with explainer(repo, f"{before}..{after}") as (scheduler, checkout):
        explanation = explain(scheduler, checkout, before, after)
    assert (
        explanation.named is not None and explanation.named.place is not None and not explanation.named.place.touched
    ), explanation.text
    assert not explanation.mentions  # a test's `x` is no program's
    beside, place = explanation.ran  # that of the file which the stack crosses comes first
    assert (beside.file, beside.text) == ("train.py", "verbose = 1")
    assert (place.file, place.line, place.function, place.touched) == ("plan.py", 2, "order", True)
    assert "drawn = [0, 2, 1," in place.text and "+    drawn = [0, 2, 1," in place.hunk
    told = explain_text(explanation)
    assert "no line of the change is on the way there; these lines of it ran:\n  train.py:" in told
    assert "\n  plan.py:2 in order\n" in told


@pytest.mark.campaign
def test_a_trainer_that_saves_nothing_runs_from_step_0(tmp_path: Path) -> None:
    """The same answer, from the beginning."""
    explanation = plant(tmp_path, UNSAVED).explain("late")
    assert explanation.divergence is not None and (explanation.divergence.step, explanation.start) == (2, None)
    assert explanation.answer == "arguments" and changed("late") in [place.line for place in explanation.mentions]


@pytest.mark.campaign
def test_a_change_of_the_forward_pass(planted: Planted) -> None:
    """A factor: the product on its line, in its module."""
    explanation = planted.explain("forward")
    assert explanation.answer == "arguments" and names_the_line(explanation, "forward")
    assert explanation.named is not None
    assert (explanation.named.name, explanation.named.phase, explanation.named.module) == (
        "aten.mul.Tensor",
        "forward",
        "Net",
    )
    assert explanation.before.explained is not None and explanation.before.explained.arguments == "T0, 3.0"


@pytest.mark.campaign
def test_the_size_of_one_ulp(planted: Planted) -> None:
    """Powers of two by the next number after 2: every result is one value off, and the histogram says so."""
    explanation = planted.explain("one ULP")
    assert explanation.answer == "arguments" and names_the_line(explanation, "one ULP") and explanation.size is not None
    size = explanation.size.magnitude
    assert (size.elements, size.total, size.differing, size.max_ulp) == (4, 4, 4, 1)
    assert list(explanation.size.histogram) == [(1, 4)] and explanation.size.dtypes == ("float32", "float32")
    assert size.max_abs == 16 * 2**-23
    assert size.max_rel is not None and size.max_rel == pytest.approx(2**-23, rel=1e-6)


@pytest.mark.campaign
def test_a_change_of_the_backward_pass_alone(planted: Planted) -> None:
    """A gradient that is cut off: no forward number moves, and the line is that of the cut."""
    explanation = planted.explain("backward")
    assert explanation.divergence is not None and explanation.divergence.phase == "grad"
    assert explanation.named is not None and explanation.named.place is not None
    assert (explanation.named.place.line, explanation.named.place.touched) == (changed("backward"), True), (
        explanation.text
    )


@pytest.mark.campaign
def test_a_change_between_backward_and_optimizer(planted: Planted) -> None:
    """Scaled gradients: the product in place, in the optimizer's phase."""
    explanation = planted.explain("gradients")
    assert explanation.answer == "arguments" and names_the_line(explanation, "gradients")
    assert explanation.named is not None and (explanation.named.name, explanation.named.phase) == (
        "aten.mul_.Tensor",
        "optimizer",
    )


@pytest.mark.campaign
def test_a_setting_of_the_optimizer(planted: Planted) -> None:
    """A learning rate: the operation is torch's, called by the step; the changed line defines what that line reads."""
    explanation = planted.explain("optimizer")
    assert explanation.named is not None and explanation.named.phase == "optimizer", explanation.text
    assert explanation.named.place is not None and explanation.named.place.line == line_of(TRAIN, "optimizer.step()")
    assert changed("optimizer") in [place.line for place in explanation.mentions]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("seed", "the weights that the run starts from"),
        ("load", "the weights that the run starts from (second."),
        ("order", "holds the same elements in another order"),
    ],
)
def test_inputs_that_differ(planted: Planted, name: str, message: str) -> None:
    """Another seed, a checkpoint that loads differently and another order of the data are told as what they are."""
    explanation = planted.explain(name)
    assert explanation.answer == "inputs" and message in explanation.text and explanation.start is None
    assert explanation.text.startswith("the step begins with other values: ")
    if name != "order":
        assert explanation.named is not None and explanation.named.phase in ("input", "forward")
    if name == "load":
        assert names_the_line(explanation, name)


@pytest.mark.campaign
def test_a_gap(planted: Planted) -> None:
    """What a custom autograd function's backward writes with NumPy is between the copy and the next reader."""
    explanation = planted.explain("numpy")
    assert explanation.answer == "gap" and explanation.gap is not None, explanation.text
    assert "by no recorded operation: what wrote it was not seen" in explanation.text
    writer = line_of(TRAIN, "found = grad.clone()")
    assert any(f"train.py:{line}" in explanation.gap[0] for line in (writer, writer + 1)), explanation.gap
    assert explanation.gap[1].startswith("aten.add.Tensor at train.py:"), "where both gradients of `hidden` meet"


@pytest.mark.campaign
def test_versions_that_agree(planted: Planted) -> None:
    """No step is recorded where no number differs."""
    explanation = planted.explain("remark")
    assert explanation.answer == "agree" and explanation.divergence is None and explanation.named is None
    assert "agree bit for bit over 3 steps" in explanation.text


# -- what is no code


@pytest.mark.campaign
def test_only_the_environment_differs(tmp_path: Path) -> None:
    """Another version of a package in the lock file: it is named, beside the operation that its number reaches."""
    repo = locked(tmp_path)
    before = repo.git("rev-parse", "HEAD")
    after = requirements(repo, "2.0")
    with explainer(repo, f"{before}..{after}") as (scheduler, checkout):
        explanation = explain(scheduler, checkout, before, after)
    assert "environment tinyscale: 1.0 -> 2.0" in explanation.environment
    assert explanation.answer == "environment" and "tinyscale" in explanation.text
    assert explanation.named is not None and "1.5" in explanation.named.arguments


# -- what is refused


def refused(folder: Path, train: str) -> str:
    """Why a forward change of a trainer cannot be explained: one line."""
    planted = plant(folder, UNSAVED, train)
    with pytest.raises(NotVerifiableError) as caught:
        planted.explain("forward")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.campaign
def test_a_step_that_the_recorder_would_change_is_refused(tmp_path: Path) -> None:
    """A trainer that looks whether a dispatch mode is under way makes another step under the recorder."""
    looking = "x, powers) * (late + torch._C._len_torch_dispatch_stack())"
    message = refused(tmp_path, TRAIN.replace("x, powers) * late", looking))
    assert message.startswith("step 0 of ") and "has other numbers under the recorder than without it" in message


@pytest.mark.campaign
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="torch.compile needs one")
def test_a_compiled_model_is_explained(tmp_path: Path) -> None:
    """Its code as it is written is: under the recorder nothing is compiled."""
    text = TRAIN.replace("loss = (model(x, powers)", "loss = (compiled(x, powers)").replace(
        "optimizer = torch.optim", "compiled = torch.compile(model)\noptimizer = torch.optim"
    )
    explanation = plant(tmp_path, UNSAVED, text).explain("forward")
    assert explanation.named is not None and explanation.named.place is not None
    assert explanation.named.place.line == line_of(text, "hidden * 3.0")
