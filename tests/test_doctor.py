"""`repro doctor` as a whole: its catalogue, its command line, and what it makes of several artefacts at once."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import warm_kit
from conftest import SOURCE, environment
from findings_kit import PATIENTS, patients
from rollout_dump_kit import plain_dump

from repro.doctor.artefacts import kinds
from repro.doctor.catalogue import SUBJECTS, catalogue, subject_of
from repro.doctor.examine import FAULT, UNREADABLE, every_rule, examine, look
from repro.doctor.show import examination_text
from repro_golden.base.checks import Found, Rule
from repro_golden.dumps.rollout.files import write_rollout_dump

TESTS = sorted(Path(__file__).parent.glob("test_doctor_*.py"))
GUIDE = SOURCE / "docs" / "how-to" / "doctor.md"
NO_PROGRAM = "not checkable by a program"


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`repro doctor`, as a user runs it."""
    return warm_kit.run([sys.executable, "-m", "repro", "doctor", *arguments], cwd, environment())


# -- the catalogue


def test_each_rule_is_a_file_with_all_that_people_must_know() -> None:
    """A rule has an id of words joined by dashes, a title, a reason, a cure and sources; its inputs are known kinds."""
    known = {getattr(kinds, name) for name in kinds.__all__}
    for rule in catalogue().values():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.id), rule.id
        assert rule.title and rule.why and rule.fix and rule.sources, rule.id
        assert rule.inputs and {*rule.inputs, *rule.uses} <= known, rule.id
        assert subject_of(rule) in SUBJECTS
        assert "\n" not in rule.title + rule.why + rule.fix, rule.id
        assert not any(text.endswith(".") for text in (rule.title, rule.why, rule.fix)), f"{rule.id}: a full stop"
        first = rule.title.split()[0]
        assert not first[0].islower() or set("_.") & set(first), f"{rule.id}: a title begins with a capital, or a name"
        assert all(not source.startswith("/") for source in rule.sources), rule.id


def test_a_rule_is_called_as_its_function() -> None:
    """Who has a rule's id finds its function by that name; only the checks that dumps had before share one."""
    sources = "".join(path.read_text() for path in (SOURCE / "repro" / "doctor" / "rules").rglob("*.py"))
    functions = set(re.findall(r"^def (\w+)", sources, re.MULTILINE))
    without = {rule for rule in catalogue() if f"_{rule.replace('-', '_')}" not in functions}
    assert all(rule.startswith("dump-") for rule in without), sorted(without)


def test_each_rule_has_a_test_of_its_own() -> None:
    """Every rule has patients, or its id stands as a string in a test of the doctor's; and nobody else has any."""
    named = {path.name for path in PATIENTS.iterdir()}
    assert named <= set(catalogue())
    assert {path.parent for path in patients("faulty")} == {path.parent for path in patients("sound")}
    for path in TESTS:
        tree = ast.parse(path.read_text())
        named |= {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
    assert not sorted(set(catalogue()) - named)


def test_every_sentence_of_the_guides_has_its_rules() -> None:
    """Each row of the guides' tables names rules that there are, or says that no program can check it or what does."""
    rows = [line for line in GUIDE.read_text().splitlines() if line.startswith('| "')]
    assert len(rows) > 140
    for row in rows:
        told = row.strip("| ").rpartition(" | ")[2]
        named = re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", told)
        assert set(named) <= set(every_rule()), row
        assert named or NO_PROGRAM in told or "`repro " in told or told.startswith(("recognised", "links")), row


def test_adding_a_rule_needs_no_list() -> None:
    """Every function that is a rule is in the catalogue: there is no table to forget."""
    files = [p for p in (SOURCE / "repro" / "doctor" / "rules").rglob("*.py") if p.stem != "__init__"]
    written = [len(re.findall(r"^@rule\(", p.read_text(), re.MULTILINE)) for p in files]
    tabled = sum(isinstance(rule.check, functools.partial) for rule in catalogue().values())
    assert 20 < len(files) < 30 and len(catalogue()) == sum(written) + tabled


# -- the command line


def test_help_lists_and_explanations_need_no_artefact(tmp_path: Path) -> None:
    """--list names every rule, --explain tells all of one, and a name that is none gets the nearest."""
    listed = run("--list", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert all(f"  {rule} " in listed.stdout for rule in every_rule())
    told = json.loads(run("--explain", "batch-invariant", "--json", cwd=tmp_path).stdout)
    assert [finding["id"] for finding in told] == ["batch-invariant"]
    assert set(told[0]) >= {"title", "severity", "certainty", "why", "cure", "inputs", "sources", "subject"}
    wrong = run("--explain", "batch-invariance", cwd=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr.strip().endswith("no rule is called batch-invariance: did you mean batch-invariant?")


LAUNCH = """\
#!/bin/bash
ARGS=(
   --actor-num-nodes 1
   --actor-num-gpus-per-node 4
   --colocate
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --global-batch-size {batch}
   --num-steps-per-rollout 1
   --num-rollout 10
)
python3 train.py "${{ARGS[@]}}"
"""


def test_exit_codes_and_evidence(tmp_path: Path) -> None:
    """An error exits with 1 and shows file and line; a launch in order exits with 0; nothing to look at is 2."""
    (tmp_path / "bad.sh").write_text(LAUNCH.format(batch=250))
    (tmp_path / "good.sh").write_text(LAUNCH.format(batch=256))
    (tmp_path / "what.bin").write_bytes(bytes(range(256)))
    bad = run("bad.sh", cwd=tmp_path)
    assert bad.returncode == 1, bad.stdout + bad.stderr
    assert "error batch-invariant" in bad.stdout
    assert "bad.sh:8 --global-batch-size = 250" in bad.stdout
    assert "why:" in bad.stdout and "do:" in bad.stdout
    assert run("good.sh", cwd=tmp_path).returncode == 0
    assert run("--ignore", "batch-invariant", "bad.sh", cwd=tmp_path).returncode == 0
    for words, message in (
        ((), "nothing to examine"),
        (("",), "an empty PATH names nothing"),
        (("--", "ls", "-l"), "no trainer's command line"),
        (("--only", "fp16", "--ignore", "fp16", "good.sh"), "--only and --ignore both name fp16"),
        (("absent",), "absent does not exist"),
        (("what.bin",), "cannot tell what what.bin is"),
    ):
        done = run(*words, cwd=tmp_path)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert message in done.stderr


def test_a_program_of_another_trainer_is_told_as_such(tmp_path: Path) -> None:
    """A launch without flags, and a Python program that is named, get the note that one with flags gets, and exit 0."""
    (tmp_path / "train.py").write_text("import torch\n")
    (tmp_path / "of_slime.py").write_text("from slime.utils.arguments import parse_args\n")
    for words in (("--", "python", "train.py"), ("--", "torchrun", "my.py"), ("train.py",)):
        done = run(*words, cwd=tmp_path)
        assert (done.returncode, "other-program" in done.stdout) == (0, True), done.stdout + done.stderr
    for words, message in (
        (("of_slime.py",), "cannot tell what"),
        (("--", "python", "of_slime.py"), "give the trainer's"),
    ):
        done = run(*words, cwd=tmp_path)
        assert (done.returncode, message in done.stderr) == (2, True), done.stdout + done.stderr


def test_a_rule_speaks_once(tmp_path: Path) -> None:
    """What one rule found stands together: a message once with its places, a reason once, each cure once.

    Of places, messages and (but for errors) cures, three are shown and the others counted.
    """
    same = ("a.sh", "b.sh", "c.sh", "d.sh")
    for name, batch in (*((name, 250) for name in same), ("e.sh", 7), ("f.sh", 11), ("g.sh", 13)):
        (tmp_path / name).write_text(LAUNCH.format(batch=batch))
    lines = [" ".join(line.split()) for line in run(".", "--only", "batch-invariant", cwd=tmp_path).stdout.splitlines()]
    assert lines.count("error batch-invariant (certain)") == 1
    assert [sum(line.startswith(word) for line in lines) for word in ("why:", "do:")] == [1, 1]
    assert sum("are not 250 x 1" in line for line in lines) == 1
    assert sum("--global-batch-size = 250" in line for line in lines) == 3
    assert "and 1 other place (--json shows all)" in lines
    assert [any(f"{name}.sh:8 --global-batch-size" in line for line in lines) for name in "efg"] == [True, True, False]
    assert "and 1 more like it (--json shows all)" in lines
    told = json.loads(run(".", "--only", "batch-invariant", "--json", cwd=tmp_path).stdout)
    assert len(told["findings"]) == 7

    for number, name in enumerate("abcdefg"):
        (tmp_path / f"{name}.sh").write_text(
            f"python3 train.py --num-rollout 10 --rollout-max-response-len {100 + min(number, 4)} "
            "--use-dynamic-batch-size --max-tokens-per-gpu 8192\n"
        )
    notes = run(".", "--only", "max-tokens-per-gpu", cwd=tmp_path).stdout
    assert [f"--max-tokens-per-gpu {start}\n" in notes for start in range(100, 105)] == [True] * 3 + [False] * 2
    assert notes.count("note max-tokens-per-gpu") == 1 and "and 4 more like it (--json shows all)" in notes


def test_a_command_line_behind_dashes_is_a_launch(tmp_path: Path) -> None:
    """Words after -- are the trainer's, with or without a path before them; --json has every finding whole."""
    words = ("--", "python", "train.py", "--rollout-batch-size", "5", "--n-samples-per-prompt", "3")
    words += ("--num-steps-per-rollout", "2", "--global-batch-size", "8")
    done = run("--json", "--only", "batch-invariant", *words, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    data = json.loads(done.stdout)
    assert data["tried"] == ["batch-invariant"]
    (finding,) = data["findings"]
    assert set(finding) == {"rule", "severity", "certainty", "message", "where", "why", "cure"}


def test_a_reward_function_and_an_interpreter_are_asked_only_where_they_are_named(tmp_path: Path) -> None:
    """--reward calls the function with the launch's flags as `args`, in the interpreter of --python."""
    write_rollout_dump(tmp_path / "3.pt", plain_dump("slime"))
    (tmp_path / "run.sh").write_text(LAUNCH.format(batch=256))
    code = "def score(args, sample, **kwargs):\n    open(WHERE, 'a').write('x')\n    return float(args.num_rollout)\n"
    (tmp_path / "mine.py").write_text(f"WHERE = {str(tmp_path / 'called')!r}\n{code}")
    words = ("--only", "reward-function", "--only", "numpy-2", "--python", sys.executable, "3.pt", "run.sh", "--json")
    assert "reward-function" not in json.loads(run(*words, cwd=tmp_path).stdout)["tried"]
    assert not (tmp_path / "called").exists()
    done = json.loads(run("--reward", "mine:score", *words, cwd=tmp_path).stdout)
    assert {"reward-function", "numpy-2"} <= set(done["tried"])
    assert (tmp_path / "called").exists()
    told = [finding["message"] for finding in done["findings"] if finding["rule"] == "reward-function"]
    assert any("10" in message for message in told), done["findings"]


# -- the frame


def _patient(check: object, inputs: tuple[type, ...]) -> Rule:
    return Rule("of-a-test", "t", inputs, "error", "certain", "w", "c", ("s",), check)  # type: ignore[arg-type]


def test_a_rule_that_fails_is_a_finding_and_silences_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a rule raises, the others are tried, and its failure is told."""

    def breaks(_: object) -> Sequence[Found]:
        raise KeyError("field")

    launch = tmp_path / "bad.sh"
    launch.write_text(LAUNCH.format(batch=250))
    rules = {"of-a-test": _patient(breaks, (kinds.Launch,)), "batch-invariant": catalogue()["batch-invariant"]}
    monkeypatch.setattr("repro.doctor.examine.catalogue", lambda: rules)
    report = examine(look([launch]))
    assert [finding.rule for finding in report.findings] == ["batch-invariant", FAULT.id]
    assert "KeyError" in report.findings[1].message


def test_what_is_corrupt_is_a_finding(tmp_path: Path) -> None:
    """A dump cut short is an error with its path, and what lies beside it is examined all the same."""
    folder = tmp_path / "rollout_data"
    folder.mkdir()
    (folder / "0.pt").write_bytes(b"PK\x03\x04 and then nothing of a dump")
    (tmp_path / "bad.sh").write_text(LAUNCH.format(batch=250))
    report = examine(look([tmp_path]))
    assert {hit.rule for hit in report.of("error")} == {UNREADABLE.id, "batch-invariant"}, report.findings


def test_links_are_followed_once_and_what_is_not_looked_at_is_said(tmp_path: Path) -> None:
    """Links inside a folder are what they lead to, a loop of them ends, and folders too deep are named in a note."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "bad.sh").write_text(LAUNCH.format(batch=250))
    links = tmp_path / "links"
    links.mkdir()
    for name in ("one", "two"):
        (links / name).symlink_to(tmp_path / "there")
    (links / "loop").symlink_to(links)
    (links / "nowhere").symlink_to(tmp_path / "absent")
    assert [hit.rule for hit in examine(look([tmp_path])).of("error")] == ["batch-invariant"]
    deep = links.joinpath(*"abcdefghi")
    deep.mkdir(parents=True)
    (deep / "bad.sh").write_text("python3 train.py --colocate\n")
    (left,) = [
        finding
        for finding in examine(look([tmp_path / "links"])).findings
        if finding.rule == "not-read" and "deep" in finding.message
    ]
    assert left.severity == "note" and left.where.path.endswith("a/b/c/d/e/f/g/h")


@pytest.mark.parametrize("kind", ["file", "folder", "file of a checkpoint", "folder through a link inside"])
def test_no_link_out_of_a_folder_is_followed(tmp_path: Path, kind: str) -> None:
    """What lies elsewhere is not read because a folder links to it, also by who reads whole folders; a note says so."""
    secret, folder = tmp_path / "elsewhere", tmp_path / "folder"
    secret.mkdir()
    (secret / "bad.sh").write_text(LAUNCH.format(batch=250))
    (secret / "config.json").write_text('{"model_type": "llama", "secret": 1}')
    (folder / "in").mkdir(parents=True)
    if kind == "file":
        (folder / "in" / "run.sh").symlink_to(secret / "bad.sh")
    elif kind == "folder":
        (folder / "in" / "there").symlink_to("../../elsewhere")
    elif kind == "file of a checkpoint":
        (folder / "in" / "config.json").symlink_to(secret / "config.json")
        (folder / "in" / "model.safetensors").write_bytes(b"")
    else:
        (folder / "in" / "there").symlink_to(secret)
        (folder / "also").symlink_to(folder / "in")
    seen = look([folder])
    assert [look.kind for look in seen if "not searched" not in look.kind and look.artefacts] == []
    (left,) = [finding for finding in examine(seen).findings if finding.rule == "not-read"]
    assert left.message == f"a link leads out of {folder} and was not followed"
    assert examine(look([secret / "bad.sh"])).of("error")
    (tmp_path / "named").symlink_to(secret)
    assert examine(look([tmp_path / "named"])).of("error"), "a link that the user names is followed"


def test_a_snapshot_of_the_hugging_face_cache_is_whole(tmp_path: Path) -> None:
    """Its links lead to blobs beside it, which are its own."""
    home = tmp_path / "models--x--y"
    (home / "blobs").mkdir(parents=True)
    (home / "snapshots" / "abc").mkdir(parents=True)
    (home / "blobs" / "1").write_text(LAUNCH.format(batch=250))
    (home / "snapshots" / "abc" / "run.sh").symlink_to("../../blobs/1")
    assert examine(look([home / "snapshots" / "abc"])).of("error")


@pytest.mark.parametrize(
    ("name", "content"),
    [("0.pt", b""), ("config.json", b"[1, 2]"), ("run.sh", b"#!/bin/bash\nX=$(\n"), ("data.jsonl", b"\xff\xfe\n")],
)
def test_a_file_that_is_not_what_its_name_says_is_corrupt(tmp_path: Path, name: str, content: bytes) -> None:
    """It is a finding with its path, and does not keep what is given beside it from being examined."""
    (tmp_path / "bad.sh").write_text(LAUNCH.format(batch=250))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / name).write_bytes(content)
    (tmp_path / "odd.bin").write_bytes(bytes(range(256)))
    measured = examine(look([tmp_path / "bad.sh", tmp_path / "broken" / name, tmp_path / "odd.bin"])).of("error")
    assert str(tmp_path / "odd.bin") in [hit.where.path for hit in measured if hit.rule == UNREADABLE.id]
    assert str(tmp_path / "broken" / name) in [finding.where.path for finding in measured], measured
    assert "batch-invariant" in {hit.rule for hit in measured}


def test_the_same_file_twice_is_one_artefact(tmp_path: Path) -> None:
    """A file that is named and lies below a folder that is named is examined once."""
    (tmp_path / "bad.sh").write_text(LAUNCH.format(batch=250))
    report = examine(look([tmp_path, tmp_path / "bad.sh"]), only=["batch-invariant"])
    assert len(report.findings) == 1


def test_the_first_line_says_what_was_looked_at(tmp_path: Path) -> None:
    """A command line and a Python environment are no files, and have words of their own."""
    words = ["--", "python", "train.py", "--global-batch-size", "8"]
    (tmp_path / "run.sh").write_text(LAUNCH.format(batch="8"))
    for given, looked in (
        (words, "command line"),
        (["--python", sys.executable, "run.sh", *words], "launch script, command line, Python environment"),
    ):
        assert run(*given, cwd=tmp_path).stdout.splitlines()[0] == f"looked at: {looked}"


def test_terminal_controls_in_artefacts_stay_silent(tmp_path: Path) -> None:
    """What a file says cannot move the reader's cursor or colour the page."""
    (tmp_path / "run.sh").write_text(LAUNCH.format(batch="'2\x1b[2J5'"))
    assert "\x1b[2J" not in examination_text(examine(look([tmp_path])))
