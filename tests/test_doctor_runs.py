"""Readers of what trainers dump: single files, folders of a run, and all that can be wrong with them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from doctor_run_kit import equal_run, rollout, samples
from examples_kit import at_most
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_folder_kit import Run, event

from repro.doctor.artefacts.kinds import NotRead, Rollout, Series, TrainStep
from repro.doctor.artefacts.runs import ROLLOUT_DUMP, RUN_FOLDER, within
from repro_golden.base.errors import ReproError
from repro_golden.dumps.archive.pickling import write_archive

SYSTEMS = ("slime", "old", "miles", "relax")


def _read(path: Path) -> list[object]:
    reader = next(each for each in (RUN_FOLDER, ROLLOUT_DUMP) if each.fits(path))
    return list(reader.read(path))


def _until_refused(path: Path) -> tuple[list[object], str]:
    """What a folder gives before it is refused, and the line that refuses it; '' where it is not."""
    artefacts: list[object] = []
    reading = iter(RUN_FOLDER.read(path) if path.is_dir() else ROLLOUT_DUMP.read(path))
    try:
        while True:
            artefacts.append(next(reading))
    except StopIteration:
        return artefacts, ""
    except ReproError as error:
        return artefacts, str(error)


def _kinds(artefacts: list[object]) -> list[tuple[str, str]]:
    return [(type(artefact).__name__, getattr(artefact, "path").name) for artefact in artefacts]  # noqa: B009 - any kind has one


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_run_gives_its_rollouts_steps_and_numbers(system: str, tmp_path: Path) -> None:
    """Of every trainer's folder: each rollout, each step with all ranks joined, and the means that a log would have."""
    run = Run(system=system, dp=1 if system == "slime" else 2)
    folder = run.write(tmp_path / "run")
    artefacts = _read(folder)
    first = "0.pt" if system == "slime" else "0_0.pt"
    second = "1.pt" if system == "slime" else "1_0.pt"
    expected = [
        ("Rollout", "0.pt"),
        ("Rollout", "1.pt"),
        ("TrainStep", first),
        ("TrainStep", second),
        ("Series", "run"),
    ]
    assert _kinds(artefacts) == expected
    steps = [artefact for artefact in artefacts if isinstance(artefact, TrainStep)]
    assert [len(step.joined.indices) for step in steps] == [run.count, run.count]
    assert {step.folder for step in steps} == {folder}
    series = artefacts[-1]
    assert isinstance(series, Series)
    lengths = run.columns(0)["response_lengths"]
    assert series.rollouts[0]["response_lengths"] == pytest.approx(sum(lengths) / len(lengths))


def test_rollouts_know_what_came_before(tmp_path: Path) -> None:
    """Each rollout has the run's first and the one before it; an evaluation has neither."""
    for number in range(3):
        rollout(tmp_path / "run", samples(), number)
    rollout(tmp_path / "run", samples(), 1, evaluation=True)
    rollouts = [artefact for artefact in _read(tmp_path / "run") if isinstance(artefact, Rollout)]
    numbers = [
        (finding.first and finding.first.rollout_id, finding.before and finding.before.rollout_id)
        for finding in rollouts
    ]
    assert numbers == [(None, None), (0, 0), (0, 1), (None, None)]
    assert [rollout.dump.evaluation for rollout in rollouts] == [False, False, False, True]


@pytest.mark.parametrize("part", ["rollout_data", "train_data"])
def test_a_part_of_a_run_is_read_alone(part: str, tmp_path: Path) -> None:
    """The folder of rollouts or of train dumps may be given by itself."""
    folder = Run().write(tmp_path / "run")
    kinds = {type(artefact) for artefact in _read(folder / part)}
    assert kinds == ({Rollout, Series} if part == "rollout_data" else {TrainStep, Series})


@pytest.mark.parametrize("system", SYSTEMS)
def test_single_files_are_told_apart(system: str, tmp_path: Path) -> None:
    """A rollout dump and a train dump are told apart by what they hold; a rank's file brings the others with it."""
    folder = Run(system=system, dp=1 if system == "slime" else 2).write(tmp_path / "run")
    assert [type(artefact) for artefact in _read(folder / "rollout_data" / "0.pt")] == [Rollout]
    name = "0.pt" if system == "slime" else "0_1.pt"
    (step,) = _read(folder / "train_data" / name)
    assert isinstance(step, TrainStep)
    assert len(step.joined.indices) == 6


def test_a_dump_of_any_name_is_recognised(tmp_path: Path) -> None:
    """The user's own template may name files as it likes: what they hold says what they are."""
    folder = Run().write(tmp_path / "run")
    for place, kind in (("rollout_data", Rollout), ("train_data", TrainStep)):
        moved = tmp_path / f"data_of_{place}.pt"
        (folder / place / "0.pt").rename(moved)
        assert [type(artefact) for artefact in _read(moved)] == [kind]


def test_what_is_corrupt_does_not_hide_the_rest(tmp_path: Path) -> None:
    """Of three rollouts and steps, one of each is damaged: the others are given, and one error names both."""
    folder = Run(rollouts=3).write(tmp_path / "run")
    for place in ("rollout_data", "train_data"):
        path = folder / place / "1.pt"
        path.write_bytes(path.read_bytes()[:200])
    artefacts, message = _until_refused(folder)
    names = [("Rollout", "0.pt"), ("Rollout", "2.pt"), ("TrainStep", "0.pt"), ("TrainStep", "2.pt"), ("Series", "run")]
    assert _kinds(artefacts) == names
    assert "rollout_data/1.pt" in message
    assert "train_data/1.pt" in message
    assert "\n" not in message


def test_a_missing_rank_is_said_of_its_rollout_alone(tmp_path: Path) -> None:
    """A rank's file that is not there makes its rollout unreadable, not the others."""
    folder = Run(system="miles", dp=2).write(tmp_path / "run")
    (folder / "train_data" / "0_0.pt").unlink()
    steps, message = _until_refused(folder)
    assert "rollout 0" in message
    assert [step.rollout_id for step in steps if isinstance(step, TrainStep)] == [1]


def test_numbers_of_events_and_of_gradient_norms(tmp_path: Path) -> None:
    """Miles' events and files of --ci-save-grad-norm become steps, under names without prefixes."""
    folder = Run(system="miles", rollouts=2).write(tmp_path / "run")
    (folder / "events").mkdir()
    lines = [
        event("metric", 0, attempt=0, metrics={"train/loss": 0.5, "train/kl_loss": None, "train/step": 0}),
        event("metric", 0, attempt=0, metrics={"rollout/raw_reward": 0.25, "rollout/step": 0}),
    ]
    (folder / "events" / "actor_cell0_rank0.jsonl").write_text("".join(lines))
    write_archive(folder / "grad_norm-actor-1-0.pt", 0.75)
    series = next(artefact for artefact in _read(folder) if isinstance(artefact, Series))
    assert series.steps[0]["loss"] == 0.5
    assert series.steps[0]["kl_loss"] != series.steps[0]["kl_loss"]
    assert series.steps[1] == {"grad_norm": 0.75}
    assert series.rollouts[0]["raw_reward"] == 0.25
    assert "step" not in series.steps[0]


def test_events_alone_are_a_run(tmp_path: Path) -> None:
    """A folder with nothing but Miles' events is a run; a broken line is said after what could be read."""
    (tmp_path / "events").mkdir()
    path = tmp_path / "events" / "actor_cell0_rank0.jsonl"
    path.write_text(event("metric", 0, attempt=0, metrics={"train/loss": 0.5, "train/step": 0}))
    (series,) = _read(tmp_path)
    assert isinstance(series, Series)
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(ReproError, match="no JSON"):
        _read(tmp_path)


def test_means_are_those_of_counted_tokens(tmp_path: Path) -> None:
    """A shift of one counted token of one sample moves the mean of the sample, and of six samples by a sixth of it."""
    length = Run().columns(0)["response_lengths"][0]
    series = [
        next(
            artefact for artefact in _read(equal_run(tmp_path / name, shift)) if isinstance(artefact, Series)
        ).rollouts[0]
        for name, shift in (("equal", 0.0), ("shifted", 0.5))
    ]
    counted = sum(1 for mask in Run().columns(0)["loss_masks"][1:] if mask.array.any()) + 1
    assert series[0]["ref_logprob_abs_diff"] == 0
    assert series[1]["ref_logprob_abs_diff"] == pytest.approx(0.5 / length / counted, rel=1e-5)


@pytest.mark.parametrize("name", ["grad_norm-actor-0-0.pt", "rank_0_call_0.pt", "model.pt", "0.txt", "common.pt"])
def test_other_files_are_left_to_others(name: str, tmp_path: Path) -> None:
    """Gradient norms, dumps of the loss and any other archive are no dump of a rollout."""
    write_archive(tmp_path / name, {"a": 1})
    assert not ROLLOUT_DUMP.fits(tmp_path / name)
    assert not RUN_FOLDER.fits(tmp_path)


def test_odd_files_neither_hang_nor_raise(tmp_path: Path) -> None:
    """Pipes, loops of links, folders with a dump's name and empty files: recognised as nothing, or refused."""
    os.mkfifo(tmp_path / "1.pt")
    (tmp_path / "2.pt").symlink_to(tmp_path / "2.pt")
    (tmp_path / "3.pt").mkdir()
    for name in ("1.pt", "2.pt", "3.pt", "absent.pt"):
        assert not ROLLOUT_DUMP.fits(tmp_path / name)
    (tmp_path / "4.pt").touch()
    assert ROLLOUT_DUMP.fits(tmp_path / "4.pt")
    with pytest.raises(ReproError):
        _read(tmp_path / "4.pt")
    with pytest.raises(ReproError):
        list(RUN_FOLDER.read(tmp_path))


@settings(at_most(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    raw=st.binary(max_size=300),
    at=st.integers(0, 400),
    cut=st.integers(0, 4000),
    name=st.sampled_from(["0.pt", "0_0.pt"]),
)
def test_any_bytes_are_read_or_refused_in_one_line(raw: bytes, at: int, cut: int, name: str, tmp_path: Path) -> None:
    """Whatever stands in a dump, and wherever it ends, reading gives artefacts or one line."""
    folder = tmp_path / "run" / "train_data"
    if not folder.exists():
        Run(rollouts=1).write(tmp_path / "run")
    whole = (tmp_path / "run" / "rollout_data" / "0.pt").read_bytes()
    path = tmp_path / name
    for content in (raw, whole[:at] + raw + whole[at + len(raw) :], whole[:cut]):
        path.write_bytes(content)
        for reader, place in ((ROLLOUT_DUMP, path), (RUN_FOLDER, tmp_path)):
            if reader.fits(place):
                assert "\n" not in _until_refused(place)[1]
    path.unlink()


@given(st.lists(st.integers(1, 10), max_size=40), st.integers(1, 120))
def test_of_more_dumps_than_fit_the_ends_are_kept(sizes: list[int], budget: int) -> None:
    """What is kept is in order, fits (or is one), is all where all fit, and begins with the first."""
    named = dict(enumerate(sizes))
    kept = within(named, budget)
    assert kept == sorted(set(kept))
    assert sum(named[n] for n in kept) <= budget or len(kept) == 1
    assert len(kept) == len(sizes) or sum(sizes) > budget
    assert not sizes or kept[0] == 0


def test_what_does_not_fit_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run whose dumps are larger than the budget some are read, and a note says how many."""
    for number in range(8):
        rollout(tmp_path, samples(4), number)
    whole = sum(path.stat().st_size for path in (tmp_path / "rollout_data").iterdir())
    monkeypatch.setattr("repro.doctor.artefacts.runs.BUDGET", whole // 2)
    read = list(RUN_FOLDER.read(tmp_path))
    (left,) = [artefact for artefact in read if isinstance(artefact, NotRead)]
    assert " of 8 rollout dumps were read" in left.reason
    assert {artefact.dump.rollout_id for artefact in read if isinstance(artefact, Rollout)} >= {0, 1}
