"""Rules on Python code that switches determinism on: before the model is built, or too late."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.doctor.artefacts.kinds import NotRead, PythonCode
from repro.doctor.artefacts.python_code import PYTHON
from repro.doctor.catalogue import catalogue
from repro_golden.base.checks import Found

AFTER, HASH = catalogue()["determinism-after-model"], catalogue()["hash-seed-in-code"]

ENGINE = """\
class Engine:
    def initialize(self, config):
        with self.device:
            self.model = make_mcore_model(config)
        if config.deterministic:
            set_deterministic_algorithms(self.model.config)
"""


def read(folder: Path, text: str) -> PythonCode:
    """A file, read as the doctor does."""
    path = folder / "engine.py"
    path.write_text(text)
    assert PYTHON.fits(path)
    (code,) = PYTHON.read(path)
    assert isinstance(code, PythonCode)
    return code


def found(folder: Path, text: str) -> list[Found]:
    """What determinism-after-model finds."""
    return list(AFTER.check(read(folder, text)))


def test_a_switch_behind_the_model_is_found_where_it_stands(tmp_path: Path) -> None:
    """The switch, its line and function, and what was built before it; earlier in the function it is no fault."""
    (finding,) = found(tmp_path, ENGINE)
    assert (finding.where.path, finding.where.line, finding.where.item) == (
        str(tmp_path / "engine.py"), 6, "set_deterministic_algorithms",
    )  # fmt: skip
    assert "Engine.initialize()" in finding.message and "make_mcore_model() in line 4" in finding.message
    assert (finding.severity, finding.certainty) == (None, None), "the rule's own"
    before = ENGINE.replace("        with", "        self.config.deterministic_mode = True\n        with", 1)
    assert found(tmp_path, before) == [], "the later call is for what asks at run time"
    assert found(tmp_path, before.replace("= True", "= False")) != [], "that switches nothing on"


@pytest.mark.parametrize(
    ("text", "item"),
    [
        ("model = get_model(p)\nconfig.deterministic_mode = True\n", "config.deterministic_mode"),
        ("model = get_model(p)\nargs.config.deterministic_mode: bool = on\n", "args.config.deterministic_mode"),
        ("model = get_model(p)\ntorch.use_deterministic_algorithms(True, warn_only=True)\n",
         "torch.use_deterministic_algorithms"),
        ("model = GPTModel(config=c)\nos.environ['NVTE_ALLOW_NONDETERMINISTIC_ALGO'] = '0'\n",
         "NVTE_ALLOW_NONDETERMINISTIC_ALGO"),
        ("model = GPTModel(config=c)\nos.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')\n",
         "CUBLAS_WORKSPACE_CONFIG"),
        ("dist.init_process_group('nccl')\nos.environ.update({'A': '1', 'NCCL_ALGO': 'Ring'})\n", "NCCL_ALGO"),
        ("dist.init_process_group('nccl')\nos.environ.update(NCCL_ALGO='Ring')\n", "NCCL_ALGO"),
        ("def build():\n    return get_model(p)\n\ndef switch():\n    enable_determinism()\n\n"
         "def main():\n    build()\n    switch()\n", "enable_determinism"),
        ("class A:\n    def setup_deterministic(self):\n        torch.use_deterministic_algorithms(True)\n"
         "    def go(self):\n        self.model = setup_model_and_optimizer(p)\n        self.setup_deterministic()\n",
         "torch.use_deterministic_algorithms"),
        ("try:\n    m = get_model(p)\nfinally:\n    torch.use_deterministic_algorithms(True)\n",
         "torch.use_deterministic_algorithms"),
        ("for _ in range(2):\n    wrap(use_deterministic_kernels(get_model(p)))\n", "use_deterministic_kernels"),
    ],
)  # fmt: skip
def test_every_form_of_a_late_switch_is_found(text: str, item: str, tmp_path: Path) -> None:
    """Calls, attributes and variables, in line, in functions and methods of the file, in blocks and nested calls."""
    assert [hit.where.item for hit in found(tmp_path, text)] == [item]


@pytest.mark.parametrize(
    "text",
    [
        "torch.use_deterministic_algorithms(True)\nmodel = get_model(p)\n",
        "model = get_model(p)\ntorch.use_deterministic_algorithms(False)\n",
        "os.environ['NCCL_ALGO'] = 'Ring'\ndist.init_process_group('nccl')\nmodel = get_model(p)\n",
        "model = get_model(p)\nprint(config.deterministic_mode == True, is_deterministic_mode(), 'NCCL_ALGO')\n",
        "if a:\n    model = get_model(p)\nelse:\n    torch.use_deterministic_algorithms(True)\n",
        "def f():\n    if a:\n        return get_model(p)\n    torch.use_deterministic_algorithms(True)\n",
        "match a:\n    case 1:\n        get_model(p)\n    case _:\n        torch.use_deterministic_algorithms(True)\n",
        "def build():\n    get_model(p)\n\ndef switch():\n    torch.use_deterministic_algorithms(True)\n",
        "model = get_model(p)\ndef later():\n    torch.use_deterministic_algorithms(True)\n",
        "model = get_model(p)\non = lambda: torch.use_deterministic_algorithms(True)\n",
        "config = AutoConfig.from_pretrained(p)\nos.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'\n",
        "def g():\n    torch.use_deterministic_algorithms(True)\n    get_model(p)\n\ndef f():\n    g()\n    g()\n",
        "def a():\n    b()\n    torch.use_deterministic_algorithms(True)\n\ndef b():\n    a()\n",
    ],
)
def test_what_is_in_order_or_never_in_a_row_is_no_fault(text: str, tmp_path: Path) -> None:
    """Switches before models, switched off, in other branches, after a return, in other functions, in recursion."""
    assert found(tmp_path, text) == []


def test_a_model_of_plain_torch_is_a_note(tmp_path: Path) -> None:
    """Its modules ask when they run: only what is built of other libraries may have copied the setting."""
    text = "m = AutoModelForCausalLM.from_pretrained(p)\ntorch.use_deterministic_algorithms(True)\n"
    (finding,) = found(tmp_path, text)
    assert (finding.severity, finding.certainty) == ("note", "possible")


def test_a_hash_seed_is_read_when_python_starts(tmp_path: Path) -> None:
    """Set in code that starts no other process it does nothing; where it starts one, that inherits it."""
    text = "def seed_everything(seed):\n    os.environ['PYTHONHASHSEED'] = str(seed)\n"
    (outcome,) = HASH.check(read(tmp_path, text))
    assert (outcome.where.line, outcome.where.item) == (2, "PYTHONHASHSEED")
    for line in ("os.execv(sys.executable, sys.argv)", "subprocess.run(['python'])", "ray.init()"):
        assert list(HASH.check(read(tmp_path, f"{text}    {line}\n"))) == []
    assert found(tmp_path, f"m = get_model(p)\n{text}") == []


def test_what_this_python_cannot_parse_is_left_out_and_said(tmp_path: Path) -> None:
    """Newer syntax, deep nesting and NUL are no faults of the run: a note names the file."""
    for name, text in {
        "new.py": "torch.use_deterministic_algorithms(True)\ndef f[[T](x): ...\n",
        "deep.py": "torch.use_deterministic_algorithms(" + "(" * 5000 + ")" * 5000 + ")\n",
        "nul.py": "torch.use_deterministic_algorithms(True)\0\n",
    }.items():
        path = tmp_path / name
        path.write_text(text)
        (left,) = PYTHON.read(path)
        assert isinstance(left, NotRead) and left.path == path, name


PIECES = st.sampled_from([
    "get_model(p)", "torch.use_deterministic_algorithms(True)", "pass", "return", "config.deterministic_mode = on",
    "os.environ['NCCL_ALGO'] = 'Ring'", "dist.init_process_group()", "f()", "self.f()",
])  # fmt: skip


@st.composite
def programs(draw: st.DrawFn, depth: int = 2, indent: str = "    ") -> str:
    """The lines of a function's body."""
    lines = []
    for _ in range(draw(st.integers(1, 3))):
        heads = draw(st.sampled_from([(), ("if a:", "else:"), ("try:", "except E:", "finally:"), ("while a:",)]))
        if depth and heads:
            lines += [f"{indent}{head}\n" + draw(programs(depth - 1, indent + "    ")) for head in heads]
        else:
            lines.append(f"{indent}{draw(PIECES)}\n")
    return "".join(lines)


@given(programs(), programs())
def test_any_program_is_read_and_a_switch_before_everything_is_enough(
    tmp_path_factory: pytest.TempPathFactory, first: str, second: str
) -> None:
    """No program of calls, branches and recursion makes the reader fail; one that begins with all switches is clean."""
    folder = tmp_path_factory.mktemp("code")
    head = "    torch.use_deterministic_algorithms(True)\n    os.environ['NCCL_ALGO'] = 'Ring'\n"
    text = f"def f():\n{first}def g():\n{second}"
    ast.parse(text)
    late = found(folder, f"{text}# torch.use_deterministic_algorithms(True)\n")
    assert all(at.where.line and at.where.line > 1 for at in late)
    assert found(folder, f"def f():\n{head}{first}def g():\n{head}{second}") == []


@given(st.binary(max_size=200))
def test_any_bytes_are_code_or_a_note(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """What ends in .py may be anything."""
    path = tmp_path_factory.mktemp("code") / "any.py"
    path.write_bytes(b"torch.use_deterministic_algorithms(True)\n" + content)
    (held,) = PYTHON.read(path)
    assert isinstance(held, PythonCode | NotRead)
