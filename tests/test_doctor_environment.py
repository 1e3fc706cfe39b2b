"""The doctor's rules about the environment, on real interpreters, package lists and launch scripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from doctor_machine_kit import MANY, environment, freeze, golden, gpus, launch
from findings_kit import told

from repro.doctor.artefacts.kinds import Launch, Machine
from repro.doctor.artefacts.launches.scripts import LAUNCH
from repro.doctor.artefacts.machine import FREEZE, machine_of
from repro.doctor.catalogue import catalogue
from repro.doctor.facts.known_versions import KNOWN, matches

DETERMINISTIC = "--deterministic-mode --hf-checkpoint /m/Qwen3-4B"
BASE = {"torch": "2.11.0", "ray": "2.48.0", "sglang": "0.5.18", **MANY}
"""What every trainer needs."""

Case = Callable[[Path], tuple[object, ...]]


def script(flags: str, before: str = "", root: str = "slime") -> Case:
    """A launch script alone."""
    return lambda folder: (launch(folder, flags, before=before, root=root),)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An environment with a torch for the CPU and FlashAttention 3 without a package's name."""
    folder = tmp_path_factory.mktemp("environment")
    return environment(folder, {"torch": "2.11.0+cpu"}, ["flash_attn_interface"])


class TestMachine:
    """Rules that ask a real interpreter with real variables."""

    @pytest.fixture(autouse=True)
    def _clean(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NCCL_ALGO", "PYTHONHASHSEED"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", gpus(tmp_path / "bin"))

    def test_flash_attention_3_is_seen_without_a_package(self, python: str, tmp_path: Path) -> None:
        """A build from source leaves its module alone: "flash-attn-3" finds that."""
        (finding,) = told("flash-attn-3", machine_of(python), launch(tmp_path, DETERMINISTIC))
        assert "flash_attn_interface" in finding.message and "pip uninstall flash_attn_3" in finding.fix

    def test_a_recipe_that_asks_for_it_keeps_it(self, python: str, tmp_path: Path) -> None:
        """Miles' recipe for FSDP runs on FlashAttention 3: "flash-attn-3" says nothing of it."""
        read = launch(tmp_path, "--true-on-policy-mode --attn-implementation flash_attention_3", root="miles")
        assert told("flash-attn-3", machine_of(python), read) == []

    def test_torch_without_cuda(self, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With GPUs there "torch-cpu-only" warns; without any it notes it for a launch, and says nothing alone."""
        (finding,) = told("torch-cpu-only", machine_of(python), None)
        assert finding.severity == "warning" and "2 GPUs" in finding.message
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
        bare = machine_of(python)
        assert bare.gpus is None and told("torch-cpu-only", bare, None) == []
        assert [reported.severity for reported in told("torch-cpu-only", bare, launch(tmp_path, "--colocate"))] == [
            "note"
        ]

    def test_torch_with_cuda_is_let_pass(self, tmp_path: Path) -> None:
        """Its own build passes "torch-cpu-only"."""
        machine = machine_of(environment(tmp_path, {"torch": "2.11.0+cu129"}))
        assert machine.gpus == 2 and told("torch-cpu-only", machine, None) == []

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("0,1", ""), ("1", ""), ("GPU-0c5f0e1a,GPU-1c5f0e1a", ""), ("", "hides all 2 GPUs"), ("-1", "hides all 2"),
            ("0,2", "names GPU 2, and the machine has 2"), ("1,1", "names GPU 1 twice"),
        ],
    )  # fmt: skip
    def test_visible_gpus(self, text: str, message: str, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of the machine, "cuda-visible" tells GPUs that are hidden, not there, or named twice."""
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        findings = told("cuda-visible", machine_of(python), None)
        assert [finding.message.count(message) for finding in findings] == ([1] if message else [])

    def test_visible_gpus_of_the_launch_come_first(
        self, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What the script exports is what "cuda-visible" judges, at its line."""
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        read = launch(tmp_path, "--colocate", before="export CUDA_VISIBLE_DEVICES=0,7")
        (finding,) = told("cuda-visible", machine_of(python), read)
        assert "GPU 7" in finding.message and finding.where.line == 2

    @pytest.mark.parametrize(
        ("text", "message"),
        [("1", ""), ("1,2", ""), ("9999", "asks for 9999 threads"), ("many", "is no number"), ("0", "is no number")],
    )
    def test_threads(self, text: str, message: str, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """More threads than cores, and what is no number, are told by "thread-count"."""
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        findings = told("thread-count", machine_of(python), None, None)
        assert [finding.message.count(message) for finding in findings] == ([1] if message else [])

    def test_threads_of_a_launch_without_ray(self, python: str, tmp_path: Path) -> None:
        """A deterministic run of no known trainer is told to pin them; one that pins them, or Ray's, is not."""
        machine = machine_of(python)
        mine = tmp_path / "run.sh"

        def said(before: str, root: str, folder: str) -> list[str]:
            read = launch(tmp_path / folder, "--deterministic-mode", before=before, root=root)
            return [finding.severity for finding in told("thread-count", machine, read, None)]

        assert said("", "mine", "a") == ["note"] and not mine.exists()
        assert said("export OMP_NUM_THREADS=1", "mine", "b") == [] and said("", "slime", "c") == []

    def test_what_the_machine_says_against_determinism(
        self, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A variable that the launch leaves to the machine is told by "env-contradicts-launch"; a good one is not."""
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
        monkeypatch.setenv("NCCL_ALGO", "Ring")
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        machine = machine_of(python)
        (finding,) = told("env-contradicts-launch", machine, launch(tmp_path, DETERMINISTIC))
        assert finding.where.item == "NVTE_ALLOW_NONDETERMINISTIC_ALGO" and finding.severity == "warning"
        assert told("env-contradicts-launch", machine, launch(tmp_path, "--colocate")) == []
        artefact = launch(tmp_path, DETERMINISTIC, before="export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0")
        assert told("env-contradicts-launch", machine, artefact) == []

    def test_what_a_submitted_job_does_not_see(
        self, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An export before `ray job submit` against the machine's value is told by "env-contradicts-launch"."""
        monkeypatch.setenv("NCCL_ALGO", "Tree")
        machine = machine_of(python)
        submit = "ray job submit --address=http://127.0.0.1:8265 -- python3"
        path = tmp_path / "run.sh"
        read = launch(tmp_path, "--colocate", before="export NCCL_ALGO=Ring")
        assert told("env-contradicts-launch", machine, read) == []
        path.write_text(path.read_text().replace("python3", submit))
        (again,) = LAUNCH.read(path)
        (finding,) = told("env-contradicts-launch", machine, again)
        assert "'Ring'" in finding.message and "'Tree'" in finding.message and finding.where.line == 2
        env_vars = """--runtime-env-json='{"env_vars": {"NCCL_ALGO": "Ring"}}' --"""
        path.write_text(path.read_text().replace("8265 --", f"8265 {env_vars}"))
        (reaching,) = LAUNCH.read(path)
        assert isinstance(reaching, Launch) and reaching.env["NCCL_ALGO"].origin == "runtime-env"
        assert told("env-contradicts-launch", machine, reaching) == []

    def test_tf32_of_the_machine(self, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The machine's own switch is told by "tf32-override-machine", as a warning where bits are asked for."""
        assert told("tf32-override-machine", machine_of(python), None) == []
        monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
        machine = machine_of(python)
        assert [reported.severity for reported in told("tf32-override-machine", machine, None)] == ["note"]
        read = launch(tmp_path, DETERMINISTIC)
        assert [finding.severity for finding in told("tf32-override-machine", machine, read)] == ["warning"]
        assert told("tf32-override", read) == []
        assert catalogue()["tf32-override-machine"].any_program  # fp32 is rounded in whatever multiplies

    def test_a_golden_of_more_threads_than_cores(self, python: str, tmp_path: Path) -> None:
        """A golden run that was recorded with more threads than there are cores is told by "thread-count"."""
        machine = machine_of(python)
        (finding,) = told("thread-count", machine, None, golden(tmp_path / "a", 512))
        assert "512 threads" in finding.message
        assert told("thread-count", machine, None, golden(tmp_path / "b", 1)) == []


class TestPackages:
    """Boundaries of the rules about packages."""

    def test_numpy_2_is_miles_own_affair(self, tmp_path: Path) -> None:
        """Only slime and Relax assert numpy 1."""
        assert told("numpy-2", freeze(tmp_path, {"numpy": "2.1.0"}), launch(tmp_path, "--colocate", root="miles")) == []

    def test_numpy_2_without_training_is_let_pass(self, tmp_path: Path) -> None:
        """The assertion stands in Megatron's initialization, which a run of rollouts alone never meets."""
        read = launch(tmp_path, "--debug-rollout-only")
        assert read.system == "slime" and told("numpy-2", freeze(tmp_path, {"numpy": "2.1.0"}), read) == []

    def test_numpy_2_beside_slime_without_a_launch(self, tmp_path: Path) -> None:
        """Where slime is installed it is likely to be run."""
        assert [
            finding.severity
            for finding in told("numpy-2", freeze(tmp_path, {"numpy": "2.1.0", "slime": "0.3.0"}), None)
        ] == ["warning"]
        assert told("numpy-2", freeze(tmp_path, {"numpy": "2.1.0"}), None) == []

    def test_an_incomplete_list_lacks_nothing(self, tmp_path: Path) -> None:
        """Requirements do not say what is not installed."""
        machine = freeze(tmp_path, {"transformers": "5.2.0"}, "requirements.txt")
        assert told("package-missing", machine, launch(tmp_path, "--attention-backend flash")) == []

    @pytest.mark.parametrize(
        ("flags", "missing"),
        [
            ("--debug-rollout-only --attention-backend flash", ""),
            ("--debug-train-only --sglang-attention-backend flashinfer", ""),
            ("--sglang-attention-backend flashinfer", "flashinfer-python"),
            ("--sglang-attention-backend fa3", ""),
            ("--transformer-impl local --attention-backend flash", ""),
            ("--transformer-impl transformer_engine", "transformer-engine"),
            ("--fp8-format e4m3", "transformer-engine"),
            ("--sglang-moe-a2a-backend deepep", "deep-ep"),
            ("--use-wandb", "wandb"),
        ],
    )
    def test_what_is_needed_is_what_runs(self, flags: str, missing: str, tmp_path: Path) -> None:
        """A flag of the half that is not started needs nothing."""
        findings = told("package-missing", freeze(tmp_path, BASE), launch(tmp_path, flags))
        assert [f"needs {missing}," in finding.message for finding in findings] == ([True] if missing else [])

    def test_an_interpreter_without_anything(self, tmp_path: Path) -> None:
        """What a trainer imports first is missed first; a replay needs no engine."""
        machine = machine_of(environment(tmp_path / "e", {}))
        messages = [
            finding.message for finding in told("package-missing", machine, launch(tmp_path, "--debug-train-only"))
        ]
        assert len(messages) == 2 and "torch" in messages[0] and "ray" in messages[1]

    @pytest.mark.parametrize(
        ("packages", "message"),
        [
            ({"flash-attn": "2.8.3", "flash-attn-3": "3.0.0b1"}, ""),
            ({"opencv-python": "4.10.0", "opencv-python-headless": "4.10.0"}, "write over each other"),
            ({"nvidia-cudnn-cu12": "9.16.0.29", "nvidia-cudnn-cu13": "9.20.0.48"}, "write over each other"),
            ({"torch": "2.11.0+cu129", "torchvision": "0.26.0+cu129", "torchaudio": "2.11.0+cu129"}, ""),
            ({"torch": "2.13.0", "torchvision": "0.28.0", "torchaudio": "2.11.0"}, ""),
            ({"torch": "2.11.0", "torchvision": "0.24.0"}, "torchvision 0.24.0 is not the one of torch 2.11.0"),
            ({"flashinfer-python": "0.6.15.post1", "flashinfer-jit-cache": "0.6.15.post1+cu130"}, ""),
            ({"flashinfer-python": "0.6.15.post1", "flashinfer-cubin": "0.6.14"}, "must be of one version"),
            ({"nvidia-cutlass-dsl": "4.6.2", "nvidia-cutlass-dsl-libs-cu13": "4.6.0"}, "must be of one version"),
        ],
    )
    def test_packages_that_belong_together(self, packages: dict[str, str], message: str, tmp_path: Path) -> None:
        """Local builds are the same version; what coexists by design is let pass."""
        findings = told("package-mismatch", freeze(tmp_path, packages))
        assert [message in finding.message for finding in findings] == ([True] if message else [])

    def test_this_very_environment_has_no_error(self, tmp_path: Path) -> None:
        """Nothing of ours is wrong enough to fail."""
        machine = machine_of(None)
        read = launch(tmp_path, "--debug-train-only")
        for rule in ("bad-version", "numpy-2", "torch-cpu-only", "package-mismatch", "thread-count", "cuda-visible"):
            artefacts = (machine, *(None for _ in catalogue()[rule].uses))
            assert [finding for finding in told(rule, *artefacts) if finding.severity == "error"] == []
        assert told("package-missing", machine, read) == []


class TestKnown:
    """The table of "bad-version"."""

    def test_every_entry_names_its_source(self) -> None:
        """A repository with an issue or a commit, or a package's own metadata."""
        for known in KNOWN:
            assert "#" in known.source or "@" in known.source or "requires-python" in known.source, known

    def test_every_entry_is_found_by_its_own_versions(self, tmp_path: Path) -> None:
        """A list with versions that its specifiers hold for gives a finding that names its source."""
        for number, known in enumerate(KNOWN):
            packages = {name: _one_of(specifier) for name, specifier in known.packages.items()}
            machine = freeze(tmp_path / str(number), {**packages, "filler": "1"})
            if known.python:
                machine = Machine(machine.source, machine.packages, python=_one_of(known.python))
            assert any(known.source in finding.message for finding in told("bad-version", machine, None)), known

    def test_without_a_launch_what_it_must_meet_is_a_note(self, tmp_path: Path) -> None:
        """It says under which flags."""
        (finding,) = told("bad-version", freeze(tmp_path, {"sglang": "0.5.14"}), None)
        assert finding.severity == "note" and "(with --sglang-enable-deterministic-inference)" in finding.message

    def test_a_launch_that_does_not_meet_it_is_let_pass(self, tmp_path: Path) -> None:
        """Seeded sampling is not asked for."""
        assert told("bad-version", freeze(tmp_path, {"sglang": "0.5.14"}), launch(tmp_path, "--colocate")) == []

    def test_python_itself(self, tmp_path: Path) -> None:
        """megatron-core 0.17 is an error below Python 3.12, and fine above."""
        core = {"megatron-core": "0.17.1"}
        conda = "# packages in environment at /opt/conda:\n#\npython {}  0\nmegatron-core 0.17.1  pypi_0\n"
        for version, severities in (("3.11.9", ["error"]), ("3.12.3", [])):
            folder = tmp_path / version
            folder.mkdir()
            (folder / "conda-list.txt").write_text(conda.format(version))
            (machine,) = FREEZE.read(folder / "conda-list.txt")
            assert [finding.severity for finding in told("bad-version", machine, None)] == severities, core

    @pytest.mark.parametrize(
        ("specifier", "version", "holds"),
        [
            (">=0.5.9,<0.5.18", "0.5.12.post1", True), (">=0.5.9,<0.5.18", "0.5.18", False),
            (">=0.5.9,<0.5.18", "0.5.13.dev21+g53e0483", True), (">=2", "2.0.0rc1", False), (">=2", "", False),
            (">=2", "unknown", False), ("==2.11.*", "2.11.0+cu129", True), ("not a specifier", "1", False),
        ],
    )  # fmt: skip
    def test_versions(self, specifier: str, version: str, holds: bool) -> None:
        """Builds from source and local versions count; what is no version never does."""
        assert matches(specifier, version) is holds


def _one_of(specifier: str) -> str:
    """A version that a specifier holds for."""
    candidates = [f"{major}.{minor}.{patch}" for major in range(10) for minor in range(30) for patch in range(25)]
    bases = [part.lstrip("<>=~!").replace(".*", ".0") for part in specifier.split(",")]
    return next(version for version in [*bases, *candidates] if matches(specifier, version))
