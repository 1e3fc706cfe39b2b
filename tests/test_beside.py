"""What lives beside optimizers: how it is found, named, read, compared and told, without a process of its own."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from beside_kit import Network, read
from torch import nn

from repro_golden.base.errors import ReproError
from repro_golden.compare.coverage import coverage_of
from repro_golden.compare.step_difference import alone, differing
from repro_golden.compare.traces import compare
from repro_golden.recording.attach.alive.beside import Beside
from repro_golden.recording.attach.alive.copies import shapes_of
from repro_golden.recording.attach.alive.opened import leaves
from repro_golden.recording.attach.alive.readings import Held
from repro_golden.recording.attach.base.settings import Settings
from repro_golden.recording.attach.gathered.run import environment_for
from repro_golden.recording.attach.gathered.unseen import Unseen
from repro_golden.trace import Header, Row, Trace, TraceWriter
from repro_golden.trace.families import SINCE, family, file_of, group
from repro_golden.trace.model import RECORDER
from repro_golden.trace.writer import digest_row, metric_row


def read_end(beside: Beside, model: nn.Module) -> set[str]:
    """The names of all that is read at the end."""
    groups = beside.readings(3, list(model.parameters()), end=True)
    return {prefix + name for prefix, reading in groups for name in reading.tensors}


def test_a_leaf_whose_optimizer_was_let_go() -> None:
    """It is read from the first search on that finds it without one: what trained it once may be changed by hand."""
    model, prompt = Network(), nn.Parameter(torch.ones(3))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([prompt], lr=0.1)]
    beside = Beside()
    assert "leaf/prompt" not in read(beside, 1, model)
    del optimizers[1]
    assert read(beside, 2, model)["leaf/prompt"] is prompt


def test_what_is_alive_is_found_and_called_what_the_program_calls_it() -> None:
    """Buffers, other modules, copies in mappings, lone leaves and generators are read under the variables' names."""
    model = Network()
    average = copy.deepcopy(model)
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    weight = torch.zeros(2, requires_grad=True)
    dice = torch.Generator().manual_seed(3)
    optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.1)
    beside = Beside()
    read(beside, 0, model.fc)
    content = read(beside, 1, model.fc)
    assert content["buffer/bn.running_mean"] is model.bn.running_mean
    assert content["unsaved/mask"] is model.mask
    assert content["frozen/bn.weight"] is model.bn.weight
    assert content["module/average/fc.weight"] is average.fc.weight
    assert content["copy/shadow/fc.weight"] is shadow["fc.weight"]
    assert content["leaf/weight"] is weight
    assert torch.equal(content["rng/own/dice"], dice.get_state())
    assert not {name for name in content if "fc.weight" in name} - {
        "module/average/fc.weight", "copy/shadow/fc.weight",
    }, "what the optimizer holds is read with it"  # fmt: skip
    del optimizer


def test_what_was_hidden_before_torch_is_not_the_program_s() -> None:
    """What Python itself hides from the collector as it starts, as 3.12 does, is not named."""
    try:
        gc.freeze()
        beside, model = Beside(), Network()
        read(beside, 0, model.fc)
        assert "what gc.freeze() hid" not in beside.unread
        gc.freeze()
        read(beside, 1, model.fc)
        assert "what gc.freeze() hid" in beside.unread
    finally:
        gc.unfreeze()


def test_what_the_program_hides_from_the_collector_stays_known() -> None:
    """`gc.freeze` takes no module away that was found before, and is named: others may be hidden by it."""
    model, target = Network(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.1)
    beside = Beside()
    for step in (0, 1):
        read(beside, step, model.fc)
    try:
        gc.freeze()
        beside.changed = True
        content = read(beside, 2, model.fc)
    finally:
        gc.unfreeze()
    assert content["buffer/bn.running_mean"] is model.bn.running_mean
    assert content["module/target/weight"] is target.weight
    assert "what gc.freeze() hid" in beside.unread
    read(beside, 4, model.fc)
    assert "what gc.freeze() hid" not in beside.unread
    try:
        gc.freeze()
        read(beside, 5, model.fc)  # no step at which all that is alive is looked at
        read_end(beside, model.fc)
    finally:
        gc.unfreeze()
    assert "what gc.freeze() hid" in beside.unread
    del optimizer


def test_a_mapping_that_is_made_anew_keeps_its_name() -> None:
    """What a variable leads to has the place of what it led to before, at every step; what is in use stays as it is."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = types.SimpleNamespace(shadow={name: p.detach().clone() for name, p in model.named_parameters()})
    beside = Beside()
    for step in range(7):
        shadow = {name: p.detach() + step for name, p in model.named_parameters()}
        content = read(beside, step, model)
        copies = {name: tensor for name, tensor in content.items() if name.startswith("copy/")}
        assert set(copies) == {f"copy/{name}/{key}" for name in ("shadow", "shadow#1") for key in shadow}
        assert copies["copy/shadow/0.weight"] is shadow["0.weight"]
        assert copies["copy/shadow#1/0.weight"] is held.shadow["0.weight"]
    del shadow, optimizer
    assert "copy/shadow/0.weight" in read_end(beside, model), "nobody else holds it, and it is what it was"


def test_modules_that_are_made_anew_are_called_by_what_leads_to_them() -> None:
    """However many were made before: a target and the one before it have the names of their variables at every step."""
    beside, model = Beside(), nn.Linear(3, 2)
    beside.watch()
    target = copy.deepcopy(model)
    for step in range(40):
        before, target = target, copy.deepcopy(model)
        held = read(beside, step, model)
        if step > 16 and step & (step - 1) and (step - 1) & (step - 2):  # not at a search, nor right after one
            assert held["module/target/weight"] is target.weight and held["module/before/weight"] is before.weight


def test_what_only_resembles_parameters_is_no_copy() -> None:
    """Views of parameters, integers, metrics, activations and what is dropped within a step are not read."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    weights = model.state_dict()
    matrices = {name: p.detach() for name, p in model.named_parameters() if p.ndim > 1}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    batch = {"ids": torch.ones(4, 3, dtype=torch.int64), "mask": torch.ones(4, dtype=torch.int64)}
    metrics = {"loss": torch.ones(1), "norm": torch.ones(1)}
    inner = {"0": model[0](torch.ones(4, 3)), "1": torch.ones(4)}
    lists = [torch.ones(4, 3), torch.ones(1, 4)]
    single = {"weight": torch.ones(4, 3)}
    beside = Beside()
    for step in range(4):
        cache = {"weight": torch.ones(4, 3), "other": torch.ones(1, 4)}
        del cache
        assert not any(name.startswith("copy/") for name in read(beside, step, model))
    del weights, matrices, gradients, batch, metrics, inner, lists, single


def test_what_stands_for_a_tensor_while_torch_traces_is_none() -> None:
    """torch.compile leaves lists of tensors whose shapes are symbols, which have no hash: none is read."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    symbols = [mode.from_tensor(torch.ones(7, 5)) for _ in range(4)]
    alike = [FakeTensorMode().from_tensor(p.detach()) for p in model.parameters()]
    with pytest.raises(TypeError):
        hash(symbols[0].shape)
    beside = Beside()
    for step in range(2):
        assert not any(name.startswith("copy/") for name in read(beside, step, model))
        assert not beside.unread
    assert shapes_of([*symbols, torch.ones(2)]) == {(2,): 1}
    del symbols, alike


def test_what_has_no_bytes_is_named_with_the_reason() -> None:
    """A module without memory is seen, and why it is not looked at is kept."""
    model = nn.Linear(2, 2)
    with torch.device("meta"):
        ghost = nn.Linear(2, 2)
    beside = Beside()
    assert not any("ghost" in name for name in read(beside, 0, model))
    assert beside.unread["module/ghost"] == "it is on meta"
    del ghost


def test_state_is_read_to_any_depth() -> None:
    """Nested and string-keyed state, numbers of each kind and public attributes of an optimizer are all there."""
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    nested = torch.ones(1)
    optimizer.state[parameter] = {"inner": {"deep": [nested]}, "count": 3, "rate": 0.5}
    optimizer.state["global"] = {"norm": torch.ones(())}
    optimizer.rounds = 7  # type: ignore[attr-defined]
    state = Held(optimizer, {"w": parameter}, {}).state()
    assert state["inner.deep.0"].tensors == {"w": nested}
    assert {k: v.tolist() for k, v in state["number"].tensors.items()} == {
        "count": [3],
        "rate": [0.5],
        "own.rounds": [7],
    }
    assert state["number"].tensors["count"].dtype == torch.int64
    assert list(state["own"].tensors) == ["global.norm"]
    assert list(leaves({"a": [1, "text", None]})) == [("a.0", 1)]


def test_parameters_whose_states_differ_are_each_read() -> None:
    """A kind that only some parameters have is read of these; and the order of kinds plays no part."""
    first, second, fresh = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    optimizer = torch.optim.SGD([second, first, fresh], lr=0.1)
    optimizer.state[second] = {"b": torch.ones(1), "a": torch.ones(2)}
    optimizer.state[first] = {"a": torch.zeros(2), "b": torch.zeros(1)}
    whole = Held(optimizer, {"first": first, "second": second}, {}).state()
    assert {k: {n: t.tolist() for n, t in r.tensors.items()} for k, r in whole.items()} == {
        "a": {"first": [0, 0], "second": [1, 1]}, "b": {"first": [0], "second": [1]},
    }  # fmt: skip
    optimizer.state[second]["more"] = torch.full((1,), 2.0)
    for known in ({"first": first, "second": second}, {"first": first, "second": second, "fresh": fresh}):
        some = Held(optimizer, known, {}).state()
        assert {k: list(r.tensors) for k, r in some.items()} == {
            "a": ["first", "second"], "b": ["first", "second"], "more": ["second"],
        }  # fmt: skip


class Lent(dict[torch.Tensor, dict[str, torch.Tensor]]):
    """A state that gives other values than it holds, and does not tell all of its keys."""

    def get(self, key: torch.Tensor, default: object = None) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """A hundred times what it holds."""
        del default
        return {name: tensor * 100 for name, tensor in self[key].items()}

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(())


def test_a_state_that_answers_otherwise_than_it_holds() -> None:
    """Of a kind of mapping that is not Python's own, what it gives for a parameter is read."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state = Lent({parameter: {"a": torch.ones(1)}})  # type: ignore[assignment]
    assert Held(optimizer, {"w": parameter}, {}).state()["a"].tensors == {"w": torch.full((1,), 100.0)}


# -- comparison


def trace(folder: Path, *steps: list[Row], recorder: int = RECORDER) -> Trace:
    """A finished trace of these steps."""
    writer = TraceWriter(folder, Header({}, "", {}, {}, len(steps), recorder=recorder))
    for number, rows in enumerate(steps):
        for row in rows:
            writer.add(row)
        writer.end_step(number)
    writer.close({"reason": "finished", "unread": {"file x": "it is not torch's"}})
    return Trace(folder)


def rows(**contents: bytes) -> list[Row]:
    """Rows of the phase update; ``__`` stands for a slash."""
    return [digest_row("update", name.replace("__", "/"), value) for name, value in contents.items()]


def test_what_one_side_does_not_have_is_named_and_no_difference(tmp_path: Path) -> None:
    """A module or generator of one side alone is told; a missing buffer, file or key of a file is a difference."""
    plain = rows(w=b"1", rng__torch=b"2")
    a = trace(tmp_path / "a", plain, plain + rows(copy__last__w=b"3"))
    b = trace(tmp_path / "b", plain + rows(module__ema__w=b"9"), plain + rows(module__ema__w=b"8"))
    comparison = compare(a, b)
    assert comparison.equal
    assert list(comparison.looked.alone) == ["last (the baseline's)", "ema (the run's)"]
    assert comparison.looked.modules == {} and comparison.looked.unread == {"file x": "it is not torch's"}
    assert "on one side only, and not compared: last (the baseline's), ema (the run's)" in str(comparison.looked)
    gone = compare(trace(tmp_path / "c", plain + rows(buffer__m=b"1")), trace(tmp_path / "d", plain)).divergence
    assert gone is not None and (gone.signal, gone.kind) == ("buffer/m", "missing")
    written = trace(tmp_path / "g", plain + rows(saved__last__w=b"3"))
    silent = compare(written, trace(tmp_path / "h", plain)).divergence
    assert silent is not None and (silent.signal, silent.kind) == ("saved/last/w", "missing")
    key = plain + rows(saved__last__w=b"3")
    keyless = compare(trace(tmp_path / "e", key + rows(saved__last__v=b"4")), trace(tmp_path / "f", key)).divergence
    assert keyless is not None and keyless.signal == "saved/last/v"


def test_an_object_that_is_renamed_and_changed_is_a_difference(tmp_path: Path) -> None:
    """Of two objects of one build, one on either side, the second is the first under another name; others are alone."""
    plain, critic = rows(w=b"1"), rows(module__critic__w=b"2")
    for name, other, kind in (
        ("module/value/w", b"3", "value"),
        ("module/value/w", b"2", None),
        ("module/value/v", b"3", None),  # of another build
        ("copy/value/w", b"3", None),
    ):
        b = [*plain, digest_row("update", name, other)]
        assert [d for d, *_ in differing(plain + critic, b)] == ([kind] if kind else [])
    sides = plain + critic, [*plain, digest_row("update", "module/value/w", b"3")]
    comparison = compare(trace(tmp_path / "a", *[sides[0]] * 2), trace(tmp_path / "b", *[sides[1]] * 2))
    assert comparison.divergence is not None and comparison.looked.alone == []
    assert (comparison.divergence.signal, comparison.divergence.now) == ("module/critic/w", "module/value/w")
    two = [*sides[1], digest_row("update", "module/other/w", b"4")]
    assert sorted(alone(sides[0], two)) == ["module/critic", "module/other", "module/value"]
    end = [[digest_row("update", f"end/{row.name}", row.sketch) for row in side] for side in sides]
    assert [row.name for _, row, _ in differing(*end)] == ["end/module/critic/w"]


def test_a_difference_behind_what_one_side_does_not_have_is_found(tmp_path: Path) -> None:
    """A module of one side alone hides no later difference of what both have."""
    first = rows(w=b"1", rng__torch=b"2")
    a = trace(tmp_path / "a", first, first, rows(w=b"1", rng__torch=b"2"))
    b = trace(tmp_path / "b", first + rows(module__ema__w=b"9"), first, rows(w=b"0", rng__torch=b"2"))
    divergence = compare(a, b).divergence
    assert divergence is not None and (divergence.step, divergence.signal) == (2, "w")


def test_files_of_an_end_that_only_one_side_has_are_not_compared() -> None:
    """What was written after the last step, or written anew, was not yet by a run that was stopped there."""
    end = rows(w=b"1", end__w=b"1", saved__last__w=b"2", saved__final__w=b"3", saved__same__w=b"4")
    stopped = rows(w=b"1", saved__last__w=b"1", saved__same__w=b"4", rng__torch=b"2")
    assert alone(end, stopped) == {"end": "a", "rng/torch": "b", "saved/last": "a", "saved/final": "a"}
    assert differing(end, stopped) == differing(stopped, end) == []
    differences = differing(end, stopped + rows(saved__own__w=b"5"))
    assert [(kind, row.name) for kind, row, _ in differences] == [("added", "saved/own/w")]
    both = differing(end, stopped + rows(end__w=b"1"))
    assert [(kind, row.name) for kind, row, _ in both] == [("value", "saved/last/w"), ("missing", "saved/final/w")]


def test_an_end_that_could_not_be_read_is_an_end(tmp_path: Path) -> None:
    """A run whose last state could not be read has ended: its files count, and its state is not said to be compared."""
    ended = rows(w=b"1", saved__last__w=b"3", end__w=b"1")
    unread = rows(w=b"1", saved__last__w=b"4", end__unread=b"0")
    assert "saved/last/w" in [row.name for _, row, _ in differing(ended, unread)]
    assert "saved/last/w" in [row.name for _, row, _ in differing(unread, ended)]
    looked = [coverage_of(trace(tmp_path / str(k), side)).end for k, side in enumerate((ended, unread))]
    assert looked == [True, False]


def test_a_file_that_was_only_renamed_is_the_same(tmp_path: Path) -> None:
    """It is told; a file of another name and content is one that is gone and one that is new."""
    plain = rows(w=b"1", rng__torch=b"2")
    a = trace(tmp_path / "a", plain, plain + rows(saved__last__w=b"3", saved__last__b=b"4", saved__kept__w=b"3"))
    b = trace(tmp_path / "b", plain, plain + rows(saved__best__w=b"3", saved__best__b=b"4", saved__kept__w=b"3"))
    c = trace(tmp_path / "c", plain, plain + rows(saved__best__w=b"3", saved__best__b=b"5", saved__kept__w=b"3"))
    comparison = compare(a, b)
    assert comparison.equal and list(comparison.renames.names) == [("saved/last/", "saved/best/")]
    assert not compare(a, c).equal


def test_traces_of_earlier_recorders_are_compared_in_what_these_saw(tmp_path: Path) -> None:
    """A baseline of a recorder that saw no family agrees with a run that shows them; the verdict says what is left out.

    Between two recordings of today's, a buffer that one side alone has is a difference, also if it is all there is.
    """
    old, new = rows(w=b"1"), rows(w=b"1", buffer__m=b"5", number__step=b"6", saved__last__w=b"2")
    comparison = compare(trace(tmp_path / "a", old, recorder=SINCE - 1), trace(tmp_path / "b", new))
    assert comparison.equal
    assert (
        "all of buffer (the run's)" in comparison.looked.alone and "all of saved (the run's)" in comparison.looked.alone
    )
    assert comparison.looked.parameters == 1 and comparison.looked.buffers == 0
    first, other = trace(tmp_path / "c", old), trace(tmp_path / "d", rows(w=b"1", buffer__m=b"5"))
    for difference, kind in ((compare(first, other), "added"), (compare(other, first), "missing")):
        assert difference.divergence is not None
        assert (difference.divergence.signal, difference.divergence.kind) == ("buffer/m", kind)
        assert "recorder" not in difference.divergence.detail


def test_a_signal_that_another_recorder_may_not_read_says_so(tmp_path: Path) -> None:
    """Where two recorders made the sides, a signal of one alone names both, with the cure."""
    old = trace(tmp_path / "a", rows(w=b"1"), recorder=RECORDER - 1)
    divergence = compare(old, trace(tmp_path / "b", rows(w=b"1", own__scale=b"5"))).divergence
    assert divergence is not None and divergence.kind == "added"
    assert divergence.detail == (
        f"not observed by the baseline; recorder {RECORDER - 1} made the baseline and {RECORDER} the run, "
        "and one reads more: record it again"
    )


def test_families_and_groups() -> None:
    """A family is told by its word in the phase update alone, behind the number of an optimizer too."""
    assert family("update", "optimizer.1/module/ema/fc.weight") == "module"
    assert group("update", "optimizer.1/module/ema/fc.weight") == "module/ema"
    assert group("update", "end/module/ema/fc.weight") == "end/module/ema"
    assert group("update", "end/fc.weight") == "end"
    assert family("update", "module") is None and family("grad", "module/x") is None
    assert file_of("update", "saved/last.pt/model.fc.weight") == "saved/last.pt" and file_of("grad", "saved/x") is None
    assert family("update", "exp_avg/fc.weight") is None and group("update", "buffer/m") is None
    a, b = rows(w=b"1", module__m__w=b"1", rng__t=b"1"), rows(w=b"1", rng__t=b"1")
    assert alone(a, b) == {"module/m": "a"} and differing(a, b) == []


def test_coverage_counts_each_signal_once(tmp_path: Path) -> None:
    """However many steps there are, and whatever is shown at the first alone."""
    step = [*rows(w=b"1", exp_avg__w=b"1", buffer__m=b"1"), metric_row("loss", "loss", 1.0)]
    start = digest_row("input", "start/w", b"1")
    grad = digest_row("grad", "w", b"1")
    text = str(coverage_of(trace(tmp_path / "a", [start, grad, *step], [grad, *step])))
    seen = "seen but not looked at: file x (it is not torch's)"
    assert text == f"1 parameter, 1 gradient, 1 buffer, optimizer state, 1 metric; {seen}"


def test_a_process_that_the_recorder_is_not_in_is_an_error(tmp_path: Path) -> None:
    """One that has torch loaded and did not say that it is recorded is named; without any recording it is not."""
    unseen = Unseen(tmp_path)
    unseen._loaded = {(1, 5): "python -I train.py"}
    unseen.check()
    (tmp_path / "rank-00000.json").write_text("{}")
    with pytest.raises(ReproError, match=r"uses torch unseen \(python -I train.py\)"):
        unseen.check()
    (tmp_path / "armed-1").touch()
    unseen.check()


def test_a_process_is_unseen_only_if_it_was_met_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child between fork and exec, and another process of the same number, are met once; who stays is named."""
    looks = iter([{1: 5, 2: 6, 3: 7}, {1: 9, 2: 6}, {1: 9}, {3: 7}])
    starts: dict[int, int] = {}
    monkeypatch.setattr("repro_golden.recording.attach.gathered.unseen.descendants", lambda _: set(starts))
    monkeypatch.setattr("repro_golden.recording.attach.gathered.unseen._start", lambda number: starts[number])
    monkeypatch.setattr("repro_golden.recording.attach.gathered.unseen._has_torch", lambda _: True)
    unseen = Unseen(tmp_path)
    names = []
    for starts in looks:  # noqa: B007 - the functions above look at it
        unseen._look(0)
        names.append(set(unseen._loaded))
    assert names == [set(), {(2, 6)}, {(2, 6), (1, 9)}, {(2, 6), (1, 9)}]


def test_a_process_says_that_the_recorder_is_in_before_torch_is_loaded(tmp_path: Path) -> None:
    """One that ends while it imports torch, and a child that it forks then, are not unseen."""
    (tmp_path / "torch.py").write_text(
        "import os\nif not os.fork():\n    os._exit(0)\nos.wait()\nos.kill(os.getpid(), 9)"
    )
    variables = environment_for(Settings(str(tmp_path)), os.environ | {"PYTHONPATH": str(tmp_path)})
    for program, marks in (("pass", 0), ("import torch", 2)):
        subprocess.run([sys.executable, "-c", program], env=variables, check=False)
        assert len(list(tmp_path.glob("armed-*"))) == marks
