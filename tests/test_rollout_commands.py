"""`repro rollout show`, `convert` and `record --format`: dumps of slime, Miles and Relax on the command line."""

from __future__ import annotations

import dataclasses
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Repo
from rollout_dump_kit import full_dump, plain_dump

from repro.__main__ import main
from repro_golden.base.systems import SYSTEMS, System
from repro_golden.dumps.rollout.files import RolloutDump, content_digest, read_rollout_dump, write_rollout_dump
from repro_golden.dumps.values import same
from repro_golden.store.rollouts import RolloutSet

torch.set_num_threads(1)


@dataclass
class Said:
    """What a command printed."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> dict[str, Any]:
        """The JSON that it printed."""
        answer: dict[str, Any] = json.loads(self.out)
        return answer


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run `repro rollout ...` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Said:
        code = main(["rollout", *map(str, words)])
        printed = capsys.readouterr()
        return Said(code, printed.out, printed.err)

    return run


def dumps(folder: Path, system: System = "slime", evaluation: bool = True) -> Path:
    """A folder of two dumps and an evaluation."""
    folder.mkdir()
    for number in (0, 1):
        write_rollout_dump(folder / f"{number}.pt", plain_dump(system, rollout_id=number))
    if evaluation:
        write_rollout_dump(folder / "eval_1.pt", plain_dump(system, rollout_id=1))
    return folder


def test_show_a_folder_of_dumps(say: Any, tmp_path: Path) -> None:
    """System, form, one row for each file and the findings; exit 0 without an error."""
    dumps(tmp_path / "d")
    result = say("show", "d")
    assert result.code == 0 and "slime, fields of d495f61c2 2026-06-21 or later: 0.pt, 1.pt" in result.out
    assert "eval 1" in result.out and "checks: nothing found" in result.out and not result.err
    data = say("show", "d", "--json").data
    assert [row["rollout"] for row in data["each"]] == ["0", "1", "eval 1"] and data["findings"] == []
    assert data["each"][0]["tokens"] == 28 and data["each"][0]["mean reward"] == 0.5


def test_a_mean_says_of_how_many_it_is(say: Any, tmp_path: Path) -> None:
    """Rewards that are no numbers, as a reward model's dicts, are in no mean, and it says so."""
    dump = plain_dump("slime")
    rewards = [{"score": 1.0} if n else 0.5 for n in range(len(dump.samples))]
    samples = [sample | {"reward": reward} for sample, reward in zip(dump.samples, rewards, strict=True)]
    write_rollout_dump(tmp_path / "0.pt", dataclasses.replace(dump, samples=samples))
    assert say("show", "0.pt", "--json").data["each"][0]["mean reward"] == "0.5 of 1"


def test_show_finds_the_folder_of_dump_details(say: Any, tmp_path: Path) -> None:
    """The folder that --dump-details writes is taken as well as rollout_data/ inside it."""
    (tmp_path / "details").mkdir()
    dumps(tmp_path / "details" / "rollout_data", "miles")
    inside, outside = (say("show", place, "--json").data for place in ("details/rollout_data", "details"))
    assert inside["digest"] == outside["digest"]


def test_an_error_is_exit_1_with_why_and_cure(say: Any, tmp_path: Path) -> None:
    """Each rule once, with file, sample, why and cure; JSON has every finding; only errors make the exit code 1."""
    folder = dumps(tmp_path / "d")
    dump = read_rollout_dump(folder / "1.pt")
    for sample in dump.samples[1:3]:
        sample["rollout_log_probs"][2] = float("nan")
    write_rollout_dump(folder / "1.pt", dump)
    result = say("show", "d")
    assert result.code == 1
    assert "error log-probs-finite: 1.pt, sample 1: rollout_log_probs is nan at response token 2" in result.out
    assert "(and 1 more)" in result.out and "  cure: " in result.out
    reported = say("show", "d", "--json").data["findings"]
    assert [(f["file"], f["rule"], f["sample"]) for f in reported] == [("1.pt", "log-probs-finite", k) for k in (1, 2)]
    assert say("show", "d/0.pt", "--group-size", 2).code == 0
    assert say("show", "d/0.pt", "--group-size", 4).code == 1
    assert say("show", "d/0.pt", "--layers", 2, "--topk", 2).code == 1
    dump.samples = [{**sample, "status": "aborted", "rollout_log_probs": [-1.0] * 4} for sample in dump.samples]
    write_rollout_dump(folder / "1.pt", dump)
    warned = say("show", "d/1.pt")
    assert warned.code == 0 and "warning unfinished" in warned.out


def test_nothing_in_a_dump_reaches_the_terminal_raw(say: Any, tmp_path: Path) -> None:
    """Control characters in names and texts of a dump are escaped, and a reward that is not finite is valid JSON."""
    dump = plain_dump()
    for number, sample in enumerate(dump.samples):
        sample.update({"\x1b[2J|evil\n": 1, "weight_versions": [f"\x1b[31m{number}"], "reward": float("inf")})
    write_rollout_dump(tmp_path / "0.pt", dump)
    result = say("show", "0.pt")
    assert result.code == 1 and "\x1b" not in result.out and "inf" in result.out
    assert "\x1b" not in say("show", "0.pt", "--json").out


@pytest.mark.parametrize("target", ["miles", "relax"])
def test_convert_between_trainers_says_what_is_lost(target: System, say: Any, tmp_path: Path) -> None:
    """Dumps keep their names and numbers, and what the form has no place for is listed once, with counts."""
    folder = dumps(tmp_path / "d", evaluation=False)
    for number in (0, 1):
        write_rollout_dump(folder / f"{number}.pt", full_dump("slime", rollout_id=number))
    result = say("convert", "d", "--out", "m", "--format", target)
    assert result.code == 0 and result.out.count("custom_rm_path of slime") == 1 and "train on them with" in result.out
    made = read_rollout_dump(tmp_path / "m" / "1.pt")
    assert made.system == target and made.rollout_id == 1
    data = say("convert", "d", "--out", "n", "--format", target, "--json").data
    lost = {entry["what"]: (entry["samples"], entry["rollouts"]) for entry in data["lost"]}
    assert lost["custom_rm_path of slime"] == (8, 2)
    assert [entry["file"] for entry in data["written"]] == ["0.pt", "1.pt"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_convert_to_ours_and_back(system: System, say: Any, tmp_path: Path) -> None:
    """Dumps, ours, dumps: equal bytes; evaluations are left out of ours, and said so; ours can be shown."""
    dumps(tmp_path / "d", system)
    result = say("convert", "d", "--out", "ours", "--format", "repro", "--system", system)
    assert result.code == 0 and "eval_1.pt" in result.out and len(RolloutSet(tmp_path / "ours")) == 2
    assert f"made of dumps of {system}" in say("show", "ours").out
    assert "nothing was lost" in say("convert", "ours", "--out", "again", "--format", system).out
    for name in ("0.pt", "1.pt"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "d" / name).read_bytes()
    assert say("convert", "ours", "--out", "copy", "--format", "repro").code == 0
    assert RolloutSet(tmp_path / "copy").digest == RolloutSet(tmp_path / "ours").digest


def test_convert_keeps_evaluations_between_trainers(say: Any, tmp_path: Path) -> None:
    """An evaluation stays one: eval_N.pt."""
    dumps(tmp_path / "d", "miles")
    assert say("convert", "d", "--out", "s", "--format", "slime").code == 0
    assert read_rollout_dump(tmp_path / "s" / "eval_1.pt").evaluation


def test_rewards_of_several_parts_need_a_key(say: Any, tmp_path: Path) -> None:
    """--reward-key says which reward becomes the column; without it nothing is written."""
    dump = plain_dump()
    for sample in dump.samples:
        sample["reward"] = {"acc": 1.0, "style": 0.25}
    write_rollout_dump(tmp_path / "7.pt", dump)
    refused = say("convert", "7.pt", "--out", "ours", "--format", "repro")
    assert refused.code == 2 and "--reward-key" in refused.err and not (tmp_path / "ours").exists()
    result = say("convert", "7.pt", "--out", "ours", "--format", "repro", "--reward-key", "style")
    assert result.code == 0 and "renamed: 7.pt is 0.safetensors" in result.out
    assert RolloutSet(tmp_path / "ours").read(0).tensors["rewards"].tolist() == [0.25] * 4


class Ran:
    """Leaves a mark where its pickle is executed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("executed"),))


def test_classes_are_refused_without_the_flag_and_never_run(say: Any, tmp_path: Path) -> None:
    """A class is refused with the flag that allows it; with it the dump is read, converted and nothing has run."""
    dump = plain_dump(rollout_id=0).content()
    dump["samples"][0]["metadata"] = {"thing": Said(1, "a", "b")}
    torch.save(dump, tmp_path / "0.pt")
    name = f"{Said.__module__}.Said"
    refused = say("show", "0.pt")
    assert refused.code == 2 and f"--allow-pickle {name}" in refused.err and len(refused.err.splitlines()) == 1
    assert say("show", "0.pt", "--allow-pickle", name).code == 0
    assert say("convert", "0.pt", "--allow-pickle", name, "--out", "ours", "--format", "repro").code == 0
    assert say("convert", "ours", "--out", "back", "--format", "slime").code == 0
    again = torch.load(tmp_path / "back" / "0.pt", weights_only=False)
    assert again["samples"][0]["metadata"]["thing"] == Said(1, "a", "b")
    (tmp_path / "1.pt").write_bytes(pickle.dumps(Ran()))
    assert say("show", "1.pt").code == 2 and say("show", "1.pt", "--allow-pickle", "pathlib.Path.touch").code == 2
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("convert", "d", "--out", "d", "--format", "miles"), "is there already"),
        (("convert", "d", "d/0.pt", "--out", "m", "--format", "miles"), "second 0.pt"),
        (("convert", "d/eval_1.pt", "--out", "m", "--format", "repro"), "nothing was written"),
        (("convert", "empty", "--out", "m", "--format", "miles"), "holds no rollouts"),
        (("convert", "d", "--out", "m", "--format", "miles", "--limit", "1KB"), "--limit"),
        (("show", "d", "--limit", "much"), "is no size"),
        (("show", "d/9.pt"), "no rollout"),
        (("show", "train.pt"), "is a train dump"),
        (("convert", "d/9.pt", "--out", "m", "--format", "miles"), "no file at d/9.pt"),
    ],
)
def test_what_cannot_be_is_one_line(words: tuple[str, ...], message: str, say: Any, tmp_path: Path) -> None:
    """Mistakes end in exit 2 with one line that names them, and leave nothing behind."""
    dumps(tmp_path / "d")
    (tmp_path / "empty").mkdir()
    torch.save({"rollout_id": 0, "rank": 0, "rollout_data": {}}, tmp_path / "train.pt")
    before = sorted(tmp_path.rglob("*"))
    result = say(*words)
    told = [line for line in result.err.splitlines() if line.startswith("repro: ")]
    assert result.code == 2 and len(told) == 1, result.err
    if message != "no rollout":
        assert message in told[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_one_is_no_plural_and_what_is_not_there_is_not_counted(say: Any, tmp_path: Path) -> None:
    """Progress names what is there."""
    dumps(tmp_path / "d", evaluation=False)
    (tmp_path / "one").mkdir()
    (tmp_path / "d" / "0.pt").rename(tmp_path / "one" / "0.pt")
    result = say("convert", "one", "--out", "m", "--format", "repro")
    assert result.code == 0 and "rollout dumps" not in result.err
    result = say("show", "m")
    assert "1 rollout at " in result.out and "1 rollouts" not in result.out
    result = say("convert", "/nonexist", "--out", "n", "--format", "miles")
    assert result.code == 2 and result.err.count("nonexist") == 1 and "rollout dump" not in result.err


def test_numpy_in_relax_dumps_is_shown(say: Any, tmp_path: Path) -> None:
    """A Relax dump with decoded tokens and arrays is recognised and shown."""
    dump = full_dump("relax")
    assert isinstance(dump.samples[0]["opd_topk_ksz"], np.ndarray)
    write_rollout_dump(tmp_path / "3.pt", dump)
    assert say("show", "3.pt", "--json").data["each"][0]["system"] == "relax"


def test_record_writes_dumps_beside(fork: Repo, tmp_path: Path) -> None:
    """`record --out --format` leaves ours and dumps of the same rollouts; a second time it takes --replace."""
    refused = fork.repro("rollout", "record", "--format", "slime")
    assert refused.returncode == 2 and "--out FOLDER" in refused.stderr
    out = tmp_path / "out"
    made = fork.repro("rollout", "record", "--debug-rollout-only", "--out", str(out), "--format", "slime", "--json")
    assert made.returncode == 0, made.stderr
    data = json.loads(made.stdout)
    assert data["format"] == "slime" and data["lost"] == ["sampling of the rollout"]
    kept = RolloutSet(out)
    assert sorted(path.name for path in out.glob("*.pt")) == [f"{k}.pt" for k in range(len(kept))]
    for number in range(len(kept)):
        dump, rollout = read_rollout_dump(out / f"{number}.pt"), kept.read(number)
        assert [token for s in dump.samples for token in s["tokens"]] == rollout.tensors["tokens"].tolist()
        assert dump.rollout_id == number and len(torch.load(out / f"{number}.pt", weights_only=True)["samples"]) > 1
    again = fork.repro("rollout", "record", "--debug-rollout-only", "--out", str(out), "--format", "miles", "--replace")
    assert again.returncode == 0 and "dumps for miles beside them" in again.stdout, again.stderr
    assert read_rollout_dump(out / "0.pt").system == "miles"
    digests = [content_digest(read_rollout_dump(path)) for path in sorted(out.glob("*.pt"))]
    converted = fork.repro("rollout", "convert", str(out), "--out", str(tmp_path / "c"), "--format", "miles")
    assert converted.returncode == 0, converted.stderr
    assert digests == [content_digest(read_rollout_dump(path)) for path in sorted((tmp_path / "c").glob("*.pt"))]


def test_dumps_of_two_systems_stay_apart(say: Any, tmp_path: Path) -> None:
    """The same samples in two forms have two digests, and each file says whose it is."""
    for system in ("slime", "miles"):
        dumps(tmp_path / system, system, evaluation=False)
    a, b = (read_rollout_dump(tmp_path / system / "0.pt") for system in ("slime", "miles"))
    assert same(a.samples[0]["tokens"], b.samples[0]["tokens"]) and content_digest(a) != content_digest(b)
    assert isinstance(a, RolloutDump) and say("show", "slime").out != say("show", "miles").out
