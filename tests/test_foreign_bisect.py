"""Real regressions of slime, Miles and Relax, planted in small trainers of their shape and found by `repro bisect`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from foreign_kit import Fork, make_fork
from foreign_regressions import REGRESSIONS, Regression

AMBIGUOUS = "inside-broken-replay"
AGAIN = ("whitening-without-cp-miles", "temperature-ignored-relax")
"""The same regression in another system."""
SYSTEMS = ("slime", "miles", "relax")


def bisect(fork: Fork, *arguments: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """JSON and progress of a bisect over all commits of a fork."""
    words = ("bisect", "--no-explain", f"{fork.good}..{fork.bad}", "--case", fork.case, "--json", *arguments)
    done = fork.repo.repro(*words)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout), done.stderr


def _marked(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.campaign) if name in AGAIN else name


def found_exactly(fork: Fork, planted: Regression) -> None:
    """The culprit is named, with the update, the phase and the signal in which it shows first."""
    result, progress = bisect(fork)
    assert result["outcome"] == "found", progress
    assert result["culprit"]["commit"] == fork.culprit, progress
    seen = result["divergence"]
    assert (seen["step"], seen["phase"], seen["signal"]) == (planted.step, planted.phase, planted.signal), progress
    assert result["explains_bad"] is True


@pytest.mark.whole
@pytest.mark.parametrize("name", [_marked(name) for name in REGRESSIONS if name != AMBIGUOUS])
def test_a_real_regression_is_found(tmp_path: Path, name: str) -> None:
    """The commit, the update, the phase and the first signal are the planted ones, with no recorder in the trainer."""
    found_exactly(make_fork(tmp_path, name, commits=6), REGRESSIONS[name])


@pytest.mark.whole
def test_a_culprit_among_commits_that_cannot_replay_is_narrowed_to_them(tmp_path: Path) -> None:
    """Where the replay itself is broken for a window that holds the culprit, the answer is exactly that window."""
    fork = make_fork(tmp_path, AMBIGUOUS)
    result, progress = bisect(fork, code=3)
    assert result["outcome"] == "ambiguous", progress
    assert set(result["suspects"]) == set(fork.suspects)


@pytest.mark.whole
def test_a_metric_predicate_finds_it_too(tmp_path: Path) -> None:
    """The same commit is named by a bound on one metric, which refactors that move no number keep."""
    name = "per-token-loss-scaled-twice"
    fork = make_fork(tmp_path, name, commits=4)
    result, progress = bisect(fork, "--when", str(REGRESSIONS[name].predicate))
    assert result["culprit"]["commit"] == fork.culprit, progress


@pytest.mark.whole
def test_a_nan_that_metrics_hide_is_found_by_the_check_of_its_ci(tmp_path: Path) -> None:
    """The NaN that `nan_to_num` keeps out of every metric of its step violates `ci:miles`, at that step."""
    fork = make_fork(tmp_path, "nan-in-old-log-probs", commits=4)
    result, progress = bisect(fork, "--when", "ci:miles")
    assert result["culprit"]["commit"] == fork.culprit, progress
    assert result["divergence"]["step"] == 0
    assert result["explains_bad"] is True, "a check that BAD fails by itself says nothing of what differs from it"


@pytest.mark.whole
def test_every_culprit_is_named_also_what_a_merge_brought_in(tmp_path: Path) -> None:
    """--all names each commit that moved the numbers, the one that a merge brought in by its own name."""
    fork = make_fork(tmp_path, "entropy-gradient-inverted", commits=3)
    repo, second = fork.repo, REGRESSIONS["bf16-rollout-log-probs"]
    repo.git("checkout", "--quiet", "-b", "side", fork.good)
    repo.edit(f"{second.system}/{second.file}", second.old, second.new)
    brought = repo.commit(second.title)
    repo.git("checkout", "--quiet", "main")
    repo.git("merge", "--quiet", "--no-ff", "--message", "Merge side", "side")
    result, progress = bisect(replace(fork, bad="HEAD"), "--all")
    assert {each["commit"]["commit"] for each in result["culprits"]} == {fork.culprit, brought}, progress
    assert all(culprit["divergence"] for culprit in result["culprits"])


@pytest.mark.campaign
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("name", ["bf16-rollout-log-probs", "whitening-without-cp", "num-tokens-counts-masked"])
def test_a_regression_is_found_in_every_system(tmp_path: Path, name: str, system: Any) -> None:
    """What one system had, planted in the others, is found there as well, among other commits and samples."""
    fork = make_fork(tmp_path, name, commits=8, seed=11, system=system)
    result, progress = bisect(fork)
    assert result["culprit"]["commit"] == fork.culprit, progress
    assert result["divergence"]["step"] == REGRESSIONS[name].step


CP2 = """
[layouts.cp2]
flags = ["--context-parallel-size", "2", "--actor-num-gpus-per-node", "4"]
ranks = 4
relative = { grad_norm = 0.01 }
"""


@pytest.mark.whole
@pytest.mark.parametrize(("system", "name"), [("miles", None), ("slime", "whitening-without-cp")])
def test_layouts_agree_until_one_computes_something_else(tmp_path: Path, system: Any, name: str | None) -> None:
    """One rank and four with context parallelism agree within roundings; whitening without the CP group parts them."""
    fork = make_fork(tmp_path, name, commits=0, system=system, flags=["--normalize-advantages"])
    repo = fork.repo
    case = repo.root / "golden" / "cases" / f"{fork.case}.toml"
    # the planted one needs context parallelism in its own launch: the case is brought back to one rank
    script = repo.root / "scripts" / "run.sh"
    script.write_text(script.read_text().replace("--context-parallel-size 2", "").replace("per-node 4", "per-node 1"))
    case.write_text(case.read_text().replace("ranks = 4", "ranks = 1") + CP2)
    if name:
        planted = REGRESSIONS[name]
        repo.edit(f"{system}/{planted.file}", planted.old, planted.new)
    repo.commit("Layouts")
    done = repo.repro("bisect", "--layout", "case..cp2", "--case", fork.case, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["outcome"] == ("part" if name else "agree"), result
    if name:
        assert result["comparison"]["parted"]["signal"] == "advantages"


@pytest.mark.whole
def test_what_the_launch_loses_is_no_agreement(tmp_path: Path) -> None:
    """A variable that the script sets over and a word that it drops are lost; what `flags` adds arrives."""
    fork = make_fork(tmp_path, commits=0)
    repo, changes = fork.repo, tmp_path / "flags.toml"
    script, case = repo.root / "scripts" / "run.sh", repo.root / "golden" / "cases" / f"{fork.case}.toml"
    script.write_text(script.read_text().replace("export ", "export NVTE_FLASH_ATTN=1\nexport ", 1))
    case.write_text(case.read_text() + '\n[layouts.two]\ncommand = "bash scripts/run.sh --sequence-parallel"\n')
    repo.commit("Layouts")

    def bisect_flags(change: str) -> tuple[int, str]:
        changes.write_text(f"[[change]]\n{change}\n")
        done = repo.repro("bisect", "--no-explain", "--flags", str(changes), "--case", fork.case)
        return done.returncode, done.stdout + done.stderr

    code, output = bisect_flags('env = { NVTE_FLASH_ATTN = "0" }')
    assert code == 3 and "NVTE_FLASH_ATTN is what it is without the change" in output, output
    done = repo.repro("bisect", "--layout", "case..two", "--case", fork.case)
    assert done.returncode == 3 and "--sequence-parallel is not on the command line" in done.stderr, done.stderr
    code, output = bisect_flags('add = ["--adam-beta1", "0.8"]')
    assert code == 0 and "1 change of 1 moves the numbers" in output and "is not on the command line" not in output, (
        output
    )


# -- the launch


@pytest.mark.whole
@pytest.mark.parametrize("system", ["slime", "miles", pytest.param("relax", marks=pytest.mark.campaign)])
def test_a_launch_script_becomes_a_golden_run_without_a_recorder(tmp_path: Path, system: Any) -> None:
    """What the trainer writes by itself is proved and verified; a script that kills every Python harms nobody."""
    fork = make_fork(tmp_path, commits=0, system=system, kill=True)
    repo = fork.repo
    assert repo.repro("init").returncode == 0
    done = repo.repro("golden", "record")
    assert done.returncode == 0, done.stderr
    assert not (repo.root / "killed").exists()
    assert "one ULP in input is seen: rollout_log_probs at step 0 named first\n" in done.stderr
    assert "planted in what the trainer wrote" in done.stderr
    assert ("parameters moved" in done.stderr) == (system == "miles")  # it alone writes hashes of them
    assert repo.repro("golden", "verify").returncode == 0
    culprit = REGRESSIONS["bf16-rollout-log-probs"]
    repo.edit(f"{system}/{culprit.file}", culprit.old, culprit.new)
    done = repo.repro("golden", "verify")
    assert done.returncode == 1, done.stdout
    assert "differs at step 0, phase input, signal rollout_log_probs" in done.stdout


def test_rollouts_are_sampled_by_the_trainers_own_engines(tmp_path: Path) -> None:
    """`repro rollout record` makes the launch sample as many rollouts as the case replays, and train nothing."""
    fork = make_fork(tmp_path, commits=0, flags=["--sglang-enable-deterministic-inference"])
    repo = fork.repo
    assert repo.repro("init").returncode == 0
    out = tmp_path / "sampled"
    done = repo.repro("rollout", "record", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in out.iterdir()) == ["0.pt", "1.pt", "2.pt"]
    assert repo.repro("rollout", "show", str(out)).returncode == 0


def test_a_commit_that_lacks_a_flag_is_skipped_with_that_reason(tmp_path: Path) -> None:
    """A parser that ignores what it does not know does not make a real run of a replay: its commit cannot be tested."""
    fork = make_fork(tmp_path, commits=0)
    repo = fork.repo
    repo.edit("slime/arguments.py", ', "--dump-details"', "")
    repo.edit("slime/arguments.py", "args.dump_details is not None", 'hasattr(args, "dump_details")')
    bad = repo.commit("Take --dump-details away")
    done = repo.repro("bisect", "--no-explain", f"{fork.good}..{bad}", "--case", fork.case)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert "--dump-details took no effect (no parser of it has this flag)" in last


def test_a_launch_that_goes_to_the_checkout_is_refused(tmp_path: Path) -> None:
    """A probe whose code came from the user's checkout would call every commit good: it is refused, and says so."""
    fork = make_fork(tmp_path, "temperature-ignored", commits=2)
    repo = fork.repo
    script = tmp_path / "launch.sh"
    lines = (repo.root / "scripts" / "run.sh").read_text().splitlines()
    launch_lines = [f"SCRIPT_DIR={repo.root}/scripts" if line.startswith("SCRIPT_DIR=") else line for line in lines]
    script.write_text("\n".join(launch_lines))
    case = repo.root / "golden" / "cases" / f"{fork.case}.toml"
    case.write_text(case.read_text().replace("scripts/run.sh", str(script)))
    done = repo.repro("bisect", "--no-explain", f"{fork.good}..{fork.bad}", "--case", fork.case)
    assert done.returncode == 2, done.stdout
    assert "was imported from another working tree, not from the commit" in done.stderr.strip().splitlines()[-1]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('flags = ["--eps-clip-hihg", "0.3"]', "did you mean --eps-clip-high?): correct subject.flags"),
        ('flags = ["--eps-clip 0.3"]', "--eps-clip 0.3 took no effect"),
        ('flags = ["--num-rollout", "1"]', "subject.flags sets --num-rollout, and so does a replay"),
        ('leave = ["--nope"]', "a replay adds no --nope; it adds --debug-train-only, "),
        ('leave = ["--dump-details"]', "no train dump shows what rollout 0 was trained on"),
        ('entry = ["main.py"]', "no Python process ran main.py and read a command line"),
        ('save = "x {checkpoint}"\nresume = "y {checkpoint}"', "save and resume are for kind command"),
    ],
)
def test_a_case_that_cannot_replay_says_so_in_one_line(tmp_path: Path, line: str, message: str) -> None:
    """What the case itself says wrongly is told with its cure: nothing is recorded, and nothing agrees by silence."""
    fork = make_fork(tmp_path, commits=0)
    repo = fork.repo
    assert repo.repro("init").returncode == 0
    case = repo.root / "golden" / "cases" / f"{fork.case}.toml"
    case.write_text(case.read_text().replace("recorder = false", f"recorder = false\n{line}"))
    done = repo.repro("golden", "record")
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr.strip().splitlines()[-1]


@pytest.mark.whole
def test_a_launch_that_resumes_begins_with_the_recorded_rollouts(tmp_path: Path) -> None:
    """A launch that would go on from rollout 5 replays rollout 0; a trainer that starts anew gets each flag once."""
    fork = make_fork(tmp_path, commits=0)
    repo = fork.repo
    repo.edit("scripts/run.sh", "--num-rollout 3", "--num-rollout 3 --start-rollout-id 5")
    anew = "import os, sys\nif os.environ.get('ANEW') != '1':\n    os.environ['ANEW'] = '1'\n"
    anew += "    os.execv(sys.executable, [sys.executable, *sys.argv])\n"
    train = repo.root / "train.py"
    head, future, rest = train.read_text().partition("from __future__ import annotations\n")
    train.write_text(head + future + anew + rest)
    assert repo.repro("init").returncode == 0
    done = repo.repro("golden", "record")
    assert done.returncode == 0, done.stderr


def test_a_trainer_that_trains_on_other_samples_is_refused(tmp_path: Path) -> None:
    """Where the flag is parsed and yet other samples are trained on, the run is no replay and says so."""
    fork = make_fork(tmp_path, commits=0)
    repo = fork.repo
    assert repo.repro("init").returncode == 0
    old = 'list(read_archive(Path(path))["samples"])'
    repo.edit("slime/samples.py", old, f'[{{**one, "tokens": one["tokens"][::-1]}} for one in {old}]')
    done = repo.repro("golden", "record")
    assert done.returncode == 2
    assert "rollout 0 was trained on other samples than were given" in done.stderr.splitlines()[-1]
