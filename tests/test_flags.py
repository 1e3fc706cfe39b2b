"""Files of changes: strict to read, and exact in what they make of a case."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro_bisect.axes.flags import (
    FlagChange,
    FlagFile,
    changed,
    check_changes,
    read_flags,
    set_name,
)  # fmt: skip
from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case


def command(text: str = "python train.py --lr 1e-3 --tf32", **subject: object) -> Case:
    """A case of a command."""
    raw = {"kind": "command", "command": text, "env": {"OLD": "1"}} | subject
    return Case.model_validate({"case": {"name": "toy", "steps": 1}, "subject": raw})


def core(**config: object) -> Case:
    """A case of the built-in trainer."""
    return Case.model_validate(
        {"case": {"name": "toy", "steps": 1, "rollouts": "golden/rollouts/toy"}, "subject": {"config": config}}
    )


def changes(*raw: dict[str, object]) -> tuple[FlagChange, ...]:
    """Changes as a file gives them."""
    return FlagFile.model_validate({"change": list(raw)}).change


def words(case: Case) -> list[str]:
    """Of its command."""
    return shlex.split(case.subject.command)  # type: ignore[union-attr]


def test_a_file_is_read(tmp_path: Path) -> None:
    """Every key of the format serves, and a change is called by its name or by what it does."""
    path = tmp_path / "flags.toml"
    path.write_text("""\
order = "list"
[[change]]
name = "mode"
env = { MODE = "fast now" }
unset = ["OLD"]
[[change]]
drop = ["--tf32"]
replace = { old = ["--lr", "1e-3"], new = ["--lr=2e-3"] }
add = ["--name", "a b"]
""")
    read = read_flags(path)
    assert read.order == "list"
    first, second = read.change
    assert (first.label, first.about) == ("mode", "MODE='fast now', unset OLD")
    assert second.label == "drop --tf32, --lr 1e-3 -> --lr=2e-3, --name 'a b'"
    case = changed(command(), read.change)
    assert words(case) == ["python", "train.py", "--lr=2e-3", "--name", "a b"]
    assert case.subject.env == {"MODE": "fast now"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ordre = 'set'\n[[change]]\nadd = ['x']", "unknown key ordre: did you mean order?"),
        ("[[change]]\nadd = ['x']\n[[change]]\nunst = ['x']", "unknown key change.2.unst: did you mean unset?"),
        ("[[change]]\nreplace = { old = ['x'], neu = [] }", "change.1.replace"),
        ("[[change]]\nname = 'x'", "change.1: changes nothing: give env, unset, add, drop, replace or config"),
        ("order = 'set'", "change: Field required"),
        ("order = 'any'\n[[change]]\nadd = ['x']", "order: Input should be 'list' or 'set'"),
        ("[[change]]\nadd = ['x']\n[[change]]\nadd = ['x']", "two are 'x': give each a name of its own"),
        ("[[change]]\nname = 'all'\nadd = ['x']", "'all' is what an end is called"),
        ("[[change]]\nenv = { A = 1 }", "change.1.env.A: Input should be a valid string"),
        ("[[change]]\nconfig = { day = 2020-01-01 }", "change.1.config: holds a date"),
        ("[[change", "is not TOML"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    """A misspelt key, a value of another type and two changes of one name are refused with the place and the cure."""
    path = tmp_path / "flags.toml"
    path.write_text(text)
    with pytest.raises(ReproError) as refused:
        read_flags(path)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(ReproError, match="no file"):
        read_flags(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": ["--lr", "2"]}, "--lr 2 is not in the command"),
        ({"unset": ["NEW"]}, "subject.env does not set NEW"),
        ({"config": {"a": 1}}, "config is for kind core"),
        ({"drop": ["python", "train.py", "--lr", "1e-3", "--tf32"]}, "the case no longer serves"),
        ({"env": {"A=B": "1"}}, "the case no longer serves"),
    ],
)
def test_what_does_not_fit_a_command(change: dict[str, object], message: str) -> None:
    """A change that the case has no place for is refused before anything runs."""
    with pytest.raises(ReproError, match=message):
        check_changes(command(), changes(change))


def test_what_does_not_fit_a_core_subject() -> None:
    """Words belong to commands; a key leads through tables alone; what is missing is made."""
    case = core(model={"hidden_size": 16}, lr=1e-3)
    with pytest.raises(ReproError, match="are for kind command"):
        check_changes(case, changes({"add": ["x"]}))
    with pytest.raises(ReproError, match="leads through lr, which is no table"):
        check_changes(case, changes({"config": {"lr.x": 1}}))
    with pytest.raises(ReproError, match="empty part"):
        check_changes(case, changes({"config": {"model.": 1}}))
    made = changed(case, changes({"config": {"model.hidden_size": 32, "new.key": True}}))
    assert made.subject.config == {"model": {"hidden_size": 32}, "lr": 1e-3, "new": {"key": True}}  # type: ignore[union-attr]
    assert case.subject.config == {"model": {"hidden_size": 16}, "lr": 1e-3}  # type: ignore[union-attr]


def test_saving_and_resuming_change_alike() -> None:
    """A flag reaches the commands that save and resume, which may lack what the command has."""
    case = command(save="python train.py --tf32 --to {checkpoint}", resume="python train.py --from {checkpoint}")
    made = changed(case, changes({"drop": ["--tf32"], "add": ["--x"]})).subject
    assert shlex.split(made.save) == ["python", "train.py", "--to", "{checkpoint}", "--x"]  # type: ignore[union-attr]
    assert shlex.split(made.resume) == ["python", "train.py", "--from", "{checkpoint}", "--x"]  # type: ignore[union-attr]


def test_a_shell_line_is_only_added_to() -> None:
    """A shell's line keeps its text, so that quotes, pipes and variables of the shell stay what they are."""
    line: dict[str, object] = {"shell": True}
    case = command('python train.py "$A" &&  true', **line)
    made = changed(case, changes({"add": ["a b"]}))
    assert made.subject.command == "python train.py \"$A\" &&  true 'a b'"  # type: ignore[union-attr]
    with pytest.raises(ReproError, match="a shell's line"):
        changed(case, changes({"drop": ["true"]}))


def test_words_that_stand_twice_are_refused() -> None:
    """Taking one of two equal options away, or changing the first, may change nothing: the last one counts."""
    case = command("python train.py --opt 1 --early --opt 1 --early")
    for change in ({"drop": ["--early"]}, {"replace": {"old": ["--opt", "1"], "new": ["--opt", "2"]}}):
        with pytest.raises(ReproError, match="stands 2 times in the command: leave it there once"):
            changed(case, changes(change))


@given(st.integers(1, 12), st.data())
def test_sets_have_names_of_their_own(count: int, data: st.DataObject) -> None:
    """Two sets of changes have two names, and the ends are called none and all."""
    between = data.draw(st.sampled_from([" ", " + "]))
    made = changes(*({"name": between.join(["x"] * (k + 1)), "add": [str(k)]} for k in range(count)))
    some = st.frozensets(st.integers(0, count - 1))
    a, b = data.draw(some), data.draw(some)
    assert (set_name(made, a) == set_name(made, b)) == (a == b)
    assert (set_name(made, ()), set_name(made, range(count))) == ("none", "all")


def test_many_changes_are_named_by_their_numbers() -> None:
    """From 1, each run of neighbours by its ends."""
    made = changes(*({"name": f"x{k}", "add": [str(k)]} for k in range(12)))
    assert set_name(made, (0, 3, 4, 7, 8, 9, 11)) == "changes 1,4-5,8-10,12 of 12"


def test_no_change_leaves_the_case() -> None:
    """Without changes the case is the case, to its digest, whatever quotes its command has."""
    case = command("python  'train.py' --x={}")
    assert changed(case, []).digest == case.digest
