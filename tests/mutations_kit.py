"""Changes of the built-in trainer's source, found by structure, each of one expression at its exact place.

An operator looks at one expression of the real source and proposes other texts for it; everything around the
expression stays byte-equal, so the lines that a change touches are read from its diff. No change is written down here:
what can be changed follows from the source as it is today, and a seed chooses. Which expressions are tensors is read
from annotations and carried through assignments.

Run as a program it trains the trainer under each change that it reads from standard input (`verdicts`).
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from types import CodeType, ModuleType
from typing import Any

from mutations_operators import OPERATORS
from mutations_source import PACKAGE, PLAIN, Edit, Mutation, Operator, Proposal, Source, number_of, sources

CONFIG: dict[str, Any] = {
    "seed": 5,
    "rollout_batch_size": 3,
    "n_samples_per_prompt": 4,
    "global_batch_size": 6,
    "num_steps_per_rollout": 2,
    "max_response_len": 5,
    "temperature": 0.9,
    "max_tokens_per_micro_batch": 36,
    "lr": 0.02,
    "adam_eps": 1e-6,
    "weight_decay": 0.1,
    "clip_grad": 0.05,
    "whiten_advantages": True,
    "eps_clip": 0.02,
    "eps_clip_high": 0.03,
    "eps_clip_c": 1.05,
    "entropy_coef": 0.01,
    "kl_loss_coef": 0.1,
    "use_tis": True,
    "tis_clip": 1.02,
    "tis_clip_low": 0.98,
    "model": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.2,
    },
}
"""A run in which as much of the trainer as possible matters: clips bind, the policy moves within a rollout."""
ROLLOUTS = 2
TIMEOUT = 20  # seconds for one run under a change; one takes well under a second

Verdict = str
"""moved, still (every signal has the same bits), nan (a signal lost its last finite number) or "failed: WHY"."""


# Changes that no operation's stack crosses


def _header(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A loop over statements runs backwards, or a branch is taken the other way."""
    owner = m.parents[node]
    if isinstance(owner, ast.For) and node is owner.iter:
        yield f"reversed(list({m.text(node)}))"
    if isinstance(owner, ast.If) and node is owner.test:
        yield f"not ({m.text(node)})"


def _constant(node: ast.expr, _: Source) -> Iterator[Proposal]:
    """A constant of a module or a default of a class has another value."""
    value = number_of(node)
    if value is not None:
        for factor in (0.5, 2, 100):
            yield repr(type(value)(value * factor))


_PLACES: dict[str, dict[str, Operator]] = {
    "body": OPERATORS,
    "header": {"header": _header},
    "constant": {"constant": _constant},
}
DISTANT = ("header", "constant")
KINDS = (*OPERATORS, *DISTANT)
"""The operators. Those of `DISTANT` are drawn only when asked for."""


# All changes, and draws from them


def _place(node: ast.expr, m: Source) -> str:
    """``body``, ``header``, ``constant`` or empty for expressions that are no place for a change."""
    child: ast.AST = node
    for owner in m.above(node):
        if isinstance(owner, (ast.Raise, ast.Assert, ast.JoinedStr, ast.arguments, ast.Slice)):
            return ""
        if isinstance(owner, (ast.FunctionDef, ast.ClassDef)) and child not in owner.body:
            return ""  # decorators, annotations, bases
        if isinstance(owner, ast.AnnAssign) and child is owner.annotation:
            return ""
        if isinstance(owner, ast.FunctionDef) and owner.name not in m.package.reached:
            return ""
        if isinstance(owner, (ast.Module, ast.ClassDef)):
            return "constant" if isinstance(child, (ast.Assign, ast.AnnAssign)) else ""
        if isinstance(owner, (ast.If, ast.For, ast.While)) and isinstance(child, ast.expr):
            return "header"
        if isinstance(owner, (ast.With, ast.ExceptHandler)) and not isinstance(child, ast.stmt):
            return ""
        if isinstance(owner, ast.FunctionDef):
            setting = isinstance(child, (ast.Assign, ast.AnnAssign)) and not any(
                isinstance(n, ast.Call) for n in ast.walk(child)
            )
            return "" if setting and owner.name == "__init__" else "body"  # a number that is read somewhere else
        child = owner
    return ""


def _changeable(node: ast.AST, m: Source) -> bool:
    """The node is an expression that is read, and by something that asks for its value."""
    owner = m.parents.get(node)
    if not isinstance(node, ast.expr) or isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
        return False
    if isinstance(owner, ast.Call) and node is owner.func:
        return False
    if isinstance(owner, ast.Attribute) and (owner.attr in PLAIN or owner.attr.endswith("_")):
        return False
    return not (isinstance(owner, ast.Subscript) and isinstance(owner.ctx, ast.Store))


def _function(node: ast.AST, m: Source) -> str:
    names = [o.name for o in m.above(node) if isinstance(o, (ast.FunctionDef, ast.ClassDef))]
    return ".".join(reversed(names))


def _applied(m: Source, edits: Sequence[Edit]) -> str:
    text = m.text_
    for node, new in sorted(edits, key=lambda edit: m.span(edit[0]), reverse=True):
        start, end = m.span(node)
        text = text[:start] + new + text[end:]
    return text


@cache
def catalogue() -> tuple[Mutation, ...]:
    """Every change that the operators find in the trainer, each once, in the order of files, places and operators."""
    mutations: dict[tuple[str, str], Mutation] = {}
    for path, m in sources().items():
        for node in ast.walk(m.tree):
            if not _changeable(node, m) or not isinstance(node, ast.expr):
                continue
            place = _place(node, m)
            for kind, operator in _PLACES.get(place, {}).items():
                for proposal in operator(node, m):
                    after = _applied(m, [(node, proposal)] if isinstance(proposal, str) else proposal)
                    if after != m.text_:
                        mutations.setdefault((path, after), Mutation(kind, path, _function(node, m), m.text_, after))
    return tuple(mutations.values())


def _order(seed: int, kinds: Sequence[str] | None) -> list[Mutation]:
    """All changes of some kinds as a seed orders them: one of each kind in turn, functions in turn within a kind."""
    rng = random.Random(seed)
    wanted = [kind for kind in KINDS if kind not in DISTANT] if kinds is None else list(kinds)
    queues: list[list[Mutation]] = []
    for kind in wanted:
        by_function: dict[tuple[str, str], list[Mutation]] = {}
        for mutation in catalogue():
            if mutation.kind == kind:
                by_function.setdefault((mutation.path, mutation.function), []).append(mutation)
        for group in by_function.values():
            rng.shuffle(group)
        groups = list(by_function.values())
        rng.shuffle(groups)
        queues.append(_in_turn(groups))
    rng.shuffle(queues)
    return _in_turn(queues)


def _in_turn(queues: Sequence[Sequence[Mutation]]) -> list[Mutation]:
    longest = max(map(len, queues), default=0)
    return [queue[i] for i in range(longest) for queue in queues if i < len(queue)]


def mutations(seed: int, count: int, *, kinds: Sequence[str] | None = None) -> list[Mutation]:
    """Distinct changes drawn by a seed, spread over kinds and functions. Not all of them move a number.

    Args:
        seed: of `random.Random`.
        count: at most as many as exist.
        kinds: some of `KINDS`; all but `DISTANT` by default.
    """
    return _order(seed, kinds)[:count]


_KNOWN: dict[tuple[str, str], Verdict] = {}


def verdicts(candidates: Sequence[Mutation]) -> list[Verdict]:
    """What each change does to the run of `CONFIG`; one child process trains all that are not known yet."""
    new = list(dict.fromkeys((m.path, m.after) for m in candidates if (m.path, m.after) not in _KNOWN))
    if new:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", __file__], input=json.dumps(new), env=environment,
            stdout=subprocess.PIPE, text=True, check=True, timeout=60 + TIMEOUT * len(new),
        )  # fmt: skip
        _KNOWN.update(zip(new, json.loads(done.stdout.splitlines()[-1]), strict=True))
    return [_KNOWN[m.path, m.after] for m in candidates]


def moves(mutation: Mutation) -> bool:
    """The trainer trains to the end under the change, with numbers in every signal, and some signal's bits differ."""
    return verdicts([mutation]) == ["moved"]


def effective(seed: int, count: int, *, kinds: Sequence[str] | None = None) -> list[Mutation]:
    """The first `count` changes in the order of `mutations` that move a number."""
    out: list[Mutation] = []
    order = _order(seed, kinds)
    while order and len(out) < count:
        size = 2 * (count - len(out))
        batch, order = order[:size], order[size:]
        out += [m for m, verdict in zip(batch, verdicts(batch), strict=True) if verdict == "moved"]
    return out[:count]


# The run that judges


def rollouts() -> list[Any]:
    """The rollouts of the run: sampled by the trainer as it is, then made harder.

    Rewards differ within groups and are equal in one, responses are of several lengths, some tokens and one whole
    sample are masked, and the engine's log-probs lie off the trainer's: masks, padding, baselines and truncated
    importance sampling have something to do.
    """
    import torch

    from repro_core import Rollout
    from repro_core.config import TrainConfig
    from repro_core.train.trainer import Trainer

    trainer = Trainer(TrainConfig.from_mapping(CONFIG), log=lambda _: None)
    out = []
    for rollout_id in range(ROLLOUTS):
        drawn, rng = trainer.sample(rollout_id), random.Random(rollout_id)
        t = dict(drawn.tensors)
        totals, lengths = t["total_lengths"].tolist(), t["response_lengths"].tolist()
        equal = CONFIG["n_samples_per_prompt"]  # the samples of the first prompt
        cuts = [rng.randrange(n) for n in lengths]
        noise = torch.tensor([rng.gauss(0, 0.03) for _ in range(sum(lengths))])
        t["tokens"] = _cut(t["tokens"], totals, cuts)
        t["rollout_log_probs"] = _cut(t["rollout_log_probs"] + noise, lengths, cuts)
        t["total_lengths"] = torch.tensor([n - cut for n, cut in zip(totals, cuts, strict=True)])
        t["response_lengths"] = torch.tensor([n - cut for n, cut in zip(lengths, cuts, strict=True)])
        masked = [i == len(lengths) - 2 for i, n in enumerate(t["response_lengths"].tolist()) for _ in range(n)]
        t["loss_mask"] = torch.tensor([int(not none and rng.random() < 0.8) for none in masked])
        t["rewards"] = torch.tensor([1.0 if i < equal else rng.randrange(8) / 3 for i in range(len(lengths))])
        cut_short = ["truncated" if cut else status for cut, status in zip(cuts, drawn.meta["statuses"], strict=True)]
        out.append(Rollout({**drawn.meta, "statuses": cut_short}, t))
    return out


def _cut(packed: Any, lengths: Sequence[int], cuts: Sequence[int]) -> Any:
    """Each sample of a packed column without its last few tokens."""
    parts = zip(packed.split(list(lengths)), cuts, strict=True)
    return packed.new_tensor([value for part, cut in parts for value in part[: len(part) - cut].tolist()])


class _Trainers(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """The trainer's package from memory, with one file replaced."""

    def __init__(self) -> None:
        self.replaced: dict[str, str] = {}
        self._codes: dict[str, CodeType] = {}

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002
        """Only the trainer's package is found here."""
        if fullname != "repro_core" and not fullname.startswith("repro_core."):
            return None
        package = self._file(fullname).endswith("__init__.py")
        return importlib.util.spec_from_loader(fullname, self, is_package=package)

    def _file(self, fullname: str) -> str:
        inside = fullname.partition(".")[2].replace(".", "/")
        return f"{inside}/__init__.py".lstrip("/") if (PACKAGE / inside).is_dir() else f"{inside}.py"

    def get_source(self, fullname: str) -> str:
        """The file's text, or what replaces it."""
        file = self._file(fullname)
        return self.replaced.get(file) or (PACKAGE / file).read_text()

    def get_code(self, fullname: str) -> CodeType:
        """Compiled once for each file that is not replaced."""
        file = self._file(fullname)
        if file in self.replaced:
            return self.source_to_code(self.replaced[file], file)
        if file not in self._codes:
            self._codes[file] = self.source_to_code(self.get_source(fullname), file)
        return self._codes[file]

    def train(self, replaced: dict[str, str], recorded: Sequence[Any]) -> tuple[list[Any], bool]:
        """Step, phase, name and bits of every signal, and whether each holds a finite number."""
        self.replaced = replaced
        for name in [name for name in sys.modules if name.partition(".")[0] == "repro_core"]:
            del sys.modules[name]
        config: ModuleType = importlib.import_module("repro_core.config")
        trainer_module: ModuleType = importlib.import_module("repro_core.train.trainer")
        trainer = trainer_module.Trainer(config.TrainConfig.from_mapping(CONFIG), log=lambda _: None)
        seen = _Seen()
        for rollout in recorded:
            for _ in trainer.train(rollout, seen):
                seen.step += 1
        return sorted(seen.bits), seen.finite


class _Seen:
    def __init__(self) -> None:
        self.bits: list[tuple[int, str, str, str, bytes]] = []
        self.step = 0
        self.finite = True

    def __call__(self, phase: str, name: str, value: Any) -> None:
        import torch

        if isinstance(value, dict):
            for key, tensor in value.items():
                self(phase, name + key, tensor)
            return
        tensor = (torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value).detach()
        self.finite &= bool(torch.isfinite(tensor).any()) or not tensor.numel()
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        self.bits.append((self.step, phase, name, f"{tensor.dtype} {list(tensor.shape)}", raw))


def _expired(*_: object) -> None:
    raise TimeoutError(f"no end after {TIMEOUT} seconds")


def main() -> None:
    """Read ``[[path, source], ...]`` and write one verdict for each."""
    trainers = _Trainers()
    sys.meta_path.insert(0, trainers)
    signal.signal(signal.SIGALRM, _expired)
    recorded = rollouts()
    baseline, _ = trainers.train({}, recorded)
    assert trainers.train({}, recorded)[0] == baseline, "the trainer does not repeat itself"
    out: list[Verdict] = []
    for path, after in json.load(sys.stdin):
        signal.alarm(TIMEOUT)
        try:
            bits, finite = trainers.train({path: after}, recorded)
            out.append("still" if bits == baseline else "moved" if finite else "nan")
        except Exception as error:  # noqa: BLE001 - whatever a changed trainer raises
            out.append(f"failed: {type(error).__name__}: {error}".splitlines()[0][:200])
        finally:
            signal.alarm(0)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
