"""Writes launch scripts as slime's users write them, and tries rules on what the reader makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from doctor_flags_kit import launch

from repro.doctor.artefacts.kinds import Launch

CLEAN: Mapping[str, str] = {
    "--hf-checkpoint": "/models/Qwen3-4B",
    "--ref-load": "/models/Qwen3-4B_torch_dist",
    "--save": "/runs/out",
    "--save-interval": "20",
    "--prompt-data": "/data/dapo.jsonl",
    "--input-key": "prompt",
    "--label-key": "label",
    "--apply-chat-template": "",
    "--rm-type": "deepscaler",
    "--num-rollout": "100",
    "--rollout-batch-size": "32",
    "--n-samples-per-prompt": "8",
    "--rollout-max-response-len": "8192",
    "--rollout-temperature": "1",
    "--global-batch-size": "256",
    "--tensor-model-parallel-size": "2",
    "--sequence-parallel": "",
    "--pipeline-model-parallel-size": "1",
    "--context-parallel-size": "1",
    "--use-dynamic-batch-size": "",
    "--max-tokens-per-gpu": "9216",
    "--advantage-estimator": "grpo",
    "--use-kl-loss": "",
    "--kl-loss-coef": "0.001",
    "--kl-coef": "0.00",
    "--attention-dropout": "0.0",
    "--hidden-dropout": "0.0",
    "--attention-backend": "flash",
    "--actor-num-nodes": "1",
    "--actor-num-gpus-per-node": "8",
    "--colocate": "",
}
"""Flags of a launch that no rule has anything to say about; '' for a switch."""

ENV: Mapping[str, str] = {
    "PYTHONPATH": "/root/Megatron-LM",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "RAY_DEDUP_LOGS": "0",
}
"""Variables of its runtime environment."""

DETERMINISTIC: Mapping[str, str] = {
    "--deterministic-mode": "",
    "--sglang-enable-deterministic-inference": "",
    "--sglang-attention-backend": "fa3",
}
DETERMINISTIC_ENV: Mapping[str, str] = {
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTHONHASHSEED": "0",
}


class Script(NamedTuple):
    """A launch script that differs from the clean one.

    Attributes:
        flags: Flags that are added or set anew; '' for a switch.
        drop: Flags that are left out.
        env: Variables that are added to the runtime environment.
        unset: Variables that are left out of it.
        top: Lines of the script in front of `ray start`.
        middle: Lines between `ray start` and the submission.
        entry: The trainer's program.
        system: Whose checkout it names.
        tail: Words behind all flags, as written.
        submitted: Whether it goes through Ray.
    """

    flags: Mapping[str, str] = {}
    drop: Sequence[str] = ()
    env: Mapping[str, str] = {}
    unset: Sequence[str] = ()
    top: str = ""
    middle: str = ""
    entry: str = "train.py"
    system: str = "slime"
    tail: str = ""
    submitted: bool = True

    def text(self) -> str:
        """As it stands in the file."""
        flags = {name: value for name, value in {**CLEAN, **self.flags}.items() if name not in self.drop}
        lines = [f"   {name} {value}".rstrip() for name, value in flags.items()]
        env = {name: value for name, value in {**ENV, **self.env}.items() if name not in self.unset}
        code = {"slime": "/root/slime", "miles": "/root/miles", "relax": "/root/Relax"}[self.system]
        command = [
            *(["ray job submit --address=http://127.0.0.1:8265 \\"] if self.submitted else []),
            *([f"   --runtime-env-json='{json.dumps({'env_vars': env})}' \\", "   -- \\"] if self.submitted else []),
            f"   python3 {self.entry} \\",
            f"   ${{ARGS[@]}} {self.tail}".rstrip(),
        ]
        return "\n".join(
            [
                "#!/bin/bash", "set -ex", f"cd {code}", self.top, "ARGS=(", *lines, ")",
                "ray start --head --num-gpus 8", self.middle, *command, "",
            ]
        )  # fmt: skip

    def write(self, folder: Path, name: str = "run.sh") -> Path:
        """Write it into a folder."""
        path = folder / name
        path.write_text(self.text())
        return path

    def read(self, folder: Path) -> Launch:
        """Write it and read it back, as the doctor does."""
        return launch(self.write(folder))


def deterministic(**more: str) -> Script:
    """A launch with the whole determinism set, and further flags (``_`` for ``-``)."""
    return Script({**DETERMINISTIC, **{f"--{k.replace('_', '-')}": v for k, v in more.items()}}, env=DETERMINISTIC_ENV)
