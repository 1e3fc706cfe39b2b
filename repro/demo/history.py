r"""The scratch repository: a made-up year of work on a copy of the built-in trainer, one commit of which is guilty.

    start -- o -- o -- ... -- o -- o -- M -- ... -- [x x x x x] -- mend -- ... -- HEAD
                        \             /
                         s -- s -- s -

The culprit lies on either line. Commits x do not import. Everything is a function of the seed and of the trainer's
source.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from repro.demo.culprits import CULPRITS, Culprit, kinds
from repro.demo.edits import Edit, anchored, apply, unbound
from repro.demo.refactors import refactor

__all__ = [
    "CASE",
    "FIRST_STEPS",
    "STEPS",
    "SUBJECT",
    "Answer",
    "History",
    "Planned",
    "choose",
    "make_history",
    "subject",
]

STEPS = 10
FIRST_STEPS = range(6, STEPS)
"""Where a culprit may first show: late enough that a glance at the first steps finds nothing."""
SUBJECT = "core/repro_core/"
"""Where the scratch repository keeps its copy of the trainer."""

# 16 answers to a prompt: a group without any difference in reward would hide a culprit in the advantages. Many small
# micro-batches and a clip range that always bites give the order of sums and the clip coefficient something to change.
CASE = f"""\
[case]
name = "demo"
steps = {STEPS}
proof_steps = 2
rollouts = "golden/rollouts/demo"

[subject]
module = "repro_core"
path = "core"
timeout = "5m"

[subject.config]
rollout_batch_size = 4
n_samples_per_prompt = 16
global_batch_size = 64
max_response_len = 4
max_tokens_per_micro_batch = 128
clip_grad = 0.1
"""

Role = Literal["start", "outside", "refactor", "culprit", "broken", "mend", "merge"]
_EPOCH = 1_736_150_400  # Monday, 6 January 2025


@dataclass(frozen=True)
class Planned:
    """One commit to be.

    Attributes:
        role: What it is for; ``broken`` commits do not import.
        subject: Its message.
        author: Name and address.
        date: Seconds since 1970.
        parents: Numbers of earlier commits.
        changes: New content by path.
    """

    role: Role
    subject: str
    author: tuple[str, str]
    date: int
    parents: tuple[int, ...]
    changes: Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """What the bisect must find. `commit` is a number in the plan, and a commit id once the repository exists."""

    commit: str
    subject: str
    kind: str
    place: str
    phase: str
    first_step: int


@dataclass(frozen=True)
class History:
    """All commits, oldest first, and which one is guilty."""

    commits: Sequence[Planned]
    culprit: int
    cause: Culprit
    first_step: int

    def answer(self, ids: Sequence[str]) -> Answer:
        """The answer, given the ids that git gave the commits."""
        cause = self.cause
        subject = self.commits[self.culprit].subject
        return Answer(ids[self.culprit], subject, cause.kind, SUBJECT + cause.place, cause.phase, self.first_step)


def choose(seed: int) -> tuple[Culprit, int, random.Random]:
    """The culprit of a seed, its first step, and the generator that draws the rest."""
    rng = random.Random(f"repro.demo {seed}")
    kind = rng.choice(kinds())
    cause = rng.choice([c for c in CULPRITS if c.kind == kind])
    return cause, rng.choice(FIRST_STEPS), rng


def make_history(trainer: Mapping[str, str], seed: int) -> History:
    """Plan a history.

    Args:
        trainer: The trainer's modules by their path in its folder.
        seed: Decides everything.

    Raises:
        ReproError: the trainer is not the one that the culprits were written for.
    """
    cause, first_step, rng = choose(seed)
    return _Writer(dict(trainer), rng, cause, first_step).write()


@dataclass(frozen=True)
class _Layout:
    """Slots of the main line, 0 being the first commit after the start; the merge and the mend have one each."""

    length: int
    fork: int
    merge: int
    side: int
    broken: int
    mend: int
    culprit: int | None
    culprit_on_side: int | None

    @classmethod
    def draw(cls, rng: random.Random) -> _Layout:
        length, side = rng.randint(60, 68), rng.randint(5, 8)
        halves = [(4, length // 2), (length // 2, length - 5)]
        rng.shuffle(halves)
        width, beside = rng.randint(4, 7), rng.randint(4, 8)
        fork = rng.randrange(halves[0][0], halves[0][1] - beside - 1)
        broken = rng.randrange(halves[1][0], halves[1][1] - width - 1)
        merge, mend = fork + beside + 1, broken + width
        free = [i for i in range(8, length - 8) if i != merge and not broken <= i <= mend]
        # Beside the window, so that the search has to find its way around it.
        near = [i for i in free if broken - 6 < i < mend + 6]
        on_side = rng.random() < 0.3
        return cls(
            length, fork, merge, side, broken, mend,
            None if on_side else rng.choice(near), rng.randrange(1, side - 1) if on_side else None,
        )  # fmt: skip

    def on_both(self, slot: int) -> bool:
        """Whether the side branch is open at a slot of the main line."""
        return self.fork < slot < self.merge


@dataclass
class _Writer:
    trainer: dict[str, str]
    rng: random.Random
    cause: Culprit
    first_step: int
    commits: list[Planned] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    culprit: int = -1

    def write(self) -> History:
        self.edits = self.cause.commit(self.first_step)
        self.window_of = self.rng.choice(_WINDOWS)
        apply(self.edits, self.trainer)  # an anchor that is missing is found here, whatever the order of commits
        layout = _Layout.draw(self.rng)
        self.files = {SUBJECT + name: text for name, text in self.trainer.items()} | _START_FILES
        self.files["golden/cases/demo.toml"] = CASE
        self.commit("start", "Import the trainer", (), self.files)
        self.side_modules = self.own_modules(layout.culprit_on_side is not None)
        touched = self.guilty_slots(layout)
        tip, forked = 0, (0, self.files)
        for slot in range(layout.length):
            if slot == layout.merge:
                tip = self.merge(tip, *forked, layout)
                continue
            tip = self.main_slot(slot, tip, layout, touched)
            if slot == layout.fork:
                forked = (tip, dict(self.files))
        assert self.culprit > 0
        return History(self.commits, self.culprit, self.cause, self.first_step)

    def own_modules(self, guilty: bool) -> list[str]:
        """The modules that the side branch changes and the main line leaves alone meanwhile: merges are clean."""
        busy = {self.cause.file, self.cause.gated}
        others = self.rng.sample([m for m in self.modules() if m not in busy], 3)
        return sorted(busy) + others if guilty else others

    def modules(self) -> list[str]:
        """Modules that get refactored; the package itself is the window's."""
        return sorted(m for m in self.trainer if not m.endswith("__init__.py"))

    def guilty_slots(self, layout: _Layout) -> set[int]:
        """Where the main line refactors the guilty file: several times before the culprit and several after it."""
        middle = layout.culprit if layout.culprit is not None else layout.merge
        fixed = {layout.merge, layout.broken, layout.mend, layout.culprit}
        free = [i for i in range(layout.length) if i not in fixed and not layout.on_both(i)]
        before, after = [i for i in free if i < middle], [i for i in free if i > middle]
        return {*self.rng.sample(before, min(4, len(before))), *self.rng.sample(after, min(4, len(after)))}

    # -- slots

    def main_slot(self, slot: int, tip: int, layout: _Layout, touched: set[int]) -> int:
        role: Role = "broken" if layout.broken <= slot < layout.mend else "refactor"
        if slot == layout.culprit:
            return self.guilty((tip,), self.files)
        if slot in (layout.broken, layout.mend):
            return self.window(tip, begin=slot == layout.broken)
        if slot in touched:
            files = [self.cause.file, self.cause.gated] if self.rng.random() < 0.4 else [self.cause.file]
            return self.refactor(role, tip, self.files, files)
        if self.rng.random() < 0.5:
            path, text, message = _outside_change(self.files, self.rng, self.used)
            self.files[path] = text
            return self.commit("broken" if role == "broken" else "outside", message, (tip,), {path: text})
        barred = {self.cause.file, *(self.side_modules if layout.on_both(slot) else ())}
        return self.refactor(role, tip, self.files, [self.rng.choice([m for m in self.modules() if m not in barred])])

    def merge(self, tip: int, base: int, files: dict[str, str], layout: _Layout) -> int:
        """The side branch's commits, then the merge."""
        before, last = dict(files), base
        for i in range(layout.side):
            where = layout.culprit_on_side
            if i == where:
                last = self.guilty((last,), files)
                continue
            near = where is not None and abs(i - where) == 1
            last = self.refactor(
                "refactor", last, files, [self.cause.file if near else self.rng.choice(self.side_modules)]
            )
        changes = {path: text for path, text in files.items() if before[path] != text}
        self.files |= changes
        return self.commit("merge", "Merge branch 'cleanup'", (tip, last), changes)

    def guilty(self, parents: tuple[int, ...], files: dict[str, str]) -> int:
        inside = {path.removeprefix(SUBJECT): text for path, text in files.items() if path.startswith(SUBJECT)}
        changed = {SUBJECT + name: text for name, text in apply(self.edits, inside).items() if inside[name] != text}
        files |= changed
        self.culprit = self.commit("culprit", subject(self.cause.file, self.rng, self.used), parents, changed)
        return self.culprit

    def refactor(self, role: Role, tip: int, files: dict[str, str], modules: Iterable[str]) -> int:
        changes: dict[str, str] = {}
        message = ""
        for module in dict.fromkeys(modules):
            path = SUBJECT + module
            due: Sequence[Edit] = [e for e in self.edits if e.path == module] if self.culprit < 0 else []
            changes[path] = refactor(
                files[path],
                self.rng,
                lambda text, m=module, due=due: _takes(due, m, text),  # type: ignore[misc]
            )
            message = message or subject(module, self.rng, self.used)
        files |= changes
        return self.commit(role, message, (tip,), changes)

    def window(self, tip: int, *, begin: bool) -> int:
        """The package imports a module that arrives with the mend only."""
        module, name, value, broke, mended = self.window_of
        package = f"{SUBJECT}__init__.py"
        if begin:
            changes = {package: _after_imports(self.files[package], f"from repro_core.{module} import {name}\n")}
        else:
            changes = {f"{SUBJECT}{module}.py": f'"""Constants of the trainer."""\n\n{name} = {value}\n'}
        self.files |= changes
        return self.commit("broken" if begin else "mend", broke if begin else mended, (tip,), changes)

    def commit(self, role: Role, message: str, parents: tuple[int, ...], changes: Mapping[str, str]) -> int:
        date = self.commits[-1].date + self.rng.randint(900, 36_000) if self.commits else _EPOCH
        self.commits.append(Planned(role, message, self.rng.choice(_AUTHORS), date, parents, dict(changes)))
        return len(self.commits) - 1


def _takes(due: Sequence[Edit], module: str, text: str) -> bool:
    """Whether a module can still be edited: each anchor is there, and in the function whose names the edit uses."""
    return anchored(due, {module: text}) and not unbound(apply(due, {module: text})[module])


def _after_imports(source: str, line: str) -> str:
    imports = [n for n in ast.parse(source).body if isinstance(n, (ast.Import, ast.ImportFrom))]
    lines = source.splitlines(keepends=True)
    at = imports[-1].end_lineno
    return "".join([*lines[:at], line, *lines[at:]])


# -- what the commits of the demo say, and what those that leave the trainer alone change


_AUTHORS = (
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

_START_FILES = {
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

_WINDOWS = (
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


def _outside_change(files: dict[str, str], rng: random.Random, used: set[str]) -> tuple[str, str, str]:
    """A change that leaves the trainer alone: path, new content and subject."""
    fresh = [
        (path, form.format(topic), topic) for path, form, topics in _OUTSIDE for topic in topics
        if form.format(topic) not in used
    ]  # fmt: skip
    path, message, topic = rng.choice(fresh)
    used.add(message)
    comment = "# " if path.endswith((".toml", ".sh")) else "- "
    return path, f"{files[path]}{comment}{topic}\n", message
