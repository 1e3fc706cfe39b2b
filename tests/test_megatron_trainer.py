"""The RL step on megatron-core in every layout: against one process, against itself, and against the built-in policy.

All layouts train on the same rollout, two updates. Where no matrix is split and no sum is made in another order, every
signal is equal to the bit; elsewhere it is a few epsilons off, and the bounds are about three times what was measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_jobs_kit import CP, EP, PP, SP, TP, VPP, Jobs, Key, eps_units, same, write_rollout
from once_kit import once
from torch import Tensor

from repro_golden.case.identity import Identity, collect
from repro_golden.fingerprint import fingerprint, merge, shares

torch.set_num_threads(1)

Job = tuple[int, str, dict[str, Any], dict[str, Any]]
FULL, SELECTIVE = ({"recompute_granularity": kind} for kind in ("full", "selective"))
DISTRIBUTED = {"use_distributed_optimizer": True}
BF16 = {"dtype": "bf16"}
PPO = {"advantage_estimator": "ppo"}
CLIP = {"clip_grad": 0.01}
"""Far below every norm of these updates: each gradient is scaled, and by what all ranks must agree on."""
REFERENCES: dict[str, Job] = {
    "dense": (1, "dense", {}, {}),
    "moe": (1, "moe", {}, {}),
    "tied": (1, "tied", {}, {}),
    "bf16": (1, "dense", {}, BF16),
    "ppo": (1, "dense", {}, PPO),
    "deep": (1, "deep", {}, {}),
    "clipped": (1, "dense", {}, CLIP),
    "moe, clipped": (1, "moe", {}, CLIP),
    "ppo, clipped": (1, "dense", {}, {**PPO, **CLIP}),
}
EXACT: dict[str, tuple[str, Job]] = {
    "recompute full": ("dense", (1, "dense", FULL, {})),
    "recompute selective": ("dense", (1, "dense", SELECTIVE, {})),
    "recompute full, experts": ("moe", (1, "moe", FULL, {})),
    "pp2": ("dense", (2, "dense", PP, {})),
    "pp2, recompute": ("dense", (2, "dense", {**PP, **FULL}, {})),
    "pp2, experts": ("moe", (2, "moe", PP, {})),
    "pp2, bf16": ("bf16", (2, "dense", PP, BF16)),
    "pp2, ppo": ("ppo", (2, "dense", PP, PPO)),
    "pp2, interleaved": ("deep", (2, "deep", VPP, {})),
    "dp2": ("dense", (2, "dense", {}, {})),
    "dp2, experts": ("moe", (2, "moe", {}, {})),
    "dp2, distributed optimizer": ("dense", (2, "dense", DISTRIBUTED, {})),
    "dp2, bf16, distributed optimizer": ("bf16", (2, "dense", DISTRIBUTED, BF16)),
    "pp2 dp2": ("dense", (4, "dense", PP, {})),
}
CLOSE: dict[str, tuple[str, Job, tuple[float, float, float, float]]] = {
    # layout: (one process, job, bounds in epsilons of columns, metrics, gradients, weights and moments)
    "tp2": ("dense", (2, "dense", TP, {}), (10, 12, 50, 60)),
    "tp2, tied": ("tied", (2, "tied", TP, {}), (10, 12, 50, 75)),
    "sp2": ("dense", (2, "dense", SP, {}), (10, 12, 50, 60)),
    "sp2, ppo": ("ppo", (2, "dense", SP, PPO), (10, 12, 60, 70)),
    "sp2, experts": ("moe", (2, "moe", SP, {}), (10, 10, 60, 120)),
    "pp2, tied": ("tied", (2, "tied", PP, {}), (5, 4, 20, 30)),
    "cp2": ("dense", (2, "dense", CP, {}), (6, 6, 60, 45)),
    "cp2, ppo": ("ppo", (2, "dense", CP, PPO), (7, 6, 30, 35)),
    "ep2": ("moe", (2, "moe", EP, {}), (4, 4, 25, 40)),
    "tp2 pp2": ("dense", (4, "dense", {**TP, **PP}, {}), (10, 12, 50, 60)),
    "tp2 dp2": ("dense", (4, "dense", TP, {}), (10, 12, 50, 60)),
    "tp2 cp2": ("dense", (4, "dense", {**TP, **CP}, {}), (10, 12, 50, 60)),
    "sp2 ep2": ("moe", (4, "moe", {**SP, **EP, "moe_token_dispatcher_type": "allgather"}, {}), (6, 6, 60, 120)),
}
CLIPPED = {
    "sp2, clipped": ("clipped", (2, "dense", SP, CLIP), (10, 12, 110, 80)),
    "sp2, ppo, clipped": ("ppo, clipped", (2, "dense", SP, {**PPO, **CLIP}), (10, 12, 50, 70)),
    "ep2, clipped": ("moe, clipped", (2, "moe", EP, CLIP), (2, 2, 10, 15)),
}
CLOSE |= CLIPPED
LAYOUTS = {**REFERENCES, **{name: job for name, (_, job) in EXACT.items()}, **{n: j for n, (_, j, _) in CLOSE.items()}}
LONG = {"global_batch_size": 8, "num_steps_per_rollout": 1, "max_response_len": 54, "max_tokens_per_micro_batch": 256}
"""Products over 236 rows: enough for two threads to share, and not in equal parts."""
SAMPLED = ("dense", "moe", "tp2", "pp2", "ep2")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """All layouts, trained twice, each time in another interpreter; and more threads, in the first."""
    return Jobs(once(tmp_path_factory, "megatron-layouts", _run), ())


def _run(folder: Path) -> None:
    jobs = Jobs(folder, ("dense", "moe", "tied", "deep"))
    for name, (world, kind, megatron, settings) in sorted(LAYOUTS.items(), key=lambda item: item[1][0]):
        after = [["sample", 7], ["weights"]] if name in SAMPLED else []
        jobs.add(world, name, kind, megatron, do=[["train", jobs.path(f"{kind}.rollout")], *after], **settings)
    jobs.run("again")
    write_rollout(jobs.folder / "long.rollout", jobs.config("dense", **LONG))
    for hidden, path, settings in ((64, "dense", {}), (512, "long", LONG)):
        model = {"hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": 1}
        for threads in (1, 2):
            given = {**settings, "hf_checkpoint": None, "model": model, "threads": threads}
            train = [["train", jobs.path(f"{path}.rollout"), 1]]
            jobs.add(1, f"{hidden} {threads}", megatron={"pad_to_multiple": 1}, do=train, **given)
    jobs.run()


def differing(jobs: Jobs, a: str, b: str) -> list[Key]:
    """The signals of which some bit differs; both jobs have the same."""
    left, right = jobs.joined(a), jobs.joined(b)
    left, right = ({k: v for k, v in all_.items() if k[1] not in ("sample", "weights")} for all_ in (left, right))
    assert left.keys() == right.keys() and any(key[1] == "update" for key in left)
    return [key for key in left if not same(left[key], right[key])]


def same_bits(jobs: Jobs, name: str) -> None:
    """All signals but the norm, which sums squares in another order: stages and slices add up their own first.

    It is a metric here, since gradients are not clipped.
    """
    apart = differing(jobs, name, EXACT[name][0])
    assert {key[2].removeprefix("critic/") for key in apart} <= {"grad_norm"}
    if "pp2" not in name and "distributed" not in name:
        assert not apart
    whole, other = jobs.joined(EXACT[name][0]), jobs.joined(name)
    for key in apart:
        assert float(other[key]) == pytest.approx(float(whole[key]), rel=2.0**-21)


def within_bounds(jobs: Jobs, name: str) -> None:
    """Each phase; the loss's inputs are equal to the bit, and something does differ."""
    reference, _, bounds = CLOSE[name]
    whole, other = jobs.joined(reference), jobs.joined(name)
    measured = {phase: eps_units(other, whole, phase) for phase in ("input", "forward", "loss", "grad", "update")}
    assert measured.pop("input") == 0.0
    for (phase, gap), bound in zip(measured.items(), bounds, strict=True):
        assert gap <= bound, f"{phase}: {gap:.1f} epsilons, of {measured}"
    assert differing(jobs, name, reference)


def test_two_ranks_train_as_one_does(tmp_path: Path) -> None:
    """Stages to the bit, split matrices but for rounding: what the whole tier says of every layout."""
    jobs = Jobs(tmp_path, ("dense",))
    for name in ("dense", "pp2", "tp2"):
        world, kind, megatron, settings = LAYOUTS[name]
        jobs.add(world, name, kind, megatron, **settings)
    jobs.run()
    same_bits(jobs, "pp2")
    within_bounds(jobs, "tp2")


@pytest.mark.whole
@pytest.mark.parametrize("name", EXACT)
def test_where_the_arithmetic_is_the_same_so_is_every_bit(name: str, jobs: Jobs) -> None:
    """Columns, metrics, gradients, weights and moments of both updates."""
    same_bits(jobs, name)


@pytest.mark.whole
@pytest.mark.parametrize("name", CLOSE)
def test_where_sums_are_made_in_another_order_differences_are_epsilons(name: str, jobs: Jobs) -> None:
    """Each phase within its bound."""
    within_bounds(jobs, name)


@pytest.mark.whole
@pytest.mark.parametrize("name", CLIPPED)
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(name: str, jobs: Jobs) -> None:
    """Every norm is that of all gradients joined, each counted once; it is above the limit, and acts."""
    gathered = jobs.joined(name)
    norms = [key for key in gathered if key[2].endswith("grad_norm") and key[1] == "grad"]
    assert {key[2] for key in norms} == ({"grad_norm", "critic/grad_norm"} if "ppo" in name else {"grad_norm"})
    for step, _, metric in norms:
        prefix = metric.removesuffix("grad_norm")
        gradients = {
            key: tensor.double() for (number, phase, key), tensor in gathered.items()
            if (number, phase) == (step, "grad") and tensor.ndim and key.startswith("critic/") == bool(prefix)
        }  # fmt: skip
        whole = sum(float(tensor.square().sum()) for tensor in gradients.values()) ** 0.5
        assert float(gathered[step, "grad", metric]) == pytest.approx(whole, rel=1e-5) and whole > 2 * CLIP["clip_grad"]
        if step:
            continue
        for key, tensor in gradients.items():  # Adam's first moment is a tenth of the first gradient
            kept = gathered[0, "update", f"{prefix}exp_avg/{key.removeprefix(prefix)}"].double()
            wanted = 0.1 * CLIP["clip_grad"] / whole * tensor
            assert float((kept - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


@pytest.mark.whole
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_repeats_itself_in_fresh_processes(name: str, jobs: Jobs) -> None:
    """Twice, in another interpreter: every rank's every signal equal to the bit."""
    for first, second in zip(jobs.ranks(name), jobs.ranks(name, "again"), strict=True):
        assert first.signals.keys() == second.signals.keys() and first.signals
        assert [k for k, (value, _) in first.signals.items() if not same(value, second.signals[k][0])] == []


def started(jobs: Jobs, name: str) -> dict[str, str]:
    """Fingerprints of the weights at load, merged over the ranks by their placements alone."""
    parts: dict[str, list[Any]] = {}
    for rank in jobs.ranks(name):
        for (_, phase, _), (tensor, place) in rank.signals.items():
            if phase == "input" and place is not None:
                for canonical, share in shares(tensor, place).items():
                    parts.setdefault(canonical, []).append(share)
    return {canonical: merge(each).fingerprint for canonical, each in parts.items()}


@pytest.mark.whole
@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_at_load_have_one_fingerprint_in_every_layout(name: str, jobs: Jobs) -> None:
    """Merged over ranks they are the fingerprints of the whole tensors, under Hugging Face's names."""
    from repro_core.model.hf import load_hf

    _, kind, _, settings = LAYOUTS[name]
    wanted = dict(load_hf(jobs.folder / kind).named_parameters())
    if settings.get("dtype") == "bf16":
        wanted = {name: weight.bfloat16().float() for name, weight in wanted.items()}
    expected = {f"start/{name}": fingerprint(weight.detach()) for name, weight in wanted.items()}
    start = started(jobs, name)
    if settings.get("advantage_estimator") == "ppo":
        expected |= {f"start/critic/{name}": fingerprint(weight.detach()) for name, weight in wanted.items()}
        del expected["start/critic/lm_head.weight"]
        hidden = wanted["model.norm.weight"].numel()
        expected["start/critic/score.weight"] = fingerprint(torch.zeros(1, hidden))
    assert start == expected


@pytest.mark.whole
@pytest.mark.parametrize("name", SAMPLED)
def test_every_rank_samples_with_the_trained_weights(name: str, jobs: Jobs) -> None:
    """After training, the gathered policy has the joined weights; all ranks sample the same (see `Jobs.joined`)."""
    gathered = jobs.joined(name)
    weights = {key: value for (_, phase, key), value in gathered.items() if phase == "weights"}
    last = max(step for step, phase, _ in gathered if phase == "update")
    assert weights and all(same(weights[key], gathered[last, "update", key]) for key in weights)
    if name == "pp2":  # the state of one process, to the bit
        state = jobs.joined("dense")
        sampled = [key for key in state if key[1] == "sample"]
        assert sampled and all(same(gathered[key], state[key]) for key in sampled)


@pytest.mark.whole
def test_more_threads_are_another_machine(jobs: Jobs) -> None:
    """Two threads change no bit of short sequences at hidden 64, and some at hidden 512; an identity always differs."""
    identity, other = (collect({}, threads=threads) for threads in (1, 2))
    assert [str(d) for d in identity.differences(other)] == ["layout threads: 1 -> 2"]
    assert identity.machine != other.machine and Identity.from_mapping(other.to_mapping()) == other
    assert differing(jobs, "64 1", "64 2") == []
    apart = differing(jobs, "512 1", "512 2")
    if not apart:
        pytest.skip("this CPU's matrix products do not depend on the number of threads")
    assert "grad" in {phase for _, phase, _ in apart}


@pytest.mark.whole
def test_the_columns_of_a_rollout_are_not_all_alike(jobs: Jobs) -> None:
    """What the comparisons above compare is not empty: ratios, KL and advantages of the second update are not 0."""
    gathered: dict[Key, Tensor] = jobs.joined("dense")
    assert float(gathered[1, "forward", "kl"].abs().max()) > 1e-4
    assert float(gathered[1, "forward", "advantages"].abs().max()) > 0.1
    moved = gathered[1, "forward", "log_probs"] - gathered[1, "forward", "old_log_probs"]
    assert float(moved.abs().max()) > 1e-3
