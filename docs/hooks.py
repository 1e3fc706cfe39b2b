"""What mkdocs asks while it builds the site: pages made of the code itself, and links to the glossary.

Three things are done to a page's Markdown: a line ``<!-- made of: commands -->``, ``case`` or ``rules`` becomes what
click's help, the case's tables or the doctor's catalogue say; a link out of docs/ becomes one to the repository, or
plain text where its address is not known; the first use of each word of the glossary becomes a link to it.
"""

from __future__ import annotations

import ast
import html
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parent.parent
GLOSSARY = "concepts/glossary.md"
TABLES = ("case/file.py", "case/subject_tables.py", "case/tables.py")
"""Where the tables of a case are defined, below golden/repro_golden."""
MODELS = {"BaseModel", "Table", "_Subject", "CommandSubject"}
"""What the classes of these tables are made from."""
_CODE = re.compile(r"^( *)(```+).*?^\1\2[ ]*$|^#.*?$", re.MULTILINE | re.DOTALL)
"""Blocks of code and headings: no word in them is linked."""
_INLINE = re.compile(r"(`[^`]*`|!?\[[^\]]*\]\([^)]*\)|<!--.*?-->|<[^>\n]+>)", re.DOTALL)
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_IDIOM = re.compile(r"\b(in|this|that|any|each|which|either|the latter|upper|lower)\s+$", re.IGNORECASE)
"""Before "case": an idiom, not a case of ours."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A page's Markdown as it is built."""
    markdown = markdown.replace("<!-- made of: commands -->", "\n".join(commands()))
    markdown = markdown.replace("<!-- made of: case -->", "\n".join(case_tables()))
    if "<!-- made of: rules -->" in markdown:
        markdown = markdown.replace("<!-- made of: rules -->", "\n".join(rules()))
    uri = page.file.src_uri
    markdown = outside(markdown, uri)
    return markdown if uri == GLOSSARY else linked(markdown, uri, words())


def commands() -> Iterator[str]:
    """Every command's own help, one heading each."""
    from repro.cli import cli

    def walk(command: click.Command, name: str, parent: click.Context | None) -> Iterator[str]:
        context = click.Context(command, info_name=name, parent=parent, terminal_width=100, max_content_width=100)
        if parent is not None:
            yield f"\n## {context.command_path}\n"
        yield f"```text\n{command.get_help(context)}\n```"
        if isinstance(command, click.Group):
            for child in command.list_commands(context):
                subcommand = command.get_command(context, child)
                if subcommand is not None and not subcommand.hidden:
                    yield from walk(subcommand, child, context)

    yield from walk(cli, "repro", None)


def case_tables() -> Iterator[str]:
    """Each table of a case file with its keys: their types, defaults and docstrings, read from the source."""
    for file in TABLES:
        for node in ast.parse((ROOT / "golden" / "repro_golden" / file).read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef) or not {ast.unparse(base) for base in node.bases} & MODELS:
                continue
            keys = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            if not keys or node.name == "Case":
                continue
            title = (ast.get_docstring(node) or node.name).splitlines()[0].removesuffix(".")
            yield f"\n### {title}\n\n| key | default | |\n|---|---|---|"
            for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    text = _text(after).replace("``", "`").replace("|", "\\|").replace("\n", " ")
                    yield f"| `{field.target.id}` | {_default(field.value)} | {re.sub(r' +', ' ', text)} |"


def rules() -> Iterator[str]:
    """Each rule of the doctor by its subject: its name, with an anchor, what it looks for, why, and what to do."""
    from repro.doctor.catalogue import catalogue, subject_of

    before = ""
    for name, rule in catalogue().items():
        if (subject := subject_of(rule)) != before:
            yield f"\n### {subject.capitalize()}\n\n| rule | what is wrong | what to do |\n|---|---|---|"
        before = subject
        yield f'| <a id="{name}"></a>`{name}` | {_cell(f"{rule.title}: {rule.why}")} | {_cell(rule.fix)} |'


def _cell(text: str) -> str:
    """A text in a table: what is in backticks is escaped by Markdown itself."""
    parts = text.replace("|", "\\|").split("`")
    return "`".join(part if at % 2 else html.escape(part, quote=False) for at, part in enumerate(parts))


def _text(node: ast.stmt | None) -> str:
    """The text of a string that stands alone, such as a key's docstring."""
    known = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return node.value.value if known else ""  # type: ignore[union-attr]


def _default(value: ast.expr | None) -> str:
    """A key's default as the source has it; *required* where there is none."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Field":
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        value = given.get("default", value.args[0] if value.args else None)
        if value is None and "default_factory" in given:
            return "empty"
    if value is None:
        return "*required*"
    text = ast.unparse(value)
    return {"None": "", "()": "empty", "_Most": ""}.get(text, f"`{text}`")


def outside(markdown: str, uri: str) -> str:
    """Links that leave docs/ lead to the repository, or are their text where its address is not known."""
    address = os.environ.get("REPOSITORY_URL", "").rstrip("/")

    def replace(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(uri), match[2]))
        if ":" in match[2] or path.startswith("docs/"):
            return match[0]
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{uri}: {match[0]} leads nowhere")
        return f"[{match[1]}]({address}/blob/HEAD/{path}{match[3] or ''})" if address else match[1]

    return _LINK.sub(replace, markdown)


def words() -> list[str]:
    """The words of the glossary: its headings."""
    return re.findall(r"^### (.+)$", (ROOT / "docs" / GLOSSARY).read_text(encoding="utf-8"), re.MULTILINE)


def linked(markdown: str, uri: str, terms: list[str]) -> str:
    """The Markdown with the first use of each term as a link to the glossary."""
    left = {term.lower() for term in terms if f"{GLOSSARY.rpartition('/')[2]}#{_anchor(term)})" not in markdown}
    target = posixpath.relpath(GLOSSARY, posixpath.dirname(uri) or ".")
    some = "|".join(re.escape(term).replace(r"\ ", r"\s+") for term in sorted(terms, key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w/-])({some})(s?)(?![\w/-])", re.IGNORECASE)

    def replace(match: re.Match[str]) -> str:
        term = " ".join(match[1].lower().split())
        idiom = term == "case" and _IDIOM.search(match.string[: match.start()])
        if term not in left or idiom:
            return match[0]
        left.discard(term)
        return f"[{match[0]}]({target}#{_anchor(term)})"

    def prose(text: str) -> str:
        parts = _INLINE.split(text)
        return "".join(part if at % 2 else pattern.sub(replace, part) for at, part in enumerate(parts))

    done, at = "", 0
    for block in _CODE.finditer(markdown):
        done += prose(markdown[at : block.start()]) + block[0]
        at = block.end()
    return done + prose(markdown[at:])


def _anchor(term: str) -> str:
    """The anchor that mkdocs gives a heading."""
    return term.lower().replace(" ", "-")
