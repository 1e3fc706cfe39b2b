"""Switches of determinism: which are missing, late, overridden or at odds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from repro.doctor.artefacts.kinds import Flag, Launch, PythonCode, Variable
from repro.doctor.artefacts.launch_kinds import Step
from repro.doctor.facts.determinism import (
    CUBLAS,
    CUBLAS_VALUES,
    ENGINES,
    NCCL_ALGO,
    NCCL_ALGOS,
    NVTE,
    SET,
    TRAINER,
    TRUE_ON_POLICY,
    asked,
    asked_of_engines,
    asked_of_trainer,
    megatron,
)
from repro.doctor.facts.known_flags import twin
from repro.doctor.facts.launches import (
    absent,
    fsdp,
    known_text,
    multi_latent_attention,
    open_ended,
    ranks,
    samples,
    seen,
    size,
    trains,
    unset,
)
from repro.doctor.facts.sources import MEGATRON_ARGS, MEGATRON_DETERMINISM, MILES, SLIME
from repro_golden.base.checks import Found, Where, rule

_READ = {
    "NCCL_ALGO": "NCCL reads it when a group makes its communicator",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "Transformer Engine reads it when its attention is built",
    "CUBLAS_WORKSPACE_CONFIG": "cuBLAS reads it at its first product",
}
_COPIED = "Megatron's embedding and Transformer Engine's attention copy the setting when they are built"


def _late(steps: Sequence[Step], at: int) -> Step | None:
    """What was built before a switch, without the same switch before that."""
    step = steps[at]
    awaited = ("groups",) if step.name == "NCCL_ALGO" else ("megatron", "model")
    for number, built in enumerate(steps[:at]):
        if built.kind in awaited and built.leads_to(step):
            before = (s for s in steps[:number] if s.leads_to(step))
            same = any(s.kind == "switch" if step.kind == "switch" else s.name == step.name for s in before)
            return None if same else built
    return None


def _found(code: PythonCode, function: str, step: Step, built: Step) -> Found:
    whose = function if function.startswith("<") else f"{function}()"
    message = f"{whose} switches {step.name} on after {built.name}() in line {built.line}"
    if step.kind == "variable":
        message = f"{whose} sets {step.name} after {built.name}() in line {built.line}: {_READ[step.name]}"
    where = Where(str(code.path), step.line, step.name)
    if built.kind == "model":  # modules of plain torch ask when they run
        return Found(message, where, "note", "possible")
    return Found(message if step.kind == "variable" else f"{message}: {_COPIED}", where)


@rule(
    title="Determinism that Python code switches on after the model is built",
    severity="warning",
    certainty="likely",
    why="what was built before keeps its kernels: the run says that it is deterministic, and grad_norm still differs",
    fix="switch it on, and set the variables, before model and process groups are built; best in the environment of "
    "the launch",
    sources=("areal-project/AReaL#1544",),
)
def _determinism_after_model(code: PythonCode) -> Iterator[Found]:
    for function, steps in code.functions.items():
        reported: set[str] = set()
        for at, step in enumerate(steps):
            late = _late(steps, at) if step.kind == "switch" or step.name in _READ else None
            name = step.name if step.kind == "variable" else "switch"
            if late and name not in reported:
                reported.add(name)
                yield _found(code, function, step, late)


@rule(
    title="The trainer's attention may be fused in a deterministic run",
    severity="warning",
    certainty="likely",
    why="fused attention is not deterministic in its backward pass in all versions of cuDNN and Transformer Engine",
    fix="--attention-backend flash, without flash-attn 3 installed",
    sources=(
        f"{SLIME} scripts/run-qwen2.5-0.5B-reproducibility.sh",
        f"{SLIME} docs/en/advanced/reproducibility.md",
        f"{MILES} examples/experimental/reproducibility/run-qwen2.5-0.5B-gsm8k.sh",
    ),
)
def _determinism_attention(launch: Launch) -> Iterator[Found]:
    asking = asked_of_trainer(launch)
    if asking is None or fsdp(launch) or launch.value("--transformer-impl") == "local":
        return
    backend, variable = launch.value("--attention-backend"), seen(launch, NVTE)
    deterministic = known_text(variable) == "0" or (variable is not None and known_text(variable) is None)
    if backend == "fused" and not deterministic:
        message = f"--attention-backend fused without {NVTE}=0 adds gradients atomically"
        yield Found(
            message, launch.where("--attention-backend"), *(() if variable else unset(launch, "warning", "likely"))
        )
    elif backend in ("fused", "auto"):
        message = (
            f"--attention-backend {backend} in a deterministic run: which kernel that is depends on the versions "
            "and the shapes"
        )
        yield Found(message, launch.where("--attention-backend"), "note", "possible")
    elif not launch.has("--attention-backend") and not multi_latent_attention(launch) and not open_ended(launch):
        message = "--deterministic-mode without --attention-backend flash: Transformer Engine picks the kernel"
        yield Found(message, asking, "note", "possible")


@rule(
    title="CUBLAS_WORKSPACE_CONFIG is neither :4096:8 nor :16:8",
    severity="error",
    certainty="certain",
    why="with another workspace cuBLAS may split sums differently from call to call",
    fix="CUBLAS_WORKSPACE_CONFIG=:4096:8",
    sources=(
        f"{SLIME} docs/en/advanced/reproducibility.md",
        f"{SLIME} slime/backends/megatron_utils/initialize.py:93",
        "torch documentation: torch.use_deterministic_algorithms",
        MEGATRON_DETERMINISM,
    ),
)
def _determinism_cublas(launch: Launch) -> Iterator[Found]:
    variable = seen(launch, CUBLAS)
    value = known_text(variable)
    if variable is None or value is None or value in CUBLAS_VALUES or asked(launch) is None or not trains(launch):
        return
    message = f"{CUBLAS}={value[:40]} is neither {CUBLAS_VALUES[0]} nor {CUBLAS_VALUES[1]}"
    stops = asked_of_trainer(launch) is not None
    message += ": torch stops at the first cuBLAS call in deterministic mode" if stops else ""
    yield Found(message, variable.where, "error" if stops else "warning")


@rule(
    title="Flags that Megatron's deterministic mode excludes",
    severity="error",
    certainty="certain",
    why="the launch is refused, or runs a kernel whose sums have no fixed order",
    fix="remove the flag that is named",
    sources=(MEGATRON_ARGS, MEGATRON_DETERMINISM, f"{MILES} miles/backends/megatron_utils/initialize.py:121"),
)
def _determinism_exclusive(launch: Launch) -> Iterator[Found]:
    if asked_of_trainer(launch) is None or fsdp(launch):
        return
    if launch.has("--cross-entropy-loss-fusion"):
        message = (
            "--cross-entropy-loss-fusion with --deterministic-mode: Megatron stops, the fusion is not deterministic"
        )
        yield Found(message, launch.where("--cross-entropy-loss-fusion"))
    for name, happens in (
        ("--tp-comm-overlap", "newer versions of Megatron stop, older ones run it and are not deterministic"),
        ("--use-flash-attn", "versions of Megatron before its determinism module stop"),
    ):
        if launch.has(name):
            yield Found(f"{name} with --deterministic-mode: {happens}", launch.where(name), "warning")
    if launch.has("--debug-deterministic-collective") and launch.has("--overlap-grad-reduce"):
        message = "--debug-deterministic-collective with --overlap-grad-reduce: Miles wants synchronous reduction"
        yield Found(message, launch.where("--overlap-grad-reduce"))


_WITHOUT = {
    NCCL_ALGO: "NCCL picks by size and topology; Megatron's validator stops or sets Ring in its own process alone",
    NVTE: "Transformer Engine's attention stops a deterministic Megatron, or adds gradients atomically",
    CUBLAS: "torch stops at the first cuBLAS call of a deterministic trainer",
    TRAINER: "the trainer's kernels stay free to add in any order",
    ENGINES: "responses depend on which requests share a batch",
}


def _missing(launch: Launch) -> list[str]:
    """What belongs to the set and is not there, as far as it applies."""
    missing: list[str] = []
    if trains(launch):
        missing += [] if launch.has(TRAINER) else [TRAINER]
        alone = ranks(launch) == 1
        wanted = [name for name in SET if not (name == NCCL_ALGO and alone) and not (name == NVTE and fsdp(launch))]
        missing += [name for name in wanted if seen(launch, name) is None]
    if samples(launch) and not launch.has(ENGINES) and not launch.has(TRUE_ON_POLICY):
        missing.append(ENGINES)
    return missing


@rule(
    title="Part of the determinism set is asked for, another part is missing",
    severity="warning",
    certainty="certain",
    why="one free choice of a kernel or of an order is enough: two runs of this launch differ",
    fix="give the whole set: --deterministic-mode --sglang-enable-deterministic-inference and the three variables",
    sources=(
        "Miles guide: Debugging",
        f"{SLIME} docs/en/advanced/reproducibility.md",
        f"{SLIME} slime/backends/megatron_utils/initialize.py:88",
        f"{MILES} examples/experimental/reproducibility/README.md",
        MEGATRON_ARGS,
        MEGATRON_DETERMINISM,
    ),
)
def _determinism_half(launch: Launch) -> Iterator[Found]:
    where = asked(launch)
    if where is None:
        return
    by = where.item
    weak = not by.startswith("--")
    for name in _missing(launch):
        flag = name.startswith("--")
        severity, certainty = absent(launch, "warning") if flag else unset(launch, "warning", "likely")
        fix = f"add {name}" if flag else f"{name}={SET[name]} in env_vars of the job's runtime environment"
        message = f"determinism is asked for by {by}, and {name} is missing: {_WITHOUT[name]}"
        place = where if flag else Where(str(launch.path), where.line, name)
        yield Found(message, place, "note" if weak else severity, certainty, fix)


@rule(
    title="PYTHONHASHSEED is not fixed where determinism is asked for",
    severity="note",
    certainty="certain",
    why="code that iterates a set, or seeds itself by hash(), does otherwise in each process and each run",
    fix="PYTHONHASHSEED=0 in the runtime environment",
    sources=("Python documentation: PYTHONHASHSEED", "Miles guide: Debugging"),
)
def _determinism_hash_seed(launch: Launch) -> Iterator[Found]:
    variable = seen(launch, "PYTHONHASHSEED")
    value = known_text(variable)
    if variable is not None and value is None:
        return
    if value not in (None, "", "random") and not (value.isdecimal() and len(value) < 12 and int(value) < 2**32):
        where = variable.where if variable else Where(str(launch.path), item="PYTHONHASHSEED")
        yield Found(f"PYTHONHASHSEED={value[:40]} is no seed: Python does not start with it", where, "error")
    elif asked(launch) and value in (None, "", "random"):
        where = variable.where if variable else Where(str(launch.path), item="PYTHONHASHSEED")
        state = "is random" if value == "random" else "is not set"
        message = f"PYTHONHASHSEED {state}: sets of texts are iterated in another order in each process"
        yield Found(message, where, *(("warning", "certain") if value else unset(launch, "note")))


_NAMES = (*SET, "PYTHONHASHSEED", "CUDA_DEVICE_MAX_CONNECTIONS")
_CLUSTER = re.compile(r"^[^#\n]*\bray\s+start\b", re.M)


def _set_too_late(launch: Launch, name: str, variable: Variable, clusters: list[int]) -> Iterator[Found]:
    here = variable.where.path == str(launch.path) and variable.where.line is not None
    line, nodes = variable.where.line or 0, size(launch, "--actor-num-nodes")
    setting = f"{name}={variable.value[:40]} is set for the submitting shell alone"
    if not clusters:
        message = f"{setting}, and the cluster is started elsewhere: its actors do not see it"
        yield Found(message, variable.where, "warning", "likely")
    elif variable.origin == "prefix" or (here and line > max(clusters)):
        message = f"{setting}, after `ray start`: its actors do not see it"
        needed = asked_of_trainer(launch) is not None and trains(launch) and name in SET
        yield Found(message, variable.where, "error" if needed else "warning", "likely")
    elif nodes is not None and nodes > 1:
        message = f"{setting}: actors on the other {nodes - 1} of {nodes} nodes do not see it"
        yield Found(message, variable.where, "warning", "likely")


@rule(
    title="A variable of the determinism set that does not reach the actors",
    severity="warning",
    certainty="likely",
    why="Ray's actors inherit from `ray start` and from the job's runtime environment, not from the submitting shell",
    fix="name it in env_vars of --runtime-env-json, or export it before `ray start` on each node",
    sources=(
        f"{SLIME} docs/en/advanced/reproducibility.md",
        f"{SLIME} slime/ray/actor_group.py:64-109",
        "Ray documentation: Environment Dependencies (env_vars)",
    ),
)
def _determinism_late(launch: Launch) -> Iterator[Found]:
    if not launch.submitted or asked(launch) is None:
        return
    # lines that start a part of the cluster from this shell
    clusters = [launch.text.count("\n", 0, match.start()) + 1 for match in _CLUSTER.finditer(launch.text)]
    for name in _NAMES:
        variable = seen(launch, name)
        if variable is None or variable.origin not in ("export", "prefix"):
            continue
        yield from _set_too_late(launch, name, variable, clusters)


@rule(
    title="NCCL_ALGO that Megatron refuses in deterministic mode",
    severity="error",
    certainty="certain",
    why="Megatron's validator compares the text letter by letter, and stops the launch at SGLang's own value too",
    fix="NCCL_ALGO=Ring. Engines with several GPUs set allreduce:tree for themselves",
    sources=(
        MEGATRON_ARGS,
        MEGATRON_DETERMINISM,
        f"{SLIME} docs/en/advanced/reproducibility.md",
        f"{MILES} tests/e2e/fsdp/test_qwen3_4B_fsdp_true_on_policy.py (allreduce:tree, FSDP alone)",
    ),
)
def _determinism_nccl_algo(launch: Launch) -> Iterator[Found]:
    variable = seen(launch, NCCL_ALGO)
    value = known_text(variable)
    if variable is None or value is None or asked_of_trainer(launch) is None or value in NCCL_ALGOS:
        return
    where, allowed = variable.where, ", ".join(NCCL_ALGOS)
    tokens = [token.strip() for token in value.split(",") if token.strip()]
    if fsdp(launch):
        if value.lower() not in ("allreduce:tree", "allreduce:ring", "ring", "tree"):
            yield Found(f"{NCCL_ALGO}={value[:60]} leaves NCCL a choice", where, "warning", "likely")
    elif value == "Tree" or (tokens and all(token in NCCL_ALGOS for token in tokens)):
        message = f"{NCCL_ALGO}={value[:60]} is taken by some versions of Megatron and refused by others: {allowed}"
        yield Found(message, where, "warning")
    else:
        yield Found(f"{NCCL_ALGO}={value[:60]} is none of {allowed}: --deterministic-mode stops at it", where)


@rule(
    title="NVTE_ALLOW_NONDETERMINISTIC_ALGO is not 0 where determinism is asked for",
    severity="error",
    certainty="certain",
    why="Transformer Engine's attention adds gradients atomically unless told not to",
    fix="NVTE_ALLOW_NONDETERMINISTIC_ALGO=0",
    sources=(
        "NVIDIA/Megatron-LM megatron/core/extensions/transformer_engine.py (TEDotProductAttention)",
        MEGATRON_DETERMINISM,
        f"{SLIME} docs/en/advanced/reproducibility.md",
    ),
)
def _determinism_nvte(launch: Launch) -> Iterator[Found]:
    variable = seen(launch, NVTE)
    value = known_text(variable)
    if variable is None or value is None or fsdp(launch) or not trains(launch):
        return
    if set(value.strip().removeprefix("+")) == {"0"}:
        return
    if asked_of_trainer(launch):
        local = launch.value("--transformer-impl") == "local"
        message = f"{NVTE}={value[:40]} with --deterministic-mode"
        message += "" if local else ": Megatron stops when it builds attention"
        yield Found(message, variable.where, "warning" if local else "error")
    elif asked_of_engines(launch):
        message = f"{NVTE}={value[:40]} leaves the trainer free while the engines are held to determinism"
        yield Found(message, variable.where, "warning")


_FLAGS = (
    TRAINER, ENGINES, TRUE_ON_POLICY, "--attention-backend", "--sglang-attention-backend", "--attention-dropout",
    "--hidden-dropout", "--seed", "--rollout-seed",
)  # fmt: skip
_VARIABLES = (*SET, "PYTHONHASHSEED")


def _place(where: Where) -> str:
    return f"line {where.line}" if where.line is not None else "before"


def _flag(flags: Sequence[Flag]) -> Iterator[Found]:
    for before, after in pairwise(flags):
        if (before.name, before.values) == (after.name, after.values):
            continue
        old, new = " ".join((before.name, *before.values)), " ".join((after.name, *after.values))
        yield Found(f"{new[:80]} overrides {old[:80]} ({_place(before.where)}): the last one counts", after.where)


def _variable(name: str, settings: Sequence[Variable]) -> Iterator[Found]:
    for before, after in pairwise(settings):
        if before.origin == "unset" or (before.value, before.origin) == (after.value, after.origin):
            continue
        if after.origin == "unset":
            yield Found(f"{name}={before.value[:40]} ({_place(before.where)}) is removed again", after.where)
        elif before.value != after.value:
            message = f"{name}={after.value[:40]} overrides {before.value[:40]} ({_place(before.where)})"
            yield Found(message, after.where)


@rule(
    title="A flag or variable of the determinism set is overridden later",
    severity="warning",
    certainty="likely",
    why="the line that was written for determinism has no effect, and nothing says so",
    fix="keep one setting; of a variable, the one in the job's runtime environment",
    sources=("Miles guide: Debugging", f"{SLIME} docs/en/advanced/reproducibility.md"),
)
def _determinism_overridden(launch: Launch) -> Iterator[Found]:
    if asked(launch) is None and not any(flag.name in (TRAINER, ENGINES) for flag in launch.given):
        return
    for name in _FLAGS:
        yield from _flag([flag for flag in launch.given if flag.name in (name, twin(name))])
    for name in _VARIABLES:
        yield from _variable(name, [variable for key, variable in launch.settings if key == name])


def _racing(launch: Launch) -> str | None:
    """The flag by which the order in which responses end decides what is trained on."""
    for name in ("--partial-rollout", "--fully-async"):
        if launch.has(name):
            return name
    if "fully_async" in (launch.value("--rollout-function-path") or ""):
        return "--rollout-function-path"
    over, batch = launch.number("--over-sampling-batch-size"), launch.number("--rollout-batch-size")
    return "--over-sampling-batch-size" if over is not None and batch is not None and over > batch else None


@rule(
    title="Deterministic inference with a rollout that takes what is ready first",
    severity="warning",
    certainty="certain",
    why="each response is the same again, but which of them make a batch is not: the runs differ all the same",
    fix="sample exactly the batch, synchronously; or record the rollouts once and replay them (repro rollout record)",
    sources=(f"{SLIME} slime/rollout/sglang_rollout.py", "Miles guide: Debugging"),
)
def _determinism_rollout_order(launch: Launch) -> Iterator[Found]:
    asking, racing = asked_of_engines(launch), _racing(launch)
    if asking is not None and racing is not None:
        flag = " ".join((racing, *launch.flags[racing].values[:1]))
        message = f"{asking.item} with {flag}: the samples that are ready first are trained on, and that is a race"
        yield Found(message, launch.where(racing))


@rule(
    title="A deterministic run also fills memory that nobody reads",
    severity="note",
    certainty="likely",
    why="most of what a deterministic run costs, 15 to 25 %, is this fill, and equal bits do not need it",
    fix="no variable turns it off: put `def init(args): import torch; "
    "torch.utils.deterministic.fill_uninitialized_memory = False` into a module of yours and give "
    "--custom-megatron-init-path MODULE.init; prove it with `repro golden verify`",
    sources=(
        "Miles guide: Debugging",
        "NVIDIA/Megatron-LM#6253 and #7093",
        f"{SLIME} slime/backends/megatron_utils/initialize.py:88",
    ),
)
def _fill_uninitialized_memory(launch: Launch) -> Iterable[Found]:
    if not launch.has("--deterministic-mode") or not megatron(launch) or launch.has("--custom-megatron-init-path"):
        return  # that hook is where it would be turned off
    if "fill_uninitialized_memory" in launch.text:
        return
    yield Found(
        "torch.use_deterministic_algorithms fills every new tensor before its first use: forward and backward took "
        "158 ms with it and 126 ms without, with equal digests (24 layers in bf16, one H200)",
        launch.where("--deterministic-mode"),
    )


@rule(
    title="PYTHONHASHSEED that Python code sets for itself",
    severity="note",
    certainty="likely",
    why="the interpreter reads it when it starts: sets of texts keep another order in each run",
    fix="PYTHONHASHSEED=0 in the environment of the launch, or in the job's runtime environment",
    sources=("Python documentation: PYTHONHASHSEED",),
)
def _hash_seed_in_code(code: PythonCode) -> Iterator[Found]:
    if code.starts_others:  # which inherit it
        return
    step = next((step for steps in code.functions.values() for step in steps if step.name == "PYTHONHASHSEED"), None)
    if step:
        message = "PYTHONHASHSEED is set in Python code, and no process is started from there that would inherit it"
        yield Found(message, Where(str(code.path), step.line, "PYTHONHASHSEED"))
