"""What a probe's verdict may rest on beside the code is part of its key: variables, packages, files outside."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Repo

from repro.__main__ import main
from repro_bisect.probe.around import Around, Pythons
from repro_bisect.probe.journal import probe_key
from repro_golden.case.file import Case
from repro_golden.recording.attach.code.identify import build, marked
from repro_golden.subjects import build_of, kind_of
from repro_golden.subjects.environments import builds as environments
from repro_golden.subjects.surroundings import (
    _is_everything,
    folders_of,
    found_outside,
    outside_of,
    seen,
    variables_digest,
    variables_of_key,
)
from repro_golden.subjects.watched import Snapshot, Watched

JUDGE = """\
import os, sys
from pathlib import Path
value = int(Path("value").read_text()) if Path("value").exists() else 0
limit = {limit}
sys.exit(value >= limit)
"""


def history(folder: Path, limit: str) -> tuple[Repo, list[str]]:
    """A program that is bad from a value on, and commits that count the value up from 0 to 4."""
    repo = Repo(folder / "repo")
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    (repo.root / ".gitignore").write_text("data\n")
    (repo.root / "judge.py").write_text(JUDGE.format(limit=limit))
    commits = [repo.commit("Start")]
    for n in range(1, 5):
        (repo.root / "value").write_text(f"{n}\n")
        commits.append(repo.commit(f"value {n}"))
    return repo, commits


class Bisect:
    """`repro bisect` by the exit code of a command, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capture = monkeypatch, capfd

    def __call__(self, repo: Repo, *command: str, **variables: str) -> dict[str, Any]:
        """What it says, under more variables."""
        self._patch.chdir(repo.root)
        for name, value in variables.items():
            self._patch.setenv(name, value)
        self._capture.readouterr()
        words = ["bisect", "--no-explain", "HEAD~4..HEAD", "--json", "-j", "1", "--when", "exit", "--"]
        assert main([*words, *(command or (sys.executable, "judge.py"))]) == 0
        answer: dict[str, Any] = json.loads(self._capture.readouterr().out)
        return answer


@pytest.fixture
def bisect(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Bisect:
    """Searches, without what CI says of this process."""
    for name in [name for name in os.environ if name.startswith(("GITHUB_", "GITLAB_", "REPRO_"))]:
        monkeypatch.delenv(name)
    return Bisect(monkeypatch, capfd)


def test_a_variable_that_the_program_sees(tmp_path: Path, bisect: Bisect) -> None:
    """The same command under another variable runs its probes anew and answers right; another terminal reuses them."""
    repo, commits = history(tmp_path, 'int(os.environ["MASK"]) + 1')
    assert bisect(repo, MASK="1", TERM="vt100")["culprit"]["commit"] == commits[2]
    other = bisect(repo, MASK="2", TERM="vt100")
    assert other["culprit"]["commit"] == commits[3] and other["cost"]["reused"] == 0
    elsewhere = {"TERM": "xterm", "COLUMNS": "80", "SSH_TTY": "/dev/pts/9", "SHLVL": "7", "TMPDIR": str(tmp_path)}
    again = bisect(repo, MASK="1", **elsewhere)
    assert again["culprit"]["commit"] == commits[2] and again["cost"]["probes"] == 0
    assert "vt100" not in (repo.root / ".git" / "repro" / "journal.jsonl").read_text()


@pytest.mark.parametrize("how", ["named", *(pytest.param(how, marks=pytest.mark.whole) for how in ("command", "path"))])
def test_a_package_upgraded_between_two_searches(tmp_path: Path, how: str) -> None:
    """A package of another version, or of other content under the same version, is another probe."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    site = next((tmp_path / "venv" / "lib").glob("python*")) / "site-packages"
    (site / "ours.pth").write_text("".join(f"{path}\n" for path in sys.path if path and Path(path).is_dir()))
    python = str(tmp_path / "venv" / "bin" / "python")
    subject = {
        "named": {"command": "{python} judge.py", "python": python},
        "command": {"command": f"nice {python} judge.py"},
        "path": {"command": "sh judge.sh", "env": {"PATH": f"{Path(python).parent}:/usr/bin:/bin"}},
    }[how]
    case = Case.model_validate({"case": {"name": "x", "steps": 1}, "subject": {"kind": "command", **subject}})
    assert kind_of(case).other_pythons(tmp_path) == ([] if how == "named" else [python])
    keys = []
    for version, content in (("1.0", "a"), ("1.1", "a"), ("1.1", "b"), ("1.1", "b")):
        for old in site.glob("limit-*"):
            shutil.rmtree(old)
        info = site / f"limit-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: limit\nVersion: {version}\n")
        (info / "RECORD").write_text(f"limit.py,sha256={content},10\n")
        environments.asked.cache_clear()
        keys.append(seen(case, build_of(case, tmp_path).digest))
    assert len(set(keys)) == 3 and keys[2] == keys[3]


@pytest.mark.parametrize("where", ["root", "folder", "absolute", "variable"])
def test_data_outside_of_the_commits(tmp_path: Path, where: str) -> None:
    """A file changed in place counts, of one size and one time too: below {root}, in a folder, by an absolute path."""
    data = (tmp_path / "repo" / "data" if where in ("root", "folder") else tmp_path / "elsewhere") / "limit"
    named = {"root": "{root}/data/limit", "folder": "{root}/data", "absolute": str(data), "variable": str(data)}[where]
    env = {"DATA": named} if where == "variable" else {}
    raw = {"case": {"name": "x", "steps": 1}, "subject": {"kind": "command", "command": f"a --d={named}", "env": env}}
    if where == "variable":
        raw["subject"]["command"] = "a"  # type: ignore[index]
    case = Case.model_validate(raw)
    data.parent.mkdir(parents=True)
    data.write_text("1")
    before, times = outside_of(case, tmp_path / "repo"), (data.stat().st_atime_ns, data.stat().st_mtime_ns)
    assert before and before == outside_of(case, tmp_path / "repo")
    data.write_text("2")
    os.utime(data, ns=times)
    assert outside_of(case, tmp_path / "repo") != before


@pytest.mark.parametrize(
    "word",
    ["x=[{data}/a,{data}/b]", "[{data}/a]", "@{data}/a", "{k: {data}/a}", "-d{data}/a", "--d={data}/a b", "~/data/a",
     "{data}/*.bin", "{data}/part-[0-9]", "{data}/{rollout_id}.pt", "file://{data}/a", "a={data}/a#2",
     "{a: {data}/a, b: {c: 1}}"],
)  # fmt: skip
def test_paths_amid_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """What lists, response files, patterns, names with blanks, flags of a letter and a home lead to counts."""
    data = tmp_path / "data"
    data.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = []
    for content in ("1", "2"):
        for name in ("a", "a b", "x.bin", "part-1", "0.pt"):
            (data / name).write_text(content)
        env = {"WORD": word.replace("{data}", str(data))}
        subject = {"kind": "command", "command": "a", "env": env}
        case = Case.model_validate({"case": {"name": "x", "steps": 1}, "subject": subject})
        keys.append(outside_of(case, tmp_path / "repo"))
    assert keys[0] and keys[0] != keys[1]


def test_data_on_pythonpath(tmp_path: Path) -> None:
    """Of a folder that PYTHONPATH alone names a library's files count; of one that the command names too, all."""
    data = tmp_path / "data"
    data.mkdir()
    keys: dict[str, list[list[str]]] = {"a": [], f"a {data}": []}
    for content in ("1", "2"):
        (data / "rows.csv").write_text(content)
        for command, facts in keys.items():
            facts.append(outside_of(on_pythonpath(data, command), tmp_path / "repo"))
    assert [a == b != [] for a, b in keys.values()] == [True, False]


def on_pythonpath(folder: Path, command: str = "a") -> Case:
    """A program that PYTHONPATH leads to a folder."""
    subject = {"kind": "command", "command": command, "env": {"PYTHONPATH": str(folder)}}
    return Case.model_validate({"case": {"name": "x", "steps": 1}, "subject": subject})


BESIDE = ["rllib/defaults.json", "rllib/conf/a.yaml", "rllib/chat.jinja"]
"""What a library ships beside its code."""


@pytest.mark.parametrize("git", ["tracked", "none", "lacking"])
def test_what_a_library_reads_beside_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, git: str) -> None:
    """Its settings count, and of a working tree all that git tracks, also in a search; what programs write does not."""
    repo = Repo(tmp_path / "lib")
    counts = [*BESIDE, "rllib/merges.bin"] if git == "tracked" else BESIDE
    passes = ["rllib/new.json" if git == "tracked" else "rllib/merges.bin", "outputs/a.json", "rllib/log", "a.ckpt"]
    for name in (*counts, *passes, "rllib/__init__.py"):
        (repo.root / name).parent.mkdir(parents=True, exist_ok=True)
        (repo.root / name).write_text("1")
    if git != "none":
        repo.git("init", "--quiet")
        (repo.root / ".gitignore").write_text("".join(f"{name}\n" for name in passes))
        repo.commit("Start")
    if git == "lacking":
        monkeypatch.setenv("PATH", str(tmp_path))

    def asked() -> tuple[Watched, Watched]:
        monkeypatch.setattr(sys, "path", [str(site)])
        build.cache_clear()
        root, case = tmp_path / "repo", on_pythonpath(repo.root)

        def environment(_: bool) -> Snapshot:
            build.cache_clear()
            built = build(root)
            return Snapshot((built.digest,), built.marks, lambda: marked(built.marks))

        return Watched(environment), Watched(lambda _: found_outside(case, root))

    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "lib.pth").write_text(f"{repo.root}\n")
    for name in (*counts, *passes):
        both = asked()
        (repo.root / name).write_text(f"2 of {name}")
        moved = name in counts
        assert [part.stand() for part in both] == [(moved, not moved)] * 2, name
        assert [part.facts == other.facts for part, other in zip(both, asked(), strict=True)] == [not moved] * 2, name
    both = asked()
    (repo.root / "rllib" / "more.weights").write_text("1")
    if git == "tracked":
        repo.git("add", "rllib/more.weights")
    assert [part.stand()[1] for part in both] == [git != "tracked"] * 2
    build.cache_clear()


@pytest.mark.parametrize(
    "word", ["data/a", "./data", "../data", "$DATA/data", "{out}/data", "https://host/data", "a+/data"]
)
def test_what_is_no_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """A path amid another word, or behind what stands for something else, is not taken for one of the root's."""
    asked: list[str] = []
    monkeypatch.setattr(os.path, "lexists", lambda path: bool(asked.append(str(path))))
    subject = {"kind": "command", "command": "a", "env": {"WORD": word}}
    outside_of(Case.model_validate({"case": {"name": "x", "steps": 1}, "subject": subject}), tmp_path)
    assert not [path for path in asked if path.startswith("/data")]


def test_folders_whose_names_begin_as_the_systems_do() -> None:
    """/runs and /devdata are data; what lies in /run and /dev is not."""
    root = Path("/nowhere/repo")
    answers = [_is_everything(Path(f), root) for f in ("/runs/a", "/devdata", "/run/a", "/dev")]
    assert answers == [False, False, True, True]


def test_a_home_that_is_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not looked at, nor is what holds it or the link."""
    for name in ("disk/me", "home", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "home" / "me").symlink_to(tmp_path / "disk" / "me")
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "me"))
    answers = [_is_everything(tmp_path / name, tmp_path / "repo") for name in ("home/me", "disk", "home", "other")]
    assert answers == [True, True, True, False]


def test_data_under_root_in_a_search(tmp_path: Path, bisect: Bisect) -> None:
    """Data that git does not track, changed in place between two searches, gives another answer."""
    repo, commits = history(tmp_path, "int(Path(sys.argv[1]).read_text())")
    (repo.root / "data").mkdir()
    for limit in (2, 3):
        (repo.root / "data" / "limit").write_text(str(limit))
        result = bisect(repo, sys.executable, "judge.py", "{root}/data/limit")
        assert result["culprit"]["commit"] == commits[limit], limit


def tool(folder: Path, limit: int) -> None:
    """A program that PATH may find, bad from a value on."""
    folder.mkdir(exist_ok=True)
    (folder / "mytool").write_text(f'#!/bin/sh\ntest "$(cat value || echo 0)" -lt {limit}\n')
    (folder / "mytool").chmod(0o755)


@pytest.mark.parametrize("command", ["mytool --a=b", "nice -n 1 mytool", "sh -c 'cd . && mytool|cat'"])
def test_a_program_that_path_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Its content counts, behind a wrapper and in the text of a shell too; the system's and the Python's own do not."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    facts = []
    for limit in (1, 2, 2):
        tool(tmp_path / "bin", limit)
        facts.append(outside_of(commanded(command), tmp_path / "repo"))
    assert facts[0] != facts[1] == facts[2]
    assert outside_of(commanded(f"{command} sh python cat"), tmp_path / "repo") == facts[2]


def commanded(command: str) -> Case:
    """A case of a command."""
    return Case.model_validate({"case": {"name": "x", "steps": 1}, "subject": {"kind": "command", "command": command}})


def test_what_an_inherited_variable_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file and a folder of few files count; what programs write from run to run and large folders do not."""
    counts = {"CONF": "hp.json", "DATA_DIR": "data", "METRICS_CONF": "metrics.yaml", "SAVED_MODEL": "sm",
              "EXPERIMENT_CONFIG": "exp.json", "WHAT": "run.toml",
              "LD_LIBRARY_PATH": f"lib:{tmp_path}/lib64"}  # fmt: skip
    passes = {"LOGFILE": "x", "RUN_FILE": "train.log", "HF_HOME": "hf", "XDG_CACHE_HOME": "c", "WANDB_DIR": "w",
              "OLDPWD": "old", "VIRTUAL_ENV": "many", "NO": "repo/.git/config", "CKPT_DIR": "ck", "ZDOTDIR": "zsh",
              "TUNE": "tune.db", "OPTUNA": "study.sqlite3", "MPLCONFIGDIR": "mpl", "WHERE": "runs",
              "TENSORBOARD_DIR": "board", "SGLANG_TORCH_PROFILER_DIR": "prof", "FLASHINFER_WORKSPACE_BASE": "fi",
              "SLURM_TMPDIR": "st", "PLACE": "tb", "REPORT_DIR": "rep"}  # fmt: skip
    for name, value in (counts | passes).items():
        monkeypatch.setenv(name, f"{tmp_path}/{value}")
    files = ["hp.json", "metrics.yaml", "exp.json", "run.toml", "sm/w", "data/deep/rows", "lib/a.so", "lib64/b.so"]
    others = ["x", "train.log", "hf/a", "c/a", "w/a", "old/a", "many/0", "repo/.git/config", "ck/a", "zsh/a", "tune.db",
              "study.sqlite3", "mpl/a", "runs/a", "board/a", "prof/a", "fi/a", "st/a", "tb/a", "rep/a"]  # fmt: skip
    for name in [*files, *others, *(f"many/{n}" for n in range(1001))]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    for name in (*files, *others):
        watched = Watched(lambda _: found_outside(commanded("a"), tmp_path / "repo"))
        (tmp_path / name).write_text("2")
        assert watched.stand()[1] == (name in others), name


@pytest.mark.whole
@pytest.mark.parametrize("how", ["path", "variable"])
def test_what_lies_outside_in_a_search(tmp_path: Path, bisect: Bisect, how: str) -> None:
    """A program of PATH's, or a file that a variable names, edited between two searches gives another answer."""
    repo, commits = history(tmp_path, 'int(Path(os.environ["CONF"]).read_text())')
    variables = {"CONF": str(tmp_path / "limit"), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    for limit in (2, 3):
        (tmp_path / "limit").write_text(str(limit))
        tool(tmp_path / "bin", limit)
        result = bisect(repo, *(("mytool",) if how == "path" else ()), **variables)
        assert result["culprit"]["commit"] == commits[limit], limit


def test_large_files_and_whole_trees(tmp_path: Path) -> None:
    """A large file counts by size, time and pieces of it; the checkout and temporary folders do not count."""
    data = tmp_path / "data"
    with data.open("wb") as file:
        file.truncate(1 << 25)
    raw = {"case": {"name": "x", "steps": 1}, "subject": {"kind": "command", "command": f"a {data} {{root}} /tmp /dev"}}
    case = Case.model_validate(raw)
    before, bare = outside_of(case, tmp_path / "repo"), outside_of(commanded("a"), tmp_path / "repo")
    assert len(before) == len(bare) + 1
    with data.open("r+b") as file:
        file.seek(1 << 24)
        file.write(b"x")
    assert outside_of(case, tmp_path / "repo") != before


def outside_facts(path: Path, root: Path) -> list[str]:
    """What stands for a path that a command names."""
    subject = {"kind": "command", "command": f"a {path}"}
    return outside_of(Case.model_validate({"case": {"name": "x", "steps": 1}, "subject": subject}), root)


def test_folders_that_a_case_names(tmp_path: Path) -> None:
    """The folders of what a command, a configuration or a variable names, to know the disks of a program."""
    (tmp_path / "out").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows").touch()
    command = f"a --out={tmp_path}/out {{root}}/data/rows {tmp_path}/none"
    subject = {"kind": "command", "command": command, "env": {"LOGS": str(tmp_path), "PATH": os.sep}}
    case = Case.model_validate({"case": {"name": "x", "steps": 1}, "subject": subject})
    assert folders_of(case, tmp_path) == [tmp_path, tmp_path / "data", tmp_path / "out"]


def test_links_to_folders_are_followed(tmp_path: Path) -> None:
    """Where a link in a folder leads counts, and so does what lies there; one that leads back up ends."""
    data, root = tmp_path / "data", tmp_path / "repo"
    for name in ("store1", "store2"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "rows").write_text("same")
    data.mkdir()
    (data / "up").symlink_to(data)
    keys = []
    for target in ("store1", "store2"):
        (data / "train").unlink(missing_ok=True)
        (data / "train").symlink_to(tmp_path / target)
        keys.append(outside_facts(data, root))
    (tmp_path / "store2" / "deep" / "rows").write_text("other")
    keys.append(outside_facts(data, root))
    assert len({tuple(facts) for facts in keys}) == 3 and keys[2] == outside_facts(data, root)
    (data / "up").unlink()
    (data / "again").symlink_to(tmp_path / "store1", target_is_directory=True)
    (tmp_path / "store1" / "back").symlink_to(data)
    assert outside_facts(data, root) == outside_facts(data, root)


def test_digests_of_variables() -> None:
    """Variables count by digest; sessions and folders of PATH that are not there do not count."""
    variables = variables_of_key({"MASK": "1", "TERM": "x", "PATH": f"/no/such:{os.sep}", "_": "a"})
    assert set(variables) == {"MASK", "PATH"} and "1" not in variables.values()
    assert variables == variables_of_key({"MASK": "1", "SSH_TTY": "y", "PATH": f"{os.sep}:{os.sep}"})
    assert variables["MASK"] != variables_of_key({"MASK": "0"})["MASK"]
    assert set(variables_of_key({"TERMINAL_STEP": "1", "SLURM_NTASKS": "2", "LANG": "C"})) == {
        "TERMINAL_STEP", "SLURM_NTASKS", "LANG"
    }  # fmt: skip


def test_a_secret_counts_where_the_program_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is withheld is in no key; what `pass_env` hands on decides as any other variable does."""
    digests: dict[bool, set[str]] = {True: set(), False: set()}
    for value in ("one", "two"):
        monkeypatch.setenv("DATA_TOKEN", value)
        for passed, digest in digests.items():
            subject = {"kind": "command", "command": "a", "pass_env": ["DATA_TOKEN"] if passed else []}
            digest.add(variables_digest(Case.model_validate({"case": {"name": "x", "steps": 1}, "subject": subject})))
    assert (len(digests[True]), len(digests[False])) == (2, 1)


def test_a_check_is_part_of_the_key() -> None:
    """A commit that a mistaken check skipped is tried again once the check is corrected."""
    keys = set()
    for check in ("true", "false"):
        subject = {"kind": "command", "command": "a", "check": check}
        case = Case.model_validate({"case": {"name": "x", "steps": 1}, "subject": subject})
        keys.add(probe_key("tree", Around(case, (), Pythons(lambda *_: Snapshot((), {}, dict))).facts))
    assert len(keys) == 2


def test_what_cannot_be_looked_at_hides_nothing(tmp_path: Path) -> None:
    """Beside a link that the kernel refuses to follow, and a name that is no text, each other file counts."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "refused").symlink_to("x" * 300)
    Path(os.fsdecode(os.fsencode(data) + b"/odd\xff")).write_text("1")
    subject = {"kind": "command", "command": f"a {data}"}
    case = Case.model_validate({"case": {"name": "x", "steps": 1}, "subject": subject})
    facts = []
    for text in ("1", "2"):
        (data / "train").write_text(text)
        facts.append(outside_of(case, tmp_path / "repo"))
        assert Watched(lambda _: found_outside(case, tmp_path / "repo")).stand() == (0, True)
    assert facts[0] != facts[1]


def test_links_in_a_circle_and_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither links that cannot be followed nor a home that nobody has end a search."""
    (tmp_path / "data").mkdir()
    for link, target in (("a", "b"), ("b", "a"), ("data/round", "round"), ("c", "x" * 300)):
        (tmp_path / link).symlink_to(target)
    monkeypatch.setenv("PATH", f"{tmp_path}/a:{tmp_path}/{'x' * 300}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", f"{tmp_path}/a")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    for name, value in (("CONF", "a"), ("DATA", "data"), ("MORE", "c")):
        monkeypatch.setenv(name, f"{tmp_path}/{value}")
    case = commanded(f"x {tmp_path}/b {tmp_path}/c")
    assert found_outside(case, tmp_path / "repo").facts == tuple(outside_of(case, tmp_path / "repo"))
    assert folders_of(case, tmp_path / "repo") == [tmp_path] and variables_digest(case)
