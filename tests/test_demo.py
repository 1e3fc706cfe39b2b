from __future__ import annotations

import ast
import json
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from repro.demo import refactors
from repro.demo.culprits import CULPRITS, Culprit, kinds
from repro.demo.edits import Edit, apply, unbound
from repro.demo.history import CASE, FIRST_STEPS, STEPS, SUBJECT, History, choose, make_history
from repro.demo.run import MARKER, DemoResult, open_answer, prepare_folder, result_text, seal_answer, write_repository
from repro.initialise import trainer_source
from repro_bisect.axes.axis import PointInfo
from repro_bisect.driver.result import BisectResult
from repro_bisect.driver.result import Culprit as BisectCulprit
from repro_bisect.probe.progress import Cost
from repro_bisect.search.first_bad import Dag, FirstBad, Search, Verdict
from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case, read_case
from repro_golden.compare.traces import Comparison, Divergence, compare
from repro_golden.replay.children import Run
from repro_golden.repository.checkout import Place
from repro_golden.runs.runs import train
from repro_golden.runs.verify import Verification
from repro_golden.store.golden import GoldenRun
from repro_golden.store.rollouts import RolloutSet
from repro_golden.subjects import launch
from repro_golden.trace import Trace

SEEDS = range(8)
NEUTRAL_STEPS = 2


@cache
def history(seed: int) -> History:
    return make_history(trainer_source(), seed)


@cache
def states(seed: int) -> list[dict[str, str]]:
    """The trainer's files at every commit, by module name."""
    out: list[dict[str, str]] = []
    for commit in history(seed).commits:
        base = out[commit.parents[0]] if commit.parents else {}
        files = {p.removeprefix(SUBJECT): text for p, text in commit.changes.items() if p.startswith(SUBJECT)}
        out.append(base | files)
    return out


def ancestors(seed: int, number: int) -> set[int]:
    ancestors, stack = set[int](), [number]
    while stack:
        if (at := stack.pop()) not in ancestors:
            ancestors.add(at)
            stack += history(seed).commits[at].parents
    return ancestors


@cache
def imports(text: str) -> set[str]:
    """The trainer's modules that a module imports by name, as paths without ending. It compiles."""
    compile(text, "module", "exec", dont_inherit=True)
    names = [node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[2].replace(".", "/") for name in names if name.startswith("repro_core.")}


def missing_modules(files: dict[str, str]) -> set[str]:
    """Modules of the trainer that some module imports although they are not there."""
    there = {name.removesuffix(".py").removesuffix("/__init__") for name in files}
    return set.union(*map(imports, files.values())) - there


# -- histories


@pytest.mark.whole
@pytest.mark.parametrize("seed", [*SEEDS, 26])
def test_no_commit_reads_a_name_that_nobody_binds(seed: int) -> None:
    """What a refactor moved into a helper never leaves the culprit's own names behind: seed 26 once did."""
    made = make_history(trainer_source(), seed)
    texts = {text for c in made.commits for path, text in c.changes.items() if path.endswith(".py")}
    assert not {name for text in texts for name in unbound(text)}
    assert unbound("def f(x):\n    return [y + z for y in x]\n") == {"z"}
    assert (
        unbound("import a\nB = 1\ndef f(x, k=B):\n    def g():\n        return x + a.b(len(k))\n    return g\n")
        == set()
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_history_is_long_has_a_side_branch_and_one_culprit(seed: int) -> None:
    """64 commits or more after the start, one merge of a branch of several, and one culprit inside the range."""
    commits = history(seed).commits
    roles = [c.role for c in commits]
    assert len(commits) - 1 >= 64 and roles[0] == "start" and roles.count("start") == 1
    assert roles.count("culprit") == roles.count("merge") == roles.count("mend") == 1
    merge = roles.index("merge")
    left, right = commits[merge].parents
    side = ancestors(seed, right) - ancestors(seed, left)
    assert len(side) >= 5 and len(ancestors(seed, left) - ancestors(seed, right)) >= 4
    assert all(len(c.parents) == 1 for i, c in enumerate(commits) if i not in (0, merge))
    assert ancestors(seed, len(commits) - 1) == set(range(len(commits)))
    assert history(seed).commits[history(seed).culprit].role == "culprit"


def test_the_culprit_lies_on_either_line() -> None:
    """For some seeds it is on the main line, for others on the side branch."""

    def on_side(seed: int) -> bool:
        commits, number = history(seed).commits, len(history(seed).commits) - 1
        main = {number}
        while commits[number].parents:
            number = commits[number].parents[0]
            main.add(number)
        return history(seed).culprit not in main

    assert {on_side(seed) for seed in SEEDS} == {True, False}


@pytest.mark.parametrize("seed", SEEDS)
def test_only_the_window_does_not_import(seed: int) -> None:
    """Every commit compiles; one and the same module is missing in several commits in a row, and in no other."""
    commits = history(seed).commits
    broken = [i for i, c in enumerate(commits) if c.role == "broken"]
    absent = [missing_modules(files) for files in states(seed)]
    assert [i for i, names in enumerate(absent) if names] == broken
    assert len(broken) >= 4 and len(set.union(*absent)) == 1
    assert all(commits[b].parents == (a,) for a, b in pairwise(broken))
    assert commits[broken[-1] + 1].role == "mend" and commits[broken[-1] + 1].parents == (broken[-1],)


@pytest.mark.parametrize("jobs", [1, 2, 4])
def test_the_search_finds_the_culprit_around_the_window(jobs: int) -> None:
    """With true verdicts the pure search names the culprit for every seed, and meets the window for most of them."""
    met = 0
    for seed in SEEDS:
        commits, culprit = history(seed).commits, history(seed).culprit
        parents = {i: c.parents for i, c in enumerate(commits) if i}
        search = Search(Dag.between(parents, [0], len(commits) - 1), len(commits) - 1, [0])
        while search.answer is None:
            for i in search.next(jobs):
                guilty = Verdict.BAD if culprit in ancestors(seed, i) else Verdict.GOOD
                search = search.with_verdict(i, Verdict.SKIP if commits[i].role == "broken" else guilty)
        assert search.answer == FirstBad(culprit)
        met += Verdict.SKIP in search.verdicts.values()
    assert met > len(SEEDS) / 2


def test_the_window_fails_in_one_way(tmp_path: Path) -> None:
    """Before and after the window the package imports; inside it, every commit fails with the same last line."""
    commits = history(0).commits
    broken = [i for i, c in enumerate(commits) if c.role == "broken"]

    def last_line(number: int) -> str:
        folder = tmp_path / str(number)
        write(folder, states(0)[number])
        command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(folder / 'core')!r}); "
                   "import repro_core, repro_core.config; print(repro_core.__file__, file=sys.stderr)"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stderr.strip().splitlines()[-1].replace(str(folder), "")

    lines = [last_line(i) for i in broken]
    assert len(set(lines)) == 1 and lines[0].startswith("ModuleNotFoundError: No module named 'repro_core.")
    for number in (broken[0] - 1, broken[-1] + 1):
        assert last_line(number) == f"/{SUBJECT}__init__.py"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_guilty_file_is_refactored_before_and_after(seed: int) -> None:
    """Several refactors touch the guilty file on both sides of the culprit, and each of them changes its text."""
    planned = history(seed)
    path = SUBJECT + planned.cause.file
    touching = [i for i, c in enumerate(planned.commits) if path in c.changes and c.role in ("refactor", "broken")]
    before = [i for i in touching if i in ancestors(seed, planned.culprit)]
    after = [i for i in touching if planned.culprit in ancestors(seed, i)]
    assert len(before) >= 3 and len(after) >= 3
    for i in touching:
        commit = planned.commits[i]
        assert commit.changes[path] != states(seed)[commit.parents[0]][planned.cause.file]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_culprit_does_not_give_itself_away(seed: int) -> None:
    """Its subject is made of the words that refactors use; subjects are unique; no commit names a precision."""
    commits = history(seed).commits
    subjects = [c.subject for c in commits]
    assert len(set(subjects)) == len(subjects)
    verb = subjects[history(seed).culprit].split()[0]
    assert verb in {c.subject.split()[0] for other in SEEDS for c in history(other).commits if c.role == "refactor"}
    assert not any(word in s.lower() for s in subjects for word in ("bf16", "epsilon", "precision", "warm", "float"))


def test_equal_seeds_give_equal_commits(tmp_path: Path) -> None:
    """Commit ids are a function of the seed; another seed shares none; git finds no fault with the repository."""
    source = trainer_source()
    ids = [write_repository(tmp_path / f"{i}", make_history(source, seed).commits) for i, seed in enumerate((3, 3, 4))]
    assert ids[0] == ids[1] and not set(ids[1]) & set(ids[2])
    listed = subprocess.run(
        ["git", "rev-list", "--topo-order", "main"], cwd=tmp_path / "0", check=True, capture_output=True, text=True
    )
    assert set(listed.stdout.split()) == set(ids[0]) and listed.stdout.split()[0] == ids[0][-1]
    subprocess.run(["git", "fsck", "--strict"], cwd=tmp_path / "0", check=True, capture_output=True)
    assert not (tmp_path / "0" / ".git" / "hooks").exists()


def test_every_kind_place_and_step_is_reachable() -> None:
    """Seeds draw all culprits, eight kinds or more, and first steps from 6 on that the case still reaches."""
    drawn = [choose(seed)[:2] for seed in range(600)]
    assert {cause for cause, _ in drawn} == set(CULPRITS) and len(kinds()) >= 8
    assert {step for _, step in drawn} == set(FIRST_STEPS)
    assert min(FIRST_STEPS) >= 6 and max(FIRST_STEPS) < STEPS
    assert len({(c.kind, c.place) for c in CULPRITS}) == len(CULPRITS) > len(kinds())


# -- edits and refactors


@pytest.mark.parametrize("cause", CULPRITS, ids=lambda c: f"{c.kind} {c.place}")
def test_every_culprit_is_anchored_in_the_trainer(cause: Culprit) -> None:
    """Each edit finds its anchor in today's trainer, changes the guilty file, and leaves code that compiles."""
    source = trainer_source()
    changed = apply(cause.commit(6), source)
    assert {name for name in changed if changed[name] != source[name]} == {cause.file, cause.gated}
    assert "_WARM_UPDATES = 6" in changed[cause.gated]
    assert f"def {cause.function.split(' ')[0].split('.')[-1]}(" in changed[cause.file]
    for name in (cause.file, cause.gated):
        compile(changed[name], name, "exec", dont_inherit=True)


def test_a_missing_anchor_is_named() -> None:
    """An edit whose anchor is absent or ambiguous is refused with the anchor and the file."""
    for text in ("b\n", "a\na\n"):
        with pytest.raises(ReproError, match=r"anchor 'a' stands \d times in x.py"):
            apply([Edit("x.py", "a", "c")], {"x.py": text})


@pytest.mark.parametrize("kind", dict.fromkeys(refactors.REFACTORS), ids=lambda k: k.__name__)
def test_every_refactor_applies_somewhere_and_compiles(kind: refactors.Refactor) -> None:
    """No refactor is dead: each changes some module, and its results compile."""
    count = 0
    for name, text in trainer_source().items():
        changed = kind(text, random.Random(name))
        if changed is not None and changed != text:
            compile(changed, name, "exec", dont_inherit=True)
            count += 1
    assert count >= 3


def test_a_refactor_leaves_names_that_are_not_its_own() -> None:
    """Arguments, keywords, names in f-strings and a module's names are never renamed; a function's result stays."""
    source = """limit = 3


def f(x, *, scale=1):
    x = x + 1
    total = x + limit
    shown = f"{total}"
    kept = [limit for limit in range(3)]
    return g(total=total, kept=kept, shown=shown) * scale


def g(total, kept, shown):
    return [total, kept, shown]
"""
    seen = {refactors.rename_local(source, random.Random(i)) for i in range(40)} - {None}
    assert len(seen) >= 3
    for changed in filter(None, seen):
        names: dict[str, Any] = {}
        exec(changed, names)  # noqa: S102 - a function of this file, renamed inside
        assert names["f"](2) == [6, [0, 1, 2], "6"]
        assert 'f"{total}"' in changed and "total=total" in changed and "for limit in" in changed


# -- what the edits do to bits


def write(folder: Path, files: dict[str, str]) -> Place:
    for name, text in files.items():
        path = folder / SUBJECT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Place(folder)


@pytest.fixture(scope="module")
def demo_case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp("case") / "demo.toml"
    path.write_text(CASE)
    return read_case(path)


@pytest.fixture(scope="module")
def golden(demo_case: Case, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The trace of the untouched trainer on rollouts that it sampled itself, which lie beside it."""
    folder = tmp_path_factory.mktemp("golden")
    place = write(folder / "place", trainer_source())
    launch(demo_case, place, [Run(STEPS, save_rollouts=str(folder / "rollouts"))], folder / "capture.log")
    RolloutSet.write_index(folder / "rollouts")
    run = Run(STEPS, str(folder / "rollouts"), trace=str(folder / "trace"))
    return train(demo_case, place, run, folder / "golden.log")


def replay(case: Case, golden: Trace, folder: Path, files: dict[str, str], steps: int) -> Trace:
    run = Run(steps, str(golden.directory.parent / "rollouts"), trace=str(folder / "trace"))
    return train(case, write(folder / "place", files), run, folder / "log")


@pytest.mark.whole
def test_refactors_move_no_bit(demo_case: Case, golden: Trace, tmp_path: Path) -> None:
    """Every module refactored eight times over trains to the same bits."""
    rng = random.Random(0)
    files = trainer_source()
    for name in files:
        for _ in range(8):
            files[name] = refactors.refactor(files[name], rng, lambda _: True)
    assert all(files[name] != text for name, text in trainer_source().items())
    trace = replay(demo_case, golden, tmp_path, files, NEUTRAL_STEPS)
    assert len(trace.steps) == NEUTRAL_STEPS and compare(golden, trace, prefix=True).equal


@pytest.mark.campaign
@pytest.mark.parametrize("first_step", FIRST_STEPS)
def test_every_culprit_shows_first_at_its_step(demo_case: Case, golden: Trace, tmp_path: Path, first_step: int) -> None:
    """Each culprit leaves every bit before its step alone and moves one in the phase it names at that step."""

    def first_difference(numbered: tuple[int, Culprit]) -> tuple[str, int, str]:
        number, cause = numbered
        files = apply(cause.commit(first_step), trainer_source())
        divergence = compare(golden, replay(demo_case, golden, tmp_path / str(number), files, STEPS)).divergence
        assert divergence is not None, f"{cause.kind} in {cause.place} moved nothing"
        return f"{cause.kind} {cause.place}", divergence.step, divergence.phase

    with ThreadPoolExecutor(max_workers=2) as pool:
        differences = list(pool.map(first_difference, enumerate(CULPRITS)))
    assert differences == [(f"{c.kind} {c.place}", first_step, c.phase) for c in CULPRITS]


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(100, 106))
def test_refactors_of_whole_histories_move_no_bit(seed: int, demo_case: Case, golden: Trace, tmp_path: Path) -> None:
    """The commit before the culprit trains as the start does, and HEAD as the culprit does, to the last step."""
    planned = make_history(trainer_source(), seed)
    parent = planned.commits[planned.culprit].parents[0]
    at = {n: replay(demo_case, golden, tmp_path / str(n), states(seed)[n], STEPS) for n in (parent, planned.culprit)}
    head = replay(demo_case, golden, tmp_path / "head", states(seed)[-1], STEPS)
    assert compare(golden, at[parent]).equal
    assert compare(at[planned.culprit], head).equal and not compare(golden, head).equal


# -- the command


def test_the_answer_is_sealed(tmp_path: Path) -> None:
    """Nothing of the answer can be read in the file; it opens to what was sealed; a changed file is refused."""
    answer = history(0).answer([f"{i:040x}" for i in range(len(history(0).commits))])
    path = tmp_path / "answer.json"
    digest = seal_answer(answer, path)
    text = path.read_text()
    assert not any(str(value) in text for value in asdict(answer).values() if len(str(value)) > 2)
    assert open_answer(path, digest) == asdict(answer)
    seal_answer(replace(answer, first_step=answer.first_step + 1), path)
    with pytest.raises(ReproError, match="changed since it was sealed"):
        open_answer(path, digest)
    path.write_text("{}")
    with pytest.raises(ReproError, match="changed since it was sealed"):
        open_answer(path, digest)


def test_only_an_earlier_demo_is_replaced(tmp_path: Path) -> None:
    """A folder of somebody else's is refused untouched; a demo's is emptied; what links lead to is left alone."""
    mine, demo, kept = tmp_path / "mine", tmp_path / "demo", tmp_path / "kept"
    for folder in (mine, kept):
        folder.mkdir()
        (folder / "thesis.txt").write_text("years")
    with pytest.raises(ReproError, match="is not empty"):
        prepare_folder(mine)
    with pytest.raises(ReproError, match="is a file"):
        prepare_folder(mine / "thesis.txt")
    prepare_folder(demo)
    (demo / "repository" / "core").mkdir(parents=True)
    (demo / "link").symlink_to(kept)
    prepare_folder(demo)
    assert [p.name for p in demo.iterdir()] == [MARKER]
    assert (mine / "thesis.txt").read_text() == (kept / "thesis.txt").read_text() == "years"


def result(commit: str, step: int, phase: str = "forward") -> DemoResult:
    """A demo that found `commit` at `step` where a commit of forty a's at step 7 was planted."""
    divergence = Divergence(step, phase, "log_probs", "value", "float32 [3]")
    comparison = Comparison(STEPS, divergence, [], {})
    info = PointInfo(commit, "A <a@example.org>", "2025-01-06", "Tidy", (), "")
    result = BisectResult(
        outcome="found", good="c" * 40, bad="d" * 40, case="demo", predicate="bitwise",
        culprits=[BisectCulprit(info, divergence, comparison)], suspects=[], untried=[], end=divergence,
        explains_bad=True, verdicts={}, skips={}, parents={}, subjects={}, cost=Cost(), git_probes=None,
        git_steps=STEPS, git_seconds=None, accepted={}, one_step=False, posterior={}, rates=None, seconds=1.0,
        answered=None, machine="m", golden=None,
    )  # fmt: skip
    answer = {"commit": "a" * 40, "first_step": 7, "phase": "forward", "kind": "k", "place": "p", "subject": "s"}
    verification = Verification(GoldenRun(Path("g"), {}), comparison, STEPS)
    reports = Path("out/report.md"), Path("out/report.html")
    return DemoResult(7, 66, 14, verification, result, answer, "0" * 64, reports, "repro bisect", 1.0)


def test_a_wrong_verdict_is_said() -> None:
    """Another commit, step or phase, no commit, or a HEAD that agrees each fail the demo with its own line."""
    right = result("a" * 40, 7)
    assert right.problem == "" and "RIGHT" in result_text(right, Path("out")).plain
    wrong = {
        "named bbbbbbbbbb, but aaaaaaaaaa": result("b" * 40, 7),
        "at step 6, but 7": result("a" * 40, 6),
        "is in loss, but forward was planted": result("a" * 40, 7, "loss"),
        "ended with 'ambiguous'": replace(right, bisect=replace(right.bisect, outcome="ambiguous", culprits=[])),
        "HEAD agrees": replace(
            right, verification=replace(right.verification, comparison=Comparison(STEPS, None, [], {}))
        ),
    }
    for message, demo in wrong.items():
        assert message in demo.problem
        assert f"WRONG: {demo.problem}" in result_text(demo, Path("out")).plain


def test_help_is_instant_and_a_foreign_folder_is_exit_2(tmp_path: Path) -> None:
    """Help loads neither torch nor the demo; a folder that is not a demo's is one line on stderr and exit code 2."""
    code = (
        "import sys\nfrom repro.cli import cli\ncli.main(['demo', '--help'], standalone_mode=False)\n"
        "assert not {'torch', 'rich', 'git', 'repro.demo'} & set(sys.modules), 'help is slow'"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
    (tmp_path / "x").touch()
    done = repro_demo(tmp_path, "--seed", "1", "--out", str(tmp_path))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "is not empty" in done.stderr


def repro_demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "repro", "demo", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def check_demo(folder: Path, seed: int) -> None:
    began = time.monotonic()
    done = repro_demo(folder, "--seed", str(seed), "--out", "out", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["right"] and data["bisect"]["culprit"]["commit"] == data["answer"]["commit"]
    assert data["bisect"]["divergence"]["step"] == data["answer"]["first_step"] >= 6
    assert data["bisect"]["divergence"]["phase"] == data["answer"]["phase"]
    assert data["bisect"]["explains_bad"] is True, "a refactor after the culprit moved a bit"
    assert data["verify"]["agrees"] is False
    assert data["sha256"][:16] in done.stderr.split("bisect")[0]
    out = folder / "out"
    assert "<svg" in (out / "demo.svg").read_text() and "RIGHT" in (out / "demo.svg").read_text()
    assert data["answer"]["commit"][:10] in (out / "report.md").read_text()
    assert "</html>" in (out / "report.html").read_text()
    assert data["seconds"] <= time.monotonic() - began


@pytest.mark.whole
def test_the_demo_finds_what_it_hid(tmp_path: Path) -> None:
    """`repro demo` as a user runs it names the planted commit, step and phase, and leaves reports and picture."""
    check_demo(tmp_path, 8)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(20, 32))
def test_the_demo_finds_what_it_hid_for_many_seeds(tmp_path: Path, seed: int) -> None:
    """Other seeds hide other kinds at other places and steps, on both lines; all are found."""
    check_demo(tmp_path, seed)
