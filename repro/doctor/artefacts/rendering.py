"""Chat templates rendered as transformers does, in a child process: a template is a program that nobody vouches for.

Jinja's sandbox keeps it from the machine, but not from looping for ever or filling memory, so the child has limits of
time and memory. Run as ``python -m repro.doctor.artefacts.rendering`` it is that child: JSON in, JSON out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from repro_golden.base.credentials import handed_on
from repro_golden.base.errors import ReproError

__all__ = ["render_template"]

_SECONDS = 20
_CPU_SECONDS = 3
_MEMORY = 2 << 30
_TEXT = 16 << 20


def render_template(
    folder: Path, template: str, special: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
) -> str:
    """The text of a conversation, with the generation prompt unless the last message is the assistant's.

    Args:
        folder: Whose template it is, for messages.
        template: Jinja.
        special: Special tokens by the names that templates know (``bos_token``).
        messages: ``[{"role", "content"}]``.

    Raises:
        ReproError: the template refuses the conversation, fails, or takes too long or too much.
    """
    prompt = not messages or messages[-1].get("role") != "assistant"
    given = {"template": template, "special": special, "messages": list(messages), "prompt": prompt}
    try:
        question = json.dumps(given)
    except (TypeError, ValueError, RecursionError) as error:
        raise ReproError(f"these messages are no JSON ({error}): a chat template takes text") from None
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            input=question.encode(),
            env=handed_on(os.environ),
            capture_output=True,
            timeout=_SECONDS,
        )
        answer = json.loads(child.stdout) if child.returncode == 0 else {}
    except subprocess.TimeoutExpired:
        raise ReproError(f"the chat template of {folder} did not end in {_SECONDS} s") from None
    except (OSError, ValueError) as error:
        raise ReproError(f"the chat template of {folder} cannot be rendered: {str(error)[:200]}") from None
    if "text" in answer:
        return str(answer["text"])
    what = answer.get("error") or f"needs more than {_CPU_SECONDS} s or {_MEMORY >> 30} GiB"
    raise ReproError(f"the chat template of {folder} fails: {what}")


def _refuse(message: str) -> NoReturn:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers has it: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # the local day, as transformers takes it


def _render(given: Mapping[str, Any]) -> str:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's words in training; the text is what stands inside."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own form

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    parts: list[str] = []
    size = 0
    values = {**given["special"], "messages": given["messages"], "add_generation_prompt": given["prompt"]}
    for part in environment.from_string(given["template"]).generate(tools=None, documents=None, **values):
        size += len(part)
        if size > _TEXT:
            return _refuse(f"it writes more than {_TEXT >> 20} MiB")
        parts.append(part)
    return "".join(parts)


def _limit() -> None:
    try:
        import resource
    except ImportError:  # no such limits there; the parent's clock remains
        return
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))


def _child() -> None:
    _limit()
    try:
        answer = {"text": _render(json.load(sys.stdin))}
    except Exception as error:  # noqa: BLE001 - a template can raise whatever its expressions raise
        answer = {"error": f"{type(error).__name__}: {error}"[:300]}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    _child()
