"""Which lines of a change's files a program runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LINES = """\
\"\"\"A module.\"\"\"
import math


def used(n):
    total = 0
    for k in range(n):
        if k > 100:
            total += math.inf
        total += k
    return total


def unused():
    return 1
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A Python in a folder."""
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=True)


def test_lines_are_noted_once_in_the_order_of_their_first_run(tmp_path: Path) -> None:
    """What ran, by file of the checkout; nothing of what did not, of other files, or of files nobody imported."""
    (tmp_path / "counted.py").write_text(LINES)
    (tmp_path / "other.py").write_text(LINES)
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from repro_golden.recording.operations.lines import LinesRun\n"
        f"ran = LinesRun({str(tmp_path)!r}, ['counted.py', 'early.py', 'never.py'])\n"
        "import counted, other, json, threading\n"
        "counted.used(3), other.used(3)\n"
        "print(json.dumps(ran.end()), sys.gettrace(), threading.gettrace()); counted.unused()\n"
        "print(json.dumps(ran.end()))\n"
    )
    done = run(tmp_path, "-c", program)
    first, second = done.stdout.splitlines()
    assert first == '{"counted.py": [1, 2, 5, 14, 6, 7, 8, 10, 11]} None None' and second == "null"


def test_lines_of_frames_that_are_under_way_and_of_threads(tmp_path: Path) -> None:
    """The program itself from there on, and what another thread runs; what was imported before has no line yet."""
    (tmp_path / "counted.py").write_text(LINES)
    (tmp_path / "program.py").write_text(
        "import counted, json, threading\n"
        "from repro_golden.recording.operations.lines import LinesRun\n"
        f"ran = LinesRun({str(tmp_path)!r}, ['counted.py', 'program.py'])\n"
        "one = 1\n"
        "thread = threading.Thread(target=lambda: counted.unused() if ran else None)\n"
        "print(json.dumps(ran.end())) if not one else thread.start() or thread.join()\n"
        "print(json.dumps(ran.end()))\n"
    )
    done = run(tmp_path, "program.py")
    assert done.stdout == '{"program.py": [4, 5, 6, 7], "counted.py": [15]}\n', done.stderr


def test_another_tracer_keeps_its_place(tmp_path: Path) -> None:
    """Under a debugger or a coverage tool nothing is noted, and they go on."""
    program = (
        "import sys\n"
        "from repro_golden.recording.operations.lines import LinesRun\n"
        "def tracer(*_): return None\n"
        "sys.settrace(tracer)\n"
        "ran = LinesRun('/', ['program.py'])\n"
        "print(ran.end(), sys.gettrace() is tracer)\n"
    )
    done = run(tmp_path, "-c", program)
    assert done.stdout == "None True\n"


def test_a_function_that_runs_for_ever_is_soon_left_alone(tmp_path: Path) -> None:
    """A loop of a million turns costs a tenth of them: its end is missed, and what another function does is not."""
    (tmp_path / "counted.py").write_text(LINES)
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from repro_golden.recording.operations import lines\n"
        f"ran = lines.LinesRun({str(tmp_path)!r}, ['counted.py'])\n"
        "import counted\n"
        "counted.used(1_000_000), counted.unused()\n"
        "turns = ran._again[counted.used.__code__]\n"
        "print(ran.end()['counted.py'], turns == lines._STALE)\n"
    )
    done = run(tmp_path, "-c", program)
    assert done.stdout == "[1, 2, 5, 14, 6, 7, 8, 10, 9, 15] True\n"


def test_nothing_is_traced_before_one_of_the_files_runs(tmp_path: Path) -> None:
    """Imports of other packages take no longer; a file that is run by `exec` is as good as one that is imported."""
    (tmp_path / "counted.py").write_text(LINES)
    (tmp_path / "other.py").write_text(LINES)
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from repro_golden.recording.operations.lines import LinesRun\n"
        f"ran = LinesRun({str(tmp_path)!r}, ['counted.py'])\n"
        "import other; exec('1'); other.used(1)\n"
        "print(sys.gettrace())\n"
        "exec(compile(open('counted.py').read(), 'counted.py', 'exec'))\n"
        "print(ran.end())\n"
    )
    done = run(tmp_path, "-c", program)
    assert done.stdout == "None\n{'counted.py': [1, 2, 5, 14]}\n"


def test_a_file_that_was_imported_before_by_another_spelling_is_seen(tmp_path: Path) -> None:
    """`sys.path` may hold `.`: what its functions run later is noted all the same."""
    (tmp_path / "counted.py").write_text(LINES)
    program = (
        "import sys; sys.path.insert(0, './.')\n"
        "import counted\n"
        "from repro_golden.recording.operations.lines import LinesRun\n"
        f"ran = LinesRun({str(tmp_path)!r}, ['counted.py'])\n"
        "counted.unused(); print(ran.end())\n"
    )
    assert run(tmp_path, "-c", program).stdout == "{'counted.py': [15]}\n"


def test_a_tracer_that_comes_before_the_files_keeps_its_place(tmp_path: Path) -> None:
    """A debugger that begins while nothing is traced yet goes on, and nothing is noted."""
    (tmp_path / "counted.py").write_text(LINES)
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from repro_golden.recording.operations.lines import LinesRun\n"
        f"ran = LinesRun({str(tmp_path)!r}, ['counted.py'])\n"
        "def tracer(*_): return None\n"
        "sys.settrace(tracer)\n"
        "import counted\n"
        "print(ran.end(), sys.gettrace() is tracer)\n"
    )
    assert run(tmp_path, "-c", program).stdout == "None True\n"
