"""What is read of an environment: from an interpreter, and from lists of packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_machine_kit import MANY, environment, gpus, listed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from repro.doctor.artefacts.kinds import Machine
from repro.doctor.artefacts.machine import FREEZE, VARIABLES, machine_of
from repro.doctor.artefacts.package_lists import read_packages
from repro_golden.base.errors import ReproError


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An environment with two packages, one of which has a module."""
    packages = {"Flash_Attn.3": "3.0.0b1", "numpy": "2.1.0"}
    return environment(tmp_path_factory.mktemp("environment"), packages, ["flash_attn_3"])


class TestInterpreter:
    """`machine_of`."""

    def test_packages_are_named_as_pip_compares_them(self, python: str) -> None:
        """A name is normalised, its version is as written."""
        assert machine_of(python).packages == {"flash-attn-3": "3.0.0b1", "numpy": "2.1.0"}

    def test_modules_are_found_without_being_imported(self, python: str) -> None:
        """A module that raises when it is imported is found all the same."""
        assert "flash_attn_3" in machine_of(python).modules
        assert "torch" not in machine_of(python).modules

    def test_ours_is_the_default(self) -> None:
        """Without a name, this interpreter answers, with its own version and packages."""
        machine = machine_of(None)
        assert machine.python == ".".join(map(str, sys.version_info[:3]))
        assert {"click", "numpy", "torch"} <= machine.packages.keys() and machine.complete

    def test_only_listed_variables_are_read(self, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A secret in the environment is nowhere in the answer."""
        monkeypatch.setenv("WANDB_API_KEY", "secret-4711")
        monkeypatch.setenv("NCCL_ALGO", "Tree")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        machine = machine_of(python)
        assert machine.variables is not None and machine.variables["NCCL_ALGO"] == "Tree"
        assert machine.variables["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert machine.variables.keys() <= set(VARIABLES) and "secret-4711" not in repr(machine)

    def test_packages_on_the_search_path_count(
        self, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A folder on PYTHONPATH is part of what the trainer imports, and shadows what is installed."""
        folder = tmp_path / "numpy-1.26.4.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.26.4\n")
        (tmp_path / "json.py").write_text("raise RuntimeError('shadows')")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        assert machine_of(python).packages["numpy"] == "1.26.4"

    def test_the_folder_that_it_starts_in_does_not(
        self, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A module of the current folder neither shadows the library nor counts as installed."""
        (tmp_path / "json.py").write_text("raise RuntimeError('shadows')")
        (tmp_path / "sglang.py").write_text("")
        monkeypatch.chdir(tmp_path)
        assert "sglang" not in machine_of(python).modules

    @pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be taken away here")
    def test_cores_are_those_that_are_left(self) -> None:
        """A process that may use one core has one, and one thread; torch agrees."""
        ask = "import torch; from repro.doctor.artefacts.machine import machine_of; m = machine_of(None)"
        code = f"import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); {ask}"
        done = subprocess.run(
            [sys.executable, "-c", f"{code}; print(m.cpus, m.threads, torch.get_num_threads())"],
            capture_output=True, text=True, check=True,
            env={k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")},
        )  # fmt: skip
        assert done.stdout.split() == ["1", "1", "1"]

    @pytest.mark.parametrize("text", ["1", " 01 ", "1,4"])
    def test_threads_are_those_that_torch_takes(self, text: str, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """OMP_NUM_THREADS says it, a list by its first number."""
        monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert machine_of(python).threads == 1

    def test_gpus_are_counted(self, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """By what `nvidia-smi -L` lists."""
        monkeypatch.setenv("PATH", gpus(tmp_path))
        assert machine_of(python).gpus == 2

    def test_a_driver_that_does_not_answer_is_no_count(
        self, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What fails says nothing."""
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        assert machine_of(python).gpus is None

    @pytest.mark.parametrize("name", ["no-such-python", "/no/such/python", "/etc/passwd"])
    def test_what_is_no_interpreter_is_one_line(self, name: str) -> None:
        """Missing, or not to be run."""
        with pytest.raises(ReproError, match="--python") as error:
            machine_of(name)
        assert "\n" not in str(error.value)

    def test_another_program_is_one_line(self) -> None:
        """A program that is no Python gives no answer."""
        with pytest.raises(ReproError, match="cannot be asked") as error:
            machine_of("true")
        assert "\n" not in str(error.value)

    def test_broken_metadata_hides_nothing_else(self, tmp_path: Path) -> None:
        """What an interrupted installation left is passed over."""
        python = environment(tmp_path, {"numpy": "1.26.4"})
        site = next(tmp_path.glob("lib/python3*/site-packages"))
        (site / "torn-1.0.dist-info").mkdir()
        (site / "empty-1.0.dist-info").mkdir()
        (site / "empty-1.0.dist-info" / "METADATA").write_bytes(b"\xff\xfe")
        assert machine_of(python).packages["numpy"] == "1.26.4"


PINS = "numpy==1.26.4\nflash_attn_3==3.0.0b1\n# a comment\ntorch==2.11.0+cu129\n"


def outcome(path: Path) -> str:
    """What reading a list comes to."""
    try:
        result = read_packages(path)
    except ReproError as error:
        return "several lines" if "\n" in str(error) else "one line"
    texts = all(isinstance(text, str) for pair in result.packages.items() for text in pair)
    return "packages" if isinstance(result, Machine) and texts else "nonsense"


class TestLists:
    """`FREEZE`."""

    def test_a_freeze_is_everything(self, tmp_path: Path) -> None:
        """Names are normalised, and what is installed from a place has its version where that says so."""
        text = PINS + (
            "-e git+https://github.com/THUDM/slime@624b824a8#egg=slime\n"
            "apex @ file:///tmp/wheels/apex-0.1-cp312-cp312-linux_x86_64.whl\n"
            "# Editable install with no version control (megatron-core==0.16.0rc0)\n-e /root/Megatron-LM\n"
        )
        (tmp_path / "pip-freeze.txt").write_text(text)
        machine = listed(tmp_path / "pip-freeze.txt")
        assert machine.packages == {
            "numpy": "1.26.4", "flash-attn-3": "3.0.0b1", "torch": "2.11.0+cu129", "slime": "", "apex": "0.1",
            "megatron-core": "0.16.0rc0",
        }  # fmt: skip
        assert machine.complete and machine.variables is None and machine.cpus is None

    @pytest.mark.parametrize(
        "text",
        [
            "Package    Version\n---------- -------\nnumpy      1.26.4\ntorch      2.11.0+cu129\n",
            "Package Version Editable project location\n------- ------- ----\nnumpy 1.26.4 /x\ntorch 2.11.0+cu129\n",
            "# packages in environment at /opt/conda:\n#\n# Name   Version   Build  Channel\n"
            "numpy  1.26.4  py312_0  conda-forge\ntorch  2.11.0+cu129  pypi_0  pypi\n",
        ],
    )
    def test_tables_are_read(self, text: str, tmp_path: Path) -> None:
        """Of pip, uv and conda: heads and rules are no packages."""
        (tmp_path / "anything.txt").write_text(text)
        machine = listed(tmp_path / "anything.txt")
        assert machine.packages == {"numpy": "1.26.4", "torch": "2.11.0+cu129"} and machine.complete

    def test_what_pip_prints_today_is_read(self, tmp_path: Path) -> None:
        """The output of pip about this interpreter agrees with what the interpreter says."""
        for name, options in {
            "freeze.txt": ["freeze", "--all"],
            "list.txt": ["list"],
            "l.json": ["list", "--format=json"],
        }.items():
            done = subprocess.run([sys.executable, "-m", "pip", *options], capture_output=True, text=True, check=True)
            (tmp_path / name).write_text(done.stdout)
        packages = machine_of(None).packages
        for name in ("freeze.txt", "list.txt", "l.json"):
            machine = listed(tmp_path / name)
            assert machine.complete and len(machine.packages) >= len(packages) - 2
            assert {k: v for k, v in machine.packages.items() if packages.get(k) != v and v} == {}

    def test_requirements_say_only_what_they_pin(self, tmp_path: Path) -> None:
        """Ranges are no versions, and the list is not all that is installed."""
        text = 'torch==2.11.0 ; python_version >= "3.12"\nnumpy>=1.26\n'
        text += "ray[default]==2.48.0 \\\n    --hash=sha256:00\n-r base.txt\n"
        (tmp_path / "requirements.txt").write_text(text)
        machine = listed(tmp_path / "requirements.txt")
        assert machine.packages == {"torch": "2.11.0", "ray": "2.48.0"} and not machine.complete

    def test_a_long_list_of_pins_is_everything_unless_its_name_says_otherwise(self, tmp_path: Path) -> None:
        """Requirements stay requirements, however many."""
        text = "".join(f"{name}=={version}\n" for name, version in MANY.items())
        for name, complete in (("image.txt", True), ("requirements-gpu.txt", False), ("constraints.txt", False)):
            (tmp_path / name).write_text(text)
            assert listed(tmp_path / name).complete is complete

    @pytest.mark.parametrize("name", ["uv.lock", "poetry.lock"])
    def test_lock_files_are_read(self, name: str, tmp_path: Path) -> None:
        """Each package once; one that a marker chooses a version of is left out."""
        text = '[[package]]\nname = "Numpy"\nversion = "1.26.4"\n' + "".join(
            f'[[package]]\nname = "triton"\nversion = "{version}"\n' for version in ("3.5.0", "3.6.0")
        )
        (tmp_path / name).write_text(text)
        machine = listed(tmp_path / name)
        assert machine.packages == {"numpy": "1.26.4"} and not machine.complete

    @pytest.mark.parametrize(
        ("name", "raw"),
        [
            ("uv.lock", b"[[package]\n"), ("poetry.lock", b"\xff\xfe"), ("pip-freeze.txt", b"numpy==1.0\na==1\n\xff\n"),
            ("uv.lock", b"[" * 5000),
        ],
    )  # fmt: skip
    def test_a_damaged_list_is_one_line(self, name: str, raw: bytes, tmp_path: Path) -> None:
        """It is recognised by its name or its beginning, and refused."""
        (tmp_path / name).write_bytes(raw)
        assert FREEZE.fits(tmp_path / name)
        with pytest.raises(ReproError) as error:
            list(FREEZE.read(tmp_path / name))
        assert "\n" not in str(error.value) and name in str(error.value)

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("README.txt", "Install with\n\n    pip install numpy==1.26.4\n\nand go on.\n"),
            ("train.log", "numpy==1.26.4\n"),
            ("notes.txt", "step 0: {'train/loss': 1.0}\nstep 1: {'train/loss': 0.9}\n"),
            ("config.json", '{"version": "1"}'),
            ("index.json", '[{"id": 1}]'),
            ("latest_checkpointed_iteration.txt", "10"),
        ],
    )
    def test_other_texts_are_left_to_others(self, name: str, text: str, tmp_path: Path) -> None:
        """Prose, logs and trackers are no lists of packages."""
        (tmp_path / name).write_text(text)
        assert not FREEZE.fits(tmp_path / name)

    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        """It is no file."""
        os.mkfifo(tmp_path / "requirements.txt")
        assert not FREEZE.fits(tmp_path / "requirements.txt")

    @given(st.binary(max_size=400), st.sampled_from(["freeze.txt", "uv.lock", "list.json", "requirements.in"]))
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_any_bytes_are_packages_or_one_line(self, tmp_path: Path, raw: bytes, name: str) -> None:
        """Nothing else than `ReproError` comes out."""
        path = tmp_path / name
        path.write_bytes(raw)
        FREEZE.fits(path)
        assert outcome(path) in ("packages", "one line")

    @given(st.recursive(st.none() | st.text() | st.integers(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)))
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_any_json_is_packages_or_one_line(self, tmp_path: Path, value: object) -> None:
        """Likewise of any types."""
        (tmp_path / "list.json").write_text(json.dumps([{"name": value, "version": value}, value]))
        assert outcome(tmp_path / "list.json") in ("packages", "one line")
