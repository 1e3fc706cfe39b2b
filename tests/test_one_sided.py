"""Objects that only some versions of a program have: what lies between is seen, and what is not compared is named."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Repo
from trace_kit import HEADER, tensor_row, write

from repro_bisect.driver import range_search
from repro_bisect.predicates.predicates import Bitwise, Exceeds
from repro_golden.compare.renames import aligned
from repro_golden.compare.traces import compare, first_difference
from repro_golden.trace import Row, Trace, TraceWriter
from repro_golden.trace.families import VALUES_SINCE
from repro_golden.trace.model import RECORDER
from repro_golden.trace.writer import metric_row

PROGRAM = """\
import copy
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
ema = copy.deepcopy(model) if RATE else None
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        for a, b in zip(ema.parameters() if ema else (), model.parameters()):
            a.lerp_(b, RATE)
"""
COMMAND = ("--", "python", "train.py")


def commits(repo: Repo, *rates: float) -> list[str]:
    """A commit for each rate of the moving average; at 0 there is none."""
    made = []
    for number, rate in enumerate(rates):
        (repo.root / "train.py").write_text(PROGRAM.replace("RATE", str(rate)) + f"# {number}\n")
        made.append(repo.commit(f"rate {rate}"))
    return made


@pytest.mark.whole
def test_a_changelog_compares_neighbours(fork: Repo) -> None:
    """GOOD has no average, so each of the others agrees with it, and not with one another; that is said."""
    good, first, *changes = commits(fork, 0, 0.1, 0.5, 0.9)
    done = fork.repro("history", f"{good}..HEAD", "--every", "--json", *COMMAND)
    data = json.loads(done.stdout)
    assert [row["commit"]["commit"] for row in data["rows"]] == changes, done.stderr
    assert data["agree"] is True and data["looked_at"]["alone"] == ["ema (the run's)"]
    done = fork.repro("history", f"{good}..{first}", *COMMAND)
    assert (done.returncode, "changed the numbers" in done.stdout) == (0, True), done.stderr
    assert "none of 1 commit" in done.stdout and "not compared: ema (the run's)" in done.stdout.replace("\n", " ")
    for ends, whose in ((f"{good}..{changes[-1]}", "run"), (f"{changes[-1]}..{commits(fork, 0)[0]}", "baseline")):
        done = fork.repro("bisect", ends, *COMMAND)
        assert f"on one side only, and not compared: ema (the {whose}'s)" in done.stdout, done.stdout + done.stderr


@pytest.mark.whole
@pytest.mark.parametrize("every", [(), ("--every",)])
def test_what_comes_back_as_another_is_a_change(fork: Repo, every: tuple[str, ...]) -> None:
    """The commit that puts it back agrees with the one before, and not with the nearest that had it."""
    good, without, back = commits(fork, 0.1, 0, 0.5)
    done = fork.repro("history", f"{good}..{back}", *every, "--json", *COMMAND)
    data = json.loads(done.stdout)
    (row,) = data["rows"]
    assert (row["kind"], row["before"], row["points"]) == ("group", good, [without, back]), done.stderr
    assert done.returncode == 3 and data["agree"] is False


@pytest.mark.whole
def test_a_merge_is_not_told_by_what_came_or_went(fork: Repo) -> None:
    """One side moves the numbers, the other only brings an object: the merge has the numbers of the first."""
    (good,) = commits(fork, 0)
    fork.git("checkout", "--quiet", "-b", "side")
    text = (fork.root / "train.py").read_text()
    (fork.root / "train.py").write_text(text.replace("manual_seed(0)", "manual_seed(1)"))
    moved = fork.commit("Seed 1")
    fork.git("checkout", "--quiet", "main")
    (fork.root / "train.py").write_text(text.replace("if 0 else", "if 0.5 else").replace("(b, 0)", "(b, 0.5)"))
    fork.commit("rate 0.5")
    fork.git("merge", "--quiet", "-m", "Merge", "side")
    done = fork.repro("history", f"{good}..HEAD", "--every", "--json", *COMMAND)
    data = json.loads(done.stdout)
    assert [(row["kind"], row["commit"]["commit"]) for row in data["rows"]] == [("change", moved)], done.stderr


@pytest.mark.whole
def test_what_is_taken_out_and_put_back_is_no_good_commit(fork: Repo) -> None:
    """A commit without the object in which BAD differs says nothing of it, whichever is probed first."""
    good, culprit, *without, bad = commits(fork, 0.1, 0.5, 0, 0, 0, 0, 0.5)
    for jobs in "12":
        done = fork.repro("bisect", f"{good}..{bad}", "-j", jobs, "--no-explain", "--json", *COMMAND)
        data = json.loads(done.stdout)
        assert (done.returncode, data["culprit"]["commit"]) == (0, culprit), done.stderr
        assert (data["skips"] or jobs == "2") and {*data["skips"]} <= {*without}, done.stderr
        assert all(why == "it has no ema, in which BAD differs" for why in data["skips"].values())


SWITCHES = """\
import os
RATE = float(os.environ.get("RATE", "0.1"))
if "OFF" in os.environ and "ON" not in os.environ:
    RATE = 0
"""
FLAGS = """\
[[change]]
name = "rate"
env = { RATE = "0.5", OFF = "1" }

[[change]]
name = "on"
env = { ON = "1" }
"""


@pytest.mark.whole
def test_a_set_without_the_object_is_not_one_that_moves_nothing(fork: Repo) -> None:
    """Whether a change is needed that only brings back what another takes out is not known."""
    switch = "import os\nRATE = float(os.environ.get('RATE', '0.1'))\nif 'OFF' in os.environ > {'ON'}: RATE = 0\n"
    switch = switch.replace("'OFF' in os.environ > {'ON'}", "'OFF' in os.environ and 'ON' not in os.environ")
    (fork.root / "train.py").write_text(SWITCHES + PROGRAM)
    fork.commit("Switches")
    (fork.root / "flags.toml").write_text(FLAGS)
    done = fork.repro("bisect", "--no-explain", "--flags", "flags.toml", "--json", *COMMAND)
    data = json.loads(done.stdout)
    assert (data["chosen"], data["hidden"]) == (["rate", "on"], ["on"]), done.stderr
    assert "SKIP  rate: it has no ema, in which BAD differs" in done.stderr


def test_a_trace_that_grows_is_aligned_anew(tmp_path: Path) -> None:
    """A replay that is judged while it runs, against a baseline without one of its modules."""

    def rows(step: int, *more: Row) -> list[Row]:
        return [metric_row("update", "w", float(step)), *more]

    def add(writer: TraceWriter, step: int, *more: Row) -> None:
        for row in rows(step, *more):
            writer.add(row)
        writer.end_step(step)

    baseline_writer, replay_writer = (TraceWriter(tmp_path / name, HEADER) for name in "ab")
    average = metric_row("update", "module/ema/w", 1.0)
    for step in range(3):
        add(baseline_writer, step)
    add(replay_writer, 0, average)
    baseline, grown = Trace(tmp_path / "a"), Trace(tmp_path / "b")
    predicate = Exceeds("ulp>4", "ulp", 4)
    for step in range(3):
        assert predicate.at(baseline, grown, step) is None
        assert aligned(baseline, grown).alone == {"module/ema": "b"}
        if step < 2:
            add(replay_writer, step + 1, average)
            grown.more()
    baseline_writer.close({"reason": "finished"})
    replay_writer.close({"reason": "finished"})


def test_a_commit_lacks_an_object_in_the_step_in_question(tmp_path: Path) -> None:
    """One that makes it earlier than GOOD agrees where BAD differs; one that has it no more says nothing."""
    traces = {}
    for name, values in {"good": "_11", "earlier": "111", "gone": "_1_", "bad": "_12"}.items():
        average = [[] if v == "_" else [metric_row("update", "module/ema/w", float(v))] for v in values]
        traces[name] = Trace(write(tmp_path / name, [[metric_row("update", "w", 1.0), *rows] for rows in average]))
    good, end = traces["good"], first_difference(traces["good"], traces["bad"])
    assert end is not None and (end.step, end.signal) == (2, "module/ema/w")
    scheduler: Any = SimpleNamespace(predicate=Bitwise(), history=None)
    search: Any = None
    judge = range_search.RangeSearch(scheduler, search, good, 3, None, end)
    verdicts = [judge.verdict("", range_search.Tested(trace, good, 3)) for trace in traces.values()]
    assert [verdict.name for verdict, _ in verdicts] == ["GOOD", "GOOD", "SKIP", "BAD"]
    assert verdicts[2][1] == "it has no ema, in which BAD differs"


def step(*rows: str, weight: bytes = b"wwww") -> list[Row]:
    """A step of a trained weight, and of what is given as ``NAME=CONTENT``; a rate is a number."""
    given = [row.partition("=")[::2] for row in rows]
    more = [
        metric_row("update", name, float(bits)) if re.search(r"(lr|/[12])(@\d)?$", name) and "." in bits
        else tensor_row("input" if name.startswith("start/") else "grad" if name.startswith("grad ") else "update",
                        name.removeprefix("grad "), bits.encode())
        for name, bits in given
    ]  # fmt: skip
    return [tensor_row("grad", "w", b"gggg"), tensor_row("update", "w", weight), *more]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ([], ["unsaved/mask=1010", "end/unsaved/mask=1010"], "mask (the run's)"),
        (
            ["module/ref/w=1"],
            ["module/ref/w=1", "unsaved/ref/mask=10", "end/unsaved/ref/mask=10"],
            "ref/mask (the run's",
        ),
        (
            ["unsaved/net/m=1"],
            ["unsaved/net/m=1", "unsaved/net/mask@0=10", "unsaved/net/mask@1=11"],
            "net/mask (the run",
        ),
        (["module/ref/w=1", "module/ref/mask=10"], ["module/ref/w=1", "unsaved/ref/mask=10"], ""),
        (["start/b=bbbb", "b=bbbb", "end/b=bbbb", "end/w=w"], ["frozen/b=bbbb", "end/frozen/b=bbbb", "end/w=w"], ""),
        (["start/b#1=bbbb", "b#1=bbbb"], ["module/net/b=bbbb"], ""),
        (["start/optimizer.1/b=bb", "optimizer.1/b=bb", "optimizer.1/v=v"], ["frozen/b=bb", "optimizer.1/v=v"], ""),
        (["lr=0.1", "lr/1=0.2", "end/lr=3", "end/lr/1=4"], ["lr=0.2", "lr/1=0.1", "end/lr=4", "end/lr/1=3"], ""),
        (["lr=0.1"], ["lr=0.1", "lr/1=0.1"], ""),
        (["lr=0.1", "lr/1=0.2"], ["lr=0.2", "lr/1=0.1", "lr/2=0.2"], ""),
        (["lr=0.1", "lr/1=0.2"], ["lr=0.1", "lr/1=0.1", "lr/2=0.2"], ""),
        (["lr@0=0.1", "lr@1=0.2"], ["lr@0=0.1", "lr@1=0.2", "lr/1@0=0.1", "lr/1@1=0.2"], ""),
        (["b=bbbb", "b#1=bbbbbbbb"], ["module/x/b=bbbb", "module/y/b=bbbbbbbb"], ""),
        (["b#1=bbbb", "buffer/t/n=1", "unsaved/t/m=2"], ["module/t/b=bbbb", "module/t/n=1", "module/t/m=2"], ""),
        (["lr=0.5", "lr/1=0.0"], ["lr=0.0", "lr/1=0.5"], ""),
        (["number/step=5"], ["number/step=5", "number/step/1=5"], ""),
        ([], ["number/own.every=5", "end/number/own.every=5"], "own.every (the run's)"),
        ([], ["number/own.every@0=5", "number/own.every@1=6"], "own.every (the run's)"),
        (["rng/numpy@0=5", "rng/numpy@1=6"], [], "numpy (the baseline's)"),
        (["optimizer.1/number/own.every=5"], [], "own.every (the baseline's)"),
    ],
)
def test_what_shows_elsewhere_may_be_on_one_side_only(
    tmp_path: Path, before: list[str], after: list[str], told: str
) -> None:
    """Where all that both have agrees, a mask, who holds a parameter, and how rates are grouped are no difference."""
    trace, other = (Trace(write(tmp_path / side, [step(*rows)] * 2)) for side, rows in (("a", before), ("b", after)))
    assert compare(trace, other).equal and compare(other, trace).equal
    assert told in " ".join(compare(trace, other).looked.alone)
    moved = Trace(write(tmp_path / "c", [step(*after), step(*after, weight=b"WWWW")]))
    for divergence in (first_difference(trace, moved), first_difference(moved, trace)):
        assert divergence is not None and (divergence.step, divergence.signal) == (1, "w")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["unsaved/mask=1010"], ["unsaved/causal=1110"]),
        (["unsaved/0.mask=1010", "unsaved/1.mask=1010"], ["unsaved/0.causal=1110", "unsaved/1.causal=1110"]),
        (["module/ref/w=1", "unsaved/ref/mask=1010"], ["module/ref/w=1", "unsaved/ref/mask=1110"]),
        (["module/ref/w=1", "module/ref/mask=1010"], ["module/ref/w=1", "unsaved/ref/mask=1110"]),
        (["module/ref/w=1", "module/ref/mask=1010"], ["module/ref/w=1"]),
        (["unsaved/ref/mask=1010"], ["unsaved/reference/causal=1110"]),
        (["buffer/mask=1010"], []),
        (["start/b=bbbb", "b=bbbb"], ["frozen/b=cccc"]),
        (["start/b=bbbb", "grad b=bbbb", "b=bbbb"], ["frozen/b=bbbb"]),
        (["start/b=bbbb", "b=bbbb", "exp_avg/b=mmmm"], ["frozen/b=bbbb"]),
        (["start/b=bbbb", "b=bbbb"], []),
        (["b=bbbb"], ["frozen/b=bbbbbbbb"]),
        (["b=bbbb", "b#1=bbbb"], ["frozen/b=bbbb"]),
        (["b=bbbb"], ["module/x/b=bbbb", "module/y/b=bbbb"]),
        (["b=bbbb"], ["module/net/b=bbbb", "module/net/c=cccc"]),
        (["buffer/t/n=1"], ["module/t/n=2"]),
        (["lr=0.1", "lr/1=0.2"], ["lr=0.2", "lr/1=0.3"]),
        (["lr=0.1", "lr/1=0.2"], ["lr=0.1", "lr/1=0.3", "lr/2=0.2"]),
        (["lr@0=0.1", "lr@1=0.2"], ["lr@0=0.1", "lr@1=0.2", "lr/1@0=0.1", "lr/1@1=0.1"]),
        (["lr=0.1", "optimizer.1/lr=0.2"], ["lr=0.1", "optimizer.1/lr=0.2", "optimizer.1/lr/1=0.1"]),
        (["lr=0.1"], ["lr=0.2", "lr/1=0.2"]),
        (["lr=0.1"], ["lr=0.1", "lr/1=0.2"]),
        (["lr=0.1", "optimizer.1/lr=0.2"], ["lr=0.1", "optimizer.1/lr=0.1"]),
        (["number/own.every=5"], ["number/own.each=6"]),
        (["number/own.every=5"], ["number/own.every=6"]),
        (["number/step=5"], []),
    ],
)
def test_what_shows_nowhere_else_is_a_difference(tmp_path: Path, before: list[str], after: list[str]) -> None:
    """What was renamed and changed, trained by one side only, or has a rate that is nobody's on the other side."""
    trace, other = (Trace(write(tmp_path / side, [step(*rows)] * 2)) for side, rows in (("a", before), ("b", after)))
    assert not compare(trace, other).equal and not compare(other, trace).equal


def test_a_name_of_the_end_is_known_where_a_parameter_is_held_otherwise(tmp_path: Path) -> None:
    """What is no difference in the first steps does not end the search for names that come later."""
    held, beside = ["b#1=bbbb", "buffer/net/m=1"], ["module/t/b=bbbb", "buffer/m=1"]
    trace, other = (
        Trace(write(tmp_path / side, [step(*rows), step(*rows, f"end/{rows[1]}", "end/w=w")]))
        for side, rows in (("a", held), ("b", beside))
    )
    assert compare(trace, other).equal and compare(other, trace).equal


def test_groups_that_warm_up_are_known_apart_later(tmp_path: Path) -> None:
    """Rates that are alike at first change places as soon as they differ, and a later change is told as it is."""
    rates = [("0.0", "0.0"), ("0.1", "0.2"), ("0.3", "0.4")]
    trace = Trace(write(tmp_path / "a", [step(f"lr={x}", f"lr/1={y}") for x, y in rates]))
    other = Trace(write(tmp_path / "b", [step(f"lr={y}", f"lr/1={x}") for x, y in rates]))
    assert compare(trace, other).equal
    moved = Trace(write(tmp_path / "c", [step(f"lr={y}", f"lr/1={x}") for x, y in [*rates[:2], ("0.3", "0.5")]]))
    divergence = compare(trace, moved).divergence
    assert divergence is not None and (divergence.step, divergence.detail) == (2, "0.4 became 0.5")


def recorded(folder: Path, *steps: dict[str, bytes], recorder: int = RECORDER) -> Trace:
    """A trace of what updates show, by its name."""
    writer = TraceWriter(folder, replace(HEADER, recorder=recorder))
    for number, shown in enumerate(steps):
        for name, value in shown.items():
            writer.add(tensor_row("update", name, value))
        writer.end_step(number)
    writer.close({"reason": "finished"})
    return Trace(folder)


SAVED = {"i": b"5", "best": b"3", "eval/loss": b"7"}


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"step": b"5", "best": b"3", "eval/loss": b"7"}, "1 signal was renamed (integers[i] -> integers[step])"),
        ({"i": b"5", "best": b"3", "test/loss": b"7"}, "(integers[eval/loss] -> integers[test/loss])"),
        ({**SAVED, "seen": b"5"}, "ck.pt/integers[seen] (the run's)"),
        ({"step": b"5", "best": b"3", "eval/loss": b"7", "seen": b"6"}, "ck.pt/integers[seen] (the run's)"),
        ({**SAVED, "best": b"4"}, ""),
        ({**SAVED, "i": b"3", "best": b"5"}, ""),
        ({"i": b"5", "z": b"4", "eval/loss": b"7"}, ""),
        ({"i": b"5", "eval/loss": b"7"}, ""),
    ],
)
def test_keys_of_numbers_in_a_file_are_names(tmp_path: Path, other: dict[str, bytes], told: str) -> None:
    """Another key is a rename, one more number is named, and one that moved or is gone is a difference, by its name."""

    def saved(side: str, values: dict[str, bytes], **more: bytes) -> Trace:
        keys = {f"integers[{key}]": value for key, value in values.items()} | more
        last = {"w": b"2", "number/step": b"6"} | {f"saved/ck.pt/{key}": value for key, value in keys.items()}
        return recorded(tmp_path / side, {"w": b"1", "number/step": b"5"}, last)

    a, b = saved("a", SAVED), saved("b", other)
    comparison = compare(a, b)
    assert comparison.equal is bool(told)
    assert told in f"{comparison.renames} {', '.join(comparison.looked.alone)}"
    assert told or str(comparison.divergence).startswith("step 1, update, saved/ck.pt/integers[")
    tensor = compare(a, saved("c", SAVED, seen=b"5")).divergence
    assert str(tensor).startswith("step 1, update, saved/ck.pt/seen"), "one more tensor is a difference"


def test_numbers_in_a_file_that_recorders_have_otherwise_are_no_difference(tmp_path: Path) -> None:
    """Once all integers were one signal, in the order of their keys. Tensors are compared, and what is not is said."""
    file = "saved/ck.pt"
    old = {f"{file}/model.w": b"1", f"{file}/integers": b"35", f"{file}/lengths": b"2"}
    new = {f"{file}/model.w": b"1", f"{file}/integers[i]": b"5", f"{file}/integers[best]": b"3"}
    a, b = recorded(tmp_path / "a", old, recorder=VALUES_SINCE - 1), recorded(tmp_path / "b", new)
    for trace, other in ((a, b), (b, a)):
        comparison = compare(trace, other)
        assert comparison.equal and len(comparison.looked.alone) == 4
    moved = recorded(tmp_path / "c", {**new, f"{file}/model.w": b"2"})
    assert str(compare(a, moved).divergence).startswith("step 0, update, saved/ck.pt/model.w")
    assert not compare(recorded(tmp_path / "d", old), b).equal, "one recorder made both"
