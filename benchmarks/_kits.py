"""Puts the kits of tests/ on the path of a benchmark that imports this first."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))
