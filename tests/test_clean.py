"""Text that somebody else wrote: what the cleaner makes of it, and that everything printed and reported passes it."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree  # what is parsed was written here

import pytest
from conftest import environment
from hypothesis import given
from hypothesis import strategies as st
from pull_kit import OURS, flat, pair, point, rendered, report, with_step
from trace_kit import write

from repro import console
from repro.__main__ import main
from repro.pulls.comment import comment
from repro.pulls.report import junit, page, pull_text
from repro.pulls.result import Failed
from repro.report.pieces import escaped
from repro_bisect.driver.result import Culprit
from repro_golden.base.clean import no_command, one_line, visible
from repro_golden.trace.writer import metric_row

HOSTILE = {
    "clipboard": "\x1b]52;c;cm0gLXJmIC8=\x07",
    "clear": "\x1b[2J\x1b[H",
    "colour": "\x1b[31mred\x1b[8m",
    "device": "\x1bP+q544e\x1b\\",
    "title": "\x1b]0;root\x1b\\",
    "C1": "\x9b2J\x9d52;c;eA==\x9c",
    "overwrite": "moved\ragrees\x08\x08",
    "null": "a\x00b\x7f",
    "bidi": "a\u202eb\u2066c\u200f",
    "unseen": "a\u200bb\u2060c\ufeffd\u00ade\U000e0041\u3164",
    "line ends": "a\u2028b\u2029c\x85d\x0be",
    "half": "\udc80\ud800",
    "command": "::add-mask::e",
    "indented command": " \u2003::set-output name=a::b",
    "old command": "x ##[add-mask]e ##vso[task.setvariable]e",
    "html": "<img src=x onerror=alert(1)><!-- c --></details>",
    "markdown": "[a](http://e) ![i](http://e/i.png) **b** `c` @someone #12 | x |",
    "rich": "[red]x[/red] [link=http://e]y[/link]",
}
"""What may stand in a commit's subject, in a metric's name, or in a path."""
ALL = " ".join(HOSTILE.values())


def check_bytes(raw: bytes, *, ours: str = "", log: bool = True) -> str:
    """A text in which nothing is unseen but `ours`, the sequences that we may send; in a `log` no line is a command."""
    text = raw.decode("utf-8")
    plain = re.sub(ours, "", text) if ours else text
    bad = [c for c in plain if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    assert not bad, (bad, plain)
    for line in plain.splitlines() if log else ():
        assert not line.strip().startswith("::") and not re.search(r"##\w*\[", line), line
    return text


# -- the cleaner


def test_our_own_words_on_a_page() -> None:
    """What our words have in backticks is code on a page, and what they quote is escaped there."""
    from repro.report.pieces import templates

    page = templates().from_string("{% autoescape true %}{{ said | prose }}{% endautoescape %}")
    assert page.render(said="try `repro bisect <b>..c` & on") == "try <code>repro bisect &lt;b&gt;..c</code> &amp; on"


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_seen_is_written_out(name: str) -> None:
    """No character that a terminal obeys or nobody sees is left, and what is seen stays as it is."""
    text = HOSTILE[name]
    shown = no_command(visible(text))
    check_bytes(shown.encode())
    if text.isprintable() and "command" not in name:
        assert shown == text
    assert one_line(f"  a\n  {text}\t\n").startswith("  a ") and "\n" not in one_line(text)


def test_every_unseen_character_is_known() -> None:
    """All control, format, surrogate and line-end characters of this Python's Unicode are written out, no letter is."""
    for code in range(0x110000):
        unseen = unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp") and chr(code) not in "\n\t"
        if unseen or chr(code).isalnum():
            assert (visible(chr(code)) != chr(code)) == (unseen or code in (0x115F, 0x1160, 0x3164, 0xFFA0)), hex(code)


@given(st.text(st.characters() | st.sampled_from(":#[ \n\u2003")))
def test_no_line_is_a_command(text: str) -> None:
    """GitHub's runner, which trims a line and looks for ``::``, and anywhere for ``##[``, obeys no text."""
    check_bytes(no_command(visible(text)).encode())
    assert no_command(no_command(text)) == no_command(text)


# -- the way out


@contextmanager
def guarded() -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    """Guarded stdout and stderr, and what comes out of them."""
    kept, raws = (sys.stdout, sys.stderr), (io.BytesIO(), io.BytesIO())
    sys.stdout, sys.stderr = (io.TextIOWrapper(raw, encoding="utf-8", write_through=True) for raw in raws)
    console.guard()
    try:
        yield raws
    finally:
        sys.stdout, sys.stderr = kept


def taken(raw: io.BytesIO) -> bytes:
    """What came out since the last call."""
    printed = raw.getvalue()
    raw.seek(0)
    raw.truncate()
    return printed


def test_nothing_printed_goes_around_the_cleaner() -> None:
    """A print, a library's write, click and rich all pass it; styles of ours and annotations stay whole."""
    import click
    from rich.console import Console
    from rich.text import Text

    from repro.pulls.github import annotation

    with guarded() as (out, err):
        print(ALL)
        sys.stdout.writelines([ALL, "\n"])
        click.echo(ALL)
        check_bytes(taken(out))
        console.styled(f"{click.style('changed', fg='red')} {HOSTILE['clipboard']}")
        assert "\x1b[31mchanged\x1b[0m" in check_bytes(taken(out), ours=r"\x1b\[[0-9;]*m")
        terminal = Console(file=console.screen(), force_terminal=True, highlight=False, width=1000)
        with terminal.status("x"):
            terminal.print(Text(ALL, "bold"))
        shown = check_bytes(taken(err), ours=r"\x1b\[[0-9;]*[A-HJKm]|\x1b\[\?25[hl]|\r")
        assert "[red]x[/red]" in shown and "\x1b[1m" in shown, "names are no markup of rich"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GITHUB_ACTIONS", "true")
            annotation("error", f"t {ALL}", f"x\n::add-mask::e\r{ALL}")
        line, end = taken(err).decode().split("\n")
        assert line.startswith("::error title=t ") and not re.search("[\x00-\x1f\x7f-\x9f\u202e]", line) and not end


def test_json_is_printed_as_it_is() -> None:
    """Every text is read back from JSON, and no line of it is a command."""
    value = HOSTILE | {"more": "###[x]", ALL: 1}
    with guarded() as (out, _):
        print(console.json_text(value))
        assert json.loads(check_bytes(taken(out))) == value


def test_no_code_knows_another_way_out() -> None:
    """In no other module: the streams of the start, bytes behind a stream, click's own output, rich consoles."""
    root = Path(__file__).parent.parent
    ways = []
    for folder in ("repro", "bisect/repro_bisect", "golden/repro_golden"):
        for path in sorted((root / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                called = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""
                keywords = {k.arg for k in node.keywords} if isinstance(node, ast.Call) else set()
                rich = isinstance(node, ast.Call) and ast.unparse(node.func) == "Console" and "file" not in keywords
                if rich or re.fullmatch(r"sys\.__std\w+__|sys\.std(out|err)\.(buffer|detach)|click\.s?echo", called):
                    ways.append(f"{path.relative_to(root)}: {ast.unparse(node)}")
    assert not ways, ways


# -- the commands


def run(capfdbinary: pytest.CaptureFixture[bytes], *arguments: object) -> tuple[int, str, str]:
    """One command in this process: its exit code and what it printed, which is checked."""
    code = main([str(argument) for argument in arguments])
    out, err = capfdbinary.readouterr()
    return code, check_bytes(out), check_bytes(err)


def folder_name() -> str:
    """A folder's name that holds all that a file system takes."""
    return ALL.replace("/", "").replace("\x00", "")[:120].encode("utf-8", "ignore").decode()


def test_diff_of_hostile_traces(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of metrics and of folders reach nobody as sequences, lines or commands, in text, JSON and errors."""
    monkeypatch.chdir(tmp_path)
    names = [text.encode("utf-8", "ignore").decode() for text in HOSTILE.values()] + ["a\nagrees: 9 steps compared"]
    sides = [write(Path(f"{side}{folder_name()}"), [[metric_row("loss", n, value) for n in names]])
             for side, value in (("a", 1.0), ("b", 2.0))]  # fmt: skip
    code, out, err = run(capfdbinary, "diff", *sides)
    assert code == 1 and "\\x1b]52;c;" in out and "[red]x[/red]" in out and not err
    assert not re.search(r"^agrees", out, re.MULTILINE), "a name is no line of ours"
    code, out, err = run(capfdbinary, "diff", *sides, "--json")
    assert code == 1 and json.loads(out)["divergence"]
    code, out, err = run(capfdbinary, "diff", sides[0], f"nowhere{folder_name()}")
    assert code == 2 and err.startswith("repro: ") and err.count("\n") == 1
    code, out, err = run(capfdbinary, "diff", f"--{ALL}".replace("\x00", ""))
    assert code == 2 and "Error: " in err


SCRIPT = """\
import sys
scale = 1.0
sys.exit(0 if scale == 1.0 else 1)
"""


def commit(root: Path, subject: str, **changes: str) -> None:
    """A commit by a hostile author."""
    (root / "train.py").write_text(SCRIPT.replace("1.0\n", changes.get("scale", "1.0") + "\n", 1) + f"# {subject!a}\n")
    author = f"A {ALL}".translate(dict.fromkeys(map(ord, "<>\n\x00")))
    raw = {"GIT_AUTHOR_NAME": author, "GIT_AUTHOR_EMAIL": "a@example.invalid"}
    identity = {k.replace("AUTHOR", who): v for k, v in raw.items() for who in ("AUTHOR", "COMMITTER")}
    told = {k: v.encode("utf-8", "ignore") for k, v in identity.items()}
    message = subject.replace("\x00", "").encode("utf-8", "ignore")
    for command in (["git", "add", "-A"], ["git", "commit", "-q", "-F", "-"]):
        subprocess.run(command, cwd=root, env={**os.environb, **{k.encode(): v for k, v in told.items()}},
                       input=message, check=True)  # fmt: skip


def test_bisect_over_hostile_commits(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Subjects and authors of a real range are text in what a bisect prints, in its report and on its page."""
    root = tmp_path / "work"
    root.mkdir()
    subprocess.run(["git", "init", "-q", "-b", "main"], cwd=root, check=True)
    for n, scale in enumerate(("1.0", "1.0", "2.0", "2.0")):
        commit(root, f"{HOSTILE['command']} {n} {ALL}", scale=scale)
    monkeypatch.chdir(root)
    out_folder = tmp_path / "report"
    what = ["--out", out_folder, "HEAD~3..HEAD", "--", sys.executable, "train.py"]
    code, out, err = run(capfdbinary, "bisect", "--when", "exit", *what)
    assert code == 0 and "is the first bad commit" in out, (out, err)
    assert "\\x1b]52;c;" in out and "[red]x[/red]" in out
    text, html = (out_folder / "report.md").read_text(), (out_folder / "report.html").read_text()
    check_bytes(text.encode(), log=False)
    check_bytes(html.encode(), log=False)
    assert set(rendered(text).tags) <= OURS | {"h1", "h2"} and "<img" not in html
    assert "@someone" not in rendered(text).prose


TRAIN = """\
import json, sys, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    print(json.dumps({"step": step, "loss": 1.0}))
"""


@pytest.mark.whole
def test_trace_into_a_hostile_folder(tmp_path: Path) -> None:
    """What `repro trace` says of a program names its folder as text."""
    (tmp_path / "train.py").write_text(TRAIN)
    out = folder_name()
    command = [sys.executable, "-m", "repro", "trace", "--out", out, "--activations", ALL.replace("\x00", "")]
    command = [word.encode("utf-8", "ignore").decode() for word in command]
    done = subprocess.run([*command, "--", sys.executable, "train.py"], cwd=tmp_path, env=environment(),
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    err = check_bytes(done.stderr)
    assert "repro: 2 steps of 1 rank in \\x1b]52;c;" in err


# -- reports


@pytest.mark.parametrize("name", HOSTILE)
def test_reports_on_a_pull_request(tmp_path: Path, name: str) -> None:
    """A comment, a page, XML and the terminal's text hold a hostile text as text."""
    text = HOSTILE[name]
    result = pair(tmp_path, flat(loss=1.0), with_step(1, flat(loss=1.0), loss=2.0))
    assert result.compared is not None and result.compared.drift.divergence is not None
    divergence = replace(result.compared.drift.divergence, signal=text, detail=text)
    drift = replace(result.compared.drift, divergence=divergence)
    culprit = Culprit(replace(point("c", text), author=text), divergence, None, (text,), None, text)
    summary = report(
        replace(result, case=text, compared=replace(result.compared, drift=drift), culprits=[culprit], notes=[text],
                head=point("b", text), machine=text, unnamed=""), Failed(text, text),
    )  # fmt: skip
    for made in (comment(summary), page(summary), junit(summary)):
        check_bytes(made.encode(), log=False)
    ElementTree.fromstring(junit(summary))  # noqa: S314
    assert set(rendered(comment(summary)).tags) <= OURS
    check_bytes(no_command(pull_text(summary)).encode())


def test_markdown_templates_escape_by_default() -> None:
    """Each value of each Markdown template is escaped unless a filter of ours made it: none is marked as HTML."""
    folder = Path(__file__).parent.parent / "repro" / "report" / "templates"
    for path in folder.glob("*.md.jinja"):
        text = path.read_text()
        assert "safe" not in text and "`{{" not in text and "```" not in text, path
    from repro.report.pieces import templates

    made = templates().overlay(autoescape=False)
    shown = made.from_string("{{ x }}|{{ x | code }}|{{ x | prose }}\n{{ x | fenced }}").render(x=f"a `b` {ALL}")
    check_bytes(no_command(shown).encode())
    assert not set(rendered(shown).tags) - OURS
    assert escaped("- a") == "\\- a" and escaped("1. a") == "1\\. a" and escaped("-0.5") == "-0.5"


@pytest.mark.parametrize("name", ["explain", "layouts"])
def test_other_reports(name: str) -> None:
    """Each value of a report on an explanation or on layouts is text, in Markdown and on the page."""
    from repro.report.change import Change, ChangedFile
    from repro.report.pieces import templates

    place = SimpleNamespace(file=ALL, line=3, function=ALL, touched=True, text=f"a\n{ALL}")
    operation = SimpleNamespace(name=ALL, phase=ALL, module=ALL, node=ALL, arguments=ALL, inputs=[ALL], outputs=[ALL],
                                place=place, stack=[place])  # fmt: skip
    side = SimpleNamespace(point=ALL, subject=ALL, explained=operation)
    first = SimpleNamespace(step=1, phase=ALL, name=ALL, detail=ALL)
    result = SimpleNamespace(case=ALL, before=side, after=side, text=ALL, divergence=first, hunks=[(ALL, ALL)],
                            environment=[ALL], looked=ALL)  # fmt: skip
    context = {"found": result, "sides": [side], "size": ALL, "headline": ALL, "lines": [ALL], "cost": ALL,
               "change": Change(ALL, [ChangedFile(ALL, [("add", ALL)])], 1), "plot": ""}  # fmt: skip
    for ending in ("md", "html"):
        text = templates().get_template(f"{name}.{ending}.jinja").render(context, command=ALL, version="1")
        check_bytes(text.encode(), log=False)
        if ending == "md":
            shown = rendered(re.sub(r"^(`{3,})\w+$", r"\1", text, flags=re.MULTILINE))
            assert set(shown.tags) <= OURS | {"h1", "h2"} and "@someone" not in shown.prose
        else:
            assert "<img" not in text and "<!-- c" not in text


@pytest.mark.parametrize(("values", "code"), [((1.0, 1.0), 0), ((1.0, 2.0), 1)])
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_the_verdict_is_the_exit_code_though_nobody_reads(
    tmp_path: Path, values: tuple[float, float], code: int, flags: tuple[str, ...]
) -> None:
    """``repro diff A B | head -1`` says by its exit code what it found, whenever the reader goes."""
    a, b = (str(write(tmp_path / str(k), [[metric_row("loss", "loss", v)]])) for k, v in enumerate(values))
    for both in (False, True):
        reads, writes = os.pipe()
        os.close(reads)
        command = [sys.executable, "-m", "repro", "diff", a, b, *flags]
        done = subprocess.run(
            command, stdout=writes, stderr=writes if both else subprocess.PIPE, env=environment(), check=False
        )
        os.close(writes)
        assert (done.returncode, done.stderr or b"") == (code, b"")
