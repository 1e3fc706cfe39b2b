"""How long a range's code keys take: ``python benchmarks/commits.py [COMMITS]``.

A history is written by `git fast-import`: 60 entries at the top, and each commit changes one file in a folder. Looked
up are all of the repository, a folder and a file, in every commit of the range.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from repro_bisect.axes.commits import History
from repro_golden.repository.checkout import find_checkout

COMMITS = 10_000
FOLDERS, FILES = 40, 20


def history(count: int) -> Iterator[str]:
    """The stream of `git fast-import`."""
    for number in range(count):
        yield f"commit refs/heads/main\nmark :{number + 1}\ncommitter T <t@example.invalid> {10**9 + number} +0000\n"
        yield data(f"Commit {number}")
        if number == 0:
            yield from (f"M 100644 inline {k}.py\n{data(str(k))}" for k in range(FILES))
            yield from (f"M 100644 inline folder{k}/train.py\n{data(str(k))}" for k in range(FOLDERS))
        yield f"M 100644 inline folder{number % FOLDERS}/train.py\n{data(f'changed {number}')}"


def data(text: str) -> str:
    """A text of such a stream."""
    return f"data {len(text)}\n{text}\n"


def main() -> None:
    """Print seconds of wall and CPU time, ours and git's, for each kind of path."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else COMMITS
    with tempfile.TemporaryDirectory() as folder:
        for arguments, given in ((["init", "--quiet", "-b", "main"], ""), (["fast-import", "--quiet"], history(count))):
            subprocess.run(["git", *arguments], cwd=folder, input="".join(given).encode(), check=True)
        listed = subprocess.run(
            ["git", "rev-list", "--max-parents=0", "main"], cwd=folder, capture_output=True, check=True
        )
        checkout, good = find_checkout(Path(folder)), listed.stdout.decode().strip()
        for path in (".", "folder3", "folder3/train.py"):
            began, before = time.perf_counter(), sum(os.times()[:4])
            commits = History(checkout, f"{good}..main", [path])
            took, cpu = time.perf_counter() - began, sum(os.times()[:4]) - before
            keys = {commits.tree(commit) for commit in (commits.good, *commits.parents)}
            print(f"{path}: {count} commits, {len(keys)} keys, {took:.2f} s, {cpu:.2f} s of CPU")


if __name__ == "__main__":
    main()
