"""What a recorder sees beside parameters, gradients and an optimizer's tensors: families of signals, by their names.

Each has a word before the first slash of its name, behind the number of its optimizer: ``buffer/bn.running_mean``,
``optimizer.1/module/ema/fc.weight``. All of them stand in the phase ``update``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from repro_golden.trace.model import METRIC, Row

__all__ = [
    "BESIDE",
    "FAMILIES",
    "SINCE",
    "UNREAD",
    "VALUES_SINCE",
    "family",
    "file_of",
    "group",
    "is_norm",
    "masks",
    "of_group",
    "optimizer_of",
    "optimizers",
    "plain",
    "setting_of",
    "skipped",
    "value_of",
]

FAMILIES = {
    "buffer": "buffers of modules with a parameter that an optimizer holds",
    "unsaved": "buffers of any module that its state does not hold (``persistent=False``)",
    "frozen": "parameters of modules with a parameter that an optimizer holds, which none holds",
    "module": "parameters and saved buffers of modules of which no optimizer holds a parameter",
    "copy": "tensors in a mapping or list that holds one of each parameter's shape, such as a moving average",
    "leaf": "tensors that require a gradient and belong to no module and no optimizer",
    "number": "Python numbers of an optimizer's state, of each kind in the order of its parameters' names",
    "own": "tensors and numbers that an optimizer holds beside its state",
    "resting": "what an optimizer holds that made steps before and has missed its turn, such as a critic's",
    "scaler": "of a gradient scaler",
    "rng": "states of random number generators",
    "saved": "what the program wrote by torch.save or safetensors, and below {checkpoint}",
    "end": "the same as it was when the program ended",
}
"""What is in each."""

SINCE = 3
"""The first recorder that looks at them."""

UNREAD = "end/unread"
"""The signal of a program that ended in a state which could not be read."""

BESIDE = frozenset(FAMILIES) - {"number", "own"}
"""Those that belong to no optimizer: where several step in turn, they are read once."""

_OPTIONAL = ("module", "copy", "leaf", "resting", "rng", "unsaved")
"""Families whose groups say nothing where only one side has them: what is not kept is not looked at either.

A buffer that no checkpoint holds acts in its module's forward pass alone, and shows in gradients. So are the numbers
that an optimizer keeps beside its parameters' state: they act in its steps alone, and show in what these update.
"""
VALUES_SINCE = 19
"""The first recorder that has the numbers and texts of a file by these names: by their keys, as far as they are few."""

_VALUE = re.compile(r"(saved/[^/]+/(?:part\.\d+/)?)((?:integers|floats|texts|lengths|places)(?:#1)*\[.*)", re.DOTALL)

_SETTINGS = frozenset((
    "adamw_mode", "adjust_lr_fn", "alpha", "amsgrad", "beta2_decay", "betas", "bias_correction", "capturable",
    "centered", "correct_bias", "dampening", "decoupled_weight_decay", "differentiable", "eps", "etas", "foreach",
    "fused", "history_size", "initial_accumulator_value", "initial_lr", "lambd", "line_search_fn", "lr_decay",
    "max_eval", "max_iter", "maximize", "momentum", "momentum_decay", "nesterov", "ns_coefficients", "ns_steps",
    "rho", "step_sizes", "t0", "tolerance_change", "tolerance_grad", "weight_decay",
))  # fmt: skip
"""Keys of an optimizer's groups that are no state: torch's hyperparameters.

Adafactor's ``d`` is not among them, for that of Prodigy is an estimate that grows.
"""
_STATE = ("lr", "step")

_RANK = re.compile(r"@\d+\Z")
_NUMBERS = re.compile(r"(optimizer\.\d+/)*")
"""Of an optimizer, and of one of several that step in one call."""
_NUMBERED = re.compile(r"(optimizer\.\d+/)?(.*)", re.DOTALL)
_GROUPED = re.compile(r"((?:end/)?(?:optimizer\.\d+/)*)((?:lr|number/step)(?:/\d+)?)(?:#new)?(@\d+)?")
"""Numbers of an optimizer's groups: the first's has no place. One that a comparison gave no counterpart is ``#new``."""


def plain(name: str) -> str:
    """A signal's name without the number of its optimizer."""
    match = _NUMBERED.fullmatch(name)
    return match[2] if match else name


def optimizers(rows: Iterable[Row]) -> set[str]:
    """The optimizers that made a step, by their numbers as its signals' names begin; the first one's is empty."""
    held = (r for r in rows if r.phase in ("grad", "update") and r.dtype != METRIC)
    names = (_NUMBERED.fullmatch(r.name) for r in held if family(r.phase, r.name) not in BESIDE)
    return {match[1] or "" for match in names if match}


def family(phase: str, name: str) -> str | None:
    """The family of a signal; None for any other."""
    word = plain(name).partition("/")[0] if phase == "update" else ""
    return word if word in FAMILIES and "/" in name else None


def masks(phase: str, name: str) -> bool:
    """Whether a signal is of a family of which some hold infinities on purpose: masks, and the best value so far."""
    name = plain(name).removeprefix("end/")  # what the end shows are the same objects once more
    return family(phase, name) not in (None, "frozen", "copy", "leaf", "resting")


def optimizer_of(name: str) -> str:
    """The number of the optimizer that a gradient or its update is of, as its name begins; of the first it is empty."""
    match = _NUMBERS.match(name)
    return match[0] if match else ""


def of_group(phase: str, name: str) -> tuple[str, str, str] | None:
    """A number of one of an optimizer's groups, such as its learning rate: what stands before, its name, its rank."""
    match = _GROUPED.fullmatch(name) if phase == "update" else None
    return match and (match[1], match[2], match[3] or "")


def skipped(rows: Iterable[Row]) -> set[str]:
    """The optimizers that made no step of a step's gradients, since a gradient scaler found some not finite."""
    names = {row.name for row in rows if row.phase == "update" and row.dtype == METRIC}
    return {number for name in names if name == (number := optimizer_of(name)) + "skipped"}


def is_norm(metric: str) -> bool:
    """Whether a metric is the gradients' norm, whoever tells it and however often."""
    return re.split("[#@?]", metric, maxsplit=1)[0].rpartition("/")[2] == "grad_norm"


def file_of(phase: str, name: str) -> str | None:
    """The file that a signal is of, as ``saved/last.pt``; None for any other signal."""
    return "/".join(plain(name).split("/")[:2]) if family(phase, name) == "saved" else None


def value_of(phase: str, name: str) -> tuple[str, str] | None:
    """Of numbers or texts in a file what stands before, and their own name (``integers[epoch]``); None elsewhere."""
    match = _VALUE.fullmatch(name) if phase == "update" and name.startswith("saved/") else None
    return match and (match[1], match[2])


def setting_of(phase: str, name: str) -> str | None:
    """A setting of an optimizer or a schedule in a file, as ``ck.pt/opt.param_groups.*.foreach``; None elsewhere.

    It counts by what it does: rates, numbers of steps and numbers that may be state are none, nor is the order of its
    parameters (``params``), which tells whose each state is. A group's texts and flags without a value are, whatever
    they are called, and so is where numbers lie.
    """
    if (of := value_of(phase, name)) is None:
        return None
    kind, _, rest = of[1].partition("[")
    path = rest.rpartition("]")[0]
    keys = path.split(".")
    setting = keys[keys.index("param_groups") :][2:3] if "param_groups" in keys else []
    no_number = kind.startswith(("texts", "places")) and setting and setting[0] not in _STATE
    is_setting = no_number or not _SETTINGS.isdisjoint(setting) or "lr_lambdas" in keys
    return f"{of[0].removeprefix('saved/')}{path}" if is_setting else None


def group(phase: str, name: str) -> str | None:
    """The object that a signal belongs to, where its absence from one side is no difference; None elsewhere.

    A module, a copy or a generator that only one side has was not there to be compared. What the end shows is what is
    still alive then, so all of it is one group and each object in it another. A number that an optimizer keeps as its
    own is one of that optimizer's alone.
    """
    kind = family(phase, name)
    if kind is None:
        return None
    parts = plain(name).split("/")
    if kind == "number":
        return _RANK.sub("", name) if parts[1].startswith("own.") else None
    if kind == "end":
        inner = group(phase, "/".join(parts[1:]))
        return f"end/{inner}" if inner else "end"
    # each generator of the program's is one of its own, and so is each buffer that no checkpoint holds
    deep = len(parts) if kind == "unsaved" else 3 if parts[:2] == ["rng", "own"] else 2
    name = "/".join(parts[:deep])
    if len(parts) == deep:  # then it may end in the rank that it is of, which is no other object
        name = _RANK.sub("", name)
    return name if kind in _OPTIONAL else None
