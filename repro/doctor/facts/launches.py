"""What several rules ask of a launch: what it runs, how large it is, what is not known of it, what its actors see."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Log, Variable
from repro.doctor.artefacts.logs.lines import argument, by, colocated, memory_errors, told
from repro_golden.base.checks import Certainty, Found, Severity

__all__ = [
    "absent",
    "critic",
    "fsdp",
    "known_text",
    "moe",
    "multi_latent_attention",
    "nonzero",
    "open_ended",
    "programmed",
    "ran_out",
    "ranks",
    "samples",
    "seen",
    "severed",
    "sft",
    "size",
    "trains",
    "unset",
]

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
    for word in launch.words:
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
