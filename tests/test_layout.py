"""The house: what lies where, and what must never lie there."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def test_top_level_holds_what_the_design_names() -> None:
    """The repository's top level holds the designed folders and files and nothing that nobody chose."""
    folders = {p.split("/")[0] for p in TRACKED if "/" in p}
    assert folders == {".ci", ".dvc", ".github", "benchmarks", "bisect", "core", "docs", "golden", "repro", "tests"}
    files = {p for p in TRACKED if "/" not in p}
    required = {"README.md", "pyproject.toml", "dvc.yaml", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt"}
    required |= {"mkdocs.yml"}  # mkdocs wants it beside docs/, not in it
    assert required <= files
    assert all(f.startswith(".") for f in files - required - {"dvc.lock"})


@pytest.mark.parametrize("folder", ["benchmarks", "bisect", "core", "golden", "tests"])
def test_component_folders_are_no_packages(folder: str) -> None:
    """No __init__.py in a component folder: bisect/__init__.py would shadow the standard library's bisect."""
    assert not (ROOT / folder / "__init__.py").exists()
    assert not (ROOT / "tests" / folder).is_dir()


def test_the_standard_library_wins_at_the_root() -> None:
    """From the repository's root, `import random` and `import bisect` get the standard library's."""
    code = "import random, bisect; assert 'site-packages' not in bisect.__file__; print(bisect.bisect([1, 2], 1))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


def test_files_stay_readable() -> None:
    """No source file is longer than 500 lines."""
    sizes = {p: len((ROOT / p).read_text().splitlines()) for p in TRACKED if p.endswith(".py") and (ROOT / p).exists()}
    assert {p: n for p, n in sizes.items() if n > 500} == {}


def test_the_page_of_the_house_is_true() -> None:
    """docs/architecture.md says of each room what its package says of itself, and the files that it names are there."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (?:\*\*)?`([\w/]+)/`(?:\*\*)? \| (.*) \|$", page.partition("## The way")[0], re.MULTILINE)
    top, lines = "", dict[str, str]()
    for name, line in rows:
        top = name if (ROOT / name).is_dir() else top
        lines[name if name == top else f"{top}/{name}"] = line
    packages = {path.removesuffix("/__init__.py") for path in TRACKED if path.endswith("/__init__.py")}
    packages = {path for path in packages if not path.startswith("benchmarks/")}
    shallow = {path for path in packages if path.count("/") <= (1 if path.startswith("repro") else 2)}
    assert shallow <= lines.keys() <= packages, shallow ^ lines.keys()
    for path, line in lines.items():
        assert (ROOT / path / "__init__.py").read_text().splitlines()[0].strip('"') == line, path
    named = re.findall(r"`((?:core|golden|bisect|repro|tests)/[\w/]+\.py)`", page)
    assert len(named) > 11 and not [path for path in named if path not in TRACKED]
    number = re.compile(r"^_?(?:RUN_)?(?:FORMAT|SCHEME|RECORDER|CONTRACT|CONTRACTS)(?:_VERSION)? = ", re.MULTILINE)
    formats = {path for path in TRACKED if path.endswith(".py") and not path.startswith("tests/")}
    formats = {path for path in formats if number.search((ROOT / path).read_text())}
    assert len(formats) > 16 and not formats - set(named), formats - set(named)


@pytest.mark.parametrize(("component", "most"), [("golden/repro_golden", 8), ("bisect/repro_bisect", 7)])
def test_rooms_stand_on_few_floors(component: str, most: int) -> None:
    """The longest way down through imports, late ones too, from room to room of a component, and none leads back."""
    name = component.rpartition("/")[2]
    down: dict[str, set[str]] = {}
    for path in (ROOT / component).glob("*/**/*.py"):
        here = path.relative_to(ROOT / component).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            froms = [f"{node.module}.{a.name}" for a in node.names] if isinstance(node, ast.ImportFrom) else []
            named = froms or ([a.name for a in node.names] if isinstance(node, ast.Import) else [])
            rooms = {each.split(".")[1] for each in named if each.startswith(f"{name}.")}
            down.setdefault(here, set()).update(room for room in rooms if (ROOT / component / room).is_dir())

    def floors(room: str, above: tuple[str, ...] = ()) -> int:
        assert room not in above, f"{component}: {above} leads back to {room}"
        return 1 + max((floors(below, (*above, room)) for below in down.get(room, set()) - {room}), default=0)

    assert len(down) > 5
    assert max(map(floors, down)) <= most


def test_every_test_states_its_claim() -> None:
    """Every test function has a docstring."""
    silent = []
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        tree = ast.parse(path.read_text())
        tests = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_"))
        silent += [f"{path.name}:{node.name}" for node in tests if not ast.get_docstring(node)]
    assert silent == []


def test_the_subject_imports_nothing_of_ours() -> None:
    """core/ names no other component, so that any commit's trainer runs under today's instrument."""
    for path in (ROOT / "core").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(n.split(".")[0] in ("repro", "repro_golden", "repro_bisect") for n in names), path


def test_tensors_of_the_recorder_are_of_no_default_of_the_programs() -> None:
    """Each that is made names its device, and its dtype where no value says it: a program may set defaults."""
    wanted = {f"torch.{name}": {"device", "dtype"} for name in ("empty", "zeros", "ones", "full")}
    wanted |= {"torch.arange": {"device"}, "torch.tensor": {"device"}}
    defaults = []
    rooms = [ROOT / "golden" / "repro_golden" / room for room in ("fingerprint", "recording", "trace")]
    for path in (path for room in rooms for path in sorted(room.rglob("*.py"))):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        arguments = [(call, {keyword.arg for keyword in call.keywords}) for call in calls]
        defaults += [
            f"{path.name}:{c.lineno}" for c, words in arguments if wanted.get(ast.unparse(c.func), set()) - words
        ]
    assert not defaults


def test_golden_runs_are_no_stage_outputs() -> None:
    """dvc.yaml has check stages only: an output that depends on core/ would re-record itself on every change."""
    import yaml

    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    assert stages
    for stage in stages.values():
        assert "outs" not in stage
        assert not any("golden/runs" in str(m) for m in stage.get("metrics", []))


def test_one_version() -> None:
    """The installed distribution and the package say the same version, and the changelog has it."""
    import repro

    assert importlib.metadata.version("repro-harness") == repro.__version__
    assert f"## {repro.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_ci_runs_what_the_readme_says() -> None:
    """.ci/run calls exactly the README's test command."""
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make")]
    assert commands == ["make test"]
    assert "make test" in (ROOT / "README.md").read_text()


def test_every_pin_serves_the_ranges() -> None:
    """constraints.txt pins every direct dependency to a version that its range in pyproject.toml admits."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    pins = {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}
    extras = project["optional-dependencies"]
    of_machines = ("all", "gpu", "sglang", "sglang-cpu")  # itself, and what a machine of one kind installs
    for text in [
        *project["dependencies"],
        *(extra for name in extras.keys() - {*of_machines} for extra in extras[name]),
    ]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[requirement.name.lower()]), text


def test_help_is_instant_because_it_imports_nothing_heavy() -> None:
    """`repro --help` imports neither torch nor any other heavy library."""
    code = (
        "import sys; from repro.__main__ import main; main(['--help']); main(['golden', '--help']);"
        "heavy = {'torch', 'numpy', 'numba', 'dvc', 'git', 'pyarrow', 'altair', 'rich', 'pydantic'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "bisect" in done.stdout
