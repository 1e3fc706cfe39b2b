"""What `git bisect run` runs: a driver whose printed numbers are compared with GOOD's; 125 where it prints none.

    python git_test.py NUMBERS LOG -- COMMAND

NUMBERS holds the lines that COMMAND printed at GOOD; where it is not there, it is written. LOG gets a line a run.
"""

import subprocess
import sys
from pathlib import Path

numbers, log, _, *command = sys.argv[1:]
done = subprocess.run(command, capture_output=True, text=True, check=False)
lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
with Path(log).open("a") as file:
    file.write(f"{len(lines)}\n")
if done.returncode or not lines:
    sys.exit(125)
known = Path(numbers)
if not known.exists():
    known.write_text("\n".join(lines))
sys.exit(int(known.read_text().split("\n") != lines))
