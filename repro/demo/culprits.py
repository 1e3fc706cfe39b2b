"""The precision regressions that the demo can hide: each lowers or reorders arithmetic from one step on.

Every one is an ordinary-looking commit: a warm-up, after which a cheaper path is taken. The gate is the number of the
step, so nothing before it moves by a bit. What the cheaper path computes is rounded to 8 bits, perturbed by far more
than an ULP, or added up in another order over thousands of outputs: that no bit moves at the step itself is out of
the question as long as rewards differ within a group and the policy has left the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

from repro.demo.edits import Edit

__all__ = ["CULPRITS", "Culprit", "kinds"]

_FIRST = "@FIRST@"
_TRAINER, _ENGINE, _DECODER = "train/trainer.py", "engines/torch_engine.py", "model/decoder.py"
_GATES = {_TRAINER: "self._step >= _WARM_UPDATES", _ENGINE: "self.updates >= _WARM_UPDATES"}
"""How the RL step, and the engine of the policy, say that the warm-up is over. The reference is never updated: what
an engine gates keeps the exact path there."""
_TOPS = {_TRAINER: "\n_INPUTS = (", _ENGINE: "\nDTYPES = {"}
"""What stands below the new constant."""


@dataclass(frozen=True)
class Culprit:
    """One regression at one place.

    Attributes:
        kind: What was done.
        file: The guilty file, relative to the trainer's folder.
        function: Where in it.
        phase: The first phase in which it shows.
        edits: Of the guilty file; with ``@FIRST@`` for the first step.
        gate: Of its caller, if that is another file: what tells the guilty function that the warm-up is over.
    """

    kind: str
    file: str
    function: str
    phase: str
    edits: tuple[Edit, ...]
    gate: tuple[Edit, ...]

    @property
    def place(self) -> str:
        """``file:function``."""
        return f"{self.file}:{self.function}"

    @property
    def gated(self) -> str:
        """The file that counts the updates: the caller's, or the guilty file itself."""
        return self.gate[0].path if self.gate else self.file

    def commit(self, first_step: int) -> list[Edit]:
        """The edits of the commit that first shows at `first_step`."""
        below = _TOPS[self.gated]
        constant = Edit(
            self.gated,
            below,
            f'\n_WARM_UPDATES = {_FIRST}\n"""Updates after which the policy has settled."""\n{below}',
        )
        return [
            Edit(e.path, e.old, e.new.replace(_FIRST, str(first_step))) for e in (constant, *self.edits, *self.gate)
        ]


def kinds() -> list[str]:
    """The kinds, each once."""
    return list(dict.fromkeys(c.kind for c in CULPRITS))


def _call(caller: str, old: str, new: str) -> tuple[Edit, ...]:
    """A call gets the gate as one more argument."""
    return (Edit(caller, old, new.replace("GATE", _GATES[caller])),)


_SCORE = '        totals, responses = t["total_lengths"].tolist(), t["response_lengths"].tolist()\n'
_MODULES = _call(
    _ENGINE,
    _SCORE,
    f"{_SCORE}        for module in self.model.modules():\n            module.settled = GATE\n",
)
"""Modules learn of the warm-up as an attribute."""


def _pure(kind: str, file: str, function: str, phase: str, gate: tuple[Edit, ...], *edits: tuple[str, str]) -> Culprit:
    return Culprit(kind, file, function, phase, tuple(Edit(file, *e) for e in edits), gate)


def _model(kind: str, function: str, *edits: tuple[str, str]) -> Culprit:
    return _pure(kind, _DECODER, function, "forward", _MODULES, *edits)


# -- what a function's signature and its caller look like with the gate

_LOG_PROBS_DOOR = (
    "def token_log_probs(logits: Tensor, targets: Tensor, loss_mask: Tensor, temperature: float) -> "
    "tuple[Tensor, Tensor]:",
    "def token_log_probs(\n"
    "    logits: Tensor, targets: Tensor, loss_mask: Tensor, temperature: float, settled: bool = False\n"
    ") -> tuple[Tensor, Tensor]:",
)
_LOG_PROBS_GATE = _call(
    _ENGINE,
    "token_log_probs(rows, batch.targets, mask, self.config.temperature)",
    "token_log_probs(rows, batch.targets, mask, self.config.temperature, GATE)",
)
_LOSS_DOOR = (
    "def policy_loss(columns: Columns, weights: Tensor, config: TrainConfig) -> LossTerms:",
    "def policy_loss(columns: Columns, weights: Tensor, config: TrainConfig, settled: bool = False) -> LossTerms:",
)
_LOSS_GATE = _call(
    _TRAINER, "return policy_loss(loss_columns, weights, c)", "return policy_loss(loss_columns, weights, c, GATE)"
)
_KL_DOOR = (
    '    estimator: Literal["k1", "k2", "k3", "low_var"],\n) -> Tensor:',
    '    estimator: Literal["k1", "k2", "k3", "low_var"],\n    settled: bool = False,\n) -> Tensor:',
)
_KL_GATE = _call(
    _TRAINER,
    "kl_per_token(log_probs, ref_log_probs[responses], mask[responses], c.kl_estimator)",
    "kl_per_token(log_probs, ref_log_probs[responses], mask[responses], c.kl_estimator, GATE)",
)
_KL_RATIO = "log_ratio = torch.where(keep, log_probs.float(), zero) - torch.where(keep, ref_log_probs.float(), zero)\n"
_NORM_DOOR = (
    "def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:",
    "def rms_norm(x: Tensor, weight: Tensor, eps: float, settled: bool = False) -> Tensor:",
)
_NORM_CALL = (
    "return rms_norm(x, self.weight, self.eps)",
    'return rms_norm(x, self.weight, self.eps, getattr(self, "settled", False))',
)
_NORM_LINE = "    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)\n"
_ATTENTION_DOOR = (
    "def attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:",
    "def attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, settled: bool = False) -> Tensor:",
)
_ATTENTION_CALL = (
    "attention(query, key, value, where.visible)",
    'attention(query, key, value, where.visible, getattr(self, "settled", False))',
)
_ROPE_CALL = "cos, sin = rotary_tables(positions, self.config.head_dim, self.config.rope_theta)\n"
_CLIP_DOOR = "def clip_grads(grads: dict[str, Tensor], max_norm: float) -> Tensor:"
_CLIP_CALL = "clip_grads(gradients, self.config.clip_grad)"
_NORM_GATE = _call(_ENGINE, _CLIP_CALL, "clip_grads(gradients, self.config.clip_grad, GATE)")
_GLOBAL_NORM = (
    ("def global_norm(grads: dict[str, Tensor]) -> Tensor:",
     "def global_norm(grads: dict[str, Tensor], settled: bool = False) -> Tensor:"),
    (_CLIP_DOOR, "def clip_grads(grads: dict[str, Tensor], max_norm: float, settled: bool = False) -> Tensor:"),
    ("norm = global_norm(grads)", "norm = global_norm(grads, settled)"),
)  # fmt: skip
_STEP_GATE = _call(_ENGINE, "        optimizer.step()\n", "        optimizer.step(settled=GATE)\n")
_STEP_DOOR = ("    def step(self) -> None:", "    def step(self, settled: bool = False) -> None:")
_ADAM_END = "            maximize=False,\n        )\n"
_BACKWARD = "        for part, (a, b) in zip(graphs, pairwise(offsets([len(p[0]) for p in graphs])), strict=True):\n"


def _moment(name: str) -> tuple[str, str]:
    return (
        _ADAM_END,
        f"{_ADAM_END}        if settled:\n"
        f'            for moment in state["{name}"]:\n'
        "                moment.copy_(moment.bfloat16())\n",
    )


CULPRITS: tuple[Culprit, ...] = (
    _pure("log-softmax in bf16", "rl/loss.py", "token_log_probs", "forward", _LOG_PROBS_GATE, _LOG_PROBS_DOOR, (
        "    log_p = torch.log_softmax(rows.float() / temperature, dim=-1)\n",
        "    scaled = rows.float() / temperature\n"
        "    log_p = torch.log_softmax(scaled.bfloat16() if settled else scaled, dim=-1).float()\n",
    )),
    _pure("logits in bf16", "rl/loss.py", "token_log_probs", "forward", _LOG_PROBS_GATE, _LOG_PROBS_DOOR, (
        "torch.log_softmax(rows.float() / temperature, dim=-1)",
        "torch.log_softmax((rows.bfloat16() if settled else rows).float() / temperature, dim=-1)",
    )),
    _model("RMSNorm variance in bf16", "rms_norm", _NORM_DOOR, _NORM_CALL, (
        _NORM_LINE,
        "    variance = wide.pow(2).mean(-1, keepdim=True)\n"
        "    if settled:\n"
        "        variance = variance.bfloat16().float()\n"
        "    normed = wide * torch.rsqrt(variance + eps)\n",
    )),
    _model("RMSNorm variance in bf16", "rms_norm (squares)", _NORM_DOOR, _NORM_CALL, (
        _NORM_LINE,
        "    squares = wide.bfloat16().pow(2).float() if settled else wide.pow(2)\n"
        "    normed = wide * torch.rsqrt(squares.mean(-1, keepdim=True) + eps)\n",
    )),
    _model("RoPE tables in bf16", "Policy.forward", (
        _ROPE_CALL,
        f'{_ROPE_CALL}        if getattr(self, "settled", False):\n'
        "            cos, sin = cos.bfloat16(), sin.bfloat16()\n",
    )),
    _model("RoPE tables in bf16", "rotary_tables", (
        "def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:",
        "def rotary_tables(\n"
        "    positions: Tensor, head_dim: int, theta: float, settled: bool = False\n"
        ") -> tuple[Tensor, Tensor]:",
    ), (
        "    half = positions[..., None].float() * inverse_wavelengths\n",
        "    if settled:\n"
        "        inverse_wavelengths = inverse_wavelengths.bfloat16().float()\n"
        "    half = positions[..., None].float() * inverse_wavelengths\n",
    ), (
        "rotary_tables(positions, self.config.head_dim, self.config.rope_theta)",
        'rotary_tables(\n            positions, self.config.head_dim, self.config.rope_theta, '
        'getattr(self, "settled", False)\n        )',
    )),
    _model("attention softmax in bf16", "attention", _ATTENTION_DOOR, _ATTENTION_CALL, (
        "weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)",
        "weights = torch.softmax(scores, dim=-1, dtype=torch.bfloat16 if settled else torch.float32).to(query.dtype)",
    )),
    _model("attention scores in bf16", "attention", _ATTENTION_DOOR, _ATTENTION_CALL, (
        "    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5\n",
        "    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5\n"
        "    if settled:\n"
        "        scores = scores.bfloat16().to(query.dtype)\n",
    )),
    _model("SwiGLU gate in bf16", "Mlp.forward", (
        "        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))\n",
        "        gate = F.silu(self.gate_proj(x))\n"
        '        if getattr(self, "settled", False):\n'
        "            gate = gate.bfloat16().to(x.dtype)\n"
        "        out: Tensor = self.down_proj(gate * self.up_proj(x))\n",
    )),
    _pure("KL in bf16", "rl/kl.py", "kl_per_token", "forward", _KL_GATE, _KL_DOOR, (
        f"    {_KL_RATIO}",
        f"    {_KL_RATIO}    if settled:\n        log_ratio = log_ratio.bfloat16().float()\n",
    )),
    _pure("KL in bf16", "rl/kl.py", "kl_per_token (both sides)", "forward", _KL_GATE, _KL_DOOR, (
        f"    {_KL_RATIO}",
        "    if settled:\n"
        "        log_probs, ref_log_probs = log_probs.bfloat16(), ref_log_probs.bfloat16()\n"
        f"    {_KL_RATIO}",
    )),
    _pure("advantage std epsilon", "rl/advantages.py", "baseline", "forward", _call(
        _TRAINER,
        '            values=self._old.get("values"),\n',
        '            values=self._old.get("values"),\n            std_eps=1e-4 if GATE else 1e-6,\n',
    ), (
        "    show: Callable[[str, Tensor], None] = lambda *_: None,\n) -> Estimate:",
        "    show: Callable[[str, Tensor], None] = lambda *_: None,\n    std_eps: float = STD_EPS,\n) -> Estimate:",
    ), (
        "            std_normalization=config.grpo_std_normalization,\n",
        "            std_normalization=config.grpo_std_normalization,\n            std_eps=std_eps,\n",
    ), (
        "    std_normalization: bool,\n) -> Baseline:",
        "    std_normalization: bool,\n    std_eps: float = STD_EPS,\n) -> Baseline:",
    ), (
        "/ max(len(group_rewards) - 1, 1)) + STD_EPS\n", "/ max(len(group_rewards) - 1, 1)) + std_eps\n",
    )),
    _pure("loss accumulated in bf16", "rl/loss.py", "policy_loss (kl_loss)", "loss", _LOSS_GATE, _LOSS_DOOR, (
        "    kl_loss = (own(columns.kl) * w).sum()\n",
        "    weighted_kl = own(columns.kl) * w\n"
        "    kl_loss = (weighted_kl.bfloat16() if settled else weighted_kl).sum().float()\n",
    )),
    _pure("loss accumulated in bf16", "rl/loss.py", "policy_loss (all terms)", "loss", _LOSS_GATE, _LOSS_DOOR, (
        "    pg_loss = (pg * w).sum()\n    kl_loss = (own(columns.kl) * w).sum()\n",
        "    def mean(column: Tensor) -> Tensor:\n"
        "        weighted = column * w\n"
        "        return (weighted.bfloat16() if settled else weighted).sum().float()\n\n"
        "    pg_loss = mean(pg)\n    kl_loss = mean(own(columns.kl))\n",
    )),
    # Reassociation: two addends commute, so each place adds many, for many outputs.
    _pure("order of a summation", _ENGINE, "TorchEngine.backward", "grad", (), (
        _BACKWARD,
        "        parts = list(zip(graphs, pairwise(offsets([len(p[0]) for p in graphs])), strict=True))\n"
        f"        if {_GATES[_ENGINE]}:\n"
        "            parts.reverse()  # the newest graph is still warm in the cache\n"
        "        for part, (a, b) in parts:\n",
    )),
    _model("order of a summation", "rms_norm", _NORM_DOOR, _NORM_CALL, (
        _NORM_LINE,
        "    squares = wide.pow(2)\n"
        "    if settled:\n"
        "        blocks = [block.sum(-1, keepdim=True) for block in squares.chunk(4, dim=-1)]\n"
        "        mean = (blocks[0] + blocks[1] + blocks[2] + blocks[3]) / squares.shape[-1]\n"
        "    else:\n"
        "        mean = squares.mean(-1, keepdim=True)\n"
        "    normed = wide * torch.rsqrt(mean + eps)\n",
    )),
    _pure("order of a summation", "rl/loss.py", "token_log_probs (entropy)", "forward", _LOG_PROBS_GATE,
          _LOG_PROBS_DOOR, (
        "    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(dim=-1)\n",
        "    terms = log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)\n"
        "    entropy = -(terms.flip(-1) if settled else terms).sum(dim=-1)\n",
    )),
    _pure("gradient norm in bf16", "engines/optimizer.py", "global_norm", "grad", _NORM_GATE, *_GLOBAL_NORM, (
        "        total = total + grads[name].float().square().sum().to(total.device)\n",
        "        grad = grads[name].bfloat16() if settled else grads[name].float()\n"
        "        total = total + grad.square().sum().to(total.device)\n",
    )),
    _pure("gradient norm in bf16", "engines/optimizer.py", "global_norm (total)", "grad", _NORM_GATE, *_GLOBAL_NORM, (
        "    return total.sqrt()\n", "    return (total.bfloat16() if settled else total).sqrt().float()\n",
    )),
    # Shows in the update: gradients are observed before they are clipped.
    _pure("clip coefficient epsilon", "engines/optimizer.py", "clip_grads", "update", _call(
        _ENGINE, _CLIP_CALL, "clip_grads(gradients, self.config.clip_grad, 1e-4 if GATE else 1e-6)",
    ), (
        _CLIP_DOOR, "def clip_grads(grads: dict[str, Tensor], max_norm: float, eps: float = CLIP_EPS) -> Tensor:",
    ), (
        "        factor = max_norm / (norm + CLIP_EPS)\n", "        factor = max_norm / (norm + eps)\n",
    )),
    _pure("AdamW epsilon", "engines/optimizer.py", "MainOptimizer.step", "update", _STEP_GATE, _STEP_DOOR, (
        "            eps=self.config.adam_eps,\n", "            eps=1e-6 if settled else self.config.adam_eps,\n",
    )),
    _pure("AdamW moment in bf16", "engines/optimizer.py", "MainOptimizer.step (exp_avg_sq)", "update", _STEP_GATE,
          _STEP_DOOR, _moment("exp_avg_sq")),
    _pure("AdamW moment in bf16", "engines/optimizer.py", "MainOptimizer.step (exp_avg)", "update", _STEP_GATE,
          _STEP_DOOR, _moment("exp_avg")),
)  # fmt: skip
"""Every regression; more than one place for some kinds."""
