"""What a GPU machine without a network needs, as parcels made here: ``python benchmarks/real_trainers/parcels.py OUT``.

``repro.txz`` is this checkout's wheel with DVC and all that its commands import, for Python 3.12 on Linux: an
import-ready folder. What a machine's own environment holds (torch, NumPy, pyarrow, ...) is left out, as ``--has`` says.

``slime.txz`` is made where ``--slime`` and ``--megatron`` name clones of THUDM/slime and NVIDIA/Megatron-LM: slime's
history as a bare clone, Megatron-LM at slime's own commit with its patches, the packages that slime needs beside torch,
SGLang and Transformer Engine, and ``--data``, a folder that `slime_data.py` made. ``sampling.txz`` (``--sampling``) is
what slime needs on top where it samples, or is submitted as a job: SGLang's router and what `ray[default]` requires.

``small.txz`` is made where ``--repositories`` names a folder of bare clones (OWNER+NAME/repo or OWNER/NAME.git): of the
cases of `small.py` as much history as they search, and what TRL needs beside the machine's own packages. ``--titan``
and ``--megatron-lm`` name clones of pytorch/torchtitan and NVIDIA/Megatron-LM: ``titan.txz`` and ``megatron.txz`` hold
the ranges that `titan.py` and `megatron_lm.py` search, and what these need beside the machine's own packages.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zlib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import megatron_lm
import titan as torchtitan
from packaging.requirements import Requirement
from small import CASES, REAL

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
HAS = """click cloudpickle colorama filelock fsspec idna jinja2 llvmlite markdown-it-py markupsafe mdurl narwhals
networkx numba numpy packaging pathspec psutil pyarrow pygments pyyaml requests rich safetensors setuptools six sympy
tabulate torch tqdm typing-extensions urllib3 certifi charset-normalizer xxhash attrs aiohttp aiosignal frozenlist
multidict propcache yarl aiohappyeyeballs"""
SLIME = "624b824a8"
MEGATRON = "1dcf0dafa884ad52ffb243625717a3471643e087"  # slime's docker/Dockerfile
PACKAGES = """ray==2.60.0 numpy==1.26.4 wandb==0.31.0 sglang-router==0.2.4 torch_memory_saver==0.0.10 omegaconf==2.4.0
zstandard==0.25.0 pylatexenc==2.11 jsonschema==4.26.0 referencing==0.37.0 rpds-py==2026.9.1 platformdirs==4.14.7
jsonschema-specifications==2025.9.1 sentry-sdk==2.75.0 gitpython==3.2.1 gitdb==4.0.12 smmap==5.0.3 zipp==4.1.2
opentelemetry-api==1.45.2 opentelemetry-sdk==1.45.2 opentelemetry-semantic-conventions==0.66b2 starlette==0.48.0
importlib-metadata==10.2.0 antlr4-python3-runtime==4.9.3"""
UNUSED = """ray/jars ray/rllib ray/dashboard/client ray/llm ray/serve ray/data ray/train ray/tune ray/workflow ray/air
ray/cpp ray/includes wandb/bin sglang_router/*.so zstandard/_cffi*.so"""
"""Of these packages, what training does not use."""
SAMPLING = """sglang-router==0.3.2 soundfile==0.13.1 aiohttp-cors cffi colorful cryptography distlib google-api-core
google-auth googleapis-common-protos grpcio opencensus opencensus-context opentelemetry-exporter-prometheus
opentelemetry-proto proto-plus protobuf pyasn1 pyasn1-modules pycparser python-discovery python-multipart
smart-open virtualenv"""
"""Those without a version as they are installed here."""
TITAN = """torchdata==0.11.0 datasets==4.7.0 dill==0.4.0 multiprocess==0.70.18 tyro==1.0.17 typeguard==4.6.1
docstring-parser==0.18.0"""
MEGATRON = "pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5"
STAND_INS = {
    "lightning-worker-seed": {"docs/source-pytorch/_static/images/general/pl_quick_start_full_compressed.gif": b"GIF"}
}
"""Large files that a clone may lack, by case."""
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (28, 27, 24, 17, 12, 5)] + ["manylinux2014_x86_64"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--has", default=HAS, help="packages of the machine's own environment, left out")
    parser.add_argument("--slime", type=Path, help="a clone of THUDM/slime")
    parser.add_argument("--megatron", type=Path, help="a clone of NVIDIA/Megatron-LM")
    parser.add_argument("--data", type=Path, help="what slime_data.py made")
    parser.add_argument("--sampling", action="store_true", help="what slime needs where it samples")
    parser.add_argument("--repositories", type=Path, help="a folder of bare clones, for the small cases")
    parser.add_argument("--titan", type=Path, help="a clone of pytorch/torchtitan")
    parser.add_argument("--megatron-lm", type=Path, help="a clone of NVIDIA/Megatron-LM, for its own script")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if options.slime:
            slime(Path(folder), options.slime, options.megatron, options.data, options.out / "slime.txz")
        elif options.sampling:
            sampling(Path(folder), options.out / "sampling.txz")
        elif options.titan:
            titan(Path(folder), options.titan, options.out / "titan.txz")
        elif options.megatron_lm:
            megatron(Path(folder), options.megatron_lm, options.out / "megatron.txz")
        elif options.repositories:
            small(Path(folder), options.repositories, options.out / "small.txz")
        else:
            repro(Path(folder), set(options.has.split()), options.out / "repro.txz")


def repro(folder: Path, has: set[str], out: Path) -> None:
    """This checkout and what its commands import."""
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder / "wheels"), str(ROOT))
    wanted = sorted(
        name for name in needs("repro-harness", {"golden", "report"}) if name not in has | {"vl-convert-python"}
    )
    pins = [f"{name}=={metadata.version(name)}" for name in wanted if name != "repro-harness"]
    packages(folder, pins)
    pack(folder / "site", out)


def needs(name: str, extras: set[str], seen: set[str] | None = None) -> set[str]:
    """Normalised names of a package and of all that it requires, as they are installed here."""
    seen = set() if seen is None else seen
    key = re.sub("[-_.]+", "-", name).lower()
    if key in seen:
        return seen
    seen.add(key)
    for text in metadata.requires(name) or ():
        need = Requirement(text)
        marks = [{"extra": extra, "python_version": "3.12"} for extra in (extras or {""})]
        if need.marker is None or any(need.marker.evaluate(mark) for mark in marks):
            needs(need.name, set(need.extras), seen)
    return seen


def slime(folder: Path, upstream: Path, megatron: Path, data: Path, out: Path) -> None:
    """Slime's history, its Megatron-LM and its packages."""
    site = packages(folder, PACKAGES.split())
    for glob in UNUSED.split():
        for path in site.glob(glob):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in [*site.rglob("*.so*"), *site.rglob("gcs_server"), *site.rglob("raylet")]:
        subprocess.run(["strip", str(path)], check=False, capture_output=True)
    parcel, source = folder / "parcel", folder / "megatron"
    (parcel / "mlm").mkdir(parents=True)
    site.rename(parcel / "site_slime")
    run("git", "clone", "-q", "--bare", "--depth", "45", f"file://{upstream.resolve()}", str(parcel / "slime.git"))
    run("git", "clone", "-q", "--shared", "--no-checkout", str(megatron), str(source))
    run("git", "-C", str(source), "checkout", "-q", MEGATRON)
    for name in ("megatron.patch", "megatron-sglang-aligned.patch"):
        patch = run("git", "-C", str(upstream), "show", f"{SLIME}:docker/patch/latest/{name}")
        subprocess.run(["git", "-C", str(source), "apply", "--3way"], input=patch, check=True)
    for name in ("megatron", "pretrain_gpt.py", "gpt_builders.py", "model_provider.py"):
        copy = shutil.copytree if (source / name).is_dir() else shutil.copy
        copy(source / name, parcel / "mlm" / name)
    shutil.copytree(data, parcel / "lab")
    pack(parcel, out)


def sampling(folder: Path, out: Path) -> None:
    """A router for SGLang and the needs of Ray's jobs."""
    pins = [pin if "==" in pin else f"{pin}=={metadata.version(pin)}" for pin in SAMPLING.split()]
    site = packages(folder, pins)
    for path in site.rglob("*.so*"):
        subprocess.run(["strip", str(path)], check=False, capture_output=True)
    (folder / "parcel").mkdir()
    site.rename(folder / "parcel" / "site_sampling")
    pack(folder / "parcel", out)


def small(folder: Path, repositories: Path, out: Path) -> None:
    """Shallow clones that hold the ranges of the small cases, and the packages."""
    parcel = folder / "parcel"
    parcel.mkdir()
    packages(folder, ["datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19"]).rename(parcel / "site")
    for name in CASES:
        case = tomllib.loads((REAL / "cases" / f"{name}.toml").read_text())
        owner, _, project = case["repository"].partition("/")
        places = (repositories / f"{owner}+{project}" / "repo", repositories / owner / f"{project}.git")
        source, target = next(place for place in places if place.exists()), parcel / owner / f"{project}.git"
        if name in STAND_INS:
            history(source, folder / name, [(case["good"], case["bad"])])
            stand_in(folder / name, STAND_INS[name])
            target.parent.mkdir(exist_ok=True)
            shutil.move(folder / name / ".git", target)
            continue
        good, bad = (run("git", "-C", str(source), "rev-parse", f"{case[key]}^{{commit}}").decode().strip()
                     for key in ("good", "bad"))  # fmt: skip
        count = int(run("git", "-C", str(source), "rev-list", "--count", f"{good}..{bad}"))
        full = folder / f"{name}.git"  # a server names no commit that no branch of it ends in
        run("git", "clone", "-q", "--bare", "--shared", str(source), str(full))
        run("git", "-C", str(full), "branch", "-f", name, (tip := case["bad"].removesuffix("~1")))
        run("git", "-C", str(full), "branch", "-f", f"{name}-good", good)
        depth = str(count + 20)
        run("git", "init", "-q", "--bare", str(target))
        wanted = [f"{branch}:{branch}" for branch in (name, f"{name}-good")]
        run("git", "-C", str(target), "fetch", "-q", "--no-tags", "--depth", depth, f"file://{full}", *wanted)
        tips = (case["good"], good), (tip, run("git", "-C", str(target), "rev-parse", name).decode().strip())
        for text, commit in tips:
            if not commit.startswith(text):
                run("git", "-C", str(target), "tag", text, commit)
        assert int(run("git", "-C", str(target), "rev-list", "--count", f"{good}..{bad}")) == count, name
        run("git", "-C", str(target), "gc", "-q", "--prune=now")
    pack(parcel, out)


def titan(folder: Path, upstream: Path, out: Path) -> None:
    """The range of torchtitan that is searched, and its packages.

    A clone may lack tests/assets/c4_test/data.json, torchtitan's largest file. Then lines of words stand in for it,
    under its name, so that commits can be checked out.
    """
    parcel = folder / "parcel"
    parcel.mkdir()
    packages(folder, TITAN.split()).rename(parcel / "site")
    place = parcel / "titan"
    history(upstream, place, [(torchtitan.GOOD, torchtitan.BAD)])
    drawn = random.Random(0)
    texts = [" ".join(drawn.choices(torchtitan.WORDS.split(), k=drawn.randint(20, 200))) for _ in range(600)]
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    stand_in(place, {"tests/assets/c4_test/data.json": content})
    pack(parcel, out)


def megatron(folder: Path, upstream: Path, out: Path) -> None:
    """The ranges of Megatron-LM that are searched, and its packages."""
    parcel = folder / "parcel"
    parcel.mkdir()
    packages(folder, MEGATRON.split()).rename(parcel / "site")
    history(upstream, parcel / "megatron", megatron_lm.RANGES)
    pack(parcel, out)


def history(upstream: Path, place: Path, ranges: Sequence[tuple[str, str]]) -> None:
    """A repository without a checkout that holds these ranges of commits alone, the last one's end as its branch."""
    git = ["git", "-C", str(upstream)]
    ends = [
        [run(*git, "rev-parse", f"{end}^{{commit}}").decode().strip() for end in (good, bad)] for good, bad in ranges
    ]
    wanted = "".join(f"--shallow {good}\n" for good, _ in ends) + "".join(f"{bad}\n" for _, bad in ends)
    words = [*git, "pack-objects", "--quiet", "--revs", "--stdout", "--missing=allow-any", "--delta-base-offset"]
    packed = subprocess.run(words, input=wanted.encode(), check=True, stdout=subprocess.PIPE).stdout
    target = ["git", "-C", str(place)]
    run("git", "init", "--quiet", "--initial-branch", "main", str(place))
    subprocess.run([*target, "index-pack", "--stdin"], input=packed, check=True, stdout=subprocess.PIPE)
    (place / ".git" / "shallow").write_text("".join(f"{good}\n" for good, _ in ends))
    for n, (_, bad) in enumerate(ends):
        run(*target, "update-ref", f"refs/heads/{f'range-{n}' if n < len(ends) - 1 else 'main'}", bad)


def stand_in(place: Path, contents: Mapping[str, bytes]) -> None:
    """Where the clone lacked one of these files, a content that stands in for it, so that commits can be checked out.

    Raises:
        ValueError: another file is lacking.
    """
    git = ["git", "-C", str(place)]
    lacks = run(*git, "rev-list", "--objects", "--missing=print", "--all").decode().splitlines()
    for name in [line[1:] for line in lacks if line.startswith("?")]:
        held = [path for path in contents if name in run(*git, "ls-tree", "-r", "HEAD", path).decode()]
        if not held:
            raise ValueError(f"{name} is not in the clone")
        objects = Path(run(*git, "rev-parse", "--git-path", "objects").decode().strip())
        loose = place / objects / name[:2] / name[2:]
        loose.parent.mkdir(exist_ok=True)
        loose.write_bytes(zlib.compress(b"blob %d\0" % len(contents[held[0]]) + contents[held[0]]))


def packages(folder: Path, pins: list[str]) -> Path:
    """Wheels of Python 3.12 on Linux, without what they need, unpacked into one folder without tests and stubs."""
    words = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    words += [word for platform in PLATFORMS for word in ("--platform", platform)]
    words += [word for abi in ("cp312", "abi3", "none") for word in ("--abi", abi)]
    sources = [pin for pin in pins if pin.startswith("antlr4-")]  # has no wheel on PyPI
    run(sys.executable, "-m", "pip", "download", *words, "-d", str(folder / "wheels"), *(set(pins) - set(sources)))
    if sources:
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder / "wheels"), *sources)
    for wheel in (folder / "wheels").glob("*.whl"):
        shutil.unpack_archive(wheel, folder / "site", "zip")
    for path in [
        *(folder / "site").rglob("tests"),
        *(folder / "site").rglob("*.pyi"),
        *(folder / "site").rglob("*.map"),
    ]:
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
    return folder / "site"


def pack(folder: Path, out: Path) -> None:
    run("tar", "--create", "--xz", "--file", str(out), "-C", str(folder), ".")
    print(f"{out}: {out.stat().st_size / 2**20:.1f} MiB")


def run(*command: str) -> bytes:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


if __name__ == "__main__":
    main()
