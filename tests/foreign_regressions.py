"""Regressions that slime, Miles and Relax really had: edits of the small trainer, and where each shows first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

System = Literal["slime", "miles", "relax"]


@dataclass(frozen=True)
class Regression:
    """One regression.

    Attributes:
        name: Its name; the case of a fork that holds it is called so too.
        system: The trainer that it is planted in.
        file: The file of the trainer's package.
        old: The text that stands there, once.
        new: What the culprit makes of it; empty with `old` where no commit changes a number.
        step: The optimizer update at which it shows first.
        phase: The phase of that update.
        signal: The first signal of that phase that differs, in the order of a trace.
        others: All others of that phase that differ too.
        flags: What the launch script needs beside the usual.
        gpus: Simulated ranks.
        steps_per_rollout: Updates that are made of one rollout.
        by_group: Whether samples lie in the dumps group after group; else as engines finish them.
        predicate: One that holds for the commits before it and not for it, without bitwise equality.
        broken: The first and the last commit after GOOD, counted from 1, at which a replay crashes at its start.
        culprit: The commit after GOOD that holds it, counted from 1; any by default.
    """

    name: str
    system: System
    file: str
    old: str
    new: str
    step: int
    phase: str
    signal: str
    others: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    gpus: int = 1
    steps_per_rollout: int = 1
    by_group: bool = True
    predicate: str | None = None
    broken: tuple[int, int] | None = None
    culprit: int | None = None
    title: str = field(default="", compare=False)


_PPO = ("--advantage-estimator", "ppo")
_COOL = ("--rollout-temperature", "0.8")
_TOKENWISE = "--calculate-per-token-loss"
_MEANS = ("loss", "pg_loss", "entropy_loss", "train_rollout_logprob_abs_diff")

TEMPERATURE = (
    "logits, at = get_responses(args, model, batch, apply_temperature=True)",
    "logits, at = get_responses(args, model, batch, apply_temperature=False)",
)
WHITENING = (
    "group_of(other) == group_of(rank)",
    "group_of(other, with_context_parallel=False) == group_of(rank, with_context_parallel=False)",
)
ENGINE = (
    "Engine(args) if args.load_debug_rollout_data is None else None",
    "Engine(args)",
)
"""Replay broken: the engine is made though nothing will be sampled, and finds that there is none."""

REGRESSIONS: dict[str, Regression] = {
    regression.name: regression
    for regression in (
        Regression(
            "bf16-rollout-log-probs", "slime", "samples.py",
            '"rollout_log_probs": "float32"', '"rollout_log_probs": "bfloat16"',
            0, "input", "rollout_log_probs",
            predicate="metric:train_rollout_logprob_abs_diff atol=1e-4",
            title="Tensorize engine log-probs with the model's dtype",
        ),
        Regression(
            "nan-in-old-log-probs", "miles", "actor.py", "host[:] = flat", "host[1:] = flat[1:]",
            0, "forward", "log_probs", flags=("--true-on-policy-mode",),
            title="Reuse the host buffer between rollouts",
        ),
        Regression(
            "masked-tokens-in-kl", "slime", "loss.py",
            'sums["kl_loss"] = total(kl)', 'sums["kl_loss"] = np.float32(kl.mean() * len(columns["tokens"]))',
            1, "loss", "kl_loss", flags=("--use-kl-loss", "--kl-loss-coef", "0.00"),
            title="Report KL as a plain mean",
        ),
        Regression(
            "per-token-loss-scaled-twice", "slime", "actor.py",
            "if not self.args.calculate_per_token_loss:\n            scale = scale",
            "if self.args.global_batch_size:\n            scale = scale",
            0, "grad", "grad_norm", flags=(_TOKENWISE,), predicate="metric:grad_norm rtol=0.01",
            title="Scale every loss the same way",
        ),
        Regression(
            "temperature-ignored", "slime", "model.py", *TEMPERATURE,
            0, "forward", "log_probs", ("ref_log_probs",), _COOL,
            predicate="metric:train_rollout_logprob_abs_diff atol=1e-3",
            title="Score responses through one path",
        ),
        Regression(
            "padding-by-the-wrong-group", "miles", "model.py",
            "pad_size = args.tensor_model_parallel_size", "pad_size = args.data_parallel_size",
            0, "forward", "log_probs", ("ref_log_probs",), ("--tensor-model-parallel-size", "4"), gpus=4,
            predicate="metric:train_rollout_logprob_abs_diff atol=1e-4",
            title="Move packing next to the model",
        ),
        Regression(
            "whitening-without-cp", "slime", "advantages.py", *WHITENING,
            0, "forward", "advantages", (), ("--normalize-advantages", "--context-parallel-size", "2"), gpus=4,
            title="Name the groups that advantages are whitened over",
        ),
        Regression(
            "whitening-without-cp-miles", "miles", "advantages.py", *WHITENING,
            0, "forward", "advantages", (), ("--normalize-advantages", "--context-parallel-size", "2"), gpus=2,
            title="Name the groups that advantages are whitened over",
        ),
        Regression(
            "kl-mutated-in-place", "relax", "advantages.py",
            "rewards = kl * np.float32(-args.kl_coef)", "rewards = kl\n    rewards *= np.float32(-args.kl_coef)",
            0, "forward", "kl", (), ("--advantage-estimator", "reinforce_plus_plus", "--kl-coef", "0.05"),
            title="Allocate less in token rewards",
        ),
        Regression(
            "rewards-by-position", "miles", "samples.py",
            'group = sample["group_index"]', "group = position // args.n_samples_per_prompt",
            0, "input", "rewards", by_group=False,
            title="Normalize rewards in one reshape",
        ),
        Regression(
            "entropy-gradient-inverted", "slime", "loss.py",
            "entropy_grad = weights if args.entropy_coef != 0 else None",
            "entropy_grad = weights if args.entropy_coef == 0 else None",
            0, "grad", "grad_norm", flags=("--entropy-coef", "0.05"),
            title="Skip the entropy's gradient where its coefficient is 0",
        ),
        Regression(
            "critic-values-scaled", "slime", "model.py",
            "values, _ = get_responses(args, model, batch, apply_temperature=False)",
            "values, _ = get_responses(args, model, batch, apply_temperature=True)",
            0, "forward", "values", ("advantages", "returns"), (*_PPO, *_COOL),
            title="Score values through the same path as log-probs",
        ),
        Regression(
            "gae-over-masked-tokens", "miles", "advantages.py",
            "steps = np.flatnonzero(mask)", "steps = np.arange(len(mask))",
            0, "forward", "returns", ("advantages",), _PPO,
            title="Run GAE over whole responses",
        ),
        Regression(
            "num-tokens-counts-masked", "slime", "loss.py", "max(int(mask.sum()), 1)", "len(mask)",
            0, "loss", "loss", _MEANS[1:], (_TOKENWISE,), predicate="metric:entropy_loss rtol=0.01",
            title="Count tokens by their masks' lengths",
        ),
        Regression(
            "eps-clip-c-dropped", "slime", "loss.py", ", eps_clip_c=args.eps_clip_c", "",
            1, "loss", "loss", ("pg_loss",), ("--eps-clip-c", "1.05", "--lr", "0.3", "--global-batch-size", "8"),
            steps_per_rollout=2,
            title="Tidy the call of the clipped loss",
        ),
        Regression(
            "diff-with-new-log-probs", "miles", "loss.py",
            "abs_diff = np.abs(old_log_probs - np", "abs_diff = np.abs(log_probs - np",
            1, "loss", "train_rollout_logprob_abs_diff", (), ("--lr", "0.1", "--global-batch-size", "8"),
            steps_per_rollout=2, predicate="metric:train_rollout_logprob_abs_diff atol=1e-3",
            title="Compare what was just scored",
        ),
        Regression(
            "temperature-ignored-relax", "relax", "model.py", *TEMPERATURE,
            0, "forward", "log_probs", ("ref_log_probs",), (*_COOL, "--context-parallel-size", "2"), gpus=4,
            title="Score responses through one path",
        ),
        Regression(
            "after-broken-replay", "miles", "model.py", *TEMPERATURE,
            0, "forward", "log_probs", ("ref_log_probs",), _COOL, broken=(2, 4), culprit=6,
            title="Score responses through one path",
        ),
        Regression(
            "inside-broken-replay", "miles", "model.py", *TEMPERATURE,
            0, "forward", "log_probs", ("ref_log_probs",), _COOL, broken=(3, 5), culprit=4,
            title="Score responses through one path",
        ),
    )
}  # fmt: skip
