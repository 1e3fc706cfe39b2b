"""torchtitan's own train.py under repro, without a network: ``python titan.py --parcels DIR --out DIR [STAGE ...]``.

DIR holds ``titan.txz`` and ``repro.txz`` of `parcels.py`. The model is torchtitan's llama3_debugmodel, its data a few
made-up lines in the form of its c4_test. Stages are run in order, each within a limit of its own; what an earlier call
finished is not run again. Results go to ``titan.json`` and ``titan.log`` under ``--out``.

``python titan.py --page titan.json`` writes the part of docs/real-trainers.md that is about it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from stages import APART, OBSERVE, Stage, Trainer, checkout, main, traced

GOOD, BAD = "330c8f817", "26762a9eb"
"""Between them, c3fe964f4 gives up torchtitan's own trunc_normal_, which had served weights in bfloat16."""
WORDS = """time people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend"""
ROWS, TOKENS = 16, 257
TRAIN = (
    "-m torchtitan.train --module llama3 --config llama3_debugmodel --training.steps 2 --training.seq_len 256 "
    "--debug.seed 42 --debug.deterministic --activation_checkpoint.mode none"
)
LAUNCH = "torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node"
ONE, TWO = f"{LAUNCH} 1", f"{LAUNCH} 2"
PLAIN = f"{TRAIN} --training.local_batch_size 4"
SEEDED = (
    f"{TRAIN} --training.local_batch_size 2 --training.global_batch_size 4 --training.max_norm 1e9 "
    "--training.mixed_precision_param float32 --checkpoint.enable --checkpoint.load_only "
    "--checkpoint.initial_load_path {work}/seed/checkpoint/step-0 --dataloader.dataset_path {work}/data"
)
"""Both layouts start from one checkpoint and sum the same two halves of each batch: as ranks, or one after the other.
No gradient is scaled: their norm is added up in another order."""
CASE = """\
[case]
name = "{name}"
steps = 2

[subject]
kind = "command"
command = "{command} --dump_folder {{out}}/dump"
python = "{work}/env_programs"
timeout = "4m"
env = {{ CUBLAS_WORKSPACE_CONFIG = ":4096:8", HF_HUB_OFFLINE = "1" }}

[resources]
ranks = 1
"""
LAYOUT = """
[layouts.fsdp2]
command = "{command} --dump_folder {{out}}/dump"
ranks = 2
relative = {{ grad_norm = 1e-3 }}
"""
STAGES = {
    "plain": Stage(
        f"{ONE} {PLAIN} --dump_folder {{work}}/plain",
        90,
        what="a launch without repro",
        shown="torchrun ... -m torchtitan.train ...",
    ),
    "record": Stage("repro golden record tiny", 240, what="golden run"),
    "verify": Stage("repro golden verify tiny", 80, what="verify"),
    "bisect": Stage(
        f"repro bisect {GOOD}..{BAD} --case bf16 -j 4 --out ../report-titan", 300, what="weights in bfloat16"
    ),
    "compiled": Stage(
        " && ".join(
            traced(f"compiled-{n}", f"{ONE} {PLAIN} --compile.enable --dump_folder {{work}}/{n}")
            for n in ("one", "two")
        )
        + " && repro diff ../compiled-one ../compiled-two",
        160,
        what="torch.compile, twice",
        shown="repro trace --out one -- ...; repro trace --out two -- ...; repro diff one two",
    ),
    "seed": Stage(
        f"{ONE} {PLAIN} --checkpoint.enable --checkpoint.create_seed_checkpoint --dump_folder {{work}}/seed",
        80,
        gpus=2,
        what="torchtitan's seed checkpoint",
        shown="torchrun ... -m torchtitan.train --checkpoint.create_seed_checkpoint ...",
    ),
    "fsdp": Stage(
        f"{traced('one', f'{ONE} {SEEDED}/one --dump_folder {{work}}/s1', APART)} && "
        f"{traced('two', f'{TWO} {SEEDED}/two --dump_folder {{work}}/s2', APART)} && "
        "repro diff --vary layout ../one ../two",
        160,
        gpus=2,
        after="seed",
        what="one GPU against FSDP2 on two, by bits",
        shown="repro trace --out one -- ...; repro trace --out two -- ...; repro diff --vary layout one two",
    ),
    "layout": Stage(
        "repro bisect --layout case..fsdp2 --case seeded -j 1",
        240,
        gpus=2,
        after="seed",
        what="the same, within a tolerance",
    ),
}


def prepare(work: Path) -> None:
    """Cases, and the same rows twice: in the order of one process, and each rank's half of every batch together."""
    cases = {
        "tiny": CASE.format(name="tiny", command=f"{ONE} {PLAIN}", work=work),
        "bf16": CASE.format(name="bf16", command=f"{ONE} {PLAIN} --training.dtype bfloat16", work=work),
        "seeded": CASE.format(name="seeded", command=f"{ONE} {SEEDED.replace('{work}', str(work))}/one", work=work)
        + OBSERVE
        + LAYOUT.format(command=f"{TWO} {SEEDED.replace('{work}', str(work))}/two"),
    }
    place = checkout(work, "titan", cases)
    rows = [row(place / "tests" / "assets" / "tokenizer" / "tokenizer.json", n) for n in range(ROWS)]
    halves = [[rows[i] for i in range(ROWS) if i % 4 // 2 == half] for half in (0, 1)]
    for name, order in (("one", rows), ("two", halves[0] + halves[1])):
        (work / "data" / name).mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps({"text": text}) + "\n" for text in order)
        (work / "data" / name / "data.json").write_text(lines)


def row(tokenizer: Path, number: int) -> str:
    """A text of as many tokens as one row of a batch takes, so that rows begin where texts do."""
    from tokenizers import Tokenizer

    words, drawn = Tokenizer.from_file(str(tokenizer)), random.Random(number)
    text = ""
    while True:
        left = TOKENS - 2 - len(words.encode(text).ids)  # torchtitan puts a token at either end
        if not left:
            return text
        fitting = [word for word in WORDS.split() if len(words.encode(f"{text} {word}").ids) <= TOKENS - 2]
        text = f"{text} {drawn.choice(fitting)}" if fitting else f"{text}{'.' * left}"


if __name__ == "__main__":
    main(
        Trainer(
            "titan",
            STAGES,
            prepare,
            ("torch", "triton", "datasets", "torchdata"),
            {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        ),
        __doc__,
    )
