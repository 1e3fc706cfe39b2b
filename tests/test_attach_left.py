"""What a program holds at its last step and when it has ended: it is read then, or it is said that it was not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import warm_kit
from attach_kit import NETWORKS
from conftest import environment

from repro_golden.trace import Trace

BEGIN = (
    NETWORKS
    + """\
def steps(model, optimizer, count):
    for step in range(count):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        yield step
"""
)


def diff(folder: Path, program: str) -> tuple[int, str]:
    """The exit code and the words of `repro diff` on a program's run and its other run."""
    (folder / "train.py").write_text(BEGIN + program)
    for other in "01":
        words = [sys.executable, "-m", "repro", "trace", "--out", f"t{other}", "--", sys.executable, "train.py"]
        done = warm_kit.run(words, folder, environment() | {"OMP_NUM_THREADS": "1", "OTHER": other})
        assert done.returncode == 0, done.stderr
    done = warm_kit.run([sys.executable, "-m", "repro", "diff", "t0", "t1"], folder, environment())
    return done.returncode, done.stdout


@pytest.mark.parametrize("count", [4, 5])
def test_a_generator_that_moved_after_the_last_step(tmp_path: Path, count: int) -> None:
    """Also where the number of steps is a power of two, at which the program's objects are searched anew."""
    code, output = diff(
        tmp_path,
        f"""
model = net()
optimizer = torch.optim.AdamW(model.parameters())
own = torch.Generator().manual_seed(1)
for _ in steps(model, optimizer, {count}):
    torch.randn(2, generator=own)
if other:
    own.manual_seed(5)
""",
    )
    assert code == 1
    assert f"differs at step {count - 1}, phase update, signal end/rng/own/own" in output


def test_how_far_a_loader_reads_ahead_is_no_difference(tmp_path: Path) -> None:
    """With workers it has drawn the next order before the steps of this one are made, from a generator it was given.

    One that no loader has is looked at, and torch's own.
    """
    code, output = diff(
        tmp_path,
        """
model = net()
optimizer = torch.optim.AdamW(model.parameters())
order, own = (torch.Generator().manual_seed(seed) for seed in (1, 2))
data = torch.utils.data.DataLoader(range(8), 4, shuffle=True, generator=order, num_workers=2 if other else 0)
for _ in range(2):
    for _ in zip(data, steps(model, optimizer, 2)):
        torch.randn(2, generator=own)
""",
    )
    assert code == 0, output
    assert "2 random generators," in output


def test_generators_in_lists_and_mappings(tmp_path: Path) -> None:
    """One for each rank, worker or environment is a common shape."""
    code, output = diff(
        tmp_path,
        """
model = net()
optimizer = torch.optim.AdamW(model.parameters())
ours = [torch.Generator().manual_seed(k) for k in range(2)]
theirs = {k: torch.Generator().manual_seed(k) for k in range(2)}
for step in steps(model, optimizer, 4):
    torch.randn(3 if other and step == 2 else 2, generator=ours[1])
    torch.randn(3 if other and step == 2 else 2, generator=theirs[0])
""",
    )
    assert code == 1
    assert "differs at step 3, phase update, signal rng/own/ours.1" in output
    assert "signals that differ in that step: 4 in update" in output, "both, and both at the end"


def test_the_last_state_of_an_optimizer_by_hand(tmp_path: Path) -> None:
    """The program's function has returned when its last step is read: what it held then is part of that step."""
    code, output = diff(
        tmp_path,
        """
class Momentum:
    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.moments = [torch.zeros_like(p) for p in self.parameters]
    def step(self, factor):
        with torch.no_grad():
            for p, moment in zip(self.parameters, self.moments):
                moment.mul_(factor).add_(p.grad)
                p.add_(p.grad, alpha=-0.01)
def main():
    model = net()
    optimizer = Momentum(model.parameters())
    for step in range(5):
        for p in model.parameters():
            p.grad = None
        loss_of(model).backward()
        optimizer.step(0.8 if other and step == 4 else 0.9)
main()
""",
    )
    assert code == 1
    assert "differs at step 4, phase update, signal copy/moments/0" in output


ANEW = """
def train():
    params = [torch.randn(3, 4).requires_grad_(), torch.randn(4, 1).requires_grad_()]
    x = torch.randn(8, 3)
    for step in range(4):
        loss = (torch.tanh(x @ params[0]) @ params[1]).square().mean()
        GRADIENTS
        rates = [0.1, 0.2 if other and step == 3 else 0.1]
        params = [(p - rate * g).detach().requires_grad_() for p, g, rate in zip(params, grads, rates)]
    return params
"""


LEFT_IN_A_LOOP = """\
for p in params:
            p.sum()
        grads = torch.autograd.grad(loss, params)"""


@pytest.mark.parametrize(
    "gradients",
    ["grads = torch.autograd.grad(loss, params)", "loss.backward(); grads = [p.grad for p in params]", LEFT_IN_A_LOOP],
    ids=["grad", "backward", "a name that stays"],
)
def test_parameters_that_are_made_anew_in_each_step(tmp_path: Path, gradients: str) -> None:
    """What a step made takes the place of what it was made of, after the last step too."""
    program = (
        ANEW.replace("GRADIENTS", gradients).replace("def train():", "if True:").replace("    return params\n", "")
    )
    code, output = diff(tmp_path, program)
    assert code == 1
    assert "differs at step 3, phase update" in output
    assert "looked at 2 parameters, 2 gradients" in output


def test_parameters_that_are_gone_at_the_end_are_told(tmp_path: Path) -> None:
    """Those that the last step made, in a function that has returned, were not seen; that is said."""
    _, output = diff(tmp_path, ANEW.replace("GRADIENTS", "grads = torch.autograd.grad(loss, params)") + "train()\n")
    assert "seen but not looked at: " in output and "it made its parameters anew" in output, output


def test_a_wrapper_that_keeps_nothing_ends_no_recording(tmp_path: Path) -> None:
    """One of torch's class that is made without torch's own beginning, and so has no state: what it wraps is read."""
    code, output = diff(
        tmp_path,
        """
class Wrapper(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner, self.param_groups = inner, inner.param_groups
    def zero_grad(self):
        self.inner.zero_grad()
    def step(self):
        self.inner.step()
model = net()
for step in steps(model, Wrapper(torch.optim.SGD(model.parameters(), lr=0.2 if other else 0.1)), 3):
    pass
""",
    )
    assert code == 1
    assert "differs at step 0, phase update" in output


def test_what_an_optimizer_keeps_in_forms_of_its_own_is_read(tmp_path: Path) -> None:
    """A state that is no mapping, and parameters by keys, are looked into; an optimizer without groups is named."""
    code, output = diff(
        tmp_path,
        """
import dataclasses, types
@dataclasses.dataclass
class Moments:
    m: dict
class Own(torch.optim.Optimizer):
    def __init__(self, model, form):
        super().__init__(model.parameters(), {"lr": 0.1})
        self._all = self.param_groups[0]["params"]
        zeros = [torch.full_like(p, 2.0 if other and form is Moments else 1.0) for p in self._all]
        self.state = form(zeros)
        self.param_groups[0]["params"] = dict(enumerate(self._all))
        if form is len:
            del self.param_groups
    def zero_grad(self):
        for p in self._all:
            p.grad = None
    @torch.no_grad()
    def step(self):
        for p in self._all:
            p.sub_(p.grad.sign(), alpha=0.1)
forms = [list, tuple, lambda zeros: types.SimpleNamespace(m=zeros), Moments, len]
models = [net() for _ in forms]
for model, optimizer in [(m, Own(m, form)) for m, form in zip(models, forms)]:
    list(steps(model, optimizer, 2))
""",
    )
    assert code == 1, output
    assert "differs at step 6, phase update, signal optimizer.3/own/state.m.0: float32 [4, 3]" in output
    assert "signals that differ in that step: 4 in update" in output
    rows = Trace(tmp_path / "t0").rows
    told = [{row.name for row in rows(step) if "own/state" in row.name} for step in (0, 2, 4)]
    assert told == [
        {f"{begin}{k}" for k in range(4)}
        for begin in ("own/state.", "optimizer.1/own/state.", "optimizer.2/own/state.m.")
    ]
    assert "the parameters of Own (it has no param_groups)" in output


def test_a_state_that_cannot_be_asked_for_ends_the_recording_alone(tmp_path: Path) -> None:
    """What the program's own code raises when we ask it is no signal handler's: the program goes on."""
    program = """
class Own(torch.optim.SGD):
    @property
    def state(self):
        raise RuntimeError("call state_dict")
    @state.setter
    def state(self, value):
        pass
    def step(self):
        pass
model = net()
list(steps(model, Own(model.parameters(), 0.1), 2))
print("the end was reached")
"""
    (tmp_path / "train.py").write_text(BEGIN + program)
    words = [sys.executable, "-m", "repro", "trace", "--out", "t", "--", sys.executable, "train.py"]
    done = warm_kit.run(words, tmp_path, environment() | {"OTHER": "0"})
    assert "the end was reached" in done.stdout and "Traceback" not in done.stderr
    assert (done.returncode, "the recorder failed at step 0: RuntimeError: call state_dict" in done.stderr) == (2, True)


def test_each_buffer_without_plain_bytes_is_named(tmp_path: Path) -> None:
    """Sparse and nested tensors end no recording, and each is told by its own name."""
    code, output = diff(
        tmp_path,
        """
model = net()
model.register_buffer("adjacent", torch.eye(3).to_sparse())
model.register_buffer("mask", torch.eye(3).to_sparse_csr())
model.register_buffer("ragged", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
list(steps(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2)), 3))
""",
    )
    assert code == 0
    assert (
        "seen but not looked at: the weights at the end (the program had let go of its optimizers when it ended), "
        "buffer/adjacent (its layout is sparse_coo), buffer/mask (its layout is sparse_csr), "
        "buffer/ragged (it is nested)" in output
    )
    assert "looked at 4 parameters, 4 gradients, optimizer state, 1 learning rate," in output, "a rate is no parameter"


def test_what_is_seen_in_a_step_between_is_counted(tmp_path: Path) -> None:
    """A file that is saved in the middle, and optimizers that step in turn."""
    code, output = diff(
        tmp_path,
        """
model = net()
optimizers = [torch.optim.Adam([p]) for p in model.parameters()]
for step in range(4):
    for optimizer in optimizers:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    if step == 2:
        torch.save({"step": step}, "last.pt")
""",
    )
    assert code == 0, output
    assert (
        "looked at 4 parameters, 4 gradients, optimizer state, 4 learning rates, 1 random generator, 1 file" in output
    )


def test_a_generator_that_one_side_has_is_told(tmp_path: Path) -> None:
    """It is no difference by itself, beside others that both have: an earlier recorder looked at fewer of them."""
    code, output = diff(
        tmp_path,
        """
model = net()
own = torch.Generator().manual_seed(1)
ours = [torch.Generator().manual_seed(2)] if other else []
list(steps(model, torch.optim.AdamW(model.parameters()), 3))
""",
    )
    assert code == 0, output
    assert "on one side only, and not compared: own/ours.0 (the run's)" in output
