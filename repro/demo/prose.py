"""What the commits of the demo say, and what those that leave the trainer alone change."""

from __future__ import annotations

import random

__all__ = ["AUTHORS", "START_FILES", "WINDOWS", "outside_change", "subject"]

AUTHORS = (
    ("Ada Lindqvist", "ada@example.org"),
    ("Tomasz Wrona", "tomasz@example.org"),
    ("Mei Tanaka", "mei@example.org"),
    ("Joao Prado", "joao@example.org"),
    ("Ruth Okafor", "ruth@example.org"),
)

_VERBS = ("Tidy", "Simplify", "Clean up", "Streamline", "Polish", "Rework", "Straighten out", "Go over", "Refine")
_TOPICS = {
    "rl/advantages.py": ("the advantage columns", "the group baseline", "group statistics"),
    "rl/batching.py": ("micro-batches", "the packing helpers", "the update plan"),
    "engines/checkpoint.py": ("checkpoints", "the resume path", "checkpoint metadata"),
    "config.py": ("the configuration", "config checks", "the config reader"),
    "rl/kl.py": ("the KL estimators", "the KL column", "the reference penalty"),
    "rl/loss.py": ("the log-prob path", "the policy loss", "the loss terms"),
    "model/decoder.py": ("the decoder", "the attention block", "the forward pass"),
    "engines/optimizer.py": ("the optimizer", "gradient handling", "the weight update"),
    "rollout/sampler.py": ("the sampler", "the decoding loop", "the rollout engine"),
    "engines/torch_engine.py": ("the backward pass of an update", "the torch engine", "micro-batches of the engine"),
    "train/trainer.py": ("the training step", "the trainer", "the update loop"),
}

START_FILES = {
    "README.md": "# tiny-grpo\n\nA small GRPO trainer. `python -m repro_core.train` starts a run.\n",
    "docs/usage.md": "# Usage\n\nEvery key of the configuration has a default.\n",
    "docs/faq.md": "# Questions\n",
    "docs/hardware.md": "# Hardware\n\nOne CPU core serves.\n",
    "configs/nightly.toml": "# The nightly run.\nsteps = 100\n",
    "scripts/train.sh": "#!/bin/sh\nexec python -m repro_core.train --steps 200\n",
    "CHANGELOG.md": "# Changes\n",
}

_OUTSIDE = (
    ("README.md", "README: {}", ("say where checkpoints go", "mention the seed", "link the paper", "shorten the intro",
                                 "add a quick start", "name the licence")),
    ("docs/usage.md", "docs: {}", ("describe the loss aggregation", "explain clip-higher", "list the metrics",
                                   "explain the group size", "describe the reward", "note on temperatures")),
    ("docs/faq.md", "docs: {}", ("why the KL is zero at first", "what a rollout holds", "how to resume a run",
                                 "when to whiten advantages", "what truncated means", "why rewards differ by group")),
    ("docs/hardware.md", "docs: {}", ("thread counts", "memory of a micro-batch", "laptops are enough",
                                      "what a step costs", "notes on NUMA", "notes on swap")),
    ("configs/nightly.toml", "configs: {}", ("longer nightly run", "nightly with another seed", "keep fewer logs",
                                             "name the nightly run", "nightly on one thread", "rotate the logs")),
    ("scripts/train.sh", "scripts: {}", ("print the git revision", "fail on the first error", "quote the arguments",
                                         "keep the log", "show the time", "check for disk space")),
    ("CHANGELOG.md", "Changelog: {}", ("the batching change", "the new metrics", "the sampler notes",
                                       "the config checks", "last week's work", "wording")),
)  # fmt: skip

WINDOWS = (
    ("limits", "MOST_STEPS", "100_000", "Keep the limits in one place", "Add the missing limits module"),
    ("names", "PROJECT", '"tiny-grpo"', "Name the project once", "Add names.py, forgotten before"),
    ("version", "VERSION", '"0.3"', "Give the trainer a version", "Check in version.py"),
    ("units", "NATS_PER_BIT", "0.6931471805599453", "Convert units in one place", "Add units.py"),
)
"""Module that is imported too early, what is imported, its value, subject of the break and subject of the mend."""


def subject(file: str, rng: random.Random, used: set[str]) -> str:
    """A fresh subject for a change of a module. Culprits and refactors draw from the same words."""
    stem = file.removesuffix(".py").replace("_", " ").replace("/", " ")
    topics = _TOPICS.get(file, (f"the {stem} module", f"{stem}: names and notes", f"the inside of {stem}"))
    fresh = [f"{verb} {topic}" for verb in _VERBS for topic in topics]
    chosen = rng.choice([s for s in fresh if s not in used])
    used.add(chosen)
    return chosen


def outside_change(files: dict[str, str], rng: random.Random, used: set[str]) -> tuple[str, str, str]:
    """A change that leaves the trainer alone: path, new content and subject."""
    fresh = [
        (path, form.format(topic), topic) for path, form, topics in _OUTSIDE for topic in topics
        if form.format(topic) not in used
    ]  # fmt: skip
    path, message, topic = rng.choice(fresh)
    used.add(message)
    comment = "# " if path.endswith((".toml", ".sh")) else "- "
    return path, f"{files[path]}{comment}{topic}\n", message
