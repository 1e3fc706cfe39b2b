"""What keeps an engine and a trainer from the same bits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from repro.doctor.artefacts.kinds import Golden, HfConfig, Launch, Machine
from repro.doctor.facts.determinism import (
    ENGINES,
    TRAINER,
    TRUE_ON_POLICY,
    asked_of_engines,
    asked_of_trainer,
    determinism,
)
from repro.doctor.facts.launches import absent, fsdp, known_text, multi_latent_attention, samples, seen, trains
from repro.doctor.facts.sources import MILES, SLIME
from repro_golden.base.checks import Found, Where, rule

_ALWAYS = ("fa3", "flashinfer", "triton")
_SINCE = ("ascend", "fa4", "intel_xpu")
"""Taken by newer versions alone."""
_SPARSE = ("nsa", "dsa")
"""Refused by SGLang, taken by the build that slime patches for sparse attention."""
_LATENT = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM")


def _latent(launch: Launch, config: HfConfig | None) -> bool:
    named = config.values.get("architectures") if config else None
    return multi_latent_attention(launch) or (isinstance(named, list) and any(name in _LATENT for name in named))


@rule(
    title="Deterministic inference with an attention backend that cannot",
    severity="error",
    certainty="certain",
    why="SGLang refuses to start, or the engine's prefix cache is lost without a word in the launch",
    fix="--sglang-attention-backend fa3, flashinfer or triton",
    sources=(
        "sgl-project/sglang python/sglang/srt/server_args.py (_handle_deterministic_inference)",
        f"{SLIME} docs/en/advanced/reproducibility.md",
        f"{SLIME} docker/patch/latest/sglang-deterministic.patch",
    ),
)
def _engine_determinism(launch: Launch, config: HfConfig | None) -> Iterator[Found]:
    backend = launch.value("--sglang-attention-backend")
    if asked_of_engines(launch) is None or backend is None:
        return
    where, allowed = launch.where("--sglang-attention-backend"), ", ".join(_ALWAYS)
    if backend in _SINCE:
        yield Found(
            f"--sglang-attention-backend {backend} is deterministic in newer versions of SGLang alone",
            where,
            "note",
            "possible",
        )
    elif backend in _SPARSE:
        message = (
            f"--sglang-attention-backend {backend}: only SGLang as slime patches it for GLM-5 is deterministic with it"
        )
        yield Found(message, where, "warning", "possible")
    elif backend not in _ALWAYS:
        message = (
            f"--sglang-attention-backend {backend[:40]} is not deterministic: SGLang stops at {ENGINES}, and "
            f"takes {allowed}"
        )
        yield Found(message, where, certainty="likely")
    elif backend == "flashinfer" and _latent(launch, config):
        message = (
            "--sglang-attention-backend flashinfer is not deterministic with latent attention: SGLang takes fa3 "
            "and triton there"
        )
        yield Found(message, where, "warning", "likely", "--sglang-attention-backend fa3, or triton")
    elif backend == "flashinfer" and not launch.has("--sglang-disable-radix-cache"):
        message = (
            "--sglang-attention-backend flashinfer: SGLang switches its radix cache off for determinism, shared "
            "prompts cost again"
        )
        yield Found(message, where, "note", fix="--sglang-attention-backend fa3 keeps the cache (Hopper)")


_MODULES = ("flash_attn_3", "flash_attn_interface")


@rule(
    title="FlashAttention 3 is installed while a deterministic run is asked for",
    severity="warning",
    certainty="likely",
    why="Transformer Engine prefers FlashAttention 3, whose backward pass is not the same twice",
    fix="pip uninstall flash_attn_3 -y",
    sources=(
        "slime guide: Reproducibility (docs/en/advanced/reproducibility.md)",
        f"{MILES} examples/experimental/reproducibility/README.md",
        "Dao-AILab/flash-attention#2244",
    ),
)
def _flash_attn_3(machine: Machine, launch: Launch) -> Iterable[Found]:
    flag = determinism(launch, sampling=False)
    chosen = launch.value("--attn-implementation") == "flash_attention_3"  # Miles' recipe for FSDP asks for it
    if not flag or chosen or not trains(launch):
        return
    version = machine.packages.get("flash-attn-3")
    modules = sorted(machine.modules & set(_MODULES))
    if version is None and not modules:
        return
    what = f"flash-attn-3 {version}".strip() if version is not None else f"the module {modules[0]}"
    where = Where(machine.source, item=what)
    yield Found(f"{flag} is given, and {what} is installed: Transformer Engine takes it before others", where)


@rule(
    title="--attention-dropout or --hidden-dropout is not 0",
    severity="warning",
    certainty="certain",
    why="the policy that is trained is not the one that sampled; layouts with other random streams give other results",
    fix="--attention-dropout 0.0 --hidden-dropout 0.0, as all launch scripts of the trainers do",
    sources=(
        f"{SLIME} scripts/run-qwen2.5-0.5B-reproducibility.sh (MISC_ARGS)",
        f"{SLIME} slime/backends/megatron_utils/model.py:748",
    ),
)
def _megatron_dropout(launch: Launch) -> Iterator[Found]:
    # with a bridge the checkpoint's own configuration decides
    bridged = launch.value("--megatron-to-hf-mode") == "bridge"
    if fsdp(launch) or not trains(launch):
        return
    for name in ("--attention-dropout", "--hidden-dropout"):
        value = launch.number(name, 0.1)
        if value is None or value == 0 or (bridged and not launch.has(name)):
            continue
        asking = ", in a run that asks for determinism" if asked_of_trainer(launch) else ""
        if launch.has(name):
            yield Found(f"{name} {launch.value(name)}{asking}", launch.where(name))
        else:
            message = f"{name} is not given: Megatron's default is 0.1{asking}"
            yield Found(message, launch.where(name), *absent(launch, "warning"))


_NAMES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
"""Variables that turn TF32 on for all products of fp32 matrices."""
_WHY = (
    "log-probs, routers and optimizer parts that are kept in fp32 lose its precision on this side alone, so "
    "trainer and engine drift apart"
)
_FIX = "unset it"
_SOURCES = ("pytorch: CUDA semantics, TensorFloat-32", "NVIDIA: NVIDIA_TF32_OVERRIDE")


def _tf32(name: str, where: Where, flag: str) -> Found:
    """What both rules say of a variable; a warning under a flag that asks for equal bits."""
    message = f"{name}=1: products of fp32 matrices keep 10 bits of mantissa, not 23"
    return Found(f"{message}, while {flag} is given", where, "warning") if flag else Found(message, where)


@rule(
    title="The launch turns fp32 into TF32",
    severity="note",
    certainty="certain",
    why=_WHY,
    fix=_FIX,
    sources=_SOURCES,
    any_program=True,
)
def _tf32_override(launch: Launch) -> Iterable[Found]:
    for name in _NAMES:
        variable = seen(launch, name)
        if variable and known_text(variable) == "1":
            yield _tf32(name, Where(variable.where.path, variable.where.line, name, "1"), determinism(launch))


@rule(
    title="The machine turns fp32 into TF32",
    severity="note",
    certainty="certain",
    why=_WHY,
    fix=_FIX,
    sources=_SOURCES,
    any_program=True,
)
def _tf32_override_machine(machine: Machine, launch: Launch | None) -> Iterable[Found]:
    for name in _NAMES:
        set_there = launch is not None and seen(launch, name) is not None
        if not set_there and (machine.variables or {}).get(name) == "1":
            yield _tf32(name, Where(machine.source, item=name, value="1"), determinism(launch))


_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def _unpinned(machine: Machine, launch: Launch | None, golden: Golden | None, *, pinned: bool) -> Iterable[Found]:
    recorded = _recorded(golden)
    if recorded and machine.cpus and recorded > machine.cpus:
        yield Found(
            f"the golden run was recorded with {recorded} threads, and {machine.cpus} cores are usable here",
            Where(machine.source, item="cores", value=str(machine.cpus)),
            fix="verify it on a machine with as many cores, or record another one here",
        )
    flag = determinism(launch)
    # Ray gives its workers OMP_NUM_THREADS by their num_cpus; a launch of no known trainer may use no Ray
    if flag and launch and launch.system is None and not launch.submitted and not pinned and machine.threads:
        yield Found(
            f"{flag} is given and OMP_NUM_THREADS is not set: torch takes {machine.threads} here, and another number "
            "on another machine",
            launch.where(flag), "note", fix=f"export OMP_NUM_THREADS={machine.threads}",
        )  # fmt: skip


def _recorded(golden: Golden | None) -> int | None:
    identity = golden.trace.header.identity if golden else None
    layout = identity.get("layout") if isinstance(identity, Mapping) else None
    text = str(layout.get("threads", "")) if isinstance(layout, Mapping) else ""
    return int(text) if text.isdecimal() and len(text) < 9 else None


@rule(
    title="More threads than cores, or a number that is left to the machine",
    severity="warning",
    certainty="certain",
    why="sums on the CPU are split by threads: another number of them gives other bits, and more than cores wait for "
    "each other",
    fix="set OMP_NUM_THREADS and MKL_NUM_THREADS to the cores of one rank, in the job's env_vars",
    sources=(
        "pytorch: CPU threading (torch.set_num_threads)",
        "ray: OMP_NUM_THREADS is set to the num_cpus of a worker",
    ),
    any_program=True,
)
def _thread_count(machine: Machine, launch: Launch | None, golden: Golden | None) -> Iterable[Found]:
    pinned = False
    for name in _VARIABLES:
        variable = seen(launch, name) if launch else None
        inherited = (machine.variables or {}).get(name)
        text = known_text(variable) if variable else inherited
        where = variable.where if variable else Where(machine.source, item=name)
        where = Where(where.path, where.line, name, text or "")
        pinned = pinned or variable is not None or inherited is not None
        if text is None:
            continue
        # a list is one number for each level of nesting
        number = re.fullmatch(r"\s*0*(\d{1,9})\s*(?:,[\d,\s]*)?", text)
        if not number or int(number[1]) < 1:
            yield Found(f"{name} is no number of threads: it is ignored, and all cores are taken", where)
        elif machine.cpus and int(number[1]) > machine.cpus:
            yield Found(
                f"{name} asks for {int(number[1])} threads, and {machine.cpus} cores are usable", where,
                fix=f"{name}={machine.cpus}, or less where several ranks share the machine",
            )  # fmt: skip
    yield from _unpinned(machine, launch, golden, pinned=pinned)


_BOTH = (
    (TRAINER,),
    ("--sglang-true-on-policy-contract", "--sglang-rl-on-policy-target"),
    ("--sglang-attention-backend",),
)
_MEGATRON = (
    ("--true-on-policy-contract",), ("--transformer-impl",), ("--batch-invariant-mode",), ("--use-cpu-initialization",),
    ("--no-bias-swiglu-fusion",), ("--no-rope-fusion",), ("--recompute-logprobs-via-prefill",),
)  # fmt: skip
_FSDP = (("--attn-implementation",),)


@rule(
    title="--true-on-policy-mode without the rest of its set",
    severity="warning",
    certainty="certain",
    why="log_probs of trainer and engine are then not equal bit by bit, which the mode takes for granted",
    fix="let Miles build the flags (miles.true_on_policy), or add what is named",
    sources=(
        f"{MILES} miles/true_on_policy/config.py:60-106,190-235",
        f"{MILES} tests/e2e/fsdp/test_qwen3_4B_fsdp_true_on_policy.py",
    ),
)
def _true_on_policy_half(launch: Launch) -> Iterator[Found]:
    if not launch.has(TRUE_ON_POLICY) or launch.system == "relax" or not samples(launch) or not trains(launch):
        return
    groups = (*_BOTH, *(_FSDP if fsdp(launch) else _MEGATRON))
    missing = [group[0] for group in groups if not launch.has(*group)]
    if missing:
        message = f"{TRUE_ON_POLICY} is given, and {len(missing)} of its set missing: {', '.join(missing)}"
        yield Found(message, launch.where(TRUE_ON_POLICY), *absent(launch, "warning"), fix="add " + " ".join(missing))
    if not fsdp(launch) and launch.has("--transformer-impl") and launch.value("--transformer-impl") != "local":
        message = (
            f"{TRUE_ON_POLICY} with --transformer-impl {launch.value('--transformer-impl')}: the contract wants local"
        )
        yield Found(message, launch.where("--transformer-impl"))
    if not fsdp(launch) and launch.has("--sequence-parallel"):
        message = f"{TRUE_ON_POLICY} with --sequence-parallel, which the contract switches off"
        yield Found(message, launch.where("--sequence-parallel"), certainty="likely")
