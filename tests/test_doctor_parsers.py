"""Which flags a trainer has, by its help, by what its parsers wrote, by a checkout; and what rules make of it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_flags_kit import BATCH, launch, script
from findings_kit import told
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from repro.doctor.artefacts.kinds import ParserDump
from repro.doctor.artefacts.parsers import PARSERS
from repro.doctor.facts.known_flags import ALSO, KNOWN, near_miss
from repro_golden.base.errors import ReproError
from repro_golden.recording.attach.entry import enter

TRAINER = """
import argparse
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--rollout-batch-size", "-r", type=int, help="prompts; see --n-samples, which is not here")
parser.add_argument("--n-samples-per-prompt", type=int)
parser.add_argument("--global-batch-size", type=int)
parser.add_argument("--tensor-model-parallel-size", type=int, default=1, help="a" * 200)
parser.add_argument("--kind", choices=["--odd", "b"])
parser.add_argument("--offload", action=argparse.BooleanOptionalAction)
parser.parse_known_args()
"""


def read(path: Path) -> ParserDump:
    """What the reader finds."""
    assert PARSERS.fits(path)
    parsers = [artefact for artefact in PARSERS.read(path) if isinstance(artefact, ParserDump)]
    assert len(parsers) == 1
    return parsers[0]


def test_help_lists_flags(tmp_path: Path) -> None:
    """What a real argparse prints: its flags, not those that a description names."""
    (tmp_path / "train.py").write_text(TRAINER)
    done = subprocess.run([sys.executable, "train.py", "--help"], cwd=tmp_path, capture_output=True, check=True)
    (tmp_path / "help.txt").write_bytes(done.stdout)
    content = read(tmp_path / "help.txt")
    assert content.options == {
        "-h", "--help", "-r", "--rollout-batch-size", "--n-samples-per-prompt", "--global-batch-size",
        "--tensor-model-parallel-size", "--kind", "--offload", "--no-offload",
    }  # fmt: skip
    assert content.complete
    artefact = launch(script(tmp_path, *BATCH, "--no-offload", "--n-sample-per-prompt 3", "--other 1"))
    severities = {finding.where.item: finding.severity for finding in told("flag-unknown", artefact, content)}
    assert severities == {"--n-sample-per-prompt": "error", "--other": "warning"}


def test_what_parsers_wrote_in_a_replay(tmp_path: Path) -> None:
    """Real parsers, watched by the replay's own entry: their flags, and those of the command line that none took."""
    source = (
        "import sys\nsys.argv = ['train.py', '--kind', 'b', '--knid', 'c', '--sglang-log-level', 'info']\n"
        "from repro_golden.recording.attach.entry import enter\n"
        f"enter({{'flags': [], 'redirect': {{}}, 'variables': [], 'out': {str(tmp_path)!r}}})\n" + TRAINER
    )
    subprocess.run([sys.executable, "-c", source], check=True, cwd=tmp_path)
    assert enter is not None
    content = read(tmp_path)
    assert "--tensor-model-parallel-size" in content.options
    assert content.ignored == ("--knid",)
    assert content.complete
    assert not content.abbreviates
    (finding,) = told("flag-ignored", content)
    assert (finding.severity, finding.fix) == ("error", "write --kind")


def checkout(folder: Path, system: str = "slime") -> Path:
    """A checkout with some of its flags."""
    arguments = folder / system / "utils" / "arguments.py"
    arguments.parent.mkdir(parents=True)
    arguments.write_text(
        "def add(parser):\n    parser.add_argument('--rollout-batch-size', type=int)\n"
        "    reset_arg(parser, '--global-batch-size', default=None)\n    log('--not-a-flag')\n"
    )
    (arguments.parent / "torn.py").write_text("def add_argument(:\n")
    (folder / system / "loop").symlink_to(folder)
    return folder


@pytest.mark.parametrize("system", ["slime", "miles", "relax"])
def test_a_checkout_registers_flags(tmp_path: Path, system: str) -> None:
    """By its source: certain of what is there, not of what is missing."""
    (parsers,) = PARSERS.read(checkout(tmp_path, system))
    assert isinstance(parsers, ParserDump)
    assert parsers.options == {"--rollout-batch-size", "--global-batch-size"}
    assert not parsers.complete
    artefact = launch(
        script(tmp_path, "--rollout-batch-sizes 4", "--tensor-model-parallel-size 2", "--no-rollout-batch-size")
    )
    (finding,) = told("flag-unknown", artefact, parsers)
    assert (finding.severity, finding.certainty, finding.where.item) == ("warning", "possible", "--rollout-batch-sizes")


def test_a_parser_settles_what_a_ghost_is(tmp_path: Path) -> None:
    """The rules "ghost-flag" and "flag-typo" yield to a trainer that has the flag after all."""
    path = tmp_path / "parsers-1-1.jsonl"
    line = {"options": ["--offload-optimizer-states", "--rollout-batch-sizes"], "abbreviates": False}
    path.write_text(json.dumps({"own": [], "variables": {}}) + "\n" + json.dumps(line) + "\n{torn")
    artefact = launch(
        script(tmp_path, "--colocate", "--offload-optimizer-states", "--rollout-batch-sizes 3", "--streaming-data")
    )
    (finding,) = told("ghost-flag", artefact, read(path))
    assert finding.where.item == "--streaming-data"
    assert [reported.certainty for reported in told("ghost-flag", artefact)] == ["possible", "certain"]
    assert told("flag-typo", artefact, read(path)) == []
    assert [finding.where.item for finding in told("flag-typo", artefact)] == ["--rollout-batch-sizes"]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--rollout_batch_size", "--rollout-batch-size"),
        ("--rollout-bacth-size", "--rollout-batch-size"),
        ("--rollout-size-batch", "--rollout-batch-size"),
        ("--n-samples-per-promt", "--n-samples-per-prompt"),
        ("--update-weight-interval", "--update-weights-interval"),
        ("--lrr", "--lr"),
        ("--something-else-entirely", ""),
        ("--x", ""),
    ],
)
def test_a_near_miss_is_a_letter_or_two_away(wrong: str, right: str) -> None:
    """Underscores, letters swapped, dropped or doubled, words in another order; and nothing for what is far."""
    assert near_miss(wrong, sorted(KNOWN | {"--lr"})) == right


def test_known_flags_are_no_misspellings() -> None:
    """No known flag is a "flag-typo", and no ghost is known."""
    words = ["train.py", *sorted(KNOWN | ALSO)]
    from repro.doctor.artefacts.launches.scripts import launch_of_argv

    assert told("flag-typo", launch_of_argv(words)) == []
    assert not KNOWN & {"--debug-determinism", "--streaming-data", "--log-level"}


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["own", "options", "abbreviates", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=80), JSON.map(lambda value: json.dumps(value).encode())), st.booleans())
def test_any_content_is_a_dump_or_one_line(tmp_path: Path, content: bytes, helps: bool) -> None:
    """Garbage, and JSON of any shape, under the names that the reader knows."""
    path = tmp_path / ("help.txt" if helps else "parsers-1-1.jsonl")
    path.write_bytes((b"usage: x\n  --a\n" if helps else b"") + content)
    PARSERS.fits(path)
    with contextlib.suppress(ReproError):
        for parsers in PARSERS.read(path):
            if isinstance(parsers, ParserDump):
                told("flag-ignored", parsers)
