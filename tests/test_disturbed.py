"""Probes that disturb each other: what no commit does is no verdict on one, and the search goes on one by one."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import Repo
from history_kit import edit, note, start

from repro_bisect.probe.company import Company
from repro_golden.replay.children import CancelledError

ONE_AT_A_TIME = """\
import os, sys, time
try:
    os.close(os.open({lock!r}, os.O_CREAT | os.O_EXCL))
except FileExistsError:
    sys.exit(125)
try:
    time.sleep(0.7)
finally:
    os.unlink({lock!r})
sys.exit(code)
"""


def searched(root: Path, program: str, codes: str) -> tuple[dict[str, Any], list[str], str]:
    """What is found in a history whose programs end with such codes, its commits, and what is said."""
    repo = Repo(root / "repo")
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    commits = []
    for number, code in enumerate(codes.split()):
        (repo.root / "train.py").write_text(f"code = {code}\n{program}# {number}\n")
        commits.append(repo.commit(f"Commit {number}"))
    options = ("-j", "2", "--json", "--when", "exit")
    done = repo.repro("bisect", f"{commits[0]}..HEAD", *options, "--", sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), commits, done.stderr


def test_a_skip_beside_other_probes_is_tried_alone(tmp_path: Path) -> None:
    """Commits that cannot be tested while another probe runs are tested one by one: the culprit is named, and why."""
    program = ONE_AT_A_TIME.format(lock=str(tmp_path / "lock"))
    result, commits, said = searched(tmp_path, program, "0 0 0 1 1 1")
    assert result["culprit"]["commit"] == commits[3] and not result["skips"]
    assert "disturb each other" in result["remarks"][0] and "from the beginning, with -j 1" in said


def test_what_cannot_be_tested_alone_either_is_skipped(tmp_path: Path) -> None:
    """A skip of the commit's own stays one, and no other with its reason is tried again."""
    result, commits, said = searched(tmp_path, "raise SystemExit(code)\n", "0 125 0 125 0 1 125 1")
    assert result["culprit"]["commit"] == commits[5] and "disturb" not in said and not result["remarks"]


def test_alone_is_alone() -> None:
    """Whoever wants to be alone waits for those under way, keeps others out, and gives up when nobody asks any more."""
    company, order, cancel = Company(), list[str](), threading.Event()
    with company.run(alone=False) as first:

        def alone() -> None:
            with company.run(alone=True) as run:
                order.append(f"alone {run.beside}")

        def later() -> None:
            with company.run(alone=False):
                order.append("later")

        threads = [threading.Thread(target=each) for each in (alone, later)]
        threads[0].start()
        while not company._alone:
            pass
        threads[1].start()
        cancel.set()
        with pytest.raises(CancelledError), company.run(alone=True, cancel=cancel):
            pass
        assert order == [] and not first.beside
    for thread in threads:
        thread.join()
    assert order == ["alone False", "later"]
    with company.run(alone=False) as first, company.run(alone=False) as second:
        assert first.beside and second.beside


@pytest.mark.whole
def test_numbers_of_another_probe_are_no_culprit_s(tmp_path: Path) -> None:
    """Probes that read what another one has written to a path that they share name nobody, until they run alone."""
    repo = start(tmp_path, case=None)
    write, read = (f"open({str(tmp_path / 'shared')!r}{mode})" for mode in (", 'w'", ""))
    share = f"scale = 1.0; {write}.write(str(scale)); __import__('time').sleep(0.7); scale = float({read}.read())\n"
    edit(repo, "scale = 1.0\n", share, "Share")
    note(repo, "one")
    culprit = edit(repo, "scale = 1.0;", "scale = 2.0;", "The culprit")
    note(repo, "two")
    done = repo.repro(
        "bisect", "HEAD~3..HEAD", "-j", "3", "--json", "--no-explain", "--",
        sys.executable, "train.py", "--steps", "2",
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert result["culprit"]["commit"] == culprit, done.stderr
    assert "disturb each other" in result["remarks"][0]
