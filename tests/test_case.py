from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case, find_case, list_cases, read_case
from repro_golden.runs.record import fix

CASE = '[case]\nname = "tiny"\nsteps = 12\nrollouts = "golden/rollouts/tiny"\n'
BOUNDS = CASE + '[compare]\nmode = "bounds"\n[compare.bounds.grad_norm]\nrtol = 1e-3\n'


def read(folder: Path, text: str, name: str = "tiny") -> Case:
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return read_case(path)


def refused(folder: Path, text: str) -> str:
    with pytest.raises(ReproError) as caught:
        read(folder, text)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{folder / 'tiny.toml'}")
    return str(caught.value)


def test_the_repositorys_own_cases_are_read() -> None:
    """Every case file in golden/cases is valid."""
    root = Path(__file__).parent.parent
    assert list_cases(root)
    for path in list_cases(root):
        assert find_case(root, path.stem).name == path.stem


def test_a_smallest_case_has_the_documented_defaults(tmp_path: Path) -> None:
    """Name, steps and rollouts are enough: bitwise, one CPU thread, all steps proved, half an hour."""
    case = read(tmp_path, CASE)
    assert (case.name, case.steps, case.proof_steps, case.compare.mode) == ("tiny", 12, 12, "bitwise")
    assert (case.resources.cpus, case.resources.gpus, case.subject.timeout) == (1, 0, 1800.0)
    assert read(tmp_path, CASE + "proof_steps = 3\n").proof_steps == 3
    assert read(tmp_path, CASE + "proof_steps = 30\nstates = [6]\n").proof_steps == 12


# -- unknown keys


@pytest.mark.parametrize(
    ("text", "where", "suggestion"),
    [
        (CASE + "[comparison]\nmode = 1\n", "comparison", "compare"),
        (CASE + "step = 3\n", "case.step", "steps"),
        (CASE + "prof_steps = 3\n", "case.prof_steps", "proof_steps"),
        (CASE + '[subject]\ntimout = "5m"\n', "subject.timout", "timeout"),
        (CASE + "[compare]\nmodes = 1\n", "compare.modes", "mode"),
        (CASE + "[resources]\ncpu = 2\n", "resources.cpu", "cpus"),
        (CASE + "[first_step]\nchecks = true\n", "first_step.checks", "check"),
        (BOUNDS + "rtoll = 1.0\n", "compare.bounds.grad_norm.rtoll", "rtol"),
        (BOUNDS + "[compare.bounds.kl]\natoll = 1.0\n", "compare.bounds.kl.atoll", "atol"),
    ],
)
def test_an_unknown_key_suggests_the_nearest_real_one(tmp_path: Path, text: str, where: str, suggestion: str) -> None:
    """A misspelt key, at any depth, is one line with its full name and the nearest key of its own table."""
    assert f"unknown key {where}: did you mean {suggestion}?" in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "known"),
    [
        (CASE + "[zzz]\n", "known: case, subject, observe, compare, first_step, resources"),
        (CASE + "[resources]\nzzz = 1\n", "known: cpus, gpus, ranks, other_ranks"),
        (BOUNDS + "zzz = 1\n", "known: rtol, atol"),
    ],
)
def test_an_unknown_key_like_no_other_lists_the_known(tmp_path: Path, text: str, known: str) -> None:
    """A key that resembles none is answered with those of its table."""
    assert known in refused(tmp_path, text)


@given(
    st.sampled_from(["case", "subject", "compare", "first_step", "resources", "compare.bounds.m", ""]),
    st.from_regex(r"[a-z_]{1,12}", fullmatch=True),
)
def test_no_unknown_key_passes(table: str, key: str) -> None:
    """No key outside the documented ones is ever accepted, whichever table it is in."""
    known = {
        "case": {"name", "steps", "proof_steps", "rollouts", "states"},
        "subject": {"kind", "module", "path", "timeout", "env", "packages", "config"},
        "compare": {"mode", "bounds"},
        "first_step": {"check", "grad_norm_max"},
        "resources": {"cpus", "gpus", "ranks"},
        "compare.bounds.m": {"rtol", "atol"},
        "": {"case", "subject", "compare", "first_step", "resources"},
    }[table]
    if key in known:
        return
    head = CASE if table != "case" else f"{CASE}{key} = 1\n"
    tail = f"[{table}]\n{key} = 1\n" if table else ""
    mode = '[compare]\nmode = "bounds"\n' if table == "compare.bounds.m" else ""
    with tempfile.TemporaryDirectory() as folder:
        text = f"{key} = 1\n{head}" if not table else head + mode + (tail if table != "case" else "")
        assert f"unknown key {table}{'.' if table else ''}{key}" in refused(Path(folder), text)


def test_the_trainers_own_keys_are_its_own(tmp_path: Path) -> None:
    """Anything goes in [subject.config] and [subject.env]: the trainer reads those."""
    text = (
        CASE
        + '[subject.env]\nANY = "x"\n[subject.config]\nanything = [1, 2.5, {a = "b"}]\n[subject.config.deep]\nx = 1\n'
    )
    case = read(tmp_path, text)
    assert case.subject.config == {"anything": [1, 2.5, {"a": "b"}], "deep": {"x": 1}}
    assert case.subject.env == {"ANY": "x"}


# -- values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CASE.replace("tiny", "other"), "case.name is 'other' but the file is tiny.toml"),
        (CASE.replace('"tiny"', '"../tiny"'), "case.name"),
        (CASE.replace('"tiny"', '""'), "case.name"),
        (CASE.replace('"tiny"', '"tiny.dvc"'), "case.name: DVC takes"),
        (CASE.replace("rollouts/tiny", "rollouts/dvc.yaml"), "case.rollouts: DVC takes"),
        (CASE.replace("12", "0"), "case.steps: Input should be greater than or equal to 1"),
        (CASE.replace("12", "12.0"), "case.steps"),
        (CASE.replace("12", '"12"'), "case.steps"),
        (CASE.replace("12", "true"), "case.steps"),
        (CASE + "proof_steps = 0\n", "case.proof_steps"),
        (CASE + "states = [1.5]\n", "case.states.0"),
        ('[case]\nname = "tiny"\nsteps = 1\n', "case.rollouts: Field required"),
        ("", "case: Field required"),
        ("case = 1\n", "case: "),
        (CASE + '[subject]\nkind = "slimy"\n', "subject.kind"),
        (CASE + "[subject.env]\nX = 1\n", "subject.env.X"),
        (CASE + '[subject.packages]\n"a b" = "1"\n', "subject.packages: 'a b' is no package's name: write one such as"),
        (CASE + '[subject.packages]\n"" = "1"\n', "subject.packages: '' is no package's name"),
        (
            CASE + '[subject.packages]\ntorch = "new"\n',
            "subject.packages: 'new' is no version of torch: write one such",
        ),
        (CASE + '[subject.packages]\ntorch = ">=2"\n', "subject.packages: '>=2' is no version of torch"),
        (CASE + "[subject.packages]\ntorch = 2.9\n", "subject.packages.torch: Input should be a valid string"),
        (CASE + '[subject.packages]\nA-b = "1"\na_B = "2"\n', "subject.packages: asks for two versions of a-b"),
        (CASE + "[resources]\nranks = 0\n", "resources.ranks"),
        (CASE + "[resources]\ncpus = 0\n", "resources.cpus"),
        (CASE + "x", "is not TOML"),
        (CASE + "steps = 3\n", "is not TOML"),
        ("x = " + "[" * 10_000 + "]" * 10_000, "is not TOML: it is nested too deeply"),
        ("x = " + "9" * 5_000, "is not TOML"),
        (CASE + '[observe]\nmetrics = ["' + "(" * 10_000 + ")" * 10_000 + '"]\n', "is no regular expression"),
    ],
)
def test_a_value_that_does_not_serve_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    """Wrong types, impossible numbers, another name than the file's and broken TOML are one line naming the key."""
    assert message in refused(tmp_path, text)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    """A missing file, a folder and a file that is no UTF-8 are one line each."""
    with pytest.raises(ReproError, match="`repro golden record NAME -- YOUR COMMAND` writes"):
        read_case(tmp_path / "no.toml")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "latin.toml").write_bytes(b"# \xe9")
    for name in ("folder", "latin"):
        with pytest.raises(ReproError, match=f"cannot read .*{name}.toml"):
            read_case(tmp_path / f"{name}.toml")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [('"30m"', 1800), ('"90s"', 90), ('"1.5h"', 5400), ("45", 45), ("0.5", 0.5), ('"0.5s"', 0.5)],
)
def test_timeouts_are_seconds_or_carry_their_unit(tmp_path: Path, value: str, seconds: float) -> None:
    """A timeout is a number of seconds or a number with s, m or h."""
    assert read(tmp_path, f"{CASE}[subject]\ntimeout = {value}\n").subject.timeout == seconds


@pytest.mark.parametrize(
    "value", ['"30"', '"30 m"', '"m"', '"1d"', '"-5m"', '"0s"', "0", "-1", "true", "nan", '"1m30s"']
)
def test_a_timeout_without_meaning_is_refused(tmp_path: Path, value: str) -> None:
    """No unit, an unknown unit, zero, negative, NaN and booleans are refused."""
    assert "subject.timeout" in refused(tmp_path, f"{CASE}[subject]\ntimeout = {value}\n")


# -- bounds


def test_bounds_are_read(tmp_path: Path) -> None:
    """A bound has rtol and atol, integers included, each 0 by default."""
    text = BOUNDS + "[compare.bounds.kl]\natol = 1\n[compare.bounds.loss]\n"
    bounds = read(tmp_path, text).compare.bounds
    assert {k: (b.rtol, b.atol) for k, b in bounds.items()} == {
        "grad_norm": (1e-3, 0.0),
        "kl": (0.0, 1.0),
        "loss": (0.0, 0.0),
    }


@pytest.mark.parametrize(
    "text",
    [
        CASE + '[compare]\nmode = "bounds"\n',
        CASE + '[compare]\nmode = "bounds"\n[compare.bounds]\n',
        CASE + "[compare.bounds.x]\nrtol = 1.0\n",
        CASE + '[compare]\nmode = "bitwise"\n[compare.bounds.x]\nrtol = 1.0\n',
    ],
)
def test_bounds_and_their_mode_go_together(tmp_path: Path, text: str) -> None:
    """Bounds without their mode, or the mode without bounds, would compare nothing or ignore them: refused."""
    assert 'mode = "bounds" needs [compare.bounds.METRIC] tables' in refused(tmp_path, text)


@pytest.mark.parametrize("value", ["-1.0", "nan", "inf", '"1"', "true"])
@pytest.mark.parametrize("key", ["rtol", "atol"])
def test_a_bound_is_a_finite_number(tmp_path: Path, key: str, value: str) -> None:
    """Negative, NaN and infinite bounds (which nothing could ever leave) and non-numbers are refused."""
    text = CASE + f'[compare]\nmode = "bounds"\n[compare.bounds.x]\n{key} = {value}\n'
    assert f"compare.bounds.x.{key}" in refused(tmp_path, text)


# -- the digest


SUBJECT = "[subject]\n"


@pytest.mark.parametrize(
    "text",
    [
        CASE.replace("12", "3"),
        CASE + "proof_steps = 2\nstates = [1]\n",
        CASE + SUBJECT + 'timeout = "5m"\n',
        CASE + SUBJECT + 'path = "core"\nmodule = "repro_core"\n',
        BOUNDS,
        CASE + "[first_step]\ncheck = false\n",
        CASE + "[resources]\ncpus = 1\n",
    ],
)
def test_the_digest_ignores_what_does_not_decide_the_numbers(tmp_path: Path, text: str) -> None:
    """Steps, timeout, proofs, states, bounds, checks and defaults written out leave the digest alone."""
    assert read(tmp_path, text).digest == read(tmp_path, CASE).digest


def test_the_digest_changes_with_all_that_decides_the_numbers(tmp_path: Path) -> None:
    """Config (type and key included), environment, module, path, threads and GPUs each give another digest."""
    values: list[Any] = ["1", "1.0", "2", '"1"', "true", "[1]", "-0.0", "0.0"]
    texts = [
        CASE,
        *(f"{CASE}[subject.config]\nx = {v}\n" for v in values),
        CASE + "[subject.config]\ny = 1\n",
        CASE + "[subject.config.x]\ny = 1\n",
        CASE + '[subject.env]\nX = "1"\n',
        CASE + SUBJECT + 'module = "other"\n',
        CASE + SUBJECT + 'path = ""\n',
        CASE + "[resources]\ncpus = 2\n",
        CASE + "[resources]\ngpus = 1\n",
    ]
    seen: dict[str, str] = {}
    for text in texts:
        assert seen.setdefault(read(tmp_path, text).digest, text) == text
    assert seen.setdefault(read(tmp_path, CASE.replace('"tiny"', '"other"'), "other").digest, "") == ""


@given(st.permutations(["a = 1", "b = 2.5", 'c = "x"', "d = [3, 4]"]))
def test_the_order_of_keys_leaves_no_trace(lines: list[str]) -> None:
    """The order of keys in the file plays no part in the digest."""
    with tempfile.TemporaryDirectory() as folder:
        text = CASE + "[subject.config]\n" + "\n".join(lines)
        assert (
            read(Path(folder), text).digest
            == read(Path(folder), CASE + "[subject.config]\n" + "\n".join(sorted(lines))).digest
        )


COMMAND = '[case]\nname = "tiny"\nsteps = 1\n[subject]\nkind = "command"\ncommand = "train"\n'


@pytest.mark.parametrize("text", [CASE + SUBJECT, COMMAND])
def test_packages_are_part_of_a_case_only_where_it_has_some(tmp_path: Path, text: str) -> None:
    """Cases of both kinds without any are what they were before there was the key; how one is spelt plays no part."""
    plain = read(tmp_path, text)
    assert "packages" not in plain.canonical()["subject"]
    assert read(tmp_path, text + "packages = {}\n").digest == plain.digest
    cases = [
        read(tmp_path, f'{text}packages = {{ "{name}" = "{version}", x = "1" }}\n')
        for name, version in (("A-b.C", "1.0RC1"), ("a_b-c", "1.0.rc1"), ("a-b-c", "1.0rc1"), ("a-b-c", "1.0"))
    ]
    assert cases[0].canonical()["subject"]["packages"] == {"a-b-c": "1.0rc1", "x": "1"}
    assert len({case.digest for case in cases[:3]}) == 1
    assert len({case.digest for case in (plain, cases[0], cases[3])}) == 3


# -- finding cases


def test_cases_are_found_by_name_or_alone(tmp_path: Path) -> None:
    """Without a name the only case serves; none, several and an unknown one are answered with those that exist."""
    folder = tmp_path / "golden" / "cases"
    with pytest.raises(ReproError, match=r"0 cases in .*`repro golden record NAME -- "):
        find_case(tmp_path, None)
    with pytest.raises(ReproError, match=r"no case 'tiny' .*`repro golden record NAME -- "):
        find_case(tmp_path, "tiny")
    folder.mkdir(parents=True)
    (folder / "tiny.toml").write_text(CASE)
    assert find_case(tmp_path, None) == find_case(tmp_path, "tiny")
    (folder / "other.toml").write_text(CASE.replace('"tiny"', '"other"'))
    assert [p.stem for p in list_cases(tmp_path)] == ["other", "tiny"]
    with pytest.raises(ReproError, match=r"2 cases in .*name one of other, tiny"):
        find_case(tmp_path, None)
    told = {"tony": r"did you mean tiny\?$", "maxi": "known: other, tiny", "../cases/tiny": "no case"}
    for name, phrase in told.items():
        with pytest.raises(ReproError, match=phrase):
            find_case(tmp_path, name)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "2026-01-01", "[1, {a = nan}]"])
def test_what_json_lacks_is_refused_in_the_trainer_configuration(tmp_path: Path, value: str) -> None:
    """A date or a float that is not finite would reach the trainer as something else, so it is refused by name."""
    with pytest.raises(ReproError, match=r"subject\.config: holds a date, nan or inf"):
        read(tmp_path, f"{CASE}[subject.config]\nx = {value}\n")
    with pytest.raises(ReproError, match=r"layouts\.wide\.config: holds a date, nan or inf"):
        read(tmp_path, f"{CASE}[layouts.wide.config]\nlr = {value}\n")


def test_the_cure_names_the_switch_that_a_case_turns_off() -> None:
    """A case that lets Transformer Engine be nondeterministic is told so where it does not reproduce itself."""
    case = {"case": {"name": "a", "steps": 1, "rollouts": "r"}, "subject": {"env": {}}}
    assert "python -m repro_core.determinism" in fix(Case.model_validate(case))
    case["subject"]["env"] = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}
    text = fix(Case.model_validate(case))
    assert text.startswith("set NVTE_ALLOW_NONDETERMINISTIC_ALGO=0") and "--attention-backend" in text
