"""Probes that disturb each other: what no commit does is no verdict on one, and the search goes on one by one."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import venv
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import Repo
from flaky_kit import Points, Told, bisect, experiment
from history_kit import edit, note, start

from repro_bisect.predicates.predicates import Bitwise, Exit
from repro_bisect.probe.answers import kind_of
from repro_bisect.probe.around import watched_rollouts
from repro_bisect.probe.attempts import Company, DisturbedError
from repro_bisect.probe.executors import Outcome, Task
from repro_bisect.probe.journal import Entry, Journal
from repro_bisect.probe.prober import Prober
from repro_bisect.probe.request import Request
from repro_golden.base.errors import MachineFailureError, ShortageError
from repro_golden.replay.children import CancelledError, ChildFailure
from repro_golden.replay.ranks import free_port
from repro_golden.repository.checkout import Checkout
from repro_golden.store.rollouts import RolloutFiles

ONE_AT_A_TIME = """\
import fcntl, sys, time
open({lock!r} + ".runs", "a").write("x")
lock = open({lock!r}, "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # one that is killed holds it no more
except BlockingIOError:
    sys.exit(125)
time.sleep(0.7)
sys.exit(code)
"""


def searched(root: Path, program: str, codes: str) -> tuple[dict[str, Any], list[str], str]:
    """What is found in a history whose programs end with such codes, its commits, and what is said."""
    repo = Repo(root / "repo")
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    commits = []
    for number, code in enumerate(codes.split()):
        (repo.root / "train.py").write_text(f"code = {code}\n{program}# {number}\n")
        commits.append(repo.commit(f"Commit {number}"))
    options = ("-j", "2", "--json", "--when", "exit")
    done = repo.repro("bisect", f"{commits[0]}..HEAD", *options, "--", sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), commits, done.stderr


def test_a_skip_beside_other_probes_is_tried_alone(tmp_path: Path) -> None:
    """Commits that cannot be tested while another probe runs are tested one by one: the culprit is named, and why."""
    program = ONE_AT_A_TIME.format(lock=str(tmp_path / "lock"))
    result, commits, output = searched(tmp_path, program, "0 0 0 1 1 1")
    assert result["culprit"]["commit"] == commits[3] and not result["skips"]
    assert "disturb each other" in result["remarks"][0] and "from the beginning, with -j 1" in output
    runs = len((tmp_path / "lock.runs").read_text())
    assert runs - result["cost"]["probes"] in (0, 1), "what was given up was spent too, but for one that was ended"


SERVER = """\
import socket, sys, time
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", {port}))
server.listen()
time.sleep(1)
sys.exit(code)
"""


@pytest.mark.whole
def test_a_program_with_a_port_of_its_own(tmp_path: Path) -> None:
    """Its probes cannot run side by side, so that they run one by one."""
    result, commits, output = searched(tmp_path, SERVER.format(port=free_port()), "0 0 0 1 1 1")
    assert result["culprit"]["commit"] == commits[3] and "from the beginning, with -j 1" in output


INSTALLS = """\
import site, sys, time
from pathlib import Path
place = Path(site.getsitepackages()[0], "__editable__.mine-0.1.pth")
place.write_text(str(Path.cwd() / "src"))
about = place.with_name("mine-0.1.dist-info")
about.mkdir(exist_ok=True)
(about / "direct_url.json").write_text(Path.cwd().as_uri())
time.sleep(0.5)
sys.exit(int(Path(place.read_text(), "code").read_text()))
"""


def test_probes_that_install_themselves_over_each_other(tmp_path: Path) -> None:
    """A test that begins with `pip install -e .` is run one by one, and leaves the user's as it was."""
    venv.create(tmp_path / "env", symlinks=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (about := site / "mine-0.1.dist-info").mkdir()
    (about / "direct_url.json").write_text((tmp_path / "repo").as_uri())
    (about / "RECORD").write_text("__editable__.mine-0.1.pth,,\n")
    (site / "__editable__.mine-0.1.pth").write_text(str(tmp_path / "repo" / "src"))
    repo = Repo(tmp_path / "repo")
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    (repo.root / "src").mkdir()
    (repo.root / "setup.cfg").write_text("[metadata]\nname = mine\n")
    (repo.root / "test.py").write_text(INSTALLS)
    commits = []
    for number, code in enumerate((0, 0, 1, 1)):
        (repo.root / "src" / "code").write_text(f"{code}\n" + " " * number)
        commits.append(repo.commit(f"Commit {number}"))
    python = str(tmp_path / "env" / "bin" / "python")
    done = repo.repro("bisect", f"{commits[0]}..HEAD", "-j", "2", "--json", "--when", "exit", "--", python, "test.py")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["culprit"]["commit"] == commits[2] and not result["skips"]
    assert "installs __editable__.mine-0.1.pth" in result["remarks"][0] and "with -j 1" in done.stderr
    assert (site / "__editable__.mine-0.1.pth").read_text() == str(tmp_path / "repo" / "src")
    assert (about / "direct_url.json").read_text() == (tmp_path / "repo").as_uri()


def line(length: int) -> Points:
    """A line of so many commits, the ends included."""
    return Points({f"c{n}": [f"c{n - 1}"] for n in range(length - 1, 0, -1)}, "c0", f"c{length - 1}")


def at_first(failing: set[str], culprit: int, slots: int = 2) -> Told:
    """Runs, so many at once, of a program that cannot be tested the first time at some commits."""
    runs = Counter[str]()

    def run(task: Task, _: Path) -> Outcome:
        time.sleep(0.05)  # another one has begun
        runs[task.commit] += 1
        first = task.commit in failing and runs[task.commit] == 1
        return Outcome(code=125 if first else int(int(task.commit[1:]) >= culprit))

    return Told(run, slots=slots)


def test_a_failure_by_chance_is_no_disturbance(tmp_path: Path) -> None:
    """What fails once beside another probe, and not alone, has its answer: the search goes on side by side."""
    messages, axis, executor = list[str](), line(16), at_first({"c15"}, 11)
    result = bisect(axis, executor, Exit(), tmp_path, messages)
    assert result.culprit and result.culprit.commit == "c11" and not result.skips
    assert result.cost.total.probes == executor.runs.total()
    with pytest.raises(DisturbedError, match="nor could another one before it"):
        bisect(axis, at_first({*axis.parents, "c0"}, 11), Exit(), tmp_path / "other")


@pytest.mark.parametrize("failing", [["c15"], ["c0", "c15"], ["c15"] * 2])
def test_a_failure_of_the_machine_beside_others_is_tried_alone(tmp_path: Path, failing: list[str]) -> None:
    """A port that another probe has is no failure of the machine alone; one is chance, many are disturbance."""
    left = Counter(failing)

    def run(task: Task, _: Path) -> Outcome:
        time.sleep(0.05)  # another one has begun
        left[task.commit] -= 1
        if left[task.commit] >= 0:
            raise ShortageError("the trainer's port is in use")
        return Outcome(code=int(int(task.commit[1:]) >= 11))

    axis, executor = line(16), Told(run, slots=2)
    expected = {1: contextlib.nullcontext(), 2: pytest.raises(DisturbedError, match="port is in use")}[
        len(set(failing))
    ]
    if len(failing) > len(set(failing)):
        expected = pytest.raises(MachineFailureError, match="port is in use")
    with expected:
        result = bisect(axis, executor, Exit(), tmp_path)
        assert result.culprit and result.culprit.commit == "c11" and not result.remarks
        assert result.cost.total.probes == executor.runs.total()


def test_a_failure_that_no_other_probe_causes_is_told_at_once(tmp_path: Path) -> None:
    """What a run did to the user's environment a second one would not tell."""

    def run(task: Task, _: Path) -> Outcome:
        time.sleep(0.05)
        if task.commit == "c0" and executor.runs["c0"] == 1:
            raise MachineFailureError("a run installed its worktree over mine")
        return Outcome(code=int(int(task.commit[1:]) >= 11))

    executor = Told(run, slots=2)
    with pytest.raises(MachineFailureError, match="over mine"):
        bisect(line(16), executor, Exit(), tmp_path)


def test_a_skip_that_decides_is_run_once_more(tmp_path: Path) -> None:
    """One chance failure leaves no suspects, not in a later search either; of each kind one is tried again."""
    runs, broken = Counter[str](), {"c2", "c3", "c4"}

    def run(task: Task, _: Path) -> Outcome:
        runs[task.commit] += 1
        number = int(task.commit[1:])
        return Outcome(code=125 if task.commit in broken else int(number >= 3))

    result = bisect(line(6), Told(run), Exit(), tmp_path)
    assert result.outcome == "ambiguous" and runs.total() <= 2 + 5 + 1 + 6, runs  # ends, each, one again, weighing
    broken.clear()
    result = bisect(line(6), Told(run), Exit(), tmp_path)
    assert result.culprit and result.culprit.commit == "c3"
    result = bisect(line(4), at_first({"c2"}, 2, slots=1), Exit(), tmp_path / "other")
    assert result.culprit and result.culprit.commit == "c2" and not result.skips


def prober(folder: Path, executor: Told, axis: Points, predicate: Exit | Bitwise) -> Prober:
    """What makes the probes of a range."""
    (case, identity), rollouts = experiment(), RolloutFiles(None)
    watched = watched_rollouts(case, rollouts)
    return Prober(Checkout(folder, folder / "git"), case, axis, watched, identity, executor, predicate)


def test_reasons_that_are_other_words_each_time_are_tried_once(tmp_path: Path) -> None:
    """Addresses, times and paths make no new reason: one commit bears it out for all."""

    def run(_: Task, folder: Path) -> Outcome:
        time.sleep(0.05)
        message = f"lost worker {id(folder):#x} after {time.time():.6f} s, see {folder}/log"
        return Outcome(ChildFailure("start", -1, message, str(folder / "log")))

    axis, executor = line(6), Told(run, slots=2)
    with ThreadPoolExecutor(2) as pool:
        made = prober(tmp_path, executor, axis, Bitwise())
        answers = list(pool.map(made.probe, [Request(point, 3) for point in axis.parents]))
    made.close()
    assert len({str(answer) for answer in answers}) == 5 and executor.runs.total() == 6


def test_skips_of_many_kinds_are_tried_alone_a_few_times() -> None:
    """Once some kinds were borne out no other is doubted, unless one was not."""
    company = Company()
    for kind in ("one", "two", "three"):
        assert not company.believes(kind)
        company.tried("c", kind, kind)
    assert company.believes("four")
    company.tried("c", "four", "")
    assert not company.believes("five") and not company.believes("four") and company.believes("one")


def test_what_was_made_beside_others_is_known_to_be(tmp_path: Path) -> None:
    """The journal says so to later searches, of which those that run one by one do without."""
    axis, executor = line(3), at_first(set(), 2)
    first = prober(tmp_path, executor, axis, Exit())
    asked = [Request(point, 3) for point in axis.parents]
    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(first.probe, asked))) == 2
    later, executor.slots = prober(tmp_path, executor, axis, Exit()), 1
    alone = prober(tmp_path, executor, axis, Exit())
    for request in asked:
        made = later.made(request)
        assert made and made.beside and later.known(request) and alone.known(request) is None
    alone.probe(asked[0])
    made = later.made(asked[0])
    assert prober(tmp_path, executor, axis, Exit()).known(asked[0]) and alone.journalled == 1


def test_a_journal_of_before_says_nothing_of_others_beside(tmp_path: Path) -> None:
    """Its lines are read as ever; what is to be made anew is no finished probe."""
    journal = Journal(tmp_path)
    journal.add(Entry("k", 0, "c", "", 1, 0.1, "", 0), None)
    journal.add(Entry("k", 1, "c", "", 1, 0.1, "", 0, search=journal.search, beside=True), None)
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    old = {name: value for name, value in json.loads(lines[0]).items() if name not in ("beside", "check")}
    (tmp_path / "journal.jsonl").write_text("\n".join([json.dumps(old), lines[1], ""]))
    assert Journal(tmp_path).count({"k"}) == 2 and Journal(tmp_path, alone=True).count({"k"}) == 1
    journal.disown()
    assert journal.count({"k"}) == Journal(tmp_path).count({"k"}) == 1 and journal.find("k", 0)


def test_what_cannot_be_tested_alone_either_is_skipped(tmp_path: Path) -> None:
    """A skip of the commit's own stays one, and no other with its reason is tried again."""
    result, commits, output = searched(tmp_path, "raise SystemExit(code)\n", "0 125 0 125 0 1 125 1")
    assert result["culprit"]["commit"] == commits[5] and "disturb" not in output and not result["remarks"]


def test_alone_is_alone() -> None:
    """Whoever wants to be alone waits for those under way, keeps others out, and gives up when nobody asks any more."""
    company, order, cancel = Company(), list[str](), threading.Event()
    with company.run(alone=False) as first:

        def alone() -> None:
            with company.run(alone=True) as run:
                order.append(f"alone {run.beside}")

        def later() -> None:
            with company.run(alone=False):
                order.append("later")

        threads = [threading.Thread(target=each) for each in (alone, later)]
        threads[0].start()
        while not company._alone:
            pass
        threads[1].start()
        cancel.set()
        with pytest.raises(CancelledError), company.run(alone=True, cancel=cancel):
            pass
        assert order == [] and not first.beside
    for thread in threads:
        thread.join()
    assert order == ["alone False", "later"]
    with company.run(alone=False) as first, company.run(alone=False) as second:
        assert first.beside and second.beside


@pytest.mark.whole
def test_numbers_of_another_probe_are_no_culprit_s(tmp_path: Path) -> None:
    """Probes that read what another one has written to a path that they share name nobody, until they run alone."""
    repo = start(tmp_path, case=None)
    write, read = (f"open({str(tmp_path / 'shared')!r}{mode})" for mode in (", 'w'", ""))
    share = f"scale = 1.0; {write}.write(str(scale)); __import__('time').sleep(0.7); scale = float({read}.read())\n"
    edit(repo, "scale = 1.0\n", share, "Share")
    note(repo, "one")
    culprit = edit(repo, "scale = 1.0;", "scale = 2.0;", "The culprit")
    note(repo, "two")
    done = repo.repro(
        "bisect", "HEAD~3..HEAD", "-j", "3", "--json", "--no-explain", "--",
        sys.executable, "train.py", "--steps", "2",
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert result["culprit"]["commit"] == culprit, done.stderr
    assert "disturb each other" in result["remarks"][0]


def test_kinds_of_reasons() -> None:
    """What is another in each run is no part of a kind: addresses, times, numbered files; other paths and codes are."""
    kind = kind_of("lost worker 0x7f31 after 1796.31 s in /tmp/run-831/log: exited with 1")
    assert kind == kind_of("lost worker 0x99aa after 12.5 s in /tmp/run-7/log: exited with 1")
    assert kind != kind_of("lost worker 0x7f31 after 1796.31 s in /tmp/run-831/log: exited with 2")
    assert kind_of("no file /data/tok.json") != kind_of("no file /tmp/shared/cache.pt")
