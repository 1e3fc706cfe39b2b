"""Files of nights: what is written is read, nothing is overwritten, folders merge by copying."""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nightly_kit import nightly_run
from trace_kit import ANY_FLOAT, TEXT, exact

from repro.nightly.records import STATUSES, Baseline, Check, NightlyRun, NightlyRuns, Summary, worst
from repro_golden.base.errors import ReproError

SUMMARIES = st.builds(Summary, ANY_FLOAT, ANY_FLOAT, ANY_FLOAT, ANY_FLOAT, ANY_FLOAT)
NIGHTS = st.builds(
    nightly_run,
    status=st.sampled_from(STATUSES),
    metrics=st.dictionaries(TEXT, SUMMARIES, max_size=3),
    kl=st.dictionaries(TEXT, ANY_FLOAT, max_size=2),
    checks=st.lists(st.builds(Check, TEXT, st.sampled_from(STATUSES), TEXT), max_size=3),
    baseline=st.builds(Baseline, st.sampled_from(["golden", "last green", "approved", "none"]), TEXT, TEXT),
    seconds=st.floats(0, 1e6),
)


def test_a_night_that_was_changed_is_damaged(tmp_path: Path) -> None:
    """One digit or letter that is another is told; a file from before, which carries no digest of itself, is read."""
    path = NightlyRuns(tmp_path).write(nightly_run())
    text = path.read_text()
    for old, new in (('"green"', '"error"'), ('"last": 1.0', '"last": 1.1'), ('"steps": 3', '"steps": 2')):
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(ReproError, match="is damaged"):
            NightlyRuns(tmp_path).read()
    raw = json.loads(text) | {"format": 1}
    del raw["check"]
    path.write_text(json.dumps(raw))
    (content,) = NightlyRuns(tmp_path).read()
    assert exact(content.to_mapping()) == exact(nightly_run().to_mapping())


@given(NIGHTS)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, run: NightlyRun) -> None:
    """Every night comes back bit for bit, NaN and its payload included, from a file that any JSON reader takes."""
    runs = NightlyRuns(tmp_path_factory.mktemp("nights"))
    path = runs.write(run)
    raw = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert raw["format"] == 2
    (content,) = runs.read()
    assert exact(content.to_mapping()) == exact(run.to_mapping())
    assert {k: exact(list(vars(v).values())) for k, v in content.metrics.items()} == {
        k: exact(list(vars(v).values())) for k, v in run.metrics.items()
    }


def test_where_a_night_lies(tmp_path: Path) -> None:
    """One file for each machine, case and night, named by when and of what."""
    path = NightlyRuns(tmp_path).write(nightly_run())
    assert path == tmp_path / "m1" / "t" / "2026-11-22T031245Z-aaaaaaaaaa.json"
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path], "nothing else is left"


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    """Nights of one second and commit lie side by side, and each is read, in the order in which they were written."""
    runs = NightlyRuns(tmp_path)
    paths = [runs.write(nightly_run(seconds=float(k))) for k in range(11)]
    assert [p.name.removeprefix("2026-11-22T031245Z-aaaaaaaaaa") for p in paths[:3]] == [".json", "-2.json", "-3.json"]
    assert [run.seconds for run in runs.read()] == [float(k) for k in range(11)]
    assert len({run.place for run in runs.read()}) == 11


def test_folders_merge_by_copying(tmp_path: Path) -> None:
    """Results of two machines copied into one folder are those of both, oldest first; one machine or case is chosen."""
    runs = [
        nightly_run(machine=machine, case=case, at=f"2026-11-{day}T03:00:00Z")
        for machine, case, day in (("m1", "a", 22), ("m2", "a", 20), ("m2", "b", 21))
    ]
    for run in runs:
        NightlyRuns(tmp_path / run.machine).write(run)
    for machine in ("m1", "m2"):
        shutil.copytree(tmp_path / machine, tmp_path / "all", dirs_exist_ok=True)
    read = NightlyRuns(tmp_path / "all").read
    assert [n.at[8:10] for n in read()] == ["20", "21", "22"]
    assert [n.at[8:10] for n in read(machine="m2")] == ["20", "21"]
    assert [n.at[8:10] for n in read(case="a")] == ["20", "22"]
    assert NightlyRuns(tmp_path / "none").read() == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not a readable result of a night"),
        ("[]", "expected a JSON object"),
        ("{}", "has no format number"),
        ('{"format": 3}', "has format 3, this repro reads up to 2"),
        ('{"format": 1}', "is damaged"),
        ('{"format": 1, "status": "fine", "at": "2026-11-22T03:12:45Z"}', "is damaged"),
        ('{"format": 1, "status": "green", "at": 3}', "is damaged"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str, why: str) -> None:
    """It is refused in one line that names it."""
    path = tmp_path / "m" / "c" / "x.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ReproError, match=why) as caught:
        NightlyRuns(tmp_path).read()
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@given(st.lists(st.sampled_from(STATUSES)), st.sampled_from(STATUSES))
def test_the_worst_status(statuses: list[str], more: str) -> None:
    """One more never makes it better; nothing at all is no pass."""
    assert worst([]) == "not judged"
    both = worst([*statuses, more])  # type: ignore[list-item]
    assert STATUSES.index(both) == max(map(STATUSES.index, [*statuses, more]))  # type: ignore[arg-type]


def test_floats_that_are_not_finite_are_hex(tmp_path: Path) -> None:
    """JSON has no NaN: the file holds its bits."""
    path = NightlyRuns(tmp_path).write(nightly_run(kl={"k1": math.nan, "k3": -0.0}))
    raw = json.loads(path.read_text())["kl"]
    assert raw["k1"] == struct.pack(">d", math.nan).hex() and math.copysign(1, raw["k3"]) == -1
