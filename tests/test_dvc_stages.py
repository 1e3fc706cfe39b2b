"""Check stages: real DVC runs the check, shows its metrics and plots, and never records a golden run."""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import warm_kit
from conftest import Repo, environment
from history_kit import CASE, TRAIN, start
from trace_kit import tensor_row, write

from repro.commands.golden_verify import step_records
from repro_golden.compare.traces import compare
from repro_golden.runs.verify import Verification, agreeing_steps
from repro_golden.store.golden import GoldenRun
from repro_golden.trace import Row, Trace
from repro_golden.trace.writer import metric_row

ROOT = Path(__file__).parent.parent
STAGE = "golden/dvc.yaml"
RATIO = """\
    print(f"step {step} loss={loss.item()!r} ratio={2.0 - scale if scale == 1.0 else float('nan')}", flush=True)
"""
OBSERVE = "\n[observe]\nmetrics = ['loss=(?P<loss>\\S+)', 'ratio=(?P<ratio>\\S+)']\n"
PLOTS = """\
plots:
  - losses:
      title: Losses
      x: step
      y:
        check-steps.json: [toy/loss, toy/ratio]
      y_label: nats
"""


def dvc(repo: Repo, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One dvc command, as a user runs it, with repro on the PATH."""
    path = f"{Path(sys.executable).parent}:{environment()['PATH']}"
    return warm_kit.run([sys.executable, "-m", "dvc", *arguments], repo.root, environment() | {"PATH": path})


def golden_bytes(repo: Repo) -> dict[str, bytes]:
    """Pointers and content of all golden runs."""
    runs = repo.root / "golden" / "runs"
    return {str(p.relative_to(runs)): p.read_bytes() for p in runs.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Repo:
    """A repository with a golden run, whose check stage ran once and was committed, and then with a change."""
    train = TRAIN.replace('    print(f"step {step} loss={loss.item()!r}", flush=True)\n', RATIO)
    case = CASE.replace("proof_steps = 2", "proof_steps = 1").replace("steps = 6", "steps = 4") + OBSERVE
    repo = start(tmp_path_factory.mktemp("stages"), train, case)
    (repo.root / ".gitignore").write_text("dvc_plots/\n")
    done = repo.repro("init", "--remote", str(repo.root.parent / "remote"))
    assert done.returncode == 0 and f"wrote {STAGE}" in done.stdout, done.stdout + done.stderr
    (repo.root / STAGE).write_text((repo.root / STAGE).read_text() + PLOTS)
    repo.commit("Start")
    done = repo.repro("golden", "record")
    assert done.returncode == 0, done.stdout + done.stderr
    repo.commit("Record")
    before = golden_bytes(repo)
    done = dvc(repo, "repro", STAGE)
    assert done.returncode == 0 and "agrees: 4 steps" in done.stdout, done.stdout + done.stderr
    assert golden_bytes(repo) == before
    repo.commit("Check")
    repo.edit("train.py", "scale = 1.0", "scale = 1.5 if step == 2 else 1.0")
    done = dvc(repo, "repro", STAGE)
    assert done.returncode == 0 and "differs at step 2" in done.stdout, done.stdout + done.stderr
    assert golden_bytes(repo) == before and len(before) > 3
    return repo


@pytest.mark.whole
def test_dvc_repro_checks_and_never_records(checked: Repo) -> None:
    """The run before and after a change left the golden run alone, byte for byte; metrics say that it differs now."""
    assert json.loads((checked.root / "golden" / "check.json").read_text())["toy"]["agrees"] == 0
    outs = [line for line in (checked.root / "golden" / "dvc.lock").read_text().splitlines() if "path:" in line]
    assert sorted(line.split()[-1] for line in outs) == ["check-steps.json", "check.json"]
    assert "golden/runs" not in checked.git("status", "--porcelain")


@pytest.mark.whole
def test_metrics_diff_shows_the_change(checked: Repo) -> None:
    """`dvc metrics show` and `diff` have whether it agrees, where it differs, and each metric's last value."""
    shown = json.loads(dvc(checked, "metrics", "show", "--json").stdout)
    assert shown[""]["data"]["golden/check.json"]["data"]["toy"]["steps"] == 4
    metrics = json.loads(dvc(checked, "metrics", "diff", "--json").stdout)["golden/check.json"]
    assert (metrics["toy.agrees"], metrics["toy.divergent_step"]) == (
        {"old": 1, "new": 0, "diff": -1},
        {"old": -1, "new": 2, "diff": 3},
    )
    assert metrics["toy.loss"]["diff"] != 0


@pytest.mark.whole
def test_plots_diff_draws_both_sides(checked: Repo) -> None:
    """`dvc plots diff` writes a page with our series of HEAD and of the working tree; NaN is null and said so."""
    done = dvc(checked, "plots", "diff", "HEAD", "--json")
    assert done.returncode == 0, done.stderr
    plots = json.loads(done.stdout)["data"]
    assert {"losses", "golden/check-steps.json"} == plots.keys()
    drawn = plots["losses"][0]["content"]
    assert drawn["title"]["text"] == "Losses"
    rows = {(r["rev"], r["field"], r["step"]): r for r in drawn["data"]["values"]}
    unnamed = plots["golden/check-steps.json"][0]["content"]  # the stage names no column
    assert '"y": {"field": "toy/bits_agree"' in json.dumps(unnamed)
    agree = [r["toy/bits_agree"] for r in unnamed["data"]["values"] if r["rev"] == "workspace"]
    assert agree == [1, 1, 0, 0]
    old, new = (rows[rev, "toy/loss", 3] for rev in ("HEAD", "workspace"))
    assert (old["toy/bits_agree"], new["toy/bits_agree"]) == (1, 0)
    assert old["dvc_inferred_y_value"] != new["dvc_inferred_y_value"]
    ratio = [rows["workspace", "toy/ratio", step] for step in range(4)]
    assert [r["dvc_inferred_y_value"] for r in ratio] == [1.0, 1.0, None, 1.0]
    assert [r["toy/finite"] for r in ratio] == [1, 1, 0, 1]
    page = dvc(checked, "plots", "diff", "HEAD")
    assert page.returncode == 0 and "WARNING" not in page.stderr
    html = (checked.root / "dvc_plots" / "index.html").read_text()
    assert '"title": {"text": "Losses"' in html and "toy/ratio" in html and "steps whose bits agree" in html


@pytest.mark.whole
def test_exp_show_has_our_metrics(checked: Repo) -> None:
    """`dvc exp show` lists the check's numbers of HEAD and of the working tree, as JSON and as CSV."""
    done = dvc(checked, "exp", "show", "--json")
    revisions = [e["data"]["metrics"]["golden/check.json"]["data"]["toy"] for e in json.loads(done.stdout)]
    assert [e["agrees"] for e in revisions] == [0, 1]
    rows = list(csv.DictReader(io.StringIO(dvc(checked, "exp", "show", "--csv").stdout)))
    assert [row["toy.divergent_step"] for row in rows] == ["2", "-1"]


@pytest.mark.whole
def test_the_gate_still_fails(checked: Repo) -> None:
    """Without --exit-zero a difference is exit 1, with the same files written; where nothing is judged it is exit 3."""
    files = [checked.root / name for name in ("m.json", "p.json")]
    done = checked.repro("golden", "verify", "--all", "--metrics", "m.json", "--plots", "p.json")
    assert done.returncode == 1, done.stderr
    assert files[0].read_bytes() == (checked.root / "golden" / "check.json").read_bytes()
    assert files[1].read_bytes() == (checked.root / "golden" / "check-steps.json").read_bytes()
    for file in files:
        file.unlink()
    case = checked.root / "golden" / "cases" / "toy.toml"
    text = case.read_text()
    case.write_text(text.replace('name = "toy"', 'name = "new"'))
    case.rename(case.with_name("new.toml"))
    try:
        none = checked.repro("golden", "verify", "--all", "--exit-zero", "--metrics", "m.json")
    finally:
        case.with_name("new.toml").unlink()
        case.write_text(text)
    assert none.returncode == 3 and "not verifiable" in none.stdout, none.stdout + none.stderr
    files[0].unlink()


# -- init


def test_init_writes_a_stage_once_and_only_where_there_is_none(tmp_path: Path) -> None:
    """Init's stage is left alone by a second init; a repository with a dvc.yaml keeps its own."""
    repo = start(tmp_path)
    remote = str(tmp_path / "remote")
    assert f"wrote {STAGE}" in repo.repro("init", "--remote", remote).stdout
    (repo.root / STAGE).write_text((repo.root / STAGE).read_text() + "# mine\n")
    again = repo.repro("init")
    assert "nothing to do" in again.stdout
    assert (repo.root / STAGE).read_text().endswith("# mine\n")
    listed = dvc(repo, "stage", "list", STAGE)
    assert listed.returncode == 0 and "check" in listed.stdout, listed.stderr
    (repo.root / STAGE).rename(repo.root / "dvc.yaml")
    assert STAGE not in repo.repro("init").stdout and not (repo.root / STAGE).exists()


def test_our_own_stages_are_valid(tmp_path: Path) -> None:
    """DVC reads this repository's dvc.yaml, and every series in it is one that the built-in trainer has."""
    import yaml

    repo = Repo(tmp_path)
    repo.git("init", "--quiet")
    assert dvc(repo, "init", "--quiet").returncode == 0
    (tmp_path / "dvc.yaml").write_text((ROOT / "dvc.yaml").read_text())
    listed = dvc(repo, "stage", "list")
    assert listed.returncode == 0 and "Replay every golden run" in listed.stdout, listed.stderr
    raw = yaml.safe_load((ROOT / "dvc.yaml").read_text())
    assert "--exit-zero" in raw["stages"]["check"]["cmd"]
    series = {name for plot in raw["plots"] for fields in plot.values() for ys in fields["y"].values() for name in ys}
    metrics = {"loss", "pg_loss", "kl_loss", "grad_norm", "train_rollout_logprob_abs_diff",
               "train_rollout_logprob_abs_diff_max"}  # fmt: skip
    ours = {"golden_kl_k1", "golden_kl_k3"}
    assert series == {f"tiny-grpo/{name}" for name in metrics | ours}


# -- records


def records(folder: Path, a: list[list[Row]], b: list[list[Row]]) -> list[dict[str, object]]:
    left, right = (Trace(write(folder / name, steps)) for name, steps in (("trace", a), ("b", b)))
    golden = GoldenRun(folder, {"chain": left.chain})
    result = Verification(golden, compare(left, right), len(a), agreeing_steps(left, right))
    return [dict(r) for r in step_records("c", result)]


def test_records_all_have_the_same_keys(tmp_path: Path) -> None:
    """A metric that some steps lack, and one that is not finite, are null there; DVC drops tables with other gaps."""
    a = [[metric_row("loss", "loss", 1.0)] for _ in range(3)]
    b = [
        [metric_row("loss", "loss", 1.0)],
        [metric_row("loss", "loss", math.inf), metric_row("loss", "finite", 7.0)],
        [metric_row("loss", "loss", 2.0)],
    ]
    recorded = records(tmp_path, a, b)
    assert len({tuple(r) for r in recorded}) == 1
    assert [r["c/loss"] for r in recorded] == [1.0, None, 2.0]
    assert [r["c/finite"] for r in recorded] == [1, 0, 1]
    assert [r["c/metric/finite"] for r in recorded] == [None, 7.0, None]
    assert [r["c/bits_agree"] for r in recorded] == [1, 0, 0]
    assert list(recorded[0])[-1] == "c/bits_agree", "DVC draws the last column where a plot names none"
    back = records(tmp_path / "back", a, [a[0], b[1], a[2]])
    assert [r["c/bits_agree"] for r in back] == [1, 0, 1], "each step is judged by itself"
    assert [r["c/golden_kl_k1"] for r in recorded] == [None] * 3
    json.dumps(recorded, allow_nan=False)


def test_kl_is_zero_while_bits_agree(tmp_path: Path) -> None:
    """With log-probs KL is 0 up to the first difference, and the estimate from there on; NaN is null."""
    import struct
    from dataclasses import replace

    def step(*values: float) -> list[Row]:
        raw = struct.pack(f"<{len(values)}f", *values)
        return [replace(tensor_row("forward", "log_probs", raw), dtype="float32", shape=(len(values),))]

    a = [step(-1.0, -2.0)] * 4
    b = [step(-1.0, -2.0), step(-1.5, -2.0), step(math.nan, -2.0), step(-1.0, -2.0)]
    recorded = records(tmp_path / "x", a, b)
    assert [r["c/golden_kl_k1"] for r in recorded] == [0.0, 0.25, None, 0.0]
    assert [r["c/finite"] for r in recorded] == [1, 1, 0, 1]
    assert [r["c/golden_kl_k3"] for r in records(tmp_path / "y", a, a)] == [0.0] * 4
