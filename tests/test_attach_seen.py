"""Programs that train otherwise in a place that is easily overlooked: their traces differ, and nothing breaks."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_folder_kit import event
from test_attach_told import HEAD, traces

from repro_golden.compare.traces import compare, first_difference
from repro_golden.dumps.run.events import EventLog

STEPS = "for i in range(3):\n    backward(); optimizer.step()"
IDLE = """\
target = torch.nn.Linear(3, 2)
target.optimizer = torch.optim.SGD(target.parameters(), lr=0.1)  # which never steps
for i in range(3):
    backward(); optimizer.step()
    with torch.no_grad(): target.weight.mul_(2 if V else 1)
"""
FROZEN = """\
for i in range(7):
    if i == 5: optimizer = torch.optim.SGD(model[0].parameters(), lr=0.01)
    backward(); optimizer.step()
with torch.no_grad(): model[2].weight.mul_(2 if V else 1)
"""
WRAPPED = """\
class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.register_buffer("count", torch.zeros(()))
model.register_buffer("count", torch.zeros(()))
whole = Wrapper(model)
for i in range(3):
    backward(); optimizer.step()
    whole.count += 2 if V else 1; model.count += 3
"""
AVERAGE = """\
norms = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.LayerNorm(4))
optimizer.add_param_group({"params": norms.parameters()})
ema = {p: p.detach().clone() for p in [*model.parameters(), *norms.parameters()]}
for i in range(3):
    backward(); optimizer.step()
    ema[norms[0].weight].mul_(2 if V else 1)
"""
AGAIN = """\
for i in range(3):
    backward(); optimizer.step()
    tell(loss=9.0 if V else 1.0); tell(loss=2.0); tell(**{"loss#1": 3.0})
"""
PACKED = """\
class Packed(torch.nn.Parameter):  # as bitsandbytes' weights: codes, and their scale as an attribute
    def __new__(cls):
        codes = torch.Tensor._make_subclass(cls, torch.ones(4, 4, dtype=torch.int8), False)
        codes.scale = torch.ones(1)
        return codes
model.register_parameter("base", Packed())
for i in range(3):
    backward(); optimizer.step()
    if i == 1: model.base.scale.mul_(2 if V else 1)
"""
OPENED = """\
from torch.testing._internal.two_tensor import TwoTensor
for i in range(3):
    backward(); optimizer.step()
    for p in model.parameters(): optimizer.state[p].setdefault("q", TwoTensor(torch.zeros(2), torch.zeros(2)))
optimizer.state[model[0].weight]["q"].a.add_(1 if V else 0)
"""
LINE = STEPS + "\nsys.stdout.write(json.dumps({'acc': 2.0 if V else 1.0}))\n"


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (IDLE, "frozen/target/weight"), (FROZEN, "end/frozen/2.weight"), (WRAPPED, "buffer/count#1"),
        (AVERAGE, "copy/ema/4"), (AGAIN, "loss#2"), (LINE, "acc"), (PACKED, "frozen/base.scale"),
        (OPENED, "end/q/0.weight.a"),
    ],
)  # fmt: skip
def test_what_is_easily_overlooked_is_seen(tmp_path: Path, program: str, name: str) -> None:
    """Weights that no optimizer steps, a name that is taken, a tensor as a key, a line without an end.

    So are the scales of a frozen quantized weight, and wrappers in the state at the end, as they are at steps.
    """
    difference = first_difference(*traces(tmp_path, HEAD + program))
    assert difference is not None and difference.name.removesuffix("#1") == name.removesuffix("#1")


def test_what_is_not_finite_at_the_end_agrees_on_nothing(tmp_path: Path) -> None:
    """Weights that are NaN after the last step are no masks."""
    spoiled = STEPS + "\nwith torch.no_grad(): model[0].weight.div_(0)\n"
    comparison = compare(*traces(tmp_path, HEAD + spoiled))
    assert comparison.divergence is None and not comparison.equal
    assert comparison.nonfinite is not None and comparison.nonfinite.name == "end/0.weight"


SWAP = """\
torch.__future__.set_swap_module_params_on_conversion(True)
head = torch.nn.Linear(4, 4).requires_grad_(False)
lone = torch.zeros(4).requires_grad_(True)
for i in range(4):
    backward(); optimizer.step(); optimizer.zero_grad()
    head.double(); head.float()
    model.load_state_dict(model.state_dict())
    if i == 2: head.weight.data.mul_(2 if V else 1)
"""


def test_tensors_are_swapped_under_the_recorder(tmp_path: Path) -> None:
    """Torch swaps none that is referred to weakly; what is read keeps its name."""
    a, b = traces(tmp_path, HEAD + SWAP)
    difference = first_difference(a, b)
    assert difference is not None and (difference.step, difference.name) == (3, "module/head/weight")
    names = [{row.name for row in trace.rows(3)} for trace in (a, b)]
    assert names[0] == names[1] and "0.weight" in names[0]


WANDB = """\
import wandb
run = wandb.init(mode=sys.argv[1], project="p", dir=tempfile.mkdtemp())
V = len(sys.argv) > 2
for i in range(2):
    backward(); optimizer.step()
    run.log({"seen": 10**400, "eval": {"acc": 2.0 if V else 1.0}})
"""


@pytest.mark.parametrize("mode", ["disabled", "offline"])
def test_what_wandb_is_given_is_kept(tmp_path: Path, mode: str) -> None:
    """Nested as wandb names it, beside a number that is none, and where wandb is disabled."""
    pytest.importorskip("wandb")
    difference = first_difference(*traces(tmp_path, HEAD + WANDB, mode))
    assert difference is not None and difference.name == "eval.acc"


def log_of(folder: Path, *events: dict[str, float]) -> EventLog:
    """A log of one update, read."""
    (folder / "actor.jsonl").write_text(
        "".join(event("metric", 0, metrics={"train/step": 0} | each) for each in events)
    )
    log = EventLog(folder)
    log.read()
    return log


def test_names_of_one_event_are_metrics_of_their_own(tmp_path: Path) -> None:
    """`pass@1` and `loss#1` are names that trainers give; a log that was put back has its new numbers alone."""
    given = {"train/pass@1": 0.5, "train/pass": 0.5, "train/loss#1": 2.0, "train/loss": 2.0}
    log = log_of(tmp_path, given, {"train/loss": 3.0})
    assert log.steps[0] == given | {"train/loss#2": 3.0, "train/step": 0}
    assert log_of(tmp_path, {"a": 1.0}, {"a": 2.0}, {"a": 1.0}).steps[0].keys() == {"a", "a#1", "a#2", "train/step"}
    (tmp_path / "actor.jsonl").write_text(event("metric", 0, metrics={"train/step": 0, "train/loss": 5.0}))
    log.read()
    assert log.steps[0] == {"train/step": 0, "train/loss": 5.0}


FOLDS = """\
import gc
gc.disable()
for fold in range(2):
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)  # keeps the first one's alive
    for i in range(2):
        backward(); optimizer.step()
if V: gc.collect()
"""


def test_when_garbage_is_collected_is_no_difference(tmp_path: Path) -> None:
    """The end shows of optimizers alike the last."""
    assert first_difference(*traces(tmp_path, HEAD + FOLDS)) is None


LAZY = """\
import copy, tempfile
critic = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyBatchNorm1d())  # warmed up later
model.add_module("head", torch.nn.LazyLinear(1))
target = copy.deepcopy(model.head)
optimizer = torch.optim.SGD([*critic.parameters(), *model.parameters()], lr=0.01)
kept = {name: p for name, p in target.named_parameters()}
path = os.path.join(tempfile.mkdtemp(), "last.pt")
for i in range(4):
    optimizer.zero_grad(); x = model[2](model[1](model[0](torch.randn(4, 8)))).pow(2).mean()
    (x + critic(torch.ones(2, 3)).sum() if i == 3 else x).backward(); optimizer.step()
    torch.save([critic.state_dict(), model.state_dict()], path)
    if V and i == 3:
        with torch.no_grad(): critic[0].weight += 1
"""


def test_modules_that_no_data_has_given_a_shape_are_named(tmp_path: Path) -> None:
    """Lazy ones beside the training, in its model, optimizer and a copy end no recording, and are read later."""
    first, other = traces(tmp_path, HEAD + LAZY)
    assert [len(trace.steps) for trace in (first, other)] == [4, 4] and first.end is not None
    named = {name for name, why in first.end["unread"].items() if why == "its shape is not known yet"}
    assert named == {"frozen/model/head.weight", "frozen/model/head.bias", "module/target"}
    late = [{row.name for row in first.rows(index) if row.phase == "update"} for index in (2, 3)]
    assert "0.weight#1" not in late[0] and {"0.weight", "0.weight#1"} <= late[1]
    difference = first_difference(first, other)
    assert difference is not None and difference.step == 3 and difference.signal.startswith("end/")
