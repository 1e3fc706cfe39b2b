"""Case files, logs, launch scripts, launchers in Python and chat templates that are made to run, or to run for ever."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator

from doctor_checkpoint_kit import tokenizer

from hostile_input.place import Commands, Input, Place

__all__ = ["inputs"]


def inputs() -> Iterator[Input]:
    """Every program."""
    for name, text in SHELL.items():
        yield Input(f"a script: {name}", lambda place, text=text: _script(place, text))
    for name, python in PYTHON.items():
        yield Input(f"a launcher: {name}", lambda place, python=python: _launcher(place, python()))
    for name, log in LOGS.items():
        yield Input(f"a log: {name}", lambda place, log=log: _log(place, log()))
    for name, template in TEMPLATES.items():
        yield Input(f"a chat template: {name}", lambda place, template=template: _template(place, template))
    for name, text in CASES.items():
        yield Input(f"a case: {name}", lambda place, text=text: _case(place, text))


# -- scripts; `touch` stands for what the canary tells of

SHELL = {
    "a substitution": "python3 train.py --load $(touch) --save `touch`",
    "a process": "python3 train.py --load <(touch) > >(touch)",
    "eval": "eval 'touch'\neval python3 train.py",
    "a trap": "trap touch EXIT DEBUG ERR RETURN\npython3 train.py",
    "a function": "python3() { touch; }\npython3 train.py --x 1",
    "an alias": "shopt -s expand_aliases\nalias python3='touch'\npython3 train.py",
    "an index": "a[$(touch)]=1\npython3 train.py --x ${a[$(touch)]} $((a[$(touch)]))",
    "an arithmetic": "x='a[$(touch)]'\n((x))\npython3 train.py --x $((x)) ${y:x}",
    "a pattern": "python3 train.py ${x/$(touch)/y} ${x:-$(touch)} ${!x@P} ${x@P}",
    "a prompt": "PS4='$(touch)'\nset -x\npython3 train.py\nPROMPT_COMMAND=touch BASH_ENV=touch bash -c :",
    "a here-document": "cat <<EOF\n$(touch)\nEOF\npython3 train.py <<< $(touch)",
    "a coprocess": "coproc touch\npython3 train.py & wait -f",
    "a condition": "[[ -v 'a[$(touch)]' ]] && test -v 'a[$(touch)]' && python3 train.py --x 1",
    "printf": "printf -v 'a[$(touch)]' x\nread 'a[$(touch)]' <<< x\npython3 train.py",
    "sourced": "source ./evil.sh\n. ./evil.sh\npython3 train.py",
    "a launcher that is here": "./python3 train.py\nPATH=.:$PATH python3 train.py\nexec ./evil.sh",
    "a fork bomb": ":(){ :|:& };:\npython3 train.py",
    "a loop": "while true; do python3 train.py --x 1; done\nuntil false; do :; done",
    "a recursion": "f() { f; python3 train.py; f; }\nf",
    "two recursions": "f() { g; g; }\ng() { f; f; }\nf\npython3 train.py",
    "sourcing itself": "source $0\nsource ./run.sh\n. ./run.sh\npython3 train.py",
    "sourcing without an end": "source /dev/zero\nsource /dev/tty\npython3 train.py",
    "braces": "python3 train.py --x {1..1000000000}",
    "braces of braces": "python3 train.py " + "{a,b}" * 60,
    "nested braces": "python3 train.py " + "{a," * 2000 + "}" * 2000,
    "doubling": "A=xxxxxxxx\n" + "A=$A$A\n" * 64 + "python3 train.py --x $A",
    "doubling an array": "A=(x x)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 64 + 'python3 train.py "${A[@]}"',
    "doubling by substitution": "A=xx\n" + "A=${A//x/$A}\n" * 64 + "python3 train.py $A",
    "a power": "python3 train.py --x $((9**9**9**9)) --y $((1<<99999999))",
    "a division": "python3 train.py --x $((1/0)) --y $((0x)) --z $((-9223372036854775808/-1))",
    "a pattern for ever": "case " + "a" * 50 + " in " + "*a" * 50 + "*b) python3 train.py;; esac\npython3 train.py",
    "globs": "python3 train.py /*/*/*/*/*/* **/*",
    "brackets in brackets": "python3 train.py " + "$(" * 5000 + ")" * 5000,
    "quotes in quotes": "python3 train.py " + '"$(echo ' * 3000 + ')"' * 3000,
    "ifs in ifs": "if true; then\n" * 5000 + "python3 train.py\n" + "fi\n" * 5000,
    "a here-document without an end": "cat <<EOF\n" + "x\n" * 500_000,
    "many flags": "python3 train.py " + "--x 1 " * 300_000,
    "many variables": "".join(f"A{n}=$A{n - 1}x\n" for n in range(20_000)) + "python3 train.py $A19999",
    "variables that stand for themselves": "A='$A$A'\nB='${!B}'\npython3 train.py ${!A} ${!B} $(eval echo $A)",
    "a loop of ranges": "for i in {1..10000}; do for j in {1..10000}; do python3 train.py --x $i$j; done; done",
    "nulls": "python3\0 train.py --x\0 1\0",
    "a name reference": "declare -n r=r\nr=1\ndeclare -n a=b b=a\npython3 train.py --x $r $a",
}  # fmt: skip


def _script(place: Place, text: str) -> Commands:
    text = text.replace("touch", place.touch)
    place.write("run.sh", f"#!/bin/bash\n{text}\n")
    for name in ("evil.sh", "python3", "train.py"):
        place.write(name, f"#!/bin/sh\n{place.touch}\n").chmod(0o755)
    return [["doctor", "run.sh"], ["doctor", "--", "bash", "run.sh"], ["doctor", "--json", "."]]


# -- launchers

PYTHON: dict[str, Callable[[], str]] = {
    "a module's body": lambda: "import os\nos.system('TOUCH')\nopen('CANARY', 'w')\n",
    "a decorator": lambda: "@print\n@(lambda f: open('CANARY', 'w'))\ndef f(): ...\n",
    "an import": lambda: "import evil\nfrom evil import *\n__import__('evil')\n",
    "another encoding": lambda: "# -*- coding: unicode_escape -*-\n# \\u000aopen('CANARY','w')\n",
    "an encoding of one's own": lambda: "# coding: evil\nopen('CANARY', 'w')\n",
    "brackets in brackets": lambda: "x = " + "(" * 100_000 + ")" * 100_000 + "\n",
    "lists in lists": lambda: "x = " + "[" * 5000 + "]" * 5000 + "\n",
    "minus signs": lambda: "x = " + "-" * 200_000 + "1\n",
    "a long sum": lambda: "x = " + "1+" * 100_000 + "1\n",
    "attributes of attributes": lambda: "x = a" + ".b" * 100_000 + "\n",
    "ifs in ifs": lambda: "".join(" " * n + "if x:\n" for n in range(99)) + " " * 99 + "pass\n",
    "a power": lambda: "SIZE = 9**9**9\nARGS = ['--x', '9' * 10**12, str(9**9**9)]\n",
    "a text times a billion": lambda: "import subprocess\nsubprocess.run(['python', 'train.py', 'x' * 10**12])\n",
    "a list times a billion": lambda: "import subprocess\nsubprocess.run(['python', 'train.py', *(['x'] * 10**12)])\n",
    "a format": lambda: "import subprocess\nsubprocess.run(['python', 'train.py', '%1000000000000d' % 1, f'{1:>99999999999}'])\n",
    "lists of themselves": lambda: "a = []\na.append(a)\na = [a, a]\n" + "a = [a, a]\na = a + a\n" * 64 + "import subprocess\nsubprocess.run(['python', 'train.py', *a])\n",
    "a loop": lambda: "while True: pass\nfor x in iter(int, 1): pass\n",
    "a pickle in it": lambda: "import pickle\npickle.loads(b'cos\\nsystem\\n(S\"TOUCH\"\\ntR.')\n",
    "determinism that runs": lambda: "import torch\ntorch.use_deterministic_algorithms(open('CANARY', 'w'))\n",
    "a reward function": lambda: "def reward(*a):\n    open('CANARY', 'w')\nreward()\n",
    "nulls": lambda: "x = 1\0\nopen('CANARY', 'w')\n",
    "a million lines": lambda: "x = 1\n" * 500_000,
}  # fmt: skip


def _launcher(place: Place, text: str) -> Commands:
    text = text.replace("TOUCH", place.touch).replace("CANARY", str(place.canary))
    place.write("launch.py", text)
    place.write("train.py", text)
    place.write("evil.py", f"open({str(place.canary)!r}, 'w')\n")
    return [["doctor", "launch.py"], ["doctor", "--", "python", "train.py", "--x", "1"], ["doctor", "."]]


# -- logs

STAMP = "[2026-11-20 15:38:49] model.py:918 - "
LOGS: dict[str, Callable[[], str]] = {
    "brackets that never close": lambda: f"{STAMP}step 0: " + "{" * 60_000,
    "tensors in tensors": lambda: f"{STAMP}step 0: {{'a': " + "tensor(" * 8000 + "1" + ")" * 8000 + "}",
    "numbers of numpy in numbers": lambda: f"{STAMP}step 0: {{'a': " + "np.float64(" * 5000 + "}",
    "a power": lambda: f"{STAMP}step 0: {{'a': 9**9**9**9}}",
    "a call": lambda: f"{STAMP}step 0: {{'a': __import__('os').system('TOUCH')}}",
    "a number without an end": lambda: f"{STAMP}step 0: {{'a': " + "9" * 60_000 + "}",
    "an exponent": lambda: f"{STAMP}step 0: {{'a': 1e999999999}}",
    "a million quotes": lambda: f"{STAMP}step 0: {{" + "'a': 1, " * 7000 + "'" * 7000,
    "backslashes": lambda: f"{STAMP}step 0: {{'" + "\\" * 60_001 + "': 1}",
    "spaces": lambda: f"{STAMP}step 0:" + " " * 60_000 + "{'a': 1",
    "almost a stamp": lambda: "[2026-11-20 " * 5000 + "step 0: {'a': 1}",
    "almost ray's prefix": lambda: "(A pid=1, ip=" * 5000 + "1.1.1.1) step 0: {'a': 1}",
    "almost a progress bar": lambda: "x:  50%|" + "█" * 30_000 + "| 1/2 [" * 2000,
    "escapes": lambda: "\x1b[" * 30_000 + "m step 0: {'a': 1}",
    "half escapes": lambda: "\x1b[1;" * 30_000,
    "a traceback without an end": lambda: "Traceback (most recent call last):\n" + '  File "x", line 1, in x\n' * 200_000,
    "a traceback in a traceback": lambda: "Traceback (most recent call last):\n" * 200_000,
    "out of memory, a hundred thousand times": lambda: "torch.OutOfMemoryError: CUDA out of memory. Tried\n" * 100_000,
    "arguments that are a program": lambda: "------ arguments ------\n  load ....... $(TOUCH)\n  x .... " + "." * 50_000,
    "a namespace in a namespace": lambda: "Namespace(" * 20_000 + ")" * 20_000,
    "steps without an order": lambda: "".join(f"{STAMP}step {n * 7919 % 50_000}: {{'a': {n}}}\n" for n in range(50_000)),
    "a step of 2**63": lambda: f"{STAMP}step 9223372036854775808: {{'train/a': 1}}\n{STAMP}step 1: {{'train/a': 1}}",
    "carriage returns": lambda: f"{STAMP}step 0: {{'a': 1}}\r" * 50_000,
    "equal signs": lambda: "=" * 60_000 + "\nloss=" * 20_000,
    "JSON in a line": lambda: '{"step": 0, "loss": ' + "[" * 30_000,
}  # fmt: skip


def _log(place: Place, text: str) -> Commands:
    place.write("train.log", text.replace("TOUCH", place.touch) + "\n")
    place.write("logs/worker-1-01000000-1.out", text.replace("TOUCH", place.touch) + "\n")
    return [["doctor", "train.log"], ["doctor", "logs"]]


# -- chat templates

TEMPLATES = {
    "the classes of all": "{{ ().__class__.__base__.__subclasses__() }}",
    "a module": "{{ cycler.__init__.__globals__.os.system('TOUCH') }}",
    "a joiner": "{{ joiner.__init__.__globals__['os'].popen('TOUCH').read() }}",
    "the environment": "{{ self.__init__.__globals__.__builtins__.__import__('os').system('TOUCH') }}",
    "an attribute by a filter": "{{ ()|attr('__class__')|attr('__base__')|attr('__subclasses__')() }}",
    "a format": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "a format by a map": "{{ ['{0.__globals__}']|map('format', strftime_now)|list }}",
    "a function of ours": "{{ strftime_now.__globals__['os'].system('TOUCH') }}{{ raise_exception.__code__ }}",
    "a file": "{% include '/etc/passwd' %}{% import '/etc/passwd' as x %}{% extends '/etc/passwd' %}",
    "a loop": "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
    "a loop that says nothing": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a range": "{{ range(10**12)|list|length }}",
    "a text times a billion": "{{ 'a' * 10**12 }}",
    "a power": "{{ 9**9**9 }}",
    "a recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "doubling": "{% set ns = namespace(a='xx') %}{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}{% endfor %}{{ ns.a }}",
    "a wide format": "{{ '%1000000000000s' % 'a' }}{{ 'a'.center(10**12) }}{{ 'a'|center(10**12) }}",
    "brackets in brackets": "{{ " + "(" * 20_000 + ")" * 20_000 + " }}",
    "a change of the messages": "{% set _ = messages.append(1) %}{% set _ = messages.__class__ %}",
    "a sleep": "{{ strftime_now('%' * 10000000) }}",
    "escapes": "\x1b]52;c;eA==\x07{{ raise_exception('\x1b[2J::error::x') }}",
}  # fmt: skip


def _template(place: Place, text: str) -> Commands:
    folder = tokenizer(place.folder / "model", template=text.replace("TOUCH", place.touch))
    auto = {"AutoTokenizer": ["evil.Evil", None], "AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    place.write("model/config.json", json.dumps({"model_type": "qwen2", "auto_map": auto, "vocab_size": 9}))
    for name in ("evil.py", "modeling_evil.py", "tokenization_evil.py", "setup.py", "conftest.py"):
        place.write(f"model/{name}", f"open({str(place.canary)!r}, 'w')\n")
    prompts = [json.dumps({"prompt": [{"role": "user", "content": "1 + 1 ="}], "label": "2"})] * 4
    place.write("prompts.jsonl", "\n".join(prompts))
    flags = "--hf-checkpoint model --prompt-data prompts.jsonl --input-key prompt --apply-chat-template"
    place.write("run.sh", f"python3 train.py {flags}\n")
    return [["doctor", str(folder)], ["doctor", "model", "run.sh", "prompts.jsonl"]]


# -- cases


def _toml(subject: str = "", case: str = "", more: str = "") -> str:
    return (
        f'[case]\nname = "evil"\nsteps = 1\n{case}\n[subject]\nkind = "command"\ncommand = "TOUCH"\n{subject}\n{more}\n'
    )


CASES = {
    "every command": _toml('setup = "TOUCH"\ncheck = "TOUCH"\nsave = "TOUCH"\nresume = "TOUCH"\nshell = true\npython = "TOUCH"'),
    "an interpreter": _toml('python = "./evil.sh"'),
    "variables": _toml('env = { LD_PRELOAD = "./evil.so", PYTHONSTARTUP = "evil.py", BASH_ENV = "evil.sh" }'),
    "a secret": _toml('pass_env = ["GITHUB_TOKEN", "*"]'),
    "lists in lists": "x = " + "[" * 20_000 + "]" * 20_000,
    "tables in tables": "[" + "a." * 5000 + "a]\n",
    "keys in keys": "a." * 20_000 + "a = 1\n",
    "inline tables": "x = " + "{a = " * 5000 + "1" + "}" * 5000,
    "a number of a million digits": "[case]\nname = 'evil'\nsteps = " + "9" * 1_000_000,
    "a pattern for ever": _toml(more='[observe]\nmetrics = ["(?P<a>(x+x+)+y)"]'),
    "a pattern in a pattern": _toml(more='[observe]\nmetrics = ["' + "(" * 20_000 + ")" * 20_000 + '"]'),
    "a pattern of two billion": _toml(more='[observe]\nmetrics = ["(?P<a>((((x{9999}){9999}){9999}){9999}))"]'),
    "a glob for ever": _toml(more='[observe]\nactivations = ["' + "*a" * 5000 + '"]'),
    "steps without an end": _toml(case="states = [" + "1, " * 300_000 + "1]"),
    "2**63 steps": _toml().replace("steps = 1", "steps = 9223372036854775807"),
    "a budget of 2**70": _toml(case='states_budget = "99999999999999999999999TiB"'),
    "a time of a million years": _toml('timeout = "' + "9" * 4000 + 'h"'),
    "ranks without an end": _toml(more="[resources]\nranks = 1000000000"),
    "a template of tokens": _toml().replace('"TOUCH"', '"{root}{out}{python.__class__}{0}{rollouts!r:>999999999}"'),
    "packages": _toml('packages = { "../../evil" = "1", "evil; TOUCH" = "1", "-r" = "x" }'),
    "a link to all": _toml('link = ["../..", "/", ".git", ".", "~"]'),
    "dates and floats": _toml(case="rollouts = 1979-05-27T07:32:00Z\nproof_steps = nan"),
    "a byte order mark": "\ufeff[case]\nname = 'evil'\n",
    "nulls": "[case]\nname = 'ev\0il'\n",
}  # fmt: skip


def _case(place: Place, text: str) -> Commands:
    """Nobody asked for a run of it: it is read, listed, examined and described."""
    place.write("golden/cases/evil.toml", text.replace("TOUCH", f"sh -c '{place.touch}'"))
    for name in ("evil.sh", "evil.py"):
        place.write(name, f"#!/bin/sh\n{place.touch}\n").chmod(0o755)
    subprocess.run(["git", "init", "-q"], cwd=place.folder, check=True)
    asking = (
        [] if "python = " in text else [["golden", "list"], ["golden", "show", "evil"], ["golden", "verify", "evil"]]
    )
    return [  # the interpreter that a case names is asked who it is by what compares with golden runs
        *asking, ["doctor", "golden/cases/evil.toml"], ["rollout", "show", "evil"], ["golden", "pull", "evil"],
        ["init", "--remote", "r"],
    ]  # fmt: skip
