"""Bad input: each gives one clear line that names the cure, the right exit code, and loses nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Repo, environment

from repro.__main__ import main
from repro.cli import cli
from repro_golden.case.file import read_case
from repro_golden.repository.checkout import find_checkout
from repro_golden.store.dvc import Dvc
from repro_golden.subjects import kind_of


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of complaint; there must be no traceback."""
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    complaints = [line for line in done.stderr.splitlines() if line.startswith(("repro: ", "Error: "))]
    assert len(complaints) == 1, done.stderr
    return complaints[0]


def misspelt_key(repo: Repo) -> None:
    repo.edit("golden/cases/mini.toml", "proof_steps", "prof_steps")


def misspelt_trainer_key(repo: Repo) -> None:
    repo.edit("golden/cases/mini.toml", "global_batch_size", "global_batchsize")


def batch_mismatch(repo: Repo) -> None:
    repo.edit("golden/cases/mini.toml", "global_batch_size = 8", "global_batch_size = 7")


def no_toml(repo: Repo) -> None:
    repo.edit("golden/cases/mini.toml", "[subject]", "[subject")


def missing_rollout(repo: Repo) -> None:
    (repo.root / "golden" / "rollouts" / "mini" / "1.safetensors").unlink()


def unreadable_rollout(repo: Repo) -> None:
    path = repo.root / "golden" / "rollouts" / "mini" / "1.safetensors"
    raw = path.read_bytes()
    path.unlink()
    path.write_bytes(raw[: len(raw) // 2])


def no_rollouts(repo: Repo) -> None:
    shutil.rmtree(repo.root / "golden" / "rollouts")


def newer_rollouts(repo: Repo) -> None:
    path = repo.root / "golden" / "rollouts" / "mini" / "index.json"
    raw = json.loads(path.read_text())
    path.unlink()
    path.write_text(json.dumps(raw | {"format": 99}))


def golden_file(repo: Repo, name: str) -> Path:
    return next((repo.root / "golden" / "runs").glob(f"*/mini/{name}"))


def newer_trace(repo: Repo) -> None:
    path = golden_file(repo, "trace/header.json")
    raw = json.loads(path.read_text())
    path.unlink()
    path.write_text(json.dumps(raw | {"format": 99}))


def newer_run(repo: Repo) -> None:
    path = golden_file(repo, "run.json")
    raw = json.loads(path.read_text())
    path.unlink()
    path.write_text(json.dumps(raw | {"format": 99}))


def empty_run(repo: Repo) -> None:
    path = golden_file(repo, "run.json")
    path.unlink()
    path.write_text("")


def cut_trace(repo: Repo) -> None:
    path = golden_file(repo, "trace/steps.jsonl")
    raw = path.read_bytes()
    path.unlink()
    path.write_bytes(raw[: len(raw) // 2])


def cut_columns(repo: Repo) -> None:
    path = golden_file(repo, "trace/rank-00000.parquet")
    raw = path.read_bytes()
    path.unlink()
    path.write_bytes(raw[: len(raw) // 2])
    repo.edit(
        "core/repro_core/rl/loss.py", "rows.float() / temperature, dim", "rows.float() / temperature * 1.001, dim"
    )


def no_pointer(repo: Repo) -> None:
    next((repo.root / "golden/runs").glob("*/mini.dvc")).unlink()


def empty_pointer(repo: Repo) -> None:
    next((repo.root / "golden/runs").glob("*/mini.dvc")).write_text("")


def crash(repo: Repo) -> None:
    repo.edit(
        "core/repro_core/rl/loss.py",
        "    log_p = torch.log_softmax",
        "    raise OSError('no')\n    log_p = torch.log_softmax",
    )


def hang(repo: Repo) -> None:
    log_p = "    log_p = torch.log_softmax"
    repo.edit("core/repro_core/rl/loss.py", log_p, f"    __import__('time').sleep(99)\n{log_p}")
    repo.edit("golden/cases/mini.toml", 'timeout = "3m"', 'timeout = "4s"')


def other_contract(repo: Repo) -> None:
    repo.edit("core/repro_core/contract.py", "CONTRACT = 1\n", "CONTRACT = 77\n")


def nothing(_: Repo) -> None:
    """The repository is fine; the command is not."""


VERIFY = ("golden", "verify")
BAD: dict[str, tuple[Callable[[Repo], None], tuple[str, ...], int, tuple[str, ...]]] = {
    "misspelt key": (misspelt_key, VERIFY, 2, ("case.prof_steps", "did you mean proof_steps?")),
    "misspelt trainer key": (misspelt_trainer_key, VERIFY, 2, ("config.global_batchsize", "approve")),
    "no TOML": (no_toml, VERIFY, 2, ("mini.toml is not TOML",)),
    "unknown case": (nothing, ("golden", "verify", "maxi"), 2, ("no case 'maxi'", "known: mini")),
    "missing rollout": (missing_rollout, VERIFY, 2, ("no rollout", "pull")),
    "unreadable rollout": (unreadable_rollout, VERIFY, 2, ("not a readable rollout", "pull")),
    "newer rollouts": (newer_rollouts, VERIFY, 2, ("format 99", "upgrade")),
    "newer trace": (newer_trace, VERIFY, 2, ("format 99", "upgrade")),
    "newer golden run": (newer_run, VERIFY, 2, ("format 99", "upgrade")),
    "empty golden run": (empty_run, VERIFY, 2, ("not a readable golden run", "dvc checkout")),
    "cut trace": (cut_trace, VERIFY, 2, ("was changed", "dvc checkout")),
    "cut columns": (cut_columns, VERIFY, 2, ("damaged", "pull")),
    "no pointer": (no_pointer, VERIFY, 2, ("has no mini.dvc", "git checkout")),
    "empty pointer": (empty_pointer, VERIFY, 2, ("names no output", "git checkout")),
    "crash": (crash, VERIFY, 2, ("OSError: no", "output in")),
    "hang": (hang, VERIFY, 2, ("no end within 4 s",)),
    "other contract": (other_contract, VERIFY, 2, ("CONTRACT 77 is unknown",)),
    "dirty DVC file": (
        missing_rollout,
        ("golden", "approve", "--reason", "r"),
        2,
        ("differs from mini.dvc", "dvc checkout"),
    ),
    "no reason": (nothing, ("golden", "approve"), 2, ("--reason",)),
    "nothing recorded for it": (nothing, ("golden", "push", "maxi"), 2, ("no golden run of maxi",)),
    "unknown flag": (nothing, ("bisect", "HEAD~1..HEAD", "--fast"), 2, ("No such option",)),
    "no range": (nothing, ("bisect", "HEAD"), 2, ("write GOOD..BAD",)),
    "unknown revision": (nothing, ("bisect", "v9..HEAD"), 2, ("no commit 'v9'", "fetch")),
    "an option as revision": (nothing, ("bisect", "--", "--all..HEAD"), 2, ("nothing to search", "GOOD..BAD")),
    "empty range": (nothing, ("bisect", "HEAD..HEAD"), 2, ("same commit",)),
    "wrong way round": (nothing, ("bisect", "HEAD..HEAD~1"), 2, ("not an ancestor", "write HEAD~1..HEAD")),
    "bisect without rollouts": (no_rollouts, ("bisect", "HEAD~1..HEAD"), 2, ("no rollouts",)),
    "no trace": (nothing, ("diff", "golden", "core"), 2, ("no trace header",)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_with_a_cure(name: str, recorded: Repo) -> None:
    """The line says what is wrong and what to do, the exit code is right, and the golden run stays as it was."""
    spoil, command, code, phrases = BAD[name]
    if name == "bisect without rollouts":
        recorded.git("rm", "--quiet", "--cached", "golden/rollouts/mini.dvc")
    spoil(recorded)
    run = golden_file(recorded, "run.json").read_bytes()
    done = recorded.repro(*command)
    line = only_line(done) if "option" not in name and "flag" not in name and name != "no reason" else done.stderr
    assert done.returncode == code, done.stdout + done.stderr
    for phrase in phrases:
        assert phrase in line, line
    assert golden_file(recorded, "run.json").read_bytes() == run
    assert list((recorded.root / ".git" / "repro" / "tmp").glob("*")) == []


@pytest.mark.parametrize(
    ("spoil", "phrase"),
    [
        (misspelt_trainer_key, "global_batchsize"),
        (batch_mismatch, "must equal global_batch_size"),
        (crash, "OSError: no"),
    ],
)
def test_a_trainer_that_cannot_start_is_one_line(spoil: Callable[[Repo], None], phrase: str, fork: Repo) -> None:
    """What the trainer itself refuses reaches the user in one line with the file that holds its output."""
    spoil(fork)
    done = fork.repro("golden", "record")
    line = only_line(done)
    assert done.returncode == 2 and phrase in line
    assert Path(line.split("output in ")[1].rstrip(")")).exists()


def test_errors_have_a_json_twin(recorded: Repo) -> None:
    """With --json an error is an object on stdout too, with the same exit code."""
    done = recorded.repro("golden", "verify", "maxi", "--json")
    assert done.returncode == 2 and json.loads(done.stdout)["exit_code"] == 2


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (["verfy"], "No such command 'verfy'."),
        (["golden", "verfy"], "No such command 'verfy'. Did you mean 'verify'?"),
        (["report", "nihgtly"], "No such command 'nihgtly'. Did you mean 'nightly'?"),
        (["bisct", "a..b"], "No such command 'bisct'. Did you mean 'bisect'?"),
        (["diff", "a"], "Missing argument 'B'."),
        (["bisect", "--jobs", "0"], "0 is not in the range x>=1"),
        (["golden", "verify", "mnii"], "did you mean mini?"),
        (["report", "pr", "HEAD..HEAD", "--case", "mnii"], "did you mean mini?"),
        (["report", "nightly", "mnii"], "did you mean mini?"),
    ],
)
def test_usage_errors_have_a_json_twin_and_name_what_is_near(
    words: list[str], phrase: str, fork: Repo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --json a usage error is the one object on stdout; of a misspelt command or case the nearest is named."""
    monkeypatch.chdir(fork.root)
    for given in ([*words, "--json"], ["--json", *words], words):
        assert main(given) == 2
        printed = capsys.readouterr()
        if given[0] != "--json":
            assert phrase in printed.err
        if given is words:
            assert printed.out == ""
        else:
            told = json.loads(printed.out)
            assert told["exit_code"] == 2 and (phrase in told["error"] or given[0] == "--json"), told


def test_a_programs_own_json_flag_is_not_ours(
    fork: Repo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--json behind -- belongs to the program: an error stays a line."""
    monkeypatch.chdir(fork.root)
    assert main(["history", "HEAD..HEAD", "--case", "mini", "--", "train", "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "exclude each other" in printed.err


def test_outside_a_repository(tmp_path: Path) -> None:
    """Outside git, and in a repository without DVC or a case, the line says which command helps."""
    folder = Repo(tmp_path / "empty")
    folder.root.mkdir()
    assert "git init" in only_line(folder.repro("golden", "list"))
    folder.git("init", "--quiet")
    assert "`repro golden record NAME -- YOUR COMMAND` writes" in only_line(folder.repro("golden", "record"))
    assert folder.repro("golden", "list").stdout.startswith("no golden runs")
    (folder.root / "train.py").touch()
    done = folder.repro("golden", "record", "toy", "--", sys.executable, "train.py")
    assert done.returncode == 2 and done.stderr.endswith("has no DVC yet: run `repro init`\n")


def test_init_says_what_it_wrote_and_twice_is_harmless(tmp_path: Path) -> None:
    """Init prepares any git repository, keeps the remote outside it, and changes nothing the second time.

    It writes no case of a trainer that the repository does not hold, and names a command only by a file that is there.
    """
    repo = Repo(tmp_path / "fork")
    repo.root.mkdir()
    repo.git("init", "--quiet")
    first = repo.repro("init", "--remote", str(tmp_path / "remote"))
    assert first.returncode == 0 and "golden/dvc.yaml" in first.stdout and ".dvc" in first.stdout
    assert first.stdout.splitlines()[-1] == "next: repro golden record NAME -- YOUR COMMAND"
    assert not list((repo.root / "golden").rglob("*.toml"))
    before = {p: p.read_bytes() for p in repo.root.rglob("*") if p.is_file()}
    again = repo.repro("init")
    assert again.returncode == 0 and "nothing to do" in again.stdout
    assert {p: p.read_bytes() for p in repo.root.rglob("*") if p.is_file()} == before
    for name in ("tests/train.py", "a/train_x.py", "b/train_y.py"):
        (repo.root / name).parent.mkdir(exist_ok=True)
        (repo.root / name).touch()
    assert json.loads(repo.repro("init", "--json").stdout)["next"] == ["repro golden record NAME -- YOUR COMMAND"]
    (repo.root / "b" / "train.py").touch()
    assert "repro golden record train -- python b/train.py" in repo.repro("init").stdout


def test_init_and_the_remote_that_is_named(tmp_path: Path) -> None:
    """A remote that is named later is the one from then on, also of a folder beside the one where it was typed.

    A clone with golden runs gets no remote of its own, in which they are not: it is told to name theirs.
    """
    repo, clone = Repo(tmp_path / "Bär"), Repo(tmp_path / "clone")
    (repo.root / "sub").mkdir(parents=True)
    repo.git("init", "--quiet")
    assert repo.repro("init").returncode == 0
    assert Dvc(repo.root).remote.isascii() and "/remotes/B_r-" in Dvc(repo.root).remote
    done = Repo(repo.root / "sub").repro("init", "--remote", "../../team")
    assert done.returncode == 0 and "in place of" in done.stdout
    assert Path(Dvc(repo.root).remote).resolve() == tmp_path / "team"
    (repo.root / ".dvc" / "config").write_text("")
    (repo.root / "golden" / "runs" / "machine").mkdir(parents=True)
    (repo.root / "golden" / "runs" / "machine" / "toy.dvc").touch()
    repo.commit("Golden runs, and no remote")
    repo.git("clone", "--quiet", str(repo.root), str(clone.root))
    done = clone.repro("init")
    assert done.returncode == 0 and "next: repro init --remote URL" in done.stdout
    assert Dvc(clone.root).remote == ""
    for name in ("../../outside", "a b"):
        done = clone.repro("init", "--example", "--case", name)
        assert done.returncode == 2 and "is no name of a case" in only_line(done)
    assert not (clone.root / "core").exists()


def test_init_gives_an_example_only_where_it_is_asked_for(tmp_path: Path) -> None:
    """--example puts the built-in trainer into the repository, where commits can change it, with a case of it."""
    repo = Repo(tmp_path / "fork")
    repo.root.mkdir()
    repo.git("init", "--quiet")
    done = repo.repro("init", "--example", "--case", "tried", "--remote", str(tmp_path / "remote"))
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "next: repro golden record"
    case = read_case(repo.root / "golden" / "cases" / "tried.toml")
    assert kind_of(case).out_of_reach(find_checkout(repo.root)) == ""
    assert (repo.root / "core" / "repro_core" / "train" / "trainer.py").is_file()
    assert "nothing to do" in repo.repro("init", "--example", "--case", "tried").stdout


def test_what_no_commit_can_change_is_not_recorded(fork: Repo) -> None:
    """A module as installed, a folder without the module, and code that git ignores or lacks would agree for ever."""
    case = fork.root / "golden" / "cases" / "mini.toml"
    text = case.read_text()
    (fork.root / "other").mkdir()
    (fork.root / "other" / "notes.py").touch()
    for path, message in (("", "is imported as installed"), ("other", "repro_core is not in other/")):
        case.write_text(text.replace('path = "core"', f'path = "{path}"'))
        line = only_line(fork.repro("golden", "record"))
        assert message in line and "no commit can change" in line and "set subject.path" in line
    case.write_text(text.replace('path = "core"', 'path = ""'))
    assert "set subject.path" in only_line(fork.repro("bisect", "HEAD..HEAD"))
    case.write_text(text)
    fork.git("rm", "-r", "--cached", "--quiet", "core")
    (fork.root / ".gitignore").write_text("core/\n")
    fork.commit("Ignore it")
    assert "git takes no file of core" in only_line(fork.repro("golden", "record"))
    bare = Repo(fork.root.parent / "bare")
    bare.root.mkdir()
    bare.git("init", "--quiet")
    assert bare.repro("init").returncode == 0
    done = bare.repro("golden", "record", "toy", "--", sys.executable, "-c", "print(1)")
    assert done.returncode == 2 and "no file beside what recording writes" in done.stderr.splitlines()[-1]
    assert not (bare.root / "golden" / "cases").exists()


def mounts() -> bool:
    """Whether this user may mount a file system of its own."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "true"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


@pytest.mark.whole
@pytest.mark.skipif(not mounts(), reason="a full disk needs a mount namespace of its own, which is denied here")
def test_a_full_disk_is_one_line_and_loses_nothing(recorded: Repo) -> None:
    """On a disk without space a bisect stops with one line, and resumes where there is space again."""
    good = recorded.git("rev-parse", "HEAD")
    recorded.edit(
        "core/repro_core/rl/loss.py", "rows.float() / temperature, dim", "rows.float() / temperature * 1.001, dim"
    )
    culprit = recorded.commit("Tidy the log-prob path")
    state = recorded.root / ".git" / "repro"
    state.mkdir(exist_ok=True)
    command = f"mount -t tmpfs -o size=64k tmpfs {state} && exec {sys.executable} -m repro bisect {good}..HEAD"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command],
        cwd=recorded.root, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "space" in only_line(done) and "again" in only_line(done)
    resumed = recorded.repro("bisect", "--no-explain", f"{good}..HEAD", "--json")
    assert json.loads(resumed.stdout)["culprit"]["commit"] == culprit


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EROFS, "clone the repository to where you may write"), (errno.EACCES, "check the path and its perm"),
        (errno.ENOSPC, "free some space"), (errno.ENOENT, "check the path"),
    ],
)  # fmt: skip
def test_what_the_system_refuses_has_a_cure(
    number: int, fix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of the system's own is one line with what helps against it: a right path needs no check."""

    def refused(**_: object) -> None:
        raise OSError(number, os.strerror(number), "/x/.git/repro")

    monkeypatch.setattr(cli, "main", refused)
    assert main(["golden", "list"]) == 2
    assert f"repro: {os.strerror(number)} /x/.git/repro: {fix}" in capsys.readouterr().err
