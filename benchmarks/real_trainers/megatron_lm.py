"""Megatron-LM's own pretrain_gpt.py under repro, without a network: ``python megatron_lm.py --parcels DIR --out DIR``.

The parcels are ``megatron.txz`` and ``repro.txz`` of `parcels.py`, and ``site_te.txz``, a folder of Transformer Engine
for the machine's torch. Models of two layers learn Megatron-LM's mock data. Stages are run in order, each within a
limit of its own; what an earlier call finished is not run again. Results go to ``megatron.json`` and ``megatron.log``
under ``--out``.

``python megatron_lm.py --page megatron.json`` writes the part of docs/real-trainers.md that is about it.
"""

from __future__ import annotations

from pathlib import Path

from stages import APART, OBSERVE, Stage, Trainer, checkout, main, traced

RANGES = [("1b1f5c4ac2", "7e3f670983")]
"""Between them, 5f668c10ec computes a router's sigmoid in fp32 for the auxiliary loss."""
VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1",
}  # fmt: skip
LAUNCH = "torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node"
ONE, TWO = f"{LAUNCH} 1", f"{LAUNCH} 2"
ARGUMENTS = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 2 --global-batch-size 4 --mock-data --split 98,1,1 --num-workers 0 "
    "--tokenizer-type NullTokenizer --vocab-size 1023 --lr 1e-3 --lr-decay-style constant --bf16 "
    "--use-distributed-optimizer --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --no-gradient-accumulation-fusion "
    "--log-interval 1 --eval-iters 0 --eval-interval 100 --deterministic-mode"
)
DENSE = f"pretrain_gpt.py {ARGUMENTS} --train-iters 2"
EXPERTS = (
    f"{DENSE} --num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid --moe-ffn-hidden-size 128 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall"
)
LOADED = f"{DENSE} --load {{work}}/saved --finetune --no-load-optim --no-load-rng --clip-grad 1000"
"""Every layout starts from one checkpoint, and no gradient is scaled: their norm is added up in another order."""
LAYOUTS = {"dp2": "", "pp2": " --pipeline-model-parallel-size 2", "tp2": " --tensor-model-parallel-size 2"}
CASE = """\
[case]
name = "{name}"
steps = 2
proof_steps = 1

[subject]
kind = "command"
command = "{command}"
python = "{work}/env_programs"
timeout = "4m"
env = {{ {env} }}

[resources]
ranks = 1
"""
LAYOUT = """
[layouts.{name}]
command = "{command}"
ranks = 2
relative = {{ grad_norm = 1e-3 }}
"""
STAGES = {
    "plain": Stage(f"{ONE} {DENSE}", 120, what="a launch without repro", shown="torchrun ... pretrain_gpt.py ..."),
    "record": Stage("repro golden record dense", 300, what="golden run"),
    "verify": Stage("repro golden verify dense", 100, what="verify"),
    "bisect": Stage(
        f"repro bisect {RANGES[0][0]}..{RANGES[0][1]} --case experts -j 4 --out ../report-megatron",
        400,
        what="experts and a sigmoid router",
    ),
    "save": Stage(
        f"{ONE} {DENSE.replace('--train-iters 2', '--train-iters 1')} --save {{work}}/saved --save-interval 1",
        100,
        gpus=2,
        what="the checkpoint that all layouts load",
        shown="torchrun ... pretrain_gpt.py --save ...",
    ),
    "one": Stage(
        traced("one", f"{ONE} {LOADED}", APART),
        100,
        gpus=2,
        after="save",
        what="one GPU",
        shown="repro trace --out one -- ...",
    ),
    **{
        name: Stage(
            f"{traced(name, f'{TWO} {LOADED}{more}', APART)} && repro diff --vary layout ../one ../{name}",
            110,
            gpus=2,
            after="one",
            what=f"{name} on two GPUs against one, by bits",
            shown=f"repro trace --out {name} -- ...; repro diff --vary layout one {name}",
        )
        for name, more in LAYOUTS.items()
    },
    **{
        f"within-{name}": Stage(
            f"repro bisect --layout case..{name} --case loaded -j 1",
            240,
            gpus=2,
            after="save",
            what=f"{name} against one, within a tolerance",
        )
        for name in ("tp2", "pp2", "dp2")
    },
}


def prepare(work: Path) -> None:
    """The cases."""
    env = ", ".join(f'{name} = "{value}"' for name, value in VARIABLES.items())
    commands = {"dense": DENSE, "experts": EXPERTS, "loaded": LOADED.replace("{work}", str(work))}
    cases = {
        name: CASE.format(name=name, command=f"{ONE} {command}", work=work, env=env)
        for name, command in commands.items()
    }
    cases["loaded"] += OBSERVE
    for name, more in LAYOUTS.items():
        cases["loaded"] += LAYOUT.format(name=name, command=f"{TWO} {commands['loaded']}{more}")
    checkout(work, "megatron", cases)


if __name__ == "__main__":
    main(Trainer("megatron", STAGES, prepare, ("torch", "triton", "transformer-engine"), VARIABLES), __doc__)
