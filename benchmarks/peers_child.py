"""A program, watched for `peers.py`: ``python peers_child.py OUT WATCH PROGRAM [ARGUMENT ...]``.

WATCH is ``tensors``: after each step of an optimizer its parameters and gradients are copied, for whoever judges them;
``hashes``: torch.hash_tensor is asked of each; ``operations``: torch's DebugMode hashes what each operation makes, as
`log_tensor_hashes` does by default; or ``nothing``. What was seen goes to OUT by torch.save.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

UNWRITTEN = ("aten::empty", "aten::new_empty", "aten::set_")
"""Operations that make memory which nobody has written yet. Its hash is another one in each run: with them DebugMode
would raise an alarm at every second run."""


def main() -> None:
    """Run the program, and write what was seen."""
    out, watch, program = sys.argv[1:4]
    sys.argv = sys.argv[3:]
    sys.path[0] = str(Path(program).parent)
    torch.save(WATCHES[watch](program), out)


def unwatched(program: str) -> list[Any]:
    """Nothing."""
    runpy.run_path(program, run_name="__main__")
    return []


def watched_tensors(program: str, of: Callable[[torch.Tensor], Any]) -> list[list[Any]]:
    """Of each step of an optimizer what `of` makes of its parameters and gradients."""
    steps: list[list[Any]] = []

    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        tensors = [p.detach() for p in held] + [p.grad.detach() for p in held if p.grad is not None]
        dense = [tensor.to_dense() if tensor.is_sparse else tensor for tensor in tensors]
        steps.append([of(tensor) for tensor in dense])

    hook = register_optimizer_step_post_hook(after)
    runpy.run_path(program, run_name="__main__")
    hook.remove()
    return steps


def watched_operations(program: str) -> list[tuple[str, str]]:
    """The operations and their hashes, in order."""
    from torch.utils._debug_mode import DebugMode

    with DebugMode() as mode, DebugMode.log_tensor_hashes():
        runpy.run_path(program, run_name="__main__")
    seen = [(call.render([]).split("(")[0], str((call.log or {}).get("hash"))) for call in mode.logs]
    return [(name, made) for name, made in seen if not name.startswith(UNWRITTEN)]


WATCHES: dict[str, Callable[[str], Any]] = {
    "nothing": unwatched,
    "tensors": partial(watched_tensors, of=torch.clone),
    "hashes": partial(watched_tensors, of=lambda tensor: torch.hash_tensor(tensor.contiguous()).tolist()),
    "operations": watched_operations,
}


if __name__ == "__main__":
    main()
