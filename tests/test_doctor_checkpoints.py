"""Rules of Megatron checkpoints and of the folders that a launch names, on folders that torch writes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from doctor_checkpoint_kit import findings, legacy, model_args, paths, torch_dist
from doctor_machine_kit import script


def _unfilled(tmp: Path) -> list[Path]:
    torch_dist(tmp / "ckpt", 20, tracker="40")
    (tmp / "ckpt" / "iter_0000040").mkdir()
    return [tmp / "ckpt"]


@pytest.mark.parametrize("kind", [torch_dist, legacy])
@pytest.mark.parametrize("name", ["checkpoint-tracker", "checkpoint-iteration", "checkpoint-truncated"])
def test_whole_checkpoints_of_both_kinds_are_clean(name: str, kind: Callable[..., Path], tmp_path: Path) -> None:
    """Distributed and per-rank checkpoints that torch wrote give no finding, with several iterations too."""
    assert findings(name, kind(tmp_path / "ckpt", 3, 7)) == []


@pytest.mark.parametrize(
    ("text", "words"), [("", "is empty"), ("  \n", "is empty"), ("latest", "no iteration"), ("٤", "no")]
)
def test_trackers_that_name_nothing(text: str, words: str, tmp_path: Path) -> None:
    """An empty tracker, and one that holds neither digits nor ``release``, are errors; digits are ASCII."""
    (finding,) = findings("checkpoint-tracker", torch_dist(tmp_path / "ckpt", 3, tracker=text))
    assert words in finding.message
    assert findings("checkpoint-iteration", tmp_path / "ckpt") == []


def test_release_is_an_iteration(tmp_path: Path) -> None:
    """A converted checkpoint's tracker says ``release``; without that folder it is an error."""
    folder = torch_dist(tmp_path / "ckpt", -1)
    for name in ("checkpoint-tracker", "checkpoint-iteration", "checkpoint-truncated"):
        assert findings(name, folder) == []
    shutil.rmtree(folder / "release")
    (finding,) = findings("checkpoint-iteration", folder)
    assert "no folder release" in finding.message


def test_an_empty_iteration_and_an_older_one(tmp_path: Path) -> None:
    """A folder without data is an error that names the newest with some; a tracker behind the newest is a note."""
    (finding,) = findings("checkpoint-iteration", *_unfilled(tmp_path))
    assert "holds no data" in finding.message and "20" in finding.fix
    (older,) = findings("checkpoint-iteration", torch_dist(tmp_path / "two", 20, 40, tracker="20"))
    assert older.severity == "note"


def test_one_iteration_alone_is_no_error(tmp_path: Path) -> None:
    """A folder iter_NNNNNNN given itself is read as one iteration, with a note to give the folder above."""
    folder = torch_dist(tmp_path / "ckpt", 5) / "iter_0000005"
    (finding,) = findings("checkpoint-tracker", folder)
    assert finding.severity == "note"
    assert findings("checkpoint-truncated", folder) == []


@pytest.mark.parametrize(
    ("file", "end"), [("common.pt", 0), (".metadata", 0), ("metadata.json", 0), ("common.pt", -40), (".metadata", -40)]
)
def test_files_cut_short(file: str, end: int, tmp_path: Path) -> None:
    """Each file that loading needs is an error when it is empty, and a pickle when it breaks off: said once."""
    folder = torch_dist(tmp_path / "ckpt", 5)
    path = folder / "iter_0000005" / file
    path.write_bytes(path.read_bytes()[:end])
    (finding,) = findings("checkpoint-truncated", folder)
    assert finding.severity == "error" and file in finding.where.path


def test_missing_shards_and_ranks(tmp_path: Path) -> None:
    """A .distcp that .metadata names, .metadata itself, and a rank of the grid are missed."""
    folder = torch_dist(tmp_path / "ckpt", 5)
    shard = next((folder / "iter_0000005").glob("*.distcp"))
    shard.unlink()
    (finding,) = findings("checkpoint-truncated", folder)
    assert shard.name in finding.message and "is missing" in finding.message
    (torch_dist(tmp_path / "other", 5) / "iter_0000005" / ".metadata").unlink()
    assert "interrupted" in findings("checkpoint-truncated", tmp_path / "other")[0].message
    shutil.rmtree(legacy(tmp_path / "ranks", 5) / "iter_0000005" / "mp_rank_01_000")
    (rank,) = findings("checkpoint-truncated", tmp_path / "ranks")
    assert "mp_rank_01_000 is missing" in rank.message and "2 x 2" in rank.message


def test_a_distributed_checkpoint_may_be_cut_anew(tmp_path: Path) -> None:
    """Another TP than saved is a note for .distcp, and so is another CP for files of ranks."""
    launch = script(tmp_path, f"--tensor-model-parallel-size 4 {paths(load=torch_dist(tmp_path / 'ckpt', 5))}")
    (finding,) = findings("checkpoint-parallelism", launch, tmp_path / "ckpt")
    assert finding.severity == "note" and "TP 2" in finding.message
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2 "
    other = script(tmp_path / "b", flags + paths(load=legacy(tmp_path / "ranks", 5)))
    (context,) = findings("checkpoint-parallelism", other, tmp_path / "ranks")
    assert context.severity == "note" and "CP 1" in context.message


def test_layouts_without_arguments_come_from_the_ranks(tmp_path: Path) -> None:
    """Where no arguments can be read, the ranks' folders say the tensor parallel size."""
    folder = legacy(tmp_path / "ckpt", 5, tp=2, pp=1)
    for file in folder.rglob("*.pt"):
        file.write_bytes(b"not a pickle")
    launch = script(tmp_path, f"--tensor-model-parallel-size 4 {paths(load=folder)}")
    (finding,) = findings("checkpoint-parallelism", launch, folder)
    assert finding.severity == "error" and "TP 2" in finding.message


def test_another_checkpoint_than_the_launch_names_is_no_error(tmp_path: Path) -> None:
    """A mismatch with a folder that no flag names is a possibility, not an error."""
    launch = script(tmp_path, f"{model_args(**{'hidden-size': 128})} --load /elsewhere/else")
    (finding,) = findings("checkpoint-model-args", launch, torch_dist(tmp_path / "ckpt", 5))
    assert (finding.severity, finding.certainty) == ("warning", "possible")


def test_switches_of_the_model_count(tmp_path: Path) -> None:
    """A switch that the launch lacks and the save had is another model."""
    flags = model_args().replace(" --swiglu", "")
    launch = script(tmp_path, f"{flags} {paths(load=torch_dist(tmp_path / 'ckpt', 5))}")
    (finding,) = findings("checkpoint-model-args", launch, tmp_path / "ckpt")
    assert finding.where.item == "--swiglu" and finding.severity == "error"


def test_a_first_run_is_only_a_note(tmp_path: Path) -> None:
    """--load and --save of one folder that is not there yet is how a run begins."""
    (tmp_path / "data").mkdir()
    out = tmp_path / "data" / "out"
    launch = script(tmp_path, paths(load=out, save=out, ref_load=torch_dist(tmp_path / "ref", -1)))
    (finding,) = findings("silent-finetune", launch)
    assert finding.severity == "note" and "first run" in finding.message


def test_a_load_that_is_missing_names_where_it_may_be(tmp_path: Path) -> None:
    """--load of a folder inside a checkpoint is a warning that proposes the folder above."""
    folder = torch_dist(tmp_path / "ckpt", 5)
    (finding,) = findings("silent-finetune", script(tmp_path, paths(load=folder / "latest", save=tmp_path / "out")))
    assert finding.severity == "warning" and str(folder) in finding.fix


def test_paths_of_another_machine_say_nothing(tmp_path: Path) -> None:
    """A script with the paths of a cluster, and paths that only a shell knows, give nothing."""
    flags = "--load /root/M_slime/ --save /root/M_slime/ --ref-load /root/M_torch_dist --hf-checkpoint /root/M"
    for text in (flags, flags.replace("/root", "$BASE"), flags.replace("/root", "relative")):
        launch = script(tmp_path, f"{text} --use-kl-loss --ckpt-step 7")
        for name in ("silent-finetune", "ref-load-missing", "resume-elsewhere", "ckpt-step"):
            assert findings(name, launch) == []


def test_a_copy_of_the_checkpoint_stands_for_the_folder_that_the_launch_names(tmp_path: Path) -> None:
    """The folder of the same name that is given beside the script is what --load means."""
    copy = torch_dist(tmp_path / "M_slime", 5, tracker=None)
    launch = script(tmp_path, "--load /cluster/M_slime/ --ref-load /cluster/ref --ckpt-step 6")
    (finding,) = findings("silent-finetune", launch, copy)
    assert finding.severity == "error" and "/cluster/ref" in finding.message
    (step,) = findings("ckpt-step", launch, copy)
    assert "it has 5" in step.message


@pytest.mark.parametrize(
    ("there", "words"), [((1,), "give 1, or drop"), ((1, 2), "give one of 1-2, or"), ((1, 4), "give one of 1, 4,")]
)
def test_the_iterations_to_choose_from(there: tuple[int, ...], words: str, tmp_path: Path) -> None:
    """One iteration is given as such, several as a choice."""
    launch = script(tmp_path, f"{paths(load=torch_dist(tmp_path / 'ckpt', *there))} --ckpt-step 7")
    (finding,) = findings("ckpt-step", launch)
    assert finding.fix.startswith(words)


@pytest.mark.parametrize(("step", "words"), [("x", "no iteration"), ("-3", "no iteration"), ("0", "not given")])
def test_steps_that_are_none(step: str, words: str, tmp_path: Path) -> None:
    """A step that is no number, and 0, which Megatron takes for not given."""
    launch = script(tmp_path, f"{paths(load=torch_dist(tmp_path / 'ckpt', 5))} --ckpt-step {step}")
    (finding,) = findings("ckpt-step", launch)
    assert words in finding.message


@pytest.mark.parametrize(
    ("model", "count"), [("Qwen3-4B-Base", 1), ("gemma-3-1b-pt", 1), ("Qwen3-4B", 0), ("Database-7B", 0)]
)
def test_base_models_by_name(model: str, count: int, tmp_path: Path) -> None:
    """A base model by its name with --apply-chat-template is a note; a name that only holds the letters is not."""
    reported = findings(
        "template-without-instruct", script(tmp_path, f"--apply-chat-template --hf-checkpoint /m/{model}/")
    )
    assert [finding.severity for finding in reported] == ["note"] * count
