"""slime's own train.py under repro, on one GPU and without a network: ``python slime.py --parcels DIR STAGE ...``.

Stages are run in the order given: what an earlier call finished is not run again, and what its time limit ended goes
on. ``setup`` unpacks the parcels (`parcels.py`; and the folders of SGLang and Transformer Engine for the machine's
torch, ``site_sgl.txz`` and ``site_te.txz``) and gives SGLang slime's own patch. Each stage's command, exit code,
seconds and what it printed go to ``slime.json`` under ``--out``. ``tp2`` and ``dp2`` need two GPUs;
``submitted`` stops every Ray on the machine.

``python slime.py --page slime.json ...`` writes the part of docs/real-trainers.md that is about it; one file of each
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "real-trainers.md"
VARIABLES = {"NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Those of slime's docs/en/advanced/reproducibility.md."""
LINKED = """torch torchgen functorch torchvision triton nvidia cuda cuda_bindings cuda_core cuda_pathfinder cuda_toolkit
pynvml nvidia_ml_py aiohappyeyeballs aiohttp aiosignal annotated_doc anyio attr attrs certifi charset_normalizer click
cloudpickle einops filelock frozenlist fsspec google protobuf grpc grpcio h11 hf_xet httpcore httpx huggingface_hub idna
jinja2 markupsafe mpmath msgpack multidict networkx packaging pil pillow propcache psutil prometheus_client pygments
pyyaml yaml _yaml regex requests rich safetensors sentencepiece setuptools pkg_resources _distutils_hack six sympy
isympy tabulate tiktoken tiktoken_ext tqdm typer typer_slim shellingham urllib3 uvloop wrapt xxhash yarl accelerate
numba llvmlite markdown_it markdown_it_py mdurl onnxscript onnx onnx_ir ml_dtypes tensorboard tensorboard_data_server
absl absl_py markdown werkzeug ninja pybind11 wheel"""
"""Packages of the machine that slime's environment sees: the others were built against NumPy 2, and slime asserts 1."""
SGLANG_PATCH = "docker/patch/v0.5.15.post1/sglang.patch"
CUT = 124  # as timeout(1) says it
CASE = """\
[case]
name = "{name}"
steps = 2
rollouts = "golden/rollouts/{rollouts}"

[subject]
kind = "slime"
command = "bash {work}/launch.sh"
python = "{work}/env_slime"
path = "slime"
timeout = "4m"
env = {{ LAB = "{work}/lab"{env} }}

[resources]
ranks = 1
other_ranks = {other_ranks}
gpus = 1
"""
LAYOUTS = """
[layouts.tp2]
flags = ["--actor-num-gpus-per-node", "2", "--num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"]
ranks = 2
gpus = 2
absolute = { "*log_probs*" = 0.1, "rollout/*" = 0.1, "*abs_diff" = 0.1, "*loss" = 0.1, "*kl" = 0.1 }
relative = { "*" = 0.1 }

[layouts.dp2]
flags = ["--actor-num-gpus-per-node", "2", "--num-gpus-per-node", "2"]
ranks = 2
gpus = 2

[layouts.submitted]
env = { SUBMIT = "1" }
"""
STALE = ', MORE = "--use-rollout-logprobs --eps-clip-c 3.0"'
CASES = {
    "tiny": {"rollouts": "tiny"},
    "critic": {
        "rollouts": "tiny",
        "env": ', EST = "ppo", MORE = "--kl-coef 0.05 --ref-load {work}/saved"',
        "other_ranks": "1",
    },
    "stale": {"rollouts": "stale", "env": STALE},
    "eager": {"rollouts": "stale", "env": f'{STALE}, TORCH_COMPILE_DISABLE = "1"'},
    "reinforce": {"rollouts": "tiny", "env": ', EST = "reinforce_plus_plus", MORE = "--normalize-advantages"'},
}
COMMANDS = {
    "record": "repro golden record tiny",
    "verify": "repro golden verify tiny",
    "bisect": "repro bisect 351e559f1..aed93211e --case stale --out ../report",
    "eager": "repro bisect 351e559f1..aed93211e --case eager --out ../report-eager",
    "again": "repro bisect 351e559f1..aed93211e --case stale --out ../report-again",
    "returns": "repro bisect 351e559f1..aed93211e --case reinforce --out ../report-returns",
    "dumps": "repro bisect d38dc29c9..41014d1f2 --case tiny",
    "history": "repro history 351e559f1~1..aed93211e --case stale",
    "critic": "repro bisect 045310b2b~1..045310b2b --case critic --out ../report-critic",
    **{name: f"repro bisect --layout case..{name} --case tiny -j 1" for name in ("tp2", "dp2", "submitted")},
}
SAMPLE = (
    "--colocate --no-offload-train --num-rollout 2 --deterministic-mode --rollout-num-gpus-per-engine 1 --rm-type f1 "
    "--sglang-mem-fraction-static 0.2 --sglang-dtype bfloat16 --sglang-attention-backend triton "
    "--sglang-sampling-backend pytorch --sglang-grammar-backend none --sglang-disable-cuda-graph "
    "--sglang-enable-deterministic-inference --sglang-custom-weight-loader repro_core.rollout.sglang_inside.export "
    "--custom-megatron-init-path slime_weights.watch"
)
REPLAY = "--debug-train-only --num-rollout 2 --start-rollout-id 0 --deterministic-mode"
PAIR = ("sampled", "replayed")
BY_HAND = {
    "weights": (
        "colocated with SGLang, each weight sync looked at",
        f"bash {{work}}/launch.sh {SAMPLE} --dump-details {{work}}/sampled",
    ),
    "withheld": (
        "the same, one tensor withheld from the engine",
        f"bash {{work}}/launch.sh {SAMPLE} --dump-details {{work}}/withheld",
    ),
    "replayed": (
        "what was sampled, trained on without an engine",
        f"bash {{work}}/launch.sh {REPLAY} --load-debug-rollout-data {{work}}/sampled/rollout_data/{{rollout_id}}.pt "
        "--dump-details {work}/replayed",
    ),
    "same": (
        "whether both trained alike",
        " && ".join([
            *(f"repro trace --from ../{name} --log ../{name}.log --out ../trace-{name}" for name in PAIR),
            "repro diff ../trace-sampled ../trace-replayed",
        ]),
    ),
    "saved": (
        "a checkpoint of Megatron's, from which actor and critic start",
        f"bash {{work}}/launch.sh {REPLAY} --num-rollout 1 --load-debug-rollout-data "
        "{work}/lab/rollouts/{rollout_id}.pt --save {work}/saved --save-interval 1",
    ),
}  # fmt: skip
"""Launches by hand, most of them with SGLang on the same GPU: what is tried, and its command."""
WITHHELD = "model.layers.1.mlp.down_proj.weight"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"setup, plain, {', '.join(COMMANDS | BY_HAND)}")
    parser.add_argument("--work", type=Path, default=Path("slime-work"))
    parser.add_argument("--parcels", type=Path)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--limit", type=float, default=560, help="seconds of all stages together")
    parser.add_argument("--page", type=Path, nargs="+")
    parser.add_argument("--add", action="store_true", help="with --page: in the place of the same, and behind the rest")
    options = parser.parse_args()
    if options.page:
        write_page([json.loads(path.read_text()) for path in options.page], add=options.add)
        return
    if unknown := set(options.stages) - {"setup", "plain", *COMMANDS, *BY_HAND}:
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    work, end = options.work.resolve(), time.monotonic() + options.limit
    work.mkdir(parents=True, exist_ok=True)
    kept = work / "slime.json"
    told: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    for stage in options.stages:
        if stage == "setup":
            if not (work / "slime").exists():
                setup(work, options.parcels)
            told["machine"] = machine(work)
        elif ended(told.get(stage)):
            continue
        elif stage == "plain":
            told["plain"] = [plain(work, name, end) for name in ("one", "two")]
        elif stage in BY_HAND:
            told[stage] = by_hand(work, stage, end)
        else:
            before = told[stage]["calls"] if stage in told else []
            told[stage] = run(COMMANDS[stage], work, end)
            told[stage]["calls"] = [*before, told[stage]["seconds"]]
        for record in told.get(stage, ()) if stage == "plain" else [told[stage]] if stage in told else []:
            print(f"== {stage}\n{record['output']}\nexit {record['code']}, {record['seconds']} s", flush=True)
        kept.write_text(json.dumps(told, indent=1))
        shutil.copy(kept, options.out / "slime.json")


def ended(stage: Any) -> bool:
    """Whether a stage was run, and to its end."""
    return bool(stage) and all(record["code"] != CUT for record in (stage if isinstance(stage, list) else [stage]))


def setup(work: Path, parcels: Path | None) -> None:
    """Both environments, slime's checkout, the cases."""
    for parcel in sorted(parcels.glob("*.txz")) if parcels else ():
        place = work / ("site_repro" if parcel.name == "repro.txz" else ".")
        place.mkdir(exist_ok=True)
        subprocess.run(["tar", "xf", str(parcel.resolve())], cwd=place, check=True)
    if not (work / "site_repro").exists() or not (work / "site_slime").exists():
        sys.exit(f"setup: parcels are missing; unpacked: {sorted(path.name for path in work.iterdir())}")
    base = Path(
        subprocess.check_output([sys.executable, "-c", "import torch; print(torch.__file__)"], text=True)
    ).parents[1]
    site, packages = slime_packages(work, base), own_packages(work, base)
    for env, name, where in (
        ("env_repro", "repro", "repro.__main__"),
        ("env_repro", "dvc", "dvc.cli"),
        ("env_slime", "ray", "ray.scripts.scripts"),
    ):
        script = work / env / "bin" / name
        script.write_text(f"#!{script.with_name('python')}\nimport sys\nfrom {where} import main\nsys.exit(main())\n")
        script.chmod(0o755)
    hot = [site / name for name in ("sglang", "ray", "wandb", "transformers", "transformer_engine", "numpy")]
    compiled = [sys.executable, "-m", "compileall", "-q", "-j", "0", *map(str, hot), str(work / "mlm"), str(packages)]
    subprocess.run(compiled, check=False, capture_output=True)
    shutil.copy(HERE / "slime_launch.sh", work / "launch.sh")
    write_prompts(work / "lab" / "prompts.jsonl")
    checkout(work)


def slime_packages(work: Path, base: Path) -> Path:
    """The site-packages of slime's environment: what the parcels brought, and of the machine's own what is named."""
    site = environment(work / "env_slime")
    shutil.rmtree(work / "site_sgl" / "share", ignore_errors=True)
    for path in (work / "site_sgl").glob("starlette*"):
        shutil.rmtree(path)
    if (work / "site_sampling").exists():
        for path in (work / "site_slime").glob("sglang_router*"):  # an older one, without its program
            shutil.rmtree(path)
    for glob in ("site_sgl/*", "site_te/transformer_engine*", "site_slime/*", "site_sampling/*"):
        for path in list(work.glob(glob)):
            if (site / path.name).is_dir():  # parts of one namespace, such as google's
                shutil.copytree(path, site / path.name, dirs_exist_ok=True)
            else:
                shutil.move(path, site / path.name)
    for path in base.iterdir():
        stem = re.split(r"-\d|\.libs$|\.dist-info$|\.cpython|\.py$", path.name)[0].lower().replace("-", "_")
        if (stem in LINKED.split() or stem.startswith("nvidia_")) and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    pages = site / "ray" / "dashboard" / "client" / "build" / "static"  # without them no dashboard starts
    pages.mkdir(parents=True, exist_ok=True)
    patch = subprocess.check_output(["git", "-C", str(work / "slime.git"), "show", f"HEAD:{SGLANG_PATCH}"])
    subprocess.run(["git", "apply", "-p2", "-"], cwd=site, input=patch, check=True)
    (site / "mlm.pth").write_text(f"{work / 'mlm'}\n")
    return site


def own_packages(work: Path, base: Path) -> Path:
    """The site-packages of repro's environment; and in ``ours`` what looks inside a training that samples."""
    packages = environment(work / "env_repro")
    for path in (work / "site_repro").iterdir():
        shutil.move(path, packages / path.name)
    (packages / "zz_base.pth").write_text(f"{base}\n")
    (work / "ours").mkdir()
    shutil.copy(HERE / "slime_weights.py", work / "ours" / "slime_weights.py")
    for name in ("repro_core", "repro_golden"):
        (work / "ours" / name).symlink_to(packages / name)
    return packages


def checkout(work: Path) -> None:
    """The newest commit of slime checked out, `repro init` done, rollouts and cases in their places."""
    place = work / "slime"
    subprocess.run(["git", "clone", "-q", str(work / "slime.git"), str(place)], check=True)
    for key in ("user.name", "user.email"):
        subprocess.run(["git", "-C", str(place), "config", key, "reader@example.org"], check=True)
    shutil.copytree(work / "lab" / "rollouts", place / "golden" / "rollouts" / "tiny")
    shutil.copytree(work / "lab" / "stale", place / "golden" / "rollouts" / "stale")
    (place / "golden" / "cases").mkdir()
    for name, facts in CASES.items():
        values = {"env": "", "other_ranks": "0"} | facts
        values = {key: value.replace("{work}", str(work)) for key, value in values.items()}
        text = CASE.format(name=name, work=work, **values) + LAYOUTS * (name == "tiny")
        (place / "golden" / "cases" / f"{name}.toml").write_text(text)
    print(run("repro init", work, time.monotonic() + 60)["output"])
    subprocess.run(["git", "add", "-A"], cwd=place, check=True)
    subprocess.run(["git", "commit", "-qm", "Cases"], cwd=place, check=True)


def write_prompts(path: Path) -> None:
    """Eight prompts of words of the model's tokenizer, and labels that random answers have something of."""
    drawn = random.Random(3)
    rows = [
        {
            "prompt": " ".join(f"w{drawn.randrange(1000)}" for _ in range(drawn.randint(6, 20))),
            "label": " ".join(f"w{word}" for word in drawn.sample(range(1000), 200)),
        }
        for _ in range(8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def environment(folder: Path) -> Path:
    """The site-packages of a new virtual environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    return site


def machine(work: Path) -> dict[str, str]:
    code = (
        "import torch, numpy, platform, transformer_engine, sglang, ray; print(torch.cuda.get_device_name(), '|', "
        "platform.python_version(), torch.__version__, numpy.__version__, transformer_engine.__version__, "
        "sglang.__version__, ray.__version__)"
    )
    done = subprocess.run([str(work / "env_slime/bin/python"), "-c", code], capture_output=True, text=True, check=False)
    device, _, versions = done.stdout.strip().rpartition("\n")[2].partition(" | ")
    names = ("Python", "torch", "NumPy", "Transformer Engine", "SGLang", "Ray")
    return {"device": device, "date": time.strftime("%Y-%m-%d"), **dict(zip(names, versions.split(), strict=False)),
            "error": done.stderr[-400:] if done.returncode else ""}  # fmt: skip


def plain(work: Path, name: str, end: float) -> dict[str, Any]:
    """One launch without repro: its seconds, and the lines of its updates."""
    replay = f"--debug-train-only --load-debug-rollout-data {work}/lab/rollouts/{{rollout_id}}.pt --start-rollout-id 0"
    more = f"--num-rollout 2 --dump-details {work}/plain_{name} --deterministic-mode"
    done = run(f"bash {work}/launch.sh {replay} {more}", work, end, {"LAB": f"{work}/lab"} | VARIABLES, "env_slime")
    lines = re.findall(r"step \d+: \{.*", done["output"])
    return done | {"output": "\n".join(lines) if done["code"] == 0 else done["output"][-3000:]}


def by_hand(work: Path, stage: str, end: float) -> dict[str, Any]:
    """One stage of `BY_HAND`: what was said of each weight sync, and the lines of updates or the end of a failure."""
    watched = work / f"{stage}.txt"
    watched.unlink(missing_ok=True)
    command = BY_HAND[stage][1].replace("{work}", str(work))
    if stage == "same":
        return run(command, work, end)
    shutil.rmtree(work / {"weights": "sampled"}.get(stage, stage), ignore_errors=True)
    data = f"--prompt-data {work}/lab/prompts.jsonl --input-key prompt --label-key label"
    variables = {"LAB": f"{work}/lab", "DATA": data, "PYTHONPATH": str(work / "ours"), "WATCHED": str(watched)}
    variables |= VARIABLES | ({"WITHHOLD": WITHHELD} if stage == "withheld" else {})
    done = run(command, work, end, variables, "env_slime")
    shutil.copy(work / "last.log", work / f"{'sampled' if stage == 'weights' else stage}.log")
    syncs = watched.read_text().splitlines() if watched.exists() else []
    lines = [*syncs, *re.findall(r"(?:step|rollout) \d+: \{.*", done["output"])]
    trouble = [] if done["code"] == 0 else [done["output"][-6000:]]
    return done | {"command": command.replace(f"{work}/", ""), "output": "\n".join([*lines, *trouble])}


def run(
    command: str, work: Path, end: float, variables: Mapping[str, str] = MappingProxyType({}), env: str = "env_repro"
) -> dict[str, Any]:
    """A command in slime's checkout: what it printed, its exit code and its seconds by the clock."""
    environ = os.environ | {"PATH": f"{work / env / 'bin'}:{os.environ['PATH']}", "COLUMNS": "120", **variables}
    began, left = time.monotonic(), max(1, end - time.monotonic())
    log = work / "last.log"
    with log.open("w") as out:
        words = ["bash", "-c", command] if "&&" in command else shlex.split(command)
        process = subprocess.Popen(words, cwd=work / "slime", env=environ, stdout=out, stderr=subprocess.STDOUT)
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(30)
            code = CUT
    text = log.read_text(errors="replace").replace(f"{work}/", "")
    shown = text if command.startswith("bash") else "\n".join(line.rstrip() for line in text.splitlines())[-9000:]
    return {"command": command, "code": code, "seconds": round(time.monotonic() - began), "output": shown}


def write_page(runs: Sequence[Mapping[str, Any]], *, add: bool = False) -> None:
    """docs/real-trainers.md, between its marks of slime: what was run, by machine, then what each command printed.

    Args:
        runs: The files of all machines.
        add: Whether the page keeps what it has, but for commands that ended and were run again on the same device.
    """
    table, printed = ["| | command | by the clock | |", "|---|---|---|---|"], list[str]()
    head, _, rest = PAGE.read_text().partition("<!-- slime -->")
    before, _, tail = rest.partition("<!-- end of slime -->")
    if add:
        above, _, below = before.strip("\n").partition("|\n\n`")
        table, printed = [f"{above}|".partition("\n\n")[2]], ["", f"`{below}"]
    for told in runs:
        facts = told["machine"]
        where = f"{facts['device']}, {facts['date']}"
        if "plain" in told:
            seconds = ", ".join(f"{stage['seconds']} s" for stage in told["plain"])
            lines = [stage["output"] if stage["code"] == 0 else "" for stage in told["plain"]]
            numbers = ("equal numbers" if len({*lines}) == 1 else "other numbers") if all(lines) else "no numbers"
            table.append(f"| {where} | a launch without repro, {len(lines)} times | {seconds} | {numbers} |")
        for stage in (stage for stage in COMMANDS | BY_HAND if stage in told):
            record, (what, _) = told[stage], BY_HAND.get(stage, ("", ""))
            title = what or f"`{record['command']}`"
            if add and not ended(record):
                continue
            begin = f"{title[0].upper()}{title[1:]}, {facts['device']}:"
            row = re.compile(rf"\| {re.escape(facts['device'])}, \S+ \| {re.escape(title)} \|.*\n?")
            block = re.compile(rf"\n\n{re.escape(begin)}\n\n```text\n.*?\n```", re.DOTALL)
            table = [row.sub("", text).rstrip("\n") for text in table]
            printed = block.sub("", "\n".join(printed)).split("\n")
            result = f"exit code {record['code']}" if ended(record) else "ended by the machine's time limit"
            spent = " + ".join(f"{seconds} s" for seconds in record.get("calls", [record["seconds"]]))
            table.append(f"| {where} | {title} | {spent} | {result} |")
            shown = (
                record["output"].strip().partition("rollout 0: ")[0].strip()
            )  # of its own lines, those before the first
            if shown:
                printed += ["", begin, "", "```text", shown, "```"]
    facts = runs[-1]["machine"]
    versions = ", ".join(f"{key} {value}" for key, value in facts.items() if key not in ("device", "date", "error"))
    text = "\n".join([f"{versions}.", "", *table, *printed])
    PAGE.write_text(f"{head}<!-- slime -->\n{text}\n<!-- end of slime -->{tail}")


if __name__ == "__main__":
    main()
