"""The checks that slime, Miles and Relax make in their CI, one row each.

Thresholds are theirs, as they stand in the file and commit that each names. They are asserts inside of a training run
(``--ci-test``); here they are asked of two traces, so that a bisect can look for the commit that broke one. What each
asks, what passes it wrongly there and why not here stands in docs/reference/bisect.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from repro_golden.base.systems import System

__all__ = ["CHECKS", "OPTIONS", "CiCheck", "How", "Threshold", "When", "check_called"]

When = Literal["first", "rollout", "every"]
"""At which updates a check holds: the first of all, the first of each rollout, or every one."""

How = Literal["near", "range", "tokens", "means", "relative", "hashes", "bits"]
"""What a check compares:

==========  ===========================================================================================================
near        a metric with 0: ``|x| < atol``
range       a mean with two numbers: ``low < x < high``
tokens      two per-token columns: their means, and the mean of ``|x - y|`` over tokens, with 0
means       two per-token columns: their means, ``|mean x - mean y| < atol``
relative    a metric with the baseline's: ``|b - a| <= rtol * max(|a|, |b|)``
hashes      every fingerprint of the update phase with the baseline's
bits        two per-token columns bit for bit
==========  ===========================================================================================================
"""

OPTIONS: Mapping[How, tuple[str, ...]] = {
    "near": ("atol",), "range": ("low", "high"), "tokens": ("atol",), "means": ("atol",), "relative": ("rtol",),
    "hashes": (), "bits": (),
}  # fmt: skip
"""Which thresholds a user may set."""


@dataclass(frozen=True)
class Threshold:
    """A check's threshold in one system.

    Attributes:
        limits: By name, as in `OPTIONS`.
        source: The file and commit that it was read in.
        strict: Whether the threshold itself is over it. A metric that is exactly 0 is near 0 by any.
    """

    limits: Mapping[str, float]
    source: str
    strict: bool = True


@dataclass(frozen=True)
class CiCheck:
    """One check.

    Attributes:
        name: What stands behind ``ci:``.
        when: At which updates it holds.
        how: What is compared.
        metrics: Metrics that it reads, with their folder; a trace may have them with it or without.
        columns: Per-token columns that it reads. Those that the baseline shows must be finite at unmasked tokens.
        rules: Thresholds by system.
    """

    name: str
    when: When
    how: How
    metrics: tuple[str, ...]
    columns: tuple[str, ...]
    rules: Mapping[System, Threshold]


_SLIME = "slime/backends/megatron_utils/model.py@624b824a8"
_SLIME_ROLLOUT = "slime/observability/train_metric_utils.py@624b824a8"
_MILES = "miles/backends/training_utils/ci_utils.py@f1843b6fc"
_MILES_ROLLOUT = "miles/backends/training_utils/log_utils.py@d0e8e7c64"
_MILES_MODEL = "miles/backends/megatron_utils/ci_utils.py@d0f9f4ee5"
_RELAX = "relax/backends/megatron/model.py@007b981ca"
_RELAX_ROLLOUT = "relax/backends/megatron/data.py@02c394deb"

CHECKS: tuple[CiCheck, ...] = (
    CiCheck(
        "ppo_kl", "rollout", "near", ("train/ppo_kl",), ("old_log_probs", "log_probs"),
        {"slime": Threshold({"atol": 1e-8}, _SLIME), "miles": Threshold({"atol": 1e-9}, _MILES),
         "relax": Threshold({"atol": 1e-8}, _RELAX)},
    ),
    CiCheck(
        "pg_clipfrac", "rollout", "near", ("train/pg_clipfrac",), ("old_log_probs", "log_probs"),
        {"miles": Threshold({"atol": 1e-10}, _MILES)},
    ),
    CiCheck(
        "kl_loss", "first", "near", ("train/kl_loss",), ("log_probs", "ref_log_probs"),
        {"slime": Threshold({"atol": 1e-8}, _SLIME), "miles": Threshold({"atol": 1e-9}, _MILES),
         "relax": Threshold({"atol": 0.0}, _RELAX, strict=False)},
    ),
    CiCheck(
        "log_probs", "first", "tokens", ("rollout/log_probs", "rollout/ref_log_probs"), ("log_probs", "ref_log_probs"),
        {"slime": Threshold({"atol": 1e-8}, _SLIME_ROLLOUT), "miles": Threshold({"atol": 1e-8}, _MILES_ROLLOUT),
         "relax": Threshold({"atol": 1e-8}, _RELAX_ROLLOUT)},
    ),
    CiCheck(
        "rollout_log_probs",
        "rollout", "means", ("rollout/log_probs", "rollout/rollout_log_probs"), ("log_probs", "rollout_log_probs"),
        {"miles": Threshold({"atol": 0.03}, _MILES_ROLLOUT)},
    ),
    CiCheck(
        "log_probs_range", "rollout", "range", ("rollout/log_probs",), ("log_probs",),
        {"slime": Threshold({"low": -1.0, "high": 0.0}, _SLIME_ROLLOUT),
         "relax": Threshold({"low": -0.5, "high": 0.0}, _RELAX_ROLLOUT)},
    ),
    CiCheck(
        "entropy", "rollout", "range", ("rollout/entropy",), ("entropy",),
        {"slime": Threshold({"low": 0.0, "high": 1.0}, _SLIME_ROLLOUT),
         "miles": Threshold({"low": 0.0, "high": 0.7}, _MILES_ROLLOUT),
         "relax": Threshold({"low": 0.0, "high": 0.5}, _RELAX_ROLLOUT)},
    ),
    CiCheck(
        "train_rollout_logprob_abs_diff",
        "every", "near", ("train/train_rollout_logprob_abs_diff",), ("log_probs", "rollout_log_probs"),
        {"slime": Threshold({"atol": 0.1}, _SLIME, strict=False)},
    ),
    CiCheck(
        "grad_norm", "every", "relative", ("train/grad_norm", "train/critic-grad_norm"), (),
        {"slime": Threshold({"rtol": 0.01}, _SLIME, strict=False),
         "miles": Threshold({"rtol": 0.03}, _MILES, strict=False),
         "relax": Threshold({"rtol": 0.01}, _RELAX, strict=False)},
    ),
    CiCheck(
        "mtp_loss", "every", "near", ("train/mtp_loss",), (),
        {"slime": Threshold({"atol": 1.0}, "slime/backends/megatron_utils/ci_utils.py@624b824a8"),
         "miles": Threshold({"atol": 1.0}, _MILES_MODEL),
         "relax": Threshold({"atol": 1.0}, "relax/backends/megatron/ci_utils.py@6aac703ed")},
    ),
    CiCheck(
        "model_hash", "every", "hashes", (), (),
        {"miles": Threshold({}, _MILES_MODEL)},
    ),
    CiCheck(
        "true_on_policy", "rollout", "bits", (), ("log_probs", "rollout_log_probs"),
        {"miles": Threshold({}, _MILES_ROLLOUT)},
    ),
)  # fmt: skip
"""Every check, in the order in which a set of them is asked."""


def check_called(name: str) -> CiCheck | None:
    """The check of a name."""
    return next((check for check in CHECKS if check.name == name), None)
