"""Archives of torch.save and plain pickles: read within bounds and without running anything of theirs, and written."""

from __future__ import annotations
