"""Cases of kind command: golden runs, verification and bisects of a program that knows nothing of us."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import warm_kit
from conftest import Repo, environment
from history_kit import start
from hypothesis import given
from hypothesis import strategies as st

from repro_golden.base.errors import ReproError
from repro_golden.case.command_line import CommandLine
from repro_golden.case.file import Case
from repro_golden.compare.traces import first_difference
from repro_golden.replay.children import ChildFailure, Run, RunResult
from repro_golden.repository.checkout import Place
from repro_golden.subjects import identity_of, launch, packages_of
from repro_golden.subjects.argv import argv_of, interpreter
from repro_golden.trace import Trace, read_dump

TRAIN = """\
import os, sys
import torch
import built
from model import loss_of, make

torch.manual_seed(0)
torch.set_num_threads(1)
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
model = make()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(50):
    loss = loss_of(model, torch.randn(2, 3))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print({"loss": loss.item(), "step_time": float(os.getpid())})
"""
MODEL = """\
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

def loss_of(model, x):
    return model(x).square().sum()
"""
CASE = """\
[case]
name = "toy"
steps = 3
proof_steps = 2

[subject]
kind = "command"
command = "{python} src/train.py --json {}"
setup = "touch src/built.py"
check = "{python} -m py_compile src/model.py"

[observe]
activations = ["0"]
"""


def make_repo(root: Path) -> Repo:
    """A repository that holds the program, with DVC and its case."""
    (root / "src").mkdir(parents=True)
    (root / "src" / "train.py").write_text(TRAIN)
    (root / "src" / "model.py").write_text(MODEL)
    (root / "src" / "built.py").touch()  # what `setup` makes in a worktree
    (root / ".gitignore").write_text("built.py\n__pycache__/\n")
    (root / "golden" / "cases").mkdir(parents=True)
    (root / "golden" / "cases" / "toy.toml").write_text(CASE)
    repo = Repo(root)
    repo.git("init", "--quiet", "--initial-branch=main")
    assert repo.repro("init", "--remote", str(root.parent / "remote")).returncode == 0
    repo.commit("Start")
    return repo


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Repo:
    """The repository with its golden run."""
    repo = make_repo(tmp_path_factory.mktemp("guarded") / "fork")
    done = repo.repro("golden", "record", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    proofs = {p["name"]: p["passed"] for p in json.loads(done.stdout)["proofs"]}
    assert all(proofs.values())
    assert {f"one ULP in {phase} is seen" for phase in ("input", "forward", "grad", "update")} < proofs.keys()
    assert {"reproduced by a second process", "the recorder changes nothing"} < proofs.keys()
    repo.commit("Record the golden run")
    return repo


@pytest.mark.whole
def test_golden_run_verify_and_bisect(guarded: Repo) -> None:
    """A command's golden run verifies, serves as GOOD's first run, and a bisect names the planted commit and signal."""
    assert guarded.repro("golden", "verify").returncode == 0
    good = guarded.git("rev-parse", "HEAD")
    for name in ("one", "two"):
        (guarded.root / "notes").write_text(name)
        guarded.commit(name)
    guarded.edit("src/model.py", "square().sum()", "square().sum() * (1 + 2**-20)")
    culprit = guarded.commit("Scale")
    guarded.edit("src/model.py", "def make", "def broken(:\n\ndef make")
    broken = guarded.commit("Break")
    guarded.edit("src/model.py", "def broken(:\n\n", "")
    guarded.commit("Mend")
    done = guarded.repro("bisect", "--no-explain", f"{good}..HEAD", "--json", "-j", "1")
    data = json.loads(done.stdout)
    assert data["outcome"] == "found", done.stderr
    assert (data["culprit"]["commit"], data["divergence"]["phase"], data["divergence"]["step"]) == (
        culprit, "loss", 0
    )  # fmt: skip
    assert data["golden"] is not None
    skip = data["skips"].get(broken)
    assert skip is None or (skip.startswith("does not import") and "py_compile" in skip)
    verified = guarded.repro("golden", "verify")
    assert verified.returncode == 1
    assert "differs at step 0, phase loss, signal loss" in verified.stdout


def case(**subject: object) -> Case:
    """A case whose command is `subject`'s."""
    resources = {"ranks": subject.pop("ranks", 1)}
    observe = subject.pop("observe", {})
    raw = {
        "case": {"name": "toy", "steps": 3},
        "subject": {"kind": "command", **subject},
        "resources": resources,
        "observe": observe,
    }
    return Case.model_validate(raw)


def run(repo: Repo, case: Case, out: Path, asked: Run | None = None, place: Place | None = None) -> RunResult:
    """One run of a command, recorded in `out`."""
    asked = asked or Run(3, trace=str(out / "trace"))
    (result,) = warm_kit.called(launch)(case, place or Place(repo.root), [asked], out / "log")
    return result


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Repo:
    """The repository without a golden run."""
    return make_repo(tmp_path_factory.mktemp("program") / "fork")


COMMAND = "{python} src/train.py"


@pytest.mark.whole
def test_ranks_of_a_launcher(program: Repo, tmp_path: Path) -> None:
    """Two ranks give one trace of as many steps as asked for; a third that is expected is an error that names it."""
    launcher = "torchrun --standalone --nproc-per-node 2 src/train.py"
    assert run(program, case(command=launcher, ranks=2), tmp_path).steps == 3
    trace = Trace(tmp_path / "trace")
    assert (len(trace.steps), trace.complete, trace.header.identity["layout"]["ranks"]) == (3, True, "2")
    with pytest.raises(ChildFailure, match=r"1 of 2 ranks recorded steps \(missing: \[1\]"):
        run(program, case(command=COMMAND, ranks=2), tmp_path / "missing", Run(3, trace=str(tmp_path / "other")))
    with pytest.raises(ChildFailure, match="`--ranks 2` before --") as more:
        run(program, case(command=launcher), tmp_path / "more", Run(3, trace=str(tmp_path / "third")))
    assert more.value.stage == "ranks"


@pytest.mark.whole
def test_a_run_ends_at_its_first_divergence(program: Repo, tmp_path: Path) -> None:
    """With a baseline, a program is ended once a step's root differs, and trains no further."""
    run(program, case(command=COMMAND), tmp_path)
    (program.root / "src" / "loud.py").write_text(TRAIN.replace("range(50)", "range(10**9)").replace("0.1", "0.2"))
    other = case(command="{python} src/loud.py")
    result = run(
        program, other, tmp_path / "b", Run(10**6, trace=str(tmp_path / "t"), baseline=str(tmp_path / "trace"))
    )
    assert result.diverged
    assert result.steps < 10**6


@pytest.mark.whole
def test_what_fails_is_said(program: Repo, tmp_path: Path) -> None:
    """A command that is not found, fails, never trains or ends early, and a Python that is none, are told apart."""
    for command, message in {
        "nowhere --x": "command not found: nowhere",
        "src/train.py": "is not executable",
        "{python} -c 'raise SystemExit(3)'": "exited with 3: no output",
        "{python} -c 'import torch'": "no optimizer step was seen",
    }.items():
        with pytest.raises(ChildFailure, match=message) as failure:
            run(program, case(command=command), tmp_path / "out")
        assert failure.value.stage == "start"
    short = '{python} -c \'exec(open("src/train.py").read().replace("range(50)", "range(2)"))\''
    early = case(command=short, env={"PYTHONPATH": "src"})
    assert run(program, early, tmp_path / "early").steps == 2
    assert not Trace(tmp_path / "early" / "trace").complete
    with pytest.raises(ReproError, match="no Python at 'python9'"):
        identity_of(case(command=COMMAND, python="python9"), program.root)
    (program.root / "own" / "bin").mkdir(parents=True)
    (program.root / "own" / "bin" / "python").symlink_to(sys.executable)
    assert "own/bin" in interpreter(case(command=COMMAND, python="own").subject, program.root)
    with pytest.raises(ReproError, match="does not answer"):
        identity_of(case(command=COMMAND, python="/bin/true"), program.root)


@pytest.mark.whole
def test_code_from_elsewhere_is_refused(program: Repo, tmp_path: Path) -> None:
    """Where a commit's code is under test, modules of the user's own checkout are an error that names one."""
    worktree = tmp_path / "w" / "tree"
    program.git("worktree", "add", "--quiet", "--detach", str(worktree))
    place = Place(worktree, home=program.root)
    (worktree / "src" / "start.py").write_text(
        f"import sys\nsys.path[0] = {str(program.root / 'src')!r}\nimport train\n"
    )
    with pytest.raises(ChildFailure, match="was imported from another working tree"):
        run(program, case(command="{python} src/start.py"), tmp_path / "a", place=place)
    built = case(command=COMMAND, setup="touch src/built.py")
    asked = Run(3, trace=str(tmp_path / "own" / "trace"))
    assert run(program, built, tmp_path / "b", asked, place).steps == 3


def test_who_a_program_is(program: Repo) -> None:
    """The identity is known before a run and is that of the subject's own Python."""
    identity = identity_of(case(command=COMMAND, env={"OMP_NUM_THREADS": "2"}), program.root)
    assert identity.environment["OMP_NUM_THREADS"] == "2"
    assert identity.environment["torch"].startswith("2.")
    assert any(p.startswith("torch==") for p in packages_of(case(command=COMMAND), program.root))
    assert identity_of(case(command=COMMAND, python=sys.executable), program.root) == identity_of(
        case(command=COMMAND), program.root
    )


def test_a_case_is_held_to_what_it_says(program: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that fails, a folder or module that is not there and rollouts that are not set are refused at once."""
    path = program.root / "golden" / "cases" / "toy.toml"
    for old, new, message in (
        ('"{python} -m py_compile src/model.py"', "\"{python} -c 'raise SystemExit(3)'\"", "subject.check fails"),
        ("setup =", 'path = "elsewhere"\nsetup =', "git takes no file of elsewhere"),
        ('["0"]', '["no.such.*"]', "no module fits 'no.such.*'"),
        ("--json {}", "--data {rollouts}", "case.rollouts is not set"),
    ):
        path.write_text(CASE.replace(old, new))
        done = program.repro("golden", "record", "toy")
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    path.write_text(CASE)
    monkeypatch.setenv("PYTHONPATH", f"{program.root / 'src'}:/elsewhere")
    made = CommandLine(["python", "a b.py"], 3, 2).case(program.root)
    assert made.subject.env == {"PYTHONPATH": "src:/elsewhere"}


def test_nothing_to_replay_is_not_agreement(program: Repo) -> None:
    """A range in which no commit changes the subject's folder is not verifiable: exit 3, and nothing agrees."""
    good = program.commit("What other tests left")
    path = program.root / "golden" / "cases" / "toy.toml"
    path.write_text(CASE.replace("setup =", 'path = "src"\nsetup ='))
    (program.root / "config.json").write_text("{}")
    program.commit("Configure")
    done = program.repro("bisect", "--no-explain", f"{good}..HEAD", "--case", "toy")
    assert (done.returncode, "widen subject.path" in done.stderr) == (3, True), done.stderr


TOKENS = {"root": "/my checkout", "rollouts": "", "out": "/o", "checkpoint": "/c", "step": "7", "python": "/p"}


@given(st.lists(st.text(st.characters(exclude_characters="\0{}"), min_size=1)), st.sampled_from(sorted(TOKENS)))
def test_words_and_tokens(plain: list[str], token: str) -> None:
    """Words come out as they went in, and a token becomes its value within one word, whatever it holds."""
    assert argv_of(f"{shlex.join(plain)} {{{token}}}/x", TOKENS, False) == [*plain, f"{TOKENS[token]}/x"]


def test_other_braces_stay() -> None:
    """JSON and shell braces are not ours; in a shell line values are quoted."""
    text = """train '{"lr": {"max": 1}}' ${HOME} {root}"""
    assert argv_of(text, TOKENS, False) == ["train", '{"lr": {"max": 1}}', "${HOME}", "/my checkout"]
    assert argv_of(text, TOKENS, True)[2] == """train '{"lr": {"max": 1}}' ${HOME} '/my checkout'"""


def test_a_stopped_recording_begins_again_with_the_same_command(tmp_path: Path) -> None:
    """The case file that it left is the one that the same command writes; that of another command is kept."""
    line = CommandLine(("python", "train.py"))
    path = line.new_file(tmp_path, "toy")
    path.parent.mkdir(parents=True)
    path.write_text(line.text(tmp_path, "toy", 4))
    assert line.new_file(tmp_path, "toy") == path
    for other in (CommandLine(("python", "train.py", "--lr", "2")), CommandLine(("python", "train.py"), steps=5)):
        with pytest.raises(ReproError, match="exists: record it with `repro golden record toy`"):
            other.new_file(tmp_path, "toy")


CHECKPOINTED = """\
import os
with open("../log", "a+") as log:
    log.seek(0)
    before = [line.split() for line in log]
    running = [pid for pid, *_ in before if os.path.exists("/proc/" + pid)]
    print(os.getpid(), "beside" if running else "alone", file=log)
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(8, 4)).square().mean().backward()
    optimizer.step()
    torch.save(model.state_dict(), "best.pt")
"""


def test_a_program_that_writes_files_proves_itself_run_after_run(tmp_path: Path) -> None:
    """No proof reads or writes what another one writes meanwhile, and what stays is of the program by itself.

    A golden run that is in git itself is not trained over: DVC could not keep what replaces it.
    """
    repo = start(tmp_path, CHECKPOINTED, None)
    (repo.root / ".gitignore").write_text("best.pt\n")
    assert repo.repro("init", "--remote", str(tmp_path / "remote")).returncode == 0
    repo.commit("Guard")
    done = repo.repro("golden", "record", "toy", "--", sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    log = tmp_path / "log"
    runs = [line.split()[1] for line in log.read_text().splitlines()]
    assert len(runs) > 4 and set(runs) == {"alone"}
    left = (repo.root / "best.pt").read_bytes()
    subprocess.run([sys.executable, "train.py"], cwd=repo.root, env=environment(), check=True)
    assert (repo.root / "best.pt").read_bytes() == left
    (pointer,) = (repo.root / "golden" / "runs").glob("*/toy.dvc")
    pointer.unlink()
    repo.git("add", "--force", str(pointer.with_suffix("")))
    repo.commit("It is in git itself")
    log.unlink()
    for verb in (("record", "toy"), ("approve", "toy", "--reason", "new weights")):
        done = repo.repro("golden", *verb)
        assert done.returncode == 2 and "is in git itself, which DVC does not keep: `git rm" in done.stderr, done.stderr
    assert not log.exists()


IN_TURN = """\
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
actor, critic = torch.nn.Linear(4, 40), torch.nn.Linear(4, 50)
{agent}
optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (actor, critic)]
for step in range(3):
    for model, optimizer in (reversed if {turned} else list)([*zip((actor, critic), optimizers)]):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
"""
AGENT = "agent = torch.nn.ModuleDict({'actor': actor, 'critic': critic})"


@pytest.mark.parametrize(
    "agent", [pytest.param(AGENT, marks=pytest.mark.whole), ""], ids=["other names", "the same names"]
)
def test_a_signal_that_is_asked_for_is_the_traces_own(agent: str, program: Repo, tmp_path: Path) -> None:
    """Whichever optimizer steps first, what is planted and what is written whole is the signal that the trace names."""
    script = tmp_path / "turned.py"
    script.write_text(IN_TURN.format(agent=agent, turned=True))
    toy = case(command=f"{{python}} {script}")
    run(program, toy, tmp_path, Run(6, trace=str(tmp_path / "trace")))
    trace = Trace(tmp_path / "trace")
    wanted = [(index, r.phase, r.name) for index in (0, 1, 3) for r in trace.rows(index) if r.dtype == "float32"]
    assert len(wanted) > 20
    run(program, toy, tmp_path, Run(6, trace=str(tmp_path / "again"), dump=wanted))
    rows = {(index, r.phase, r.name): r for index in (0, 1, 3) for r in Trace(tmp_path / "again").rows(index)}
    assert [at for at in wanted if read_dump(Trace(tmp_path / "again"), at[0], rows[at]) is None] == []
    assert len([*(tmp_path / "again" / "dumps").iterdir()]) == len(wanted), "and no other"
    second = {r.phase: r.name for r in trace.rows(1) if r.phase in ("input", "grad")}
    for at in (
        (0, "grad", "actor.bias" if agent else "bias"),
        (1, "input", second["input"]),
        (1, "grad", second["grad"]),
    ):
        folder = tmp_path / f"planted-{at[0]}-{at[1]}"
        run(program, toy, tmp_path, Run(at[0] + 1, trace=str(folder), baseline=str(trace.directory), perturbation=at))
        difference = first_difference(trace, Trace(folder), strict=True)
        assert difference and (difference.step, difference.phase, difference.signal) == at


def test_what_was_never_planted_is_an_error(program: Repo, tmp_path: Path) -> None:
    """A change that the recorder did not meet is no agreement, whatever the reason."""
    script = tmp_path / "turned.py"
    script.write_text(IN_TURN.format(agent="", turned=True))
    asked = Run(2, trace=str(tmp_path / "trace"), perturbation=(0, "grad", "nowhere"))
    with pytest.raises(ChildFailure, match=r"nothing was planted in nowhere \(grad\)"):
        run(program, case(command=f"{{python}} {script}"), tmp_path, asked)


RESUMED = """\
import os, sys
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first, last = 0, os.path.join(sys.argv[1], "last.pt")
if os.path.exists(last):
    state = torch.load(last)
    first = state.pop("step")
    model.load_state_dict(state)
os.makedirs(sys.argv[1], exist_ok=True)
for step in range(first, 3):
    optimizer.zero_grad()
    model(torch.ones(8, 4)).square().mean().backward()
    optimizer.step()
    torch.save({"step": step + 1, **model.state_dict()}, last)
"""


def test_a_program_that_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    """What one run of a recording left and another takes up is named with the cure, and so is what lay there."""
    repo = start(tmp_path, RESUMED, None)
    (repo.root / ".gitignore").write_text("last-run/\n")
    assert repo.repro("init", "--remote", str(tmp_path / "remote")).returncode == 0
    repo.commit("Guard")
    record = ("golden", "record", "toy", "--", sys.executable, "train.py")
    done = repo.repro(*record, "last-run")
    line = done.stderr.splitlines()[-1]
    fix = "let the command name {out} in its place"
    assert done.returncode == 2 and "left last-run/ in your checkout: if" in line and fix in line, done.stderr
    (repo.root / "golden" / "cases" / "toy.toml").unlink()
    done = repo.repro(*record, "last-run")
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "which has no last-run/, makes a step" in line and fix in line, done.stderr
    done = repo.repro(*record, "{out}")
    assert done.returncode == 0, done.stderr
    assert repo.repro("golden", "verify").returncode == 0
