"""Two layouts compared: shards by their fingerprints, differences in units of epsilon, and real runs of both."""

from __future__ import annotations

import json
import math
import sys
import venv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import history_kit as kit
import pytest
import torch
from conftest import Repo
from hypothesis import given
from hypothesis import strategies as st
from trace_kit import HEADER

from repro.report.layouts import headline
from repro_bisect.axes.layouts import EPSILON, compare_layouts, joined
from repro_bisect.axes.sets import layout_axis
from repro_bisect.driver.layout_difference import LayoutResult
from repro_bisect.predicates.predicates import Bitwise
from repro_bisect.probe.around import watched_rollouts
from repro_bisect.probe.executors.local import Local
from repro_bisect.probe.prober import Prober
from repro_bisect.probe.progress import Cost
from repro_golden.base.errors import ReproError
from repro_golden.case.file import find_case
from repro_golden.fingerprint.placement import shard
from repro_golden.repository.checkout import find_checkout
from repro_golden.store.rollouts import RolloutFiles
from repro_golden.subjects import identity_of
from repro_golden.subjects.environments import builds
from repro_golden.trace import Row, Trace, TraceWriter
from repro_golden.trace.signals import Signals
from repro_golden.trace.writer import digest_row

Taken = tuple[str, str, Any]


def trace(folder: Path, *steps: Sequence[Taken | Row]) -> Trace:
    """A trace of signals, as the recorder takes them."""
    writer = TraceWriter(folder, HEADER)
    for number, signals in enumerate(steps):
        for signal in signals:
            if isinstance(signal, Row):
                writer.add(signal)
                continue
            taken = Signals()
            taken.take(*signal)
            for row in taken.rows():
                writer.add(row)
        writer.end_step(number)
    writer.close({"reason": "finished"})
    return Trace(folder)


def pair(folder: Path, a: Sequence[Taken | Row], b: Sequence[Taken | Row], tolerance: float = 64.0) -> Any:
    """Two traces of one step, compared."""
    return compare_layouts(trace(folder / "a", a), trace(folder / "b", b), tolerance)


# -- units


@given(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.lists(st.floats(-100, 100, width=16), min_size=1, max_size=40),
    st.integers(0, 39),
    st.integers(1, 300),
)
def test_units_are_what_they_are_said_to_be(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, values: list[float], at: int, ulps: int
) -> None:
    """The distance is max |a - b| over eps times the largest magnitude of both, of all values where they are kept."""
    a = torch.tensor(values, dtype=dtype)
    b = a.clone()
    b[at % len(values)] += ulps * torch.finfo(dtype).eps
    comparison = pair(tmp_path_factory.mktemp("units"), [("forward", "x", a)], [("forward", "x", b)])
    if torch.equal(a, b):
        return
    scale = max(a.abs().max().item(), b.abs().max().item())
    wide = (a.double() - b.double()).abs().max().item()
    assert comparison.first is not None
    assert comparison.first.how == "whole"
    assert comparison.first.units == wide / (torch.finfo(dtype).eps * scale)
    assert (comparison.verdict == "part") == (comparison.first.units > 64)


def test_log_probs_are_compared_token_by_token(tmp_path: Path) -> None:
    """The gap is over unmasked tokens, in nats, and is there whether or not the layouts part."""
    mask, a = torch.tensor([1, 1, 1, 0]), torch.tensor([-1.0, -2.0, -4.0, -8.0])
    b = a + torch.tensor([0.0, 0.25, 0.5, 7.0])
    comparison = pair(tmp_path, *([("input", "loss_mask", mask), ("forward", "log_probs", x)] for x in (a, b)))
    gap = comparison.log_probs
    assert comparison.verdict == "part" and (gap.tokens, gap.differing, gap.largest, gap.mean) == (3, 2, 0.5, 0.25)
    assert comparison.to_mapping()["log_probs"]["largest"] == 0.5
    nan = torch.tensor([-1.0, math.nan, -4.0, -8.0])
    sides = ([("input", "loss_mask", mask), ("forward", "log_probs", x)] for x in (a, nan))
    assert pair(tmp_path / "nan", *sides).log_probs.largest == math.inf


def test_generators_of_ranks_have_no_partner(tmp_path: Path) -> None:
    """A seed for each rank is none of another layout; parameters of ranks are compared with its one."""
    weight, state = torch.ones(3), torch.arange(8, dtype=torch.uint8)
    ranks = [("update", f"{name}@{k}", value + k) for name, value in (("rng/torch", state), ("buffer/mean", weight))
             for k in range(2)]  # fmt: skip
    rows: list[Taken | Row] = [
        ("update", "w", weight),
        ("update", "rng/torch", state),
        ("update", "buffer/mean", weight),
    ]
    comparison = pair(tmp_path, rows, [("update", "w@0", weight), ("update", "w@1", weight), *ranks])
    assert comparison.verdict == "equal" and [len(comparison.alone[side]) for side in "ab"] == [2, 4]
    comparison = pair(tmp_path / "moved", rows, [("update", "w@0", weight), ("update", "w@1", weight * 2), *ranks])
    assert (comparison.verdict, comparison.first.signal) == ("part", "w")
    copies = [("update", f"copy/ema/w@{k}", weight + k) for k in range(2)]
    comparison = pair(tmp_path / "copy", [("update", "w", weight), ("update", "copy/ema/w", weight)],
                 [("update", "w", weight), *copies])  # fmt: skip
    assert (comparison.verdict, comparison.first.signal) == ("part", "copy/ema/w")


def test_a_metric_of_roundings_has_its_own_allowance(tmp_path: Path) -> None:
    """Within it its distance in epsilons counts for nothing; beyond it, and for NaN, the layouts part."""
    for name, other, verdict in (("in", 3e-7, "agree"), ("out", 3e-6, "part"), ("nan", math.nan, "part")):
        a, b = (trace(tmp_path / name / k, [("loss", "gap", v)]) for k, v in (("a", 1e-7), ("b", other)))
        assert compare_layouts(a, b, 64.0, {"gap": 1e-6}).verdict == verdict
        assert compare_layouts(a, b, 64.0).verdict == "part"


def test_an_allowance_is_for_all_signals_of_a_glob(tmp_path: Path) -> None:
    """The first pattern that fits counts, of tensors and metrics alike, but for inputs; what fits none has epsilons."""
    names = ("layers.0.k_proj.bias", "layers.1.k_proj.bias", "layers.0.q_proj.bias", "gap_max")

    def verdict(folder: Path, absolute: dict[str, float], moved: str, phase: str = "grad") -> str:
        sides = (
            trace(folder / side, [(phase, name, torch.full((3,), 1e-7 if (side, name) != ("b", moved) else 9e-7))
                                  for name in names[:3]] + [("loss", names[3], 1.0)])
            for side in ("a", "b")
        )  # fmt: skip
        a, b = sides
        return compare_layouts(a, b, 64.0, absolute).verdict

    biases = {"*.k_proj.bias": 1e-6}
    for number, (moved, wanted) in enumerate(zip(names, ("agree", "agree", "part", "equal"), strict=True)):
        assert verdict(tmp_path / str(number), biases, moved) == wanted
    assert verdict(tmp_path / "first", {"layers.0.*": 1e-7, **biases}, names[0]) == "part"
    assert verdict(tmp_path / "second", {"layers.0.*": 1e-7, **biases}, names[1]) == "agree"
    assert verdict(tmp_path / "part", {"k_proj": 1e-6}, names[0]) == "part", "a glob is of the whole name"
    assert verdict(tmp_path / "input", biases, names[0], "input") == "part"


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        (0.28, 0.279, "agree"),
        (0.28, 0.26, "part"),
        (0.26, 0.28, "part"),
        (-0.28, -0.279, "agree"),
        (0.28, -0.28, "part"),
        (0.0, 0.0, "equal"),
        (0.0, 1e-30, "part"),
        (math.nan, 0.28, "part"),
        (math.inf, 0.28, "part"),
    ],
)
def test_a_relative_allowance_is_a_share_of_the_larger_side(tmp_path: Path, a: float, b: float, verdict: str) -> None:
    """A norm may be 1 % off and not 7 %; small numbers get no absolute slack, and NaN or infinity are in no share."""
    sides = [trace(tmp_path / k, [("grad", "grad_norm", v)]) for k, v in (("a", a), ("b", b))]
    assert compare_layouts(*sides, 64.0, None, {"grad_*": 0.01}).verdict == verdict


def test_a_tolerance_of_nothing_is_equal_bits(tmp_path: Path) -> None:
    """-0.0 for 0.0 parts, and a difference that no sample shows; what has an allowance of its own still has it."""
    zeros = torch.zeros(3)
    assert pair(tmp_path / "zero", [("grad", "w", zeros)], [("grad", "w", -zeros)], 0.0).parted.signal == "w"
    wide = torch.linspace(0, 1, 5000).reshape(50, 100)
    other = wide.clone()
    other[0, 1] += 1e-3
    unseen = pair(tmp_path / "unseen", [("grad", "w", wide)], [("grad", "w", other)], 0.0)
    assert (unseen.parted.how, unseen.parted.beyond) == ("at least", "every bit must be equal")
    sides = [[("grad", "w", wide), ("grad", "grad_norm", norm)] for norm in (1.0, 1.0 + 2e-7)]
    a, b = (trace(tmp_path / name, side) for name, side in zip("ab", sides, strict=True))
    comparison = compare_layouts(a, b, 0.0, {"grad_norm": 1e-6})
    assert (comparison.verdict, comparison.first.signal, comparison.first.beyond) == ("agree", "grad_norm", "")
    assert compare_layouts(a, b, 0.0).verdict == "part" and compare_layouts(a, a, 0.0).verdict == "equal"


def test_what_only_hashes_tell_is_no_equal_bits(tmp_path: Path) -> None:
    """Digests that differ are no measure, and no agreement bit for bit; what the case allows is said to be that."""

    def said(name: str, a: Taken | Row, b: Taken | Row, absolute: dict[str, float]) -> str:
        x, y = (trace(tmp_path / name / k, [("grad", "w", torch.ones(3)), row]) for k, row in (("a", a), ("b", b)))
        comparison = compare_layouts(x, y, 64.0, absolute)
        return headline(LayoutResult("one", "two", "toy", "", comparison.verdict, {}, comparison, [], Cost(), 1.0, ""))

    files = [digest_row("update", "saved/last.pt", bytes([n]) * 32) for n in (1, 2)]
    unknown = "one and two agree on toy, as far as is known: 1 difference could not be measured"
    assert said("files", files[0], files[1], {}) == unknown
    assert said("same", files[0], files[0], {}) == "one and two agree bit for bit on toy"
    allowed = said("allowed", ("loss", "gap", 1e-7), ("loss", "gap", 3e-7), {"gap": 1e-6})
    assert allowed == "one and two agree within what the case allows on toy"


def test_what_was_trained_under_other_names_is_no_agreement(tmp_path: Path) -> None:
    """Without a gradient or parameter in common nothing is told; with some of them in one layout alone, not all is."""
    weight, loss = torch.ones(3), ("loss", "loss", 1.0)
    with pytest.raises(ReproError, match=r"no gradient and no parameter in common, such as w and inner\.w"):
        pair(tmp_path / "renamed", [loss, ("grad", "w", weight)], [loss, ("grad", "inner.w", weight)])
    comparison = pair(tmp_path / "more", [("grad", "w", weight), ("grad", "b", weight)], [("grad", "w", weight)])
    assert (comparison.verdict, comparison.untold) == ("agree", 1)
    message = headline(LayoutResult("one", "two", "toy", "", comparison.verdict, {}, comparison, [], Cost(), 1.0, ""))
    assert message == "one and two agree on toy, as far as is known: 1 trained tensor of one layout alone not compared"


def test_ranks_versions_are_compared_from_either_side(tmp_path: Path) -> None:
    """Gradients that ranks have in versions of their own part from the other layout's one, whichever comes first."""
    ranks = [("grad", "w@0", torch.ones(3)), ("grad", "w@1", torch.zeros(3))]
    for name, sides in (("a", (ranks, [("grad", "w", torch.ones(3))])), ("b", ([("grad", "w", torch.ones(3))], ranks))):
        comparison = pair(tmp_path / name, *sides)
        assert (comparison.verdict, comparison.signals) == ("part", 2 if name == "a" else 1)


def test_epsilons_are_torchs() -> None:
    """The distance from 1 to the next number, as torch has it; a metric's is fp32's."""
    assert {k: v for k, v in EPSILON.items() if k != "metric"} == {
        name: torch.finfo(getattr(torch, name)).eps for name in EPSILON if name != "metric"
    }
    assert EPSILON["metric"] == torch.finfo(torch.float32).eps


def test_a_sample_says_that_it_is_one(tmp_path: Path) -> None:
    """Of a large tensor only a sample is kept; what it misses is known by the largest magnitude at least, or not."""
    a = torch.linspace(0, 1, 5000).reshape(50, 100)
    comparison = pair(tmp_path / "1", [("grad", "w", a)], [("grad", "w", a * (1 + 2e-6))])
    assert (comparison.first.how, comparison.verdict) == ("sampled", "agree")
    assert 10 < comparison.first.units < 20
    b = a.clone()
    b[0, 1] += 1e-3
    comparison = pair(tmp_path / "2", [("grad", "w", a)], [("grad", "w", b)])
    assert (comparison.first.how, comparison.first.units, comparison.first.size) == ("at least", 0.0, "not measured")
    assert (comparison.verdict, comparison.unmeasured) == ("agree", 1)
    b[-1, -1] = 2.0
    comparison = pair(tmp_path / "3", [("grad", "w", a)], [("grad", "w", b)])
    assert comparison.first.units == 1.0 / (2.0 * 2**-23)
    assert comparison.verdict == "part"


@pytest.mark.parametrize(
    ("phase", "a", "b", "why"),
    [
        ("input", torch.ones(3), torch.ones(3) + 2**-23, "an input differs"),
        ("forward", torch.ones(3), torch.ones(3).double(), "dtypes differ"),
        ("forward", torch.ones(3), torch.ones(3, 1), "shapes differ"),
        ("forward", torch.tensor([1, 2]), torch.tensor([1, 3]), "int64 has no epsilon"),
        ("forward", torch.ones(3), torch.tensor([1, 1, math.nan]), "0 non-finite became 1"),
        ("forward", torch.tensor([1.0, math.inf]), torch.tensor([math.inf, 1.0]), "beyond 64 eps"),
    ],
)
def test_what_no_reordered_sum_explains(tmp_path: Path, phase: str, a: torch.Tensor, b: torch.Tensor, why: str) -> None:
    """Another input, dtype, shape, integer or NaN parts two layouts whatever the tolerance."""
    comparison = pair(tmp_path, [(phase, "x", a)], [(phase, "x", b)])
    assert comparison.parted.beyond == why
    assert comparison.verdict == "part"


def test_order_tolerance_and_what_is_alone(tmp_path: Path) -> None:
    """The first difference and the first beyond the tolerance are told apart, step by step and phase by phase."""
    ones = torch.ones(4)
    eps = 2.0**-23
    a = trace(
        tmp_path / "a",
        [("grad", "g", ones), ("forward", "f", ones), ("loss", "loss", 1.0), ("forward", "mine", ones)],
        [("forward", "f", ones)],
    )
    steps = [
        [
            ("grad", "g", ones + 8 * eps),
            ("forward", "f", ones + 2 * eps),
            ("loss", "loss", 1.0),
            ("forward", "yours@1", ones),
        ],
        [("forward", "f", ones + 100 * eps)],
    ]
    b = trace(tmp_path / "b", *steps)
    comparison = compare_layouts(a, b)
    assert (comparison.first.signal, comparison.first.phase, comparison.first.step) == ("f", "forward", 0)
    assert (comparison.parted.signal, comparison.parted.step, comparison.worst) == ("f", 1, comparison.parted)
    assert (comparison.signals, comparison.equal, comparison.steps) == (4, 1, 2)
    assert comparison.alone == {"a": ["forward mine"], "b": ["forward yours@1"]}
    assert compare_layouts(a, b, 4).parted.signal == "g"
    assert compare_layouts(a, b, 1000).verdict == "agree"
    assert compare_layouts(a, a).verdict == "equal"
    json.dumps(comparison.to_mapping())


def test_nothing_in_common_is_refused(tmp_path: Path) -> None:
    """Layouts that observe nothing alike are not said to agree."""
    with pytest.raises(ReproError, match="have no signal in common"):
        pair(tmp_path, [("forward", "x", torch.ones(2))], [("forward", "y", torch.ones(2))])


def test_ranks_that_hold_their_own_version(tmp_path: Path) -> None:
    """A parameter that ranks hold apart is compared with the single one, each; the losses of ranks are not."""
    w = torch.ones(3)
    b = [("update", "w@0", w), ("update", "w@1", w * 2), ("loss", "loss@0", 1.0), ("loss", "loss@1", 2.0)]
    comparison = pair(tmp_path, [("update", "w", w), ("loss", "loss", 1.5)], b)
    assert (comparison.parted.signal, comparison.parted.detail) == ("w", "float32 [3], on rank 1")
    assert comparison.alone == {"a": ["loss loss"], "b": ["loss loss@0", "loss loss@1"]}


@given(st.sampled_from([1, 2, 3]), st.integers(0, 1), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
def test_shards_are_joined_by_their_fingerprints(
    tmp_path_factory: pytest.TempPathFactory, ranks: int, dim: int, dtype: torch.dtype, changed: bool
) -> None:
    """Shards of a tensor equal the whole without being gathered, and no longer do where one bit differs."""
    whole = torch.arange(36.0).reshape(6, 6).to(dtype)
    rows = []
    for rank in range(ranks):
        local = whole.chunk(ranks, dim)[rank].clone(memory_format=torch.contiguous_format)
        if changed and rank == ranks - 1:
            local[0, 0] += 0.5
        taken = Signals()
        taken.take("update", f"w@{rank}", local, shard(f"w@{rank}", (6, 6), dim, rank, ranks))
        rows += taken.rows()
    comparison = pair(
        tmp_path_factory.mktemp("shards"), [("update", "w", whole)], rows if ranks > 1 else [replace(rows[0], name="w")]
    )
    assert comparison.signals == 1
    assert (comparison.verdict == "equal") == (not changed)
    if ranks > 1:
        assert [row.name for row in joined(rows)] == ["w"]
        assert len(joined(rows[1:])) == ranks - 1, "without a rank the shards stay what they are"


def test_metrics_are_shown(tmp_path: Path) -> None:
    """A metric is a float: its own values are shown, and the unit is fp32's epsilon."""
    comparison = pair(tmp_path, [("loss", "loss", 1.0)], [("loss", "loss", 1.0 + 2.0**-22)])
    assert (comparison.first.units, comparison.first.detail) == (2.0 / (1 + 2.0**-22), "1.0 became 1.000000238418579")


# -- real runs

TRAIN = """
import os
import torch
import torch.distributed as dist
torch.manual_seed(int.from_bytes(os.urandom(4), "big") if os.environ.get("NOISE") else 3)
world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
if world > 1:
    dist.init_process_group("gloo")
    if os.environ.get("WAY") == "fsdp":
        from torch.distributed.fsdp import fully_shard
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (world,)))
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    every = torch.randn(4096, 8, generator=torch.Generator().manual_seed(step))
    x = every.chunk(world)[rank]
    scale = float(os.environ.get("SCALE", "1")) if step else 1.0
    loss = (model(x) * scale).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if world > 1:
    dist.destroy_process_group()
"""
LAUNCH = '"{python} -m torch.distributed.run --nproc-per-node 2 train.py"'
CASE = f"""
[case]
name = "toy"
steps = 2

[subject]
kind = "command"
command = "{{python}} train.py"
path = "train.py"
timeout = "10m"

[layouts.ddp]
command = {LAUNCH}
ranks = 2

[layouts.fsdp]
command = {LAUNCH}
ranks = 2
env = {{ WAY = "fsdp" }}

[layouts.wrong]
command = {LAUNCH}
ranks = 2
env = {{ SCALE = "1.001" }}

[layouts.scaled]
env = {{ SCALE = "1.001" }}

[layouts.noisy]
env = {{ NOISE = "1" }}
"""


def sides(repo: Repo, layout: str, *arguments: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """JSON and the report of a comparison."""
    done = repo.repro("bisect", "--layout", layout, "--json", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    data = json.loads(done.stdout)
    return data, Path(data["reports"][0]).read_text()


@pytest.mark.whole
def test_the_key_that_computes_something_else(tmp_path: Path) -> None:
    """A layout with another loss parts from the case where it is another, and of two keys the right one is named."""
    repo = kit.start(tmp_path, TRAIN, CASE)
    result, report = sides(repo, "case..scaled,threads=1", "-j", "1")
    parted = result["comparison"]["parted"]
    assert (result["outcome"], parted["step"], parted["phase"], parted["how"]) == ("part", 1, "grad", "whole")
    assert [(b["key"], b["comparison"]["verdict"] == "part") for b in result["between"]] == [
        ("table: case -> scaled", True),
        ("threads: the layout's own -> 1", False),
    ]
    assert report.startswith("# case and scaled,threads=1 part on toy: step 1, phase grad")
    assert result["reproduce"].startswith("repro bisect --layout case..scaled,threads=1 --at ")


@pytest.mark.whole
def test_a_layout_that_does_not_reproduce_itself(tmp_path: Path) -> None:
    """It is said to, with how it differs from itself, and nothing is compared."""
    repo = kit.start(tmp_path, TRAIN, CASE)
    result, report = sides(repo, "case..noisy", code=3)
    assert (result["outcome"], result["comparison"], list(result["flaky"])) == ("flaky", None, ["noisy"])
    assert "noisy does not reproduce itself on toy" in report


def keys(repo: Repo, layouts: str) -> list[str]:
    """The keys under which probes of both layouts are journalled."""
    checkout, case = find_checkout(repo.root), find_case(repo.root, "toy")
    axis = layout_axis(checkout, case, layouts, at=None)
    executor, rollouts = Local(checkout, axis.roomy, None, 1), watched_rollouts(axis.roomy, RolloutFiles(None))
    prober = Prober(checkout, axis.roomy, axis, rollouts, identity_of(axis.roomy, repo.root), executor, Bitwise())
    journal_keys = [prober.key(point) for point in (axis.good, *axis.parents)]
    prober.close()
    executor.close()
    return journal_keys


def test_a_run_of_the_case_serves_every_layout(tmp_path: Path) -> None:
    """What was replayed of the case beside one layout is not replayed beside another of other threads or ranks."""
    repo = kit.start(tmp_path, TRAIN, CASE)
    by_layout = [keys(repo, f"case..{other}") for other in ("threads=2", "scaled,threads=3", "ddp", "scaled")]
    assert len({points[0] for points in by_layout}) == 1
    assert all(len({*points}) == len(points) for points in by_layout)


@pytest.mark.whole
def test_a_layout_in_another_python(tmp_path: Path) -> None:
    """A package that was upgraded in the Python that a layout's command names makes that layout's probes anew alone."""
    site = tmp_path / "venv" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    venv.create(tmp_path / "venv", with_pip=False)
    (site / "ours.pth").write_text("".join(f"{path}\n" for path in sys.path if path and Path(path).is_dir()))
    table = f'[layouts.other]\ncommand = "{tmp_path}/venv/bin/python train.py"\n'
    repo, journal_keys = kit.start(tmp_path / "repo", TRAIN, CASE + table), []
    for version in ("1.0", "1.1"):
        (site / "limit-1.dist-info").mkdir(exist_ok=True)
        about = f"Metadata-Version: 2.1\nName: limit\nVersion: {version}\n"
        (site / "limit-1.dist-info" / "METADATA").write_text(about)
        builds.asked.cache_clear()
        journal_keys.append(keys(repo, "case..other"))
    assert [a == b for a, b in zip(*journal_keys, strict=True)] == [True, False]


@pytest.mark.campaign
def test_two_ranks(tmp_path: Path) -> None:
    """DDP and FSDP over two ranks agree with one process within the tolerance; with another loss they part there.

    The sharded weights that they start from are seen to be equal, without being gathered.
    """
    repo = kit.start(tmp_path, TRAIN, CASE)
    result, _ = sides(repo, "case..ddp")
    assert (result["outcome"], result["comparison"]["first"]["how"]) == ("agree", "whole")
    result, _ = sides(repo, "case..wrong")
    first, parted = result["comparison"]["first"], result["comparison"]["parted"]
    assert (first["step"], first["phase"], first["beyond"], parted["step"]) == (0, "grad", "", 1)
    result, report = sides(repo, "case..fsdp", "--tolerance", "100")
    assert (result["outcome"], result["comparison"]["first"]["phase"]) == ("agree", "grad")
    assert result["comparison"]["unmeasured"] > 0, "shards keep no values"
    assert "as far as is known" in report and "--tolerance 100" in result["reproduce"]


@pytest.mark.campaign
def test_threads_of_the_built_in_trainer(recorded: Repo) -> None:
    """Another number of threads is another layout of the built-in trainer, replayed on the same rollouts."""
    result, _ = sides(recorded, "threads=1..threads=2")
    assert result["outcome"] in ("equal", "agree")
    assert result["comparison"]["steps"] == 3
