"""The golden store: one recording at a time, and nothing is pulled that is not what its pointer stands for."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import Repo, environment
from doctor_golden_kit import golden, repository
from history_kit import CASE, start

from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.case.file import read_case
from repro_golden.repository.checkout import Checkout, find_checkout, held_alone
from repro_golden.store.dvc import Dvc
from repro_golden.store.golden import Store
from repro_golden.store.pulled import check_pulled, drop_damaged
from repro_golden.subjects.environments.builds import identity_in
from repro_golden.trace import Trace

pytestmark = pytest.mark.usefixtures("warm_dvc")

TAKEN = "is being recorded by process {}: wait for it, or end it, and run again"


def started(repo: Repo, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "repro", *arguments],
        cwd=repo.root, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


# -- one at a time


@pytest.mark.whole
def test_of_two_recordings_at_once_one_wins(fork: Repo) -> None:
    """Two `golden record` of one case at once: one keeps its run, the other ends with one line and exit 2."""
    both = [started(fork, "golden", "record") for _ in range(2)]
    ends = {process.pid: (*process.communicate(timeout=300), process.returncode) for process in both}
    assert sorted(code for *_, code in ends.values()) == [0, 2], ends
    winner = next(pid for pid, (*_, code) in ends.items() if code == 0)
    (_, message, _) = next(end for end in ends.values() if end[2] == 2)
    assert message.strip().splitlines()[-1].endswith(TAKEN.format(winner))
    assert fork.repro("golden", "verify").returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        ("golden", "record"),
        ("golden", "approve", "--reason", "x"),
        ("golden", "pull"),
        ("rollout", "record", "--replace"),
    ],
    ids=" ".join,
)
def test_who_writes_to_the_store_waits_for_nobody(recorded: Repo, words: tuple[str, ...]) -> None:
    """While a case and its rollouts are being recorded, whatever would write there ends with one line."""
    runs, rollouts = recorded.root / "golden" / "runs" / "mini", recorded.root / "golden" / "rollouts" / "mini"
    with held_alone(find_checkout(recorded.root), runs, rollouts):
        done = recorded.repro(*words)
    assert done.returncode == 2
    assert "is being recorded by process" in done.stderr.splitlines()[-1]


HOLD = """\
import sys, time
from pathlib import Path
from repro_golden.case.file import read_case
from repro_golden.repository.checkout import Checkout
from repro_golden.repository.checkout import held_alone
from repro_golden.store.pulled import check_pulled
with held_alone(Checkout(Path(sys.argv[1]), Path(sys.argv[1])), Path(sys.argv[1]) / "case"):
    print("held", flush=True)
    time.sleep(999)
"""


def test_a_killed_recording_leaves_no_lock(tmp_path: Path) -> None:
    """Whoever holds a lock is named by its process; once it is killed the next one goes on."""
    checkout = Checkout(tmp_path, tmp_path)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with (
        pytest.raises(ReproError, match=re.escape("case " + TAKEN.format(holder.pid))),
        held_alone(checkout, tmp_path / "case"),
    ):
        pass
    with held_alone(checkout, tmp_path / "other"):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with held_alone(checkout, tmp_path / "case"):
        pass


# -- what is pulled


@pytest.fixture
def tracked(tmp_path: Path) -> Repo:
    """A repository whose folder `kept` is behind a pointer, pushed, and neither here nor in the cache."""
    repo = Repo(tmp_path / "repo")
    repo.root.mkdir()
    repo.git("init", "--quiet")
    dvc = Dvc(repo.root)
    dvc.init()
    dvc.set_default_remote("store", str(tmp_path / "remote"), local=False)
    (repo.root / "kept" / "states").mkdir(parents=True)
    for name in ("run.json", "states/a.bin", "ü.txt"):
        (repo.root / "kept" / name).write_text(f"content of {name}")
    dvc.add(repo.root / "kept")
    dvc.push(repo.root / "kept.dvc")
    forget(repo)
    return repo


def test_a_pointer_with_merge_conflicts(recorded: Repo) -> None:
    """It is named with the cure, whatever is asked of it; other cases are verified all the same."""
    (pointer,) = (recorded.root / "golden" / "runs").glob("*/*.dvc")
    name = pointer.relative_to(recorded.root)
    case = recorded.root / "golden" / "cases" / f"{pointer.stem}.toml"
    case.with_name("zz.toml").write_text(case.read_text().replace(f'name = "{pointer.stem}"', 'name = "zz"'))
    text = pointer.read_text()
    pointer.write_text(f"outs:\n<<<<<<< HEAD\n{text[6:]}=======\n{text[6:]}>>>>>>> other\n")
    fix = f"{name} has merge conflicts: take one side (`git checkout --ours {name}`"
    for words in (["list"], ["pull"], ["push"], ["show", pointer.stem], ["verify", "--all"],
                  ["approve", pointer.stem, "--reason", "x"]):  # fmt: skip
        done = recorded.repro("golden", *words)
        assert fix in done.stdout + done.stderr and done.returncode == (0 if words == ["list"] else 2), done.stderr
        assert ("zz: not verifiable" in done.stdout) == (words[-1] == "--all")


def forget(repo: Repo) -> None:
    shutil.rmtree(repo.root / "kept", ignore_errors=True)
    shutil.rmtree(repo.root / ".dvc" / "cache", ignore_errors=True)


def flip(path: Path) -> None:
    """Change a byte of a file that may not be written to; DVC trusts what nobody may write to."""
    raw, mode = path.read_bytes(), path.stat().st_mode
    path.chmod(0o644)
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    path.chmod(mode)


def test_every_file_is_compared_with_the_pointer(tracked: Repo) -> None:
    """A flipped byte of any file, or of DVC's own list of them, and a file that is gone, are one line that names it."""
    pointer, cache = tracked.root / "kept.dvc", tracked.root / ".dvc" / "cache"
    Dvc(tracked.root).pull(pointer)
    check_pulled(tracked.root, pointer, cache)
    (listing,) = cache.rglob("*.dir")
    for path in (*(p for p in (tracked.root / "kept").rglob("*") if p.is_file()), listing):
        for damage in (flip, Path.unlink):
            if path is listing and damage is not flip:
                continue
            whole = path.read_bytes()
            damage(path)
            name = re.escape(str(path.relative_to(tracked.root)))
            with pytest.raises(ReproError, match=f"^{name} is not what its pointer stands for.*repro golden pull"):
                check_pulled(tracked.root, pointer, cache)
            path.chmod(0o644) if path.exists() else None
            path.write_bytes(whole)
    check_pulled(tracked.root, pointer, cache)


@pytest.mark.whole
@pytest.mark.parametrize("where", ["remote", "cache"])
def test_a_pull_refuses_what_is_not_what_was_pushed(tracked: Repo, where: str) -> None:
    """A flipped byte in the remote, of which DVC says nothing, is one line with a cure; in the cache it is mended."""
    pointer, dvc, cache = tracked.root / "kept.dvc", Dvc(tracked.root), tracked.root / ".dvc" / "cache"
    if where == "cache":
        dvc.pull(pointer)
        shutil.rmtree(tracked.root / "kept")
    base = tracked.root.parent / "remote" if where == "remote" else cache
    broken = next(p for p in base.rglob("*") if p.is_file() and p.suffix != ".dir")
    whole = broken.read_bytes()
    flip(broken)
    if where == "remote":
        with pytest.raises(ReproError, match="is not what its pointer stands for") as refused:
            dvc.pull(pointer)
        broken.write_bytes(whole)
        fix = re.search(r"`(rm -r [^`]*)`", str(refused.value))
        assert fix is not None
        subprocess.run(fix[1], shell=True, cwd=tracked.root, check=True)  # noqa: S602 - what the message says
    dvc.pull(pointer)
    assert (tracked.root / "kept" / "run.json").read_text() == "content of run.json"


@pytest.mark.whole
def test_what_dvc_remembers_of_a_push_decides_nothing(tracked: Repo) -> None:
    """Its list of what is to be pushed may be a part of one, or no list: the remote gets every file all the same."""
    dvc, remote = Dvc(tracked.root), tracked.root.parent / "remote"
    dvc.pull(tracked.root / "kept.dvc")
    dvc.push(tracked.root / "kept.dvc")
    pushed = sorted(path.name for path in remote.rglob("*") if path.is_file())
    shutil.rmtree(remote)
    site = re.search(r"site_cache_dir: (.+)", dvc.run("doctor"))
    assert pushed and site
    lists = [path for path in Path(site[1], "index").rglob("*") if path.is_file()]
    assert lists
    for path in lists:
        path.write_bytes(b"no list")
    dvc.push(tracked.root / "kept.dvc")
    assert sorted(path.name for path in remote.rglob("*") if path.is_file()) == pushed


@pytest.mark.whole
def test_a_push_of_what_is_only_in_the_remote(tracked: Repo) -> None:
    """A clone that has pulled nothing may push: what the remote has, and the cache has not, is kept."""
    Dvc(tracked.root).push(tracked.root / "kept.dvc")


class Forgets(http.server.BaseHTTPRequestHandler):
    """A remote that takes every file and keeps none."""

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        """It has nothing."""
        self.send_error(404)

    def do_POST(self) -> None:
        """It reads to the end what comes in chunks."""
        while size := int(self.rfile.readline(), 16):
            self.rfile.read(size + 2)
        self.rfile.readline()
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.mark.whole
def test_a_remote_that_keeps_nothing_is_one_line(tracked: Repo) -> None:
    """What was pushed must be there: DVC says that it pushed, and a pull elsewhere would find nothing."""
    dvc = Dvc(tracked.root)
    dvc.pull(tracked.root / "kept.dvc")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Forgets) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        dvc.set_default_remote("store", f"http://127.0.0.1:{server.server_port}", local=False)
        with pytest.raises(MachineFailureError, match=r"^the remote took .* and has not kept kept, [^\n]*$"):
            dvc.push(tracked.root / "kept.dvc")
        server.shutdown()


class Waits(Forgets):
    """A remote that lets whoever brings a file wait."""

    asked, may = threading.Event(), threading.Event()

    def do_POST(self) -> None:
        """Once it may."""
        self.asked.set()
        self.may.wait(60)
        super().do_POST()


@pytest.mark.whole
def test_two_pushes_leave_each_others_lists_alone(tracked: Repo) -> None:
    """While one push runs, another does not remove the lists that it has open."""
    dvc, other, pointer = Dvc(tracked.root), Dvc(tracked.root), tracked.root / "kept.dvc"
    dvc.pull(pointer)
    site = re.search(r"site_cache_dir: (.+)", dvc.run("doctor"))
    assert site
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Waits) as server, ThreadPoolExecutor(2) as pool:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        dvc.set_default_remote("store", f"http://127.0.0.1:{server.server_port}", local=False)
        first = pool.submit(dvc.push, pointer)
        assert Waits.asked.wait(60)
        assert list(Path(site[1], "index").rglob("*")), "the first has them"
        second = pool.submit(other.push, pointer)
        time.sleep(5)  # longer than it takes to ask where they are
        assert list(Path(site[1], "index").rglob("*"))
        Waits.may.set()
        for push in (first, second):
            with pytest.raises(MachineFailureError, match="has not kept kept"):
                push.result()
        server.shutdown()


def test_a_pull_command_is_one_line_and_exits_2(recorded: Repo) -> None:
    """`golden pull` of a run whose state was damaged in the remote ends at once, not where it is needed."""
    assert recorded.repro("golden", "push").returncode == 0
    (run,) = (recorded.root / "golden" / "runs").glob("*/mini")
    shutil.rmtree(run)
    shutil.rmtree(recorded.root / ".dvc" / "cache")
    objects = [p for p in (recorded.root.parent / "remote").rglob("*") if p.is_file() and p.suffix != ".dir"]
    for path in objects:
        flip(path)
    done = recorded.repro("golden", "pull", "mini")
    assert done.returncode == 2
    assert "is not what its pointer stands for" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("remote", [True, False])
def test_what_cannot_be_fetched_is_told_with_the_cure(recorded: Repo, tmp_path: Path, remote: bool) -> None:
    """In a clone of what was never pushed, or whose remote stays in the checkout that was initialised."""
    recorded.git("clone", "--quiet", str(recorded.root), str(tmp_path / "clone"))
    clone = Repo(tmp_path / "clone")
    if not remote:
        (clone.root / ".dvc" / "config").write_text("")
    done = clone.repro("golden", "verify")
    assert done.returncode == 2
    fix = "`repro golden push`" if remote else "`repro init --remote URL`"
    told = done.stderr.splitlines()[-1]
    assert "cannot be fetched: " in told and fix in told and re.search(r"`git rm golden/r\S*\.dvc`", told)


def test_a_case_has_its_rollouts_whatever_their_name(tmp_path: Path) -> None:
    """Of one case are its run, the runs that it replaced, and the rollouts that it names; not another's."""
    repo = start(tmp_path)
    names = ["runs/m/toy", "runs/m/toy~0a", "runs/m/toys", "rollouts/shared", "rollouts/toys"]
    for name in names:
        pointer = repo.root / "golden" / f"{name}.dvc"
        pointer.parent.mkdir(parents=True, exist_ok=True)
        pointer.write_text("outs: []\n")
    case = repo.root / "golden" / "cases" / "toy.toml"
    case.write_text(case.read_text().replace("[subject]", 'rollouts = "golden/rollouts/shared"\n\n[subject]', 1))
    store = Store(repo.root)
    told = [str(path.relative_to(repo.root / "golden"))[:-4] for path in store.pointers("toy")]
    assert told == sorted([names[3], *names[:2]])
    assert len(store.pointers()) == len(names)


# -- whose modules are imported


@pytest.mark.parametrize("name", ["json", "typing", "re", "dvc"])
def test_a_module_of_the_repository_is_not_the_interpreters(tmp_path: Path, name: str) -> None:
    """A repository may hold a file called as a module that DVC, or the interpreter asked who it is, imports."""
    repo = start(tmp_path)
    (repo.root / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(9)\n")
    Dvc(repo.root).init()
    case = read_case(repo.root / "golden" / "cases" / "toy.toml")
    assert identity_in(case, sys.executable, environment(), repo.root).packages
    assert not (tmp_path / "ran").exists()


class Ending(Dvc):
    """DVC in a process that ends at its call of so many."""

    def __init__(self, root: Path, calls: int) -> None:
        """Count from here."""
        super().__init__(root)
        self.calls = calls

    def add(self, *paths: Path) -> None:
        """Add, or end."""
        self.calls -= 1
        if self.calls < 0:
            raise KeyboardInterrupt
        Dvc(self.root).add(*paths)


@pytest.mark.parametrize("calls", [0, 1])
def test_a_golden_run_is_never_gone_while_it_is_replaced(tmp_path: Path, calls: int) -> None:
    """Whoever ends between any two calls of DVC leaves the old run or the new one, and the next one replaces it."""
    repo = repository(tmp_path)
    Dvc(repo.root).init()
    old, new = golden(repo, machine="m"), golden(repo, machine="n", made=2)
    Dvc(repo.root).add(old)
    chains = [Trace(folder / "trace").chain for folder in (old, new)]
    store = Store(repo.root)
    store.dvc = Ending(repo.root, calls)
    shutil.copytree(new, tmp_path / "staged")
    with pytest.raises(KeyboardInterrupt):
        store.keep(tmp_path / "staged", "m", "toy", replace_reason="x")
    assert Store(repo.root).read("m", "toy").trace.chain == chains[calls]
    assert Store(repo.root).keep(new, "m", "toy", replace_reason="x").trace.chain == chains[1]
    assert Store(repo.root).load("m", f"toy~{chains[0][:8]}").trace.chain == chains[0]
    assert (old.parent / "toy.dvc").exists()


# -- a repository that ignores folders of our names


def ignoring(root: Path, rules: str) -> Dvc:
    """A repository with DVC whose .gitignore has these lines."""
    repo = Repo(root)
    (root / ".gitignore").write_text(rules)
    repo.git("init", "--quiet")
    dvc = Dvc(root)
    dvc.init()
    (root / "golden" / "runs" / "m" / "case").mkdir(parents=True)
    (root / "golden" / "runs" / "m" / "case" / "run.json").write_text("{}")
    return dvc


def test_a_repository_that_ignores_runs_keeps_golden_ones(tmp_path: Path) -> None:
    """Megatron-LM's .gitignore has `runs/`: git is told that golden/runs is another, once, and sees the pointer."""
    dvc, gitignore = ignoring(tmp_path, "runs/\n"), tmp_path / "golden" / ".gitignore"
    for _ in range(2):
        dvc.add(tmp_path / "golden" / "runs" / "m" / "case")
        assert gitignore.read_text() == "!/runs/\n/runs/*/*/*\n"
    assert "golden/runs/m/case.dvc" in Repo(tmp_path).git("ls-files", "--others", "--exclude-standard").splitlines()


def test_pointers_that_git_cannot_be_made_to_see_are_refused_before_any_work(tmp_path: Path) -> None:
    """A rule for `golden` itself, or for all pointers, is named with its file and line."""
    for name, rule in (("folder", "golden/"), ("pointers", "/golden/**/*.dvc")):
        (tmp_path / name).mkdir()
        dvc = ignoring(tmp_path / name, f"# ours\n{rule}\n")
        with pytest.raises(ReproError, match=re.escape(f"git ignores golden/runs by .gitignore:2:{rule}: take")):
            dvc.check()


def test_a_store_that_is_busy_is_waited_for(tmp_path: Path) -> None:
    """While another command holds DVC's lock for longer than DVC itself waits, nothing that was recorded is lost."""
    dvc = ignoring(tmp_path, "")
    holds = "import sys\nfrom dvc.repo import Repo\nwith Repo('.').lock:\n    print(flush=True), sys.stdin.readline()"
    with subprocess.Popen(
        [sys.executable, "-c", holds], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder, ThreadPoolExecutor(1) as pool:  # fmt: skip
        assert holder.stdin and holder.stdout and holder.stdout.readline()
        adding = pool.submit(dvc.add, tmp_path / "golden" / "runs" / "m" / "case")
        time.sleep(8)
        assert not adding.done()
        holder.stdin.close()
        adding.result()
    assert (tmp_path / "golden" / "runs" / "m" / "case.dvc").exists()


def test_what_dvc_would_leave_out_is_refused(tmp_path: Path) -> None:
    """By a .dvcignore: before any work where we know the file's name, else before a part passes for the whole."""
    (tmp_path / "a").mkdir()
    dvc = ignoring(tmp_path / "a", "")
    (tmp_path / "a" / ".dvcignore").write_text("# ours\n*.jsonl\n")
    with pytest.raises(
        ReproError, match=r"DVC leaves golden/runs/machine/case/trace/steps\.jsonl out by .*2:\*\.jsonl"
    ):
        dvc.check()
    (tmp_path / "a" / ".dvcignore").write_text("*.jsonl\n!/golden/**\n")
    dvc.check()
    (tmp_path / "a" / ".dvcignore").write_text("*.odd\n")
    case = tmp_path / "a" / "golden" / "runs" / "m" / "case"
    (case / "x.odd").write_text("x")
    with pytest.raises(ReproError, match=r"DVC left out 1 of the 2 files of "):
        dvc.add(case)
    assert not case.with_name("case.dvc").exists()


def test_a_list_that_names_a_file_elsewhere_removes_none(tmp_path: Path) -> None:
    """Damaged content is removed where DVC put it, never at a place outside that a list of files names."""
    other, cache = tmp_path / "other", tmp_path / "cache" / "files" / "md5"
    other.write_text("mine")
    inside = tmp_path / "kept" / "a"
    inside.parent.mkdir()
    inside.write_text("mine")
    md5 = "0" * 32  # of nothing: what lies there is damaged
    listing = json.dumps([{"md5": md5, "relpath": "../other"}, {"md5": md5[:-1] + "1", "relpath": "a"}]).encode()
    name = hashlib.md5(listing, usedforsecurity=False).hexdigest()
    for blob, content in ((md5, b"mine"), (md5[:-1] + "1", b"mine"), (f"{name}.dir", listing)):
        (cache / blob[:2]).mkdir(parents=True, exist_ok=True)
        (cache / blob[:2] / blob[2:]).write_bytes(content)
    pointer = tmp_path / "kept.dvc"
    pointer.write_text(f"outs:\n- md5: {name}.dir\n  hash: md5\n  path: kept\n")
    drop_damaged(pointer, tmp_path / "cache")
    assert other.exists() and not inside.exists()
    assert not (cache / md5[:2] / md5[2:]).exists()


@pytest.mark.whole
def test_rollouts_outside_golden_are_kept_as_those_within(tmp_path: Path) -> None:
    """They are pushed, named to be committed, and no golden run is approved on others than their pointer says."""
    case = CASE.replace("steps = 6", 'steps = 6\nrollouts = "data/rolls"')
    repo = start(tmp_path, case=case + 'env = { ROLLS = "{rollouts}" }\n')
    rolls = repo.root / "data" / "rolls" / "d.txt"
    rolls.parent.mkdir(parents=True)
    rolls.write_text("1\n")
    assert repo.repro("init", "--remote", str(tmp_path / "remote")).returncode == 0
    done = repo.repro("golden", "record", "toy")
    assert done.returncode == 0, done.stderr
    assert "next: git add golden data/rolls.dvc data/.gitignore && git commit" in done.stdout
    repo.commit("Record")
    pushed = json.loads(repo.repro("golden", "push", "toy", "--json").stdout)["pointers"]
    assert str(repo.root / "data" / "rolls.dvc") in pushed and len(pushed) == 2
    rolls.write_text("2\n")
    done = repo.repro("golden", "approve", "toy", "--reason", "new data")
    assert done.returncode == 2 and "rolls differs from rolls.dvc" in done.stderr, done.stderr
