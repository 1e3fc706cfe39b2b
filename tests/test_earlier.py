"""What an earlier run of other code may have written, and a later one reads: no verdict is silent about it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import Repo
from history_kit import start

from repro_golden.recording.attach.code.earlier import Touched, others_in
from repro_golden.recording.attach.gathered.earlier_runs import Code, noted, read_in

TRAINS = """
import json
import os
from pathlib import Path
import torch
import data
torch.manual_seed(0)
torch.set_num_threads(1)
kept = Path(os.environ["KEPT"]) / "rows.json"
if not kept.exists():
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(data.rows()))
x = torch.tensor(json.loads(kept.read_text()))
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
ROWS = "def rows():\n    return [[1.0, 2.0, 3.0, 4.0]]\n"
SAYS = "which it reads, was last changed while"


def history(folder: Path) -> tuple[Repo, str]:
    """A program that keeps what it makes of its data; the second commit makes other data of it. And the first one."""
    repo = start(folder, TRAINS, None)
    (repo.root / ".gitignore").write_text("kept\n__pycache__\n")
    (repo.root / "data.py").write_text(ROWS)
    first = repo.commit("Data")
    (repo.root / "data.py").write_text(ROWS.replace("4.0", "5.0"))
    repo.commit("Other data")
    return repo, first


def test_ends_that_agree_by_what_one_of_them_left_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GOOD fills a cache, and BAD reads it: the agreement names the file, and no more once the file is touched."""
    monkeypatch.setenv("KEPT", str(tmp_path / "cache"))
    repo, first = history(tmp_path / "repo")
    words = "bisect", "--no-explain", "-j", "1", "HEAD~1..HEAD", "--steps", "2", "--", sys.executable, "train.py"
    done = repo.repro(*words)
    assert f"{tmp_path}/cache/rows.json, {SAYS} {first[:10]} ran" in done.stdout, done.stdout + done.stderr
    (tmp_path / "cache/rows.json").touch()
    done = repo.repro(words[0], "--fresh", *words[1:])
    assert "agree bit for bit" in done.stdout and SAYS not in done.stdout, done.stdout + done.stderr


@pytest.mark.whole
def test_a_cache_that_the_first_run_saves_is_told_from_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GOOD's second replay saves no such file: the refusal says that it is a cache, and how to name it."""
    monkeypatch.setenv("KEPT", str(tmp_path / "cache"))
    repo, _ = history(tmp_path / "repo")
    repo.edit("train.py", "kept.write_text(json.dumps(data.rows()))", "torch.save(data.rows(), kept)")
    repo.edit("train.py", "json.loads(kept.read_text())", "torch.load(kept)")
    repo.commit("Save")
    repo.edit("data.py", "5.0", "6.0")
    repo.commit("Other data again")
    words = "bisect", "--no-explain", "-j", "1", "HEAD~1..HEAD", "--steps", "2", "--", sys.executable, "train.py"
    done = repo.repro(*words)
    assert (
        done.returncode == 3
        and "a file that only the first run saved: if it is a cache, name it by {out}" in done.stderr
    )


@pytest.mark.whole
def test_names_of_files_that_are_no_text_end_no_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose name is no UTF-8 is named, be it made by a run or read."""
    monkeypatch.setenv("KEPT", os.fsdecode(bytes(tmp_path) + b"/cache-\xe9"))
    repo, _ = history(tmp_path / "repo")
    words = "bisect", "--no-explain", "-j", "1", "HEAD~1..HEAD", "--steps", "2", "--", sys.executable, "train.py"
    done = repo.repro(*words)
    assert done.returncode == 0 and f"{tmp_path}/cache-\\udce9/rows.json, {SAYS}" in done.stdout, done.stderr


def test_a_working_tree_that_reads_what_the_golden_run_left_says_so(
    recorded: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that git ignores in the checkout is told of, and what a run wrote itself is not."""
    monkeypatch.setenv("KEPT", "kept")
    with (recorded.root / ".gitignore").open("a") as ignored:
        ignored.write("kept\n")
    (recorded.root / "train.py").write_text(TRAINS)
    (recorded.root / "data.py").write_text(ROWS)
    first = recorded.commit("Train")
    words = "--steps", "2", "--", sys.executable, "train.py"
    done = recorded.repro("golden", "record", "kept", *words)
    assert done.returncode == 0 and SAYS not in done.stdout, done.stdout + done.stderr
    recorded.commit("Golden run")
    recorded.edit("data.py", "4.0", "5.0")
    recorded.commit("Other data")
    done = recorded.repro("golden", "verify", "kept")
    assert f"agrees: 2 steps compared, but {recorded.root}/kept/rows.json, {SAYS} {first[:10]} ran" in done.stdout, (
        done.stderr
    )
    (recorded.root / "kept" / "rows.json").unlink()
    done = recorded.repro("golden", "verify", "kept")
    assert "differs at step 0" in done.stdout and "last changed" not in done.stdout, "it has made its own"


def test_the_name_of_a_commit_that_rests_on_a_cache_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits before BAD read what BAD has left, so that an innocent one is named: the file is, too."""
    monkeypatch.setenv("KEPT", str(tmp_path / "cache"))
    begin, end = TRAINS.index("kept = "), TRAINS.index("model = ")
    repo = start(tmp_path / "repo", f"{TRAINS[:begin]}x = torch.tensor(data.rows())\n{TRAINS[end:]}", None)
    (repo.root / "data.py").write_text(ROWS)
    repo.commit("Data")
    (repo.root / "train.py").write_text(TRAINS)
    innocent = repo.commit("Keep rows")
    repo.commit("Nothing")
    repo.edit("data.py", "4.0", "5.0")
    repo.commit("Other data")
    for command in ("bisect", "history"):
        (tmp_path / "cache/rows.json").unlink(missing_ok=True)
        options = ["--no-explain"] if command == "bisect" else []
        words = *options, "-j", "1", "HEAD~3..HEAD", "--steps", "2", "--", sys.executable, "train.py"
        done = repo.repro(command, "--fresh", *words)
        assert innocent[:10] in done.stdout, done.stdout + done.stderr
        assert f"last changed while other code ran: {tmp_path}/cache/rows.json" in " ".join(done.stdout.split())


def run(tmp_path: Path, code: Code, *files: Path, reads: Sequence[Path] = ()) -> dict[str, str]:
    """What is said of a run of some code that writes files, and then reads some."""
    raw = Path(tempfile.mkdtemp(dir=tmp_path))
    with noted(raw, tmp_path / "state", code):
        time.sleep(0.02)  # a file's time is that of the last tick
        opened = process(raw, tmp_path).opened
        for file in files:
            opened(str(file), "w", os.O_WRONLY | os.O_TRUNC)
            file.write_text("x")
        for file in reads:
            opened(str(file), "r", os.O_RDONLY)
        time.sleep(0.02)
    return read_in(raw)


def process(raw: Path, tmp_path: Path) -> Touched:
    """What takes the files that a process of a run opens, once that has begun."""
    others = others_in(str(raw))
    assert others

    def tell(file: str, moment: float | None) -> None:
        with (raw / "touched-1.jsonl").open("a") as out:
            out.write(f"{json.dumps([file, moment])}\n")

    here = str(tmp_path / "checkout")
    return Touched(others, None, here, lambda: {"tracked"}, [str(tmp_path / "env")], tell)


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """Files in a folder, in the checkout, and where no commit's lie."""
    names = ("any", "checkout/any", "checkout/tracked", "env/any", "a/site-packages/any", "hf/models--a--b/blobs/any")
    for name in ("state", *(Path(name).parent for name in names)):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    return [tmp_path / name for name in names]


A, B, SETTINGS = Code("a x", "a"), Code("b x", "b"), Code("a y", "a")


def test_only_what_other_code_may_have_written_is_told(tmp_path: Path, places: list[Path]) -> None:
    """Neither what the same code wrote or the run itself, nor a package, a file that git tracks or the hub's."""
    assert run(tmp_path, A, *places, reads=places) == {}, "its own"
    assert run(tmp_path, A, reads=places) == {}, "of the same code"
    assert run(tmp_path, B, reads=places) == {str(path): "a" for path in places[:2]}
    assert run(tmp_path, SETTINGS, reads=places[:1]) == {str(places[0]): "a with other settings"}
    assert run(tmp_path, B, *places, reads=places) == {}, "it has written them anew"
    assert run(tmp_path, A, reads=places[:1]) == {str(places[0]): "b"}
    time.sleep(0.02)
    places[0].write_text("x")
    assert run(tmp_path, A, reads=places[:1]) == {}, "the user has written it between two runs"


def test_what_another_run_writes_meanwhile_is_told_where_both_touched_it(tmp_path: Path, places: list[Path]) -> None:
    """Of two runs at once the one that ends later names the file, and no file that the other did not touch."""
    state, raws = tmp_path / "state", [tmp_path / "first", tmp_path / "second"]
    for raw in raws:
        raw.mkdir()
    with noted(raws[1], state, B):
        time.sleep(0.02)
        second = process(raws[1], tmp_path).opened
        with noted(raws[0], state, A):
            first = process(raws[0], tmp_path)
            time.sleep(0.02)
            (tmp_path / "part").write_text("x")
            first.renamed(str(tmp_path / "part"), str(places[0]), -1, -1)
            (tmp_path / "part").replace(places[0])
            places[1].write_text("x")  # nobody tells of it: an extension, or another process of the second run
        for place in places[:2]:
            second(str(place), "r", os.O_RDONLY)
    assert (read_in(raws[0]), read_in(raws[1])) == ({}, {str(places[0]): "a"})


def test_what_a_process_adds_to_a_file_is_not_its_own(tmp_path: Path, places: list[Path]) -> None:
    """A file that is opened to be read and added to is read; one that is only added to is not told."""
    run(tmp_path, A, *places[:2])
    raw = tmp_path / "raw"
    raw.mkdir()
    with noted(raw, tmp_path / "state", B):
        opened = process(raw, tmp_path).opened
        opened(str(places[0]), "a+", os.O_RDWR | os.O_APPEND | os.O_CREAT)
        opened(str(places[1]), "a", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    assert read_in(raw) == {str(places[0]): "a"}


def test_what_one_process_read_before_another_wrote_it_is_told(tmp_path: Path, places: list[Path]) -> None:
    """What was there before the run wrote it anew counts, whichever process tells of it last."""
    run(tmp_path, A, places[0])
    raw = tmp_path / "raw"
    raw.mkdir()
    with noted(raw, tmp_path / "state", B):
        time.sleep(0.02)
        process(raw, tmp_path).opened(str(places[0]), "r", os.O_RDONLY)
        process(raw, tmp_path).opened(str(places[0]), "w", os.O_WRONLY | os.O_TRUNC)
        places[0].write_text("x")
        process(raw, tmp_path).opened(str(places[0]), "r", os.O_RDONLY)
    assert read_in(raw) == {str(places[0]): "a"}


def test_what_a_killed_run_wrote_is_told(tmp_path: Path, places: list[Path]) -> None:
    """Of a run without an end, which was killed, what was changed before the next one began may be its own."""
    state, raw = tmp_path / "state", tmp_path / "raw"
    raw.mkdir()
    with noted(raw, state, A):
        begun = (state / "runs.jsonl").read_text()
        time.sleep(0.02)
        places[0].write_text("x")
        time.sleep(0.02)
    (state / "runs.jsonl").write_text(begun)
    assert run(tmp_path, B, reads=places[:1]) == {str(places[0]): "a"}


def test_many_files_of_a_process_hide_no_run(tmp_path: Path) -> None:
    """Runs that touch very many files leave the log to those before them, and what is read is told all the same."""
    (tmp_path / "state").mkdir()
    (tmp_path / "many").mkdir()
    many, kept = [tmp_path / "many" / f"{'x' * 100}-{n}" for n in range(1500)], tmp_path / "kept"
    assert run(tmp_path, A, kept) == {}
    for _ in range(5):
        run(tmp_path, A, *many)
    assert run(tmp_path, B, *many, reads=[kept]) == {str(kept): "a"}


def test_what_cannot_be_noted_is_not(tmp_path: Path) -> None:
    """A log that is damaged, full or a folder ends no run; names that are no UTF-8 are told; the log keeps its end."""
    state = tmp_path / "state"
    state.mkdir()
    log, odd = state / "runs.jsonl", Path(os.fsdecode(bytes(tmp_path) + b"/kept-\xe9"))
    log.write_bytes(b'null\n7\n\xff\xfe\n["a", "b"]\n{"name": 1}\n{"name": "n", "key": "k"')
    assert run(tmp_path, A, odd) == {}
    assert run(tmp_path, B, reads=[odd]) == {f"{tmp_path}/kept-\\udce9": "a"}
    log.write_text(f"{'x' * 100}\n" * 20_000)
    assert run(tmp_path, A) == {}
    assert 400_000 < log.stat().st_size < 600_000
    log.unlink()
    log.mkdir()
    assert run(tmp_path, B, reads=[odd]) == {}
