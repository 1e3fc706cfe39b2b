"""What several rules ask of a launch: what it runs, how large it is, what is not known of it, what folders it names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from repro.doctor.artefacts.checkpoints.megatron import TRACKER, iteration_of
from repro.doctor.artefacts.kinds import Launch, Log, MegatronCheckpoint, Variable
from repro.doctor.artefacts.logs.lines import argument, by, colocated, memory_errors, told
from repro_golden.base.checks import Certainty, Found, Severity

__all__ = [
    "PATHS", "absent", "critic", "exists", "flag_of", "flagged", "folder_of", "fsdp", "has_checkpoints", "is_known",
    "is_whole", "known_text", "moe", "multi_latent_attention", "named", "nonzero", "open_ended", "programmed",
    "ran_out", "ranks", "same", "samples", "seen", "severed", "sft", "shown", "size", "trains", "unset",
]  # fmt: skip

_LIST = re.compile(r"\$\{?\w+\[[@*]\]\}?|\$\{?\w*(args?|opts|options|flags|extra)\}?|\$[@*]|\$\{[@*]\}", re.I)
"""What, left for a shell to compute, holds flags: arrays, `$EXTRA_ARGS`, `$@`."""
_COMPUTED = re.compile(r"\$\w+|\$\{[^}]*\}|\$\((?!\(|seq\b).*\)|`.*`", re.S)
"""A word that is nothing but a variable or what a command prints: no path below one, no number."""
_FLAG = re.compile(r"--[A-Za-z]")


def programmed(launch: Launch) -> bool:
    """Whether its flags were gathered from a Python launcher.

    They are those of all its branches, which need not run together, and `execute_train` adds more: the model's flags,
    and variables such as CUDA_DEVICE_MAX_CONNECTIONS.
    """
    return launch.path.suffix == ".py"


def open_ended(launch: Launch) -> bool:
    """Whether a word of the command line that only a shell knows may hold more flags.

    A flag that is not given may then be given all the same.
    """
    if not launch.entry or severed(launch) or launch.joined or launch.shortened or programmed(launch):
        return True
    before = ""
    for word in launch.argv:
        if _LIST.fullmatch(word) or (_COMPUTED.fullmatch(word) and not before.startswith("--")):
            return True
        before = word
    return False


def absent(launch: Launch, severity: Severity, certainty: Certainty = "certain") -> tuple[Severity, Certainty]:
    """How bad and how sure a finding is that rests on a flag that is not given."""
    return _weaker(severity) if open_ended(launch) else (severity, certainty)


def unset(launch: Launch, severity: Severity, certainty: Certainty = "certain") -> tuple[Severity, Certainty]:
    """How bad and how sure a finding is that rests on a variable that is not set."""
    return _weaker(severity) if launch.hidden else (severity, certainty)


def _weaker(severity: Severity) -> tuple[Severity, Certainty]:
    return ("warning" if severity == "error" else "note"), "possible"


def nonzero(launch: Launch, name: str) -> bool:
    """Whether a flag is given a number other than zero."""
    return bool(launch.number(name, 0.0))


def size(launch: Launch, name: str, default: int = 1) -> int | None:
    """A whole number of a flag, at least 1; None where it is given and not known."""
    number = launch.number(name, float(default))
    return int(number) if number is not None and number >= 1 and number == int(number) else None


def ranks(launch: Launch) -> int | None:
    """GPUs of the trainer; None where they are not known."""
    nodes, per_node = size(launch, "--actor-num-nodes"), size(launch, "--actor-num-gpus-per-node", 8)
    return None if nodes is None or per_node is None else nodes * per_node


def sft(launch: Launch) -> bool:
    """Whether it trains on given responses: nothing is sampled."""
    loss = (launch.value("--loss-type") or "").startswith("sft")
    return loss or "sft_rollout" in (launch.value("--rollout-function-path") or "")


def samples(launch: Launch) -> bool:
    """Whether engines run and sample."""
    replays = launch.has("--debug-train-only", "--load-debug-rollout-data")
    return not (replays or sft(launch))


def trains(launch: Launch) -> bool:
    """Whether the model is trained."""
    return not launch.has("--debug-rollout-only")


def fsdp(launch: Launch) -> bool:
    """Whether the trainer is not Megatron."""
    return launch.value("--train-backend") == "fsdp"


def moe(launch: Launch) -> bool:
    """Whether the flags describe a mixture of experts."""
    return nonzero(launch, "--num-experts")


def multi_latent_attention(launch: Launch) -> bool:
    """Whether the flags describe a model with multi-head latent attention."""
    return launch.has("--multi-latent-attention")


def critic(launch: Launch) -> bool:
    """Whether a critic is trained beside the actor."""
    return launch.value("--advantage-estimator") == "ppo"


def severed(launch: Launch) -> tuple[str, ...] | None:
    """A command of the script that begins with a flag: what stood before it lost its backslash."""
    return next((argv for argv in launch.commands if argv and _FLAG.match(argv[0])), None)


def seen(launch: Launch, name: str) -> Variable | None:
    """A variable as the launch sets it; None where it does not, or removes it."""
    variable = launch.env.get(name)
    return None if variable is None or variable.origin == "unset" else variable


def known_text(variable: Variable | None) -> str | None:
    """A variable's value; None where it has none, or only a shell knows it."""
    return None if variable is None or "$" in variable.value or "`" in variable.value else variable.value


# -- The folders that a launch names, and what this machine knows of them


PATHS = ("--load", "--ref-load", "--save", "--hf-checkpoint", "--critic-load", "--critic-save", "--prompt-data")
"""Flags that name what must be on the machine that trains."""

_LEFT = re.compile(r"\$\{?\w*(?:\[[@*]\]|[@*]|ARGS|FLAGS|OPTS|EXTRA)")

_COMMON = frozenset({"/", ".", "/root", "/home", "/tmp", "/mnt", "/data", "/workspace", "/opt", "/var"})  # noqa: S108
"""Folders that every machine may have, so that they do not say that this is the one that trains."""


def named(launch: Launch, flag: str) -> Path | None:
    """The path that a flag names; None where it is not given or only a shell knows it."""
    value = launch.value(flag)
    return Path(value) if value and "\0" not in value else None


def exists(path: Path) -> bool:
    """Whether a path is there, as far as this user may look."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_known(launch: Launch, path: Path) -> bool:
    """Whether this machine is one that would have the path: it does, or has its folder, or another path of the launch.

    A launch script is often read on another machine than the one that trains: what is missing here says nothing there.
    """
    if exists(path):
        return True
    if any(exists(other) for flag in PATHS if (other := named(launch, flag)) is not None):
        return path.is_absolute()
    parent = path.parent
    return path.is_absolute() and str(parent) not in _COMMON and parent != _home() and exists(parent)


def _home() -> Path | None:
    try:
        return Path.home()
    except (RuntimeError, KeyError):
        return None


def same(path: Path, other: Path) -> bool:
    """Whether two paths are one folder, as far as can be told: by the file system, else as written."""
    try:
        if path.exists() and other.exists():
            return path.samefile(other)
    except (OSError, ValueError):
        pass
    return PurePosixPath(path) == PurePosixPath(other)


def flag_of(launch: Launch, path: Path, flags: tuple[str, ...]) -> str | None:
    """The first of the flags that names a folder: the same, or one of the same name (copied from where it trains)."""
    for flag in flags:
        value = named(launch, flag)
        if value is not None and (same(value, path) or (not exists(value) and value.name == path.absolute().name)):
            return flag
    return None


def is_whole(launch: Launch) -> bool:
    """Whether all flags are seen: no array or list of further ones is left to the shell."""
    return bool(launch.argv) and not any(_LEFT.search(word) for word in launch.argv)


def flagged(launch: Launch, flags: tuple[str, ...]) -> bool:
    """Whether any of the flags has a value that can be read."""
    return any(named(launch, flag) is not None for flag in flags)


def has_checkpoints(path: Path) -> bool:
    """Whether Megatron has saved to a folder."""
    try:
        return (path / TRACKER).is_file() or any(iteration_of(child.name) is not None for child in path.iterdir())
    except OSError:
        return False


def folder_of(checkpoint: MegatronCheckpoint, iteration: int) -> Path:
    """The folder of one iteration; -1 is ``release``."""
    if iteration_of(checkpoint.path.absolute().name) == iteration:
        return checkpoint.path
    return checkpoint.path / ("release" if iteration < 0 else f"iter_{iteration:07d}")


def shown(text: str) -> str:
    """A text of a file, in one line and short."""
    return ascii(text[:60])[1:-1]


# -- GPU memory that ran out where trainer and engines share GPUs


def ran_out(log: Log, launch: Launch | None, rollouts: int, when: str) -> Iterator[Found]:
    """That it did, the first time after so many rollouts: whose, when in the cycle, and what the engines keep."""
    error = next((error for error in memory_errors(log, launch) if error.rollouts == rollouts), None)
    if error is None or not colocated(launch, log):
        return
    side = "an inference engine" if error.engine else "the trainer"
    fraction = argument("sglang_mem_fraction_static", launch, log)
    now = f"; --sglang-mem-fraction-static is {fraction}" if fraction else ""
    message = f"GPU memory ran out in {side}{by(error.hit, ', ')}, {when.format(error.steps)}{now}"
    yield told(log, error.hit, message)
