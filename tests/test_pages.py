"""The pages that people read: the site builds, what it tells readers to type is known, and pages that run do."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pages_kit
import pytest
from conftest import SOURCE
from pages_kit import PAGES

from repro.cli import cli


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as the workflow builds it."""
    folder = tmp_path_factory.mktemp("pages") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)], cwd=SOURCE, check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def hooks() -> Any:
    """docs/hooks.py, which mkdocs loads by its path."""
    spec = importlib.util.spec_from_file_location("docs_hooks", SOURCE / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def walk(command: click.Command, name: str, parent: click.Context | None = None) -> list[tuple[str, click.Command]]:
    context = click.Context(command, info_name=name, parent=parent)
    if not isinstance(command, click.Group):
        return [(context.command_path, command)]
    children = [(child, command.get_command(context, child)) for child in command.list_commands(context)]
    return [row for child, subcommand in children if subcommand for row in walk(subcommand, child, context)]


def test_the_site_builds_and_holds_every_page(site: Path) -> None:
    """`mkdocs build --strict` takes every link and anchor, and every page of docs/ is on the site."""
    for page in PAGES[1:]:
        assert (site / page.relative_to(SOURCE / "docs").with_suffix(".html")).exists(), page


def test_the_page_of_commands_is_clicks_help(site: Path) -> None:
    """The page of commands shows every command and every option of it."""
    text = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    commands = walk(cli, "repro")
    assert len(commands) > 20
    for path, command in commands:
        assert f">{path}<" in text, path
        options = [name for param in command.params for name in param.opts if name.startswith("--")]
        assert not [name for name in options if name not in text], path


def test_the_page_of_the_doctor_has_every_rule(site: Path) -> None:
    """Each rule has an anchor on the doctor's page, beside what it looks for."""
    from repro.doctor.catalogue import catalogue

    text = (site / "how-to" / "doctor.html").read_text(encoding="utf-8")
    assert len(catalogue()) > 200
    assert not [name for name in catalogue() if f'<a id="{name}"></a><code>{name}</code>' not in text]


def test_the_page_of_the_case_has_every_key(site: Path) -> None:
    """The page of the case file shows every key of every table that a case may have, with what it is for."""
    from repro_golden.case import subject_tables, tables
    from repro_golden.case.file import Bound, Compare, Experiment, FirstStep, Observe, Resources

    text = (site / "reference" / "case.html").read_text(encoding="utf-8")
    models = [Bound, Compare, Experiment, FirstStep, Observe, Resources, subject_tables.CoreSubject]
    models += [
        subject_tables.CommandSubject,
        subject_tables.TrainerSubject,
        tables.Layout,
        tables.MismatchTable,
        tables.NightlyTable,
    ]
    for model in models:
        for key, field in model.model_fields.items():
            assert f"<code>{field.alias or key}</code>" in text, (model, key)


def test_first_uses_lead_to_the_glossary(site: Path) -> None:
    """Every word of the glossary is linked on some page, and on none more than once by the build."""
    words = hooks().words()
    assert len(words) > 20
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html") if page.name != "glossary.html"}
    for word in words:
        link = re.compile(rf'glossary\.html#{word.replace(" ", "-")}"')
        counts = [len(link.findall(text)) for text in pages.values()]
        assert max(counts) == 1, word


def test_a_word_is_linked_where_it_is_used_first() -> None:
    """The first use in prose becomes a link; headings, code, links, idioms and later uses stay as they are."""
    text = (
        "# A golden run\n\n`golden run`, in any case a Golden\nrun of a case; a golden run, [a trace](x.md), traces.\n"
    )
    linked = hooks().linked(text, "how-to/a.md", ["case", "golden run", "trace"])
    assert linked == (
        "# A golden run\n\n`golden run`, in any case a [Golden\nrun](../concepts/glossary.md#golden-run) of a "
        "[case](../concepts/glossary.md#case); a golden run, [a trace](x.md), "
        "[traces](../concepts/glossary.md#trace).\n"
    )
    block = "```text\na trace\n```\n"
    assert hooks().linked(block, "a.md", ["trace"]) == block


def test_the_readme_is_short_and_leads_somewhere() -> None:
    """The README has fewer than 120 lines, and every link of it to a file leads to one."""
    text = PAGES[0].read_text(encoding="utf-8")
    assert len(text.splitlines()) < 120
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if ":" not in link]
    assert len(links) > 10 and not [link for link in links if not (SOURCE / link).exists()]


def parsed(line: str) -> str:
    """What is wrong with a command line, by click's own parser; empty where nothing is.

    Values are not looked at: a page's GOOD..BAD and FILE stand for the reader's. Brackets mean "may be left out", and
    bars between words of a form stand for each of them.
    """
    line = re.sub(r"\s+#.*$", "", line)
    line = re.sub(r"\[([^\]]*)\]", r" \1 ", line).replace("...", " ").replace("…", " ")
    try:
        words = shlex.split(line)[1:]
    except ValueError as why:
        return str(why)
    words = words[: next((at for at, word in enumerate(words) if word in ("|", "&&", ";", ">", "&")), len(words))]
    command: click.Command = cli
    context = click.Context(cli, info_name="repro")
    while isinstance(command, click.Group):
        if not words or words[0] in ("--help", "-h", "--version"):
            return ""
        subcommand = command.get_command(context, words[0])
        if subcommand is None:
            return f"no command {words[0]}"
        command, context = subcommand, click.Context(subcommand, info_name=words.pop(0), parent=context)
    if "-h" in words or "--help" in words:
        return ""
    try:
        command.make_parser(context).parse_args(list(words))
    except click.UsageError as why:
        return why.format_message()
    return ""


def test_every_command_line_is_known() -> None:
    """Every command line on a page or in the README that begins with `repro` is one that click's parser takes."""
    wrong, lines = [], 0
    for page in PAGES:
        for line in pages_kit.command_lines(page.read_text(encoding="utf-8")):
            lines += 1
            message = parsed(line)
            if message:
                wrong.append(f"{pages_kit.name(page)}: {line}: {message}")
    assert lines > 150
    assert not wrong, "\n".join(wrong)


def test_the_parser_refuses_what_is_unknown() -> None:
    """The check above can fail: an option, a command and a missing value are refused."""
    assert "No such option" in parsed("repro bisect v1..v2 --no-such -- python train.py")
    assert parsed("repro golden verfy") == "no command verfy"
    assert "requires an argument" in parsed("repro trace --out")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, id=pages_kit.name(page), marks=[pytest.mark.whole] if pages_kit.tier(page) == "whole" else []
        )
        for page in PAGES
        if pages_kit.tier(page)
    ],
)
def test_a_page_runs(page: Path, tmp_path: Path) -> None:
    """A page that says it runs prints what it shows, from an empty folder to its end."""
    if "lightning" in page.name:
        pytest.importorskip("lightning", reason="an extra of the whole tier")
    assert len(pages_kit.run(page, tmp_path)) > 2


def test_the_page_of_the_recorder_is_of_its_samples(tmp_path: Path) -> None:
    """What recording costs on a GPU stands there as it follows from the samples beside it."""
    page, written = SOURCE / "docs" / "benchmarks" / "trace.md", tmp_path / "trace.md"
    script = [sys.executable, str(SOURCE / "benchmarks" / "recorder.py"), "--from", str(page.with_suffix(".json"))]
    subprocess.run([*script, "--page", str(written)], check=True, capture_output=True)
    assert written.read_text() == page.read_text()
