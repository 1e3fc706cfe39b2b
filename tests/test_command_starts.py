"""How a command starts, and what is said of one that cannot."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from repro_golden.base.errors import ReproError
from repro_golden.base.machine.processes import ExecError, executed
from repro_golden.case.file import Case
from repro_golden.recording.attach.gathered.run import run_traced
from repro_golden.replay.children import Child, ChildFailure
from repro_golden.repository.checkout import Place
from repro_golden.subjects import exit_code


def case(command: str) -> Case:
    """Of a command."""
    subject = {"kind": "command", "command": command}
    return Case.model_validate({"case": {"name": "toy", "steps": 3}, "subject": subject})


UNSOUND = {
    "no": "command not found: ./no",
    "plain": "./plain is not executable",
    "folder": "./folder is not executable",
    "plain/run.sh": "./plain/run.sh cannot be run: Not a directory",
    "loop": "./loop cannot be run: Too many levels of symbolic links",
    "binary": "./binary cannot be run: Exec format error",
}


@pytest.mark.parametrize("name", UNSOUND)
def test_a_command_that_cannot_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It is the program's failure to start, whatever the kernel says of it, and an error where it is traced."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    for file, content, mode in (("plain", b"true", 0o644), ("binary", b"\x7fELF\0", 0o755)):
        (tmp_path / file).write_bytes(content)
        (tmp_path / file).chmod(mode)
    with pytest.raises(ChildFailure, match=UNSOUND[name]) as failure:
        exit_code(case(f"./{name}"), Place(tmp_path), tmp_path / "log")
    assert failure.value.stage == "start"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ReproError, match=UNSOUND[name]):
        run_traced([f"./{name}"], tmp_path / "trace")


@pytest.mark.parametrize("named", ["./run", "run"])
@pytest.mark.parametrize("bound", [True, False])
def test_a_text_without_a_first_line_of_its_own(tmp_path: Path, named: str, bound: bool) -> None:
    """It is run by /bin/sh, as shells and `git bisect run` do, with its arguments."""
    (tmp_path / "run").write_text('exit "$1"\n')
    (tmp_path / "run").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert Child([named, "3"], tmp_path, variables, tmp_path / "log", 60, bound=bound).run() == 3


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE])
def test_what_the_machine_lacks_is_not_the_commands(tmp_path: Path, number: int) -> None:
    """Without memory, processes or files no command can be run, and none is blamed."""

    def start(_: object) -> subprocess.Popen[bytes]:
        raise OSError(number, os.strerror(number), "run")

    with pytest.raises(OSError, match=os.strerror(number)) as error:
        executed(["run"], tmp_path, {}, start)
    assert not isinstance(error.value, ExecError)
