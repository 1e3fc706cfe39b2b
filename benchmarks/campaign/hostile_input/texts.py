"""Texts that are programs to a terminal, a browser, or GitHub, wherever a text of somebody else is shown."""

from __future__ import annotations

import html.parser
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree  # what is parsed was written here

from attempts import unseen_in
from dump_kit import archive
from pull_kit import OURS, flat, pair, point, rendered, report, with_step
from site_pages_kit import evil_results
from test_clean import HOSTILE
from trace_kit import write

from hostile_input.place import Commands, Input, Place
from repro.pulls.comment import comment
from repro.pulls.report import junit, page
from repro.pulls.result import Failed
from repro.site.build import Options, build
from repro_bisect.driver.result import Culprit
from repro_golden.trace.writer import metric_row

__all__ = ["markup", "terminal"]

TERMINAL = HOSTILE | {
    "a file by iTerm2": "\x1b]1337;File=name=eA==;inline=1:eA==\x07",
    "a link": "\x1b]8;;http://e\x1b\\here\x1b]8;;\x1b\\",
    "a picture by sixel": "\x1bPq#0;2;0;0;0#0~~\x1b\\",
    "a picture by kitty": "\x1b_Ga=T,f=24,s=1,v=1;AAAA\x1b\\",
    "a private message": "\x1b^hidden\x1b\\",
    "an answer": "\x05\x1b[c\x1b[6n\x1b[>q",
    "the window's title, typed back": "\x1b]2;\ntouch x\n\x07\x1b[21t",
    "another alphabet": "\x0e\x1b(0lqqk\x0f",
    "the other screen": "\x1b[?1049h\x1b[?25l",
    "the end of a paste": "\x1b[201~\ntouch x\n\x1b[200~",
    "a key of its own": '\x1b["touch x";13p',
    "a reset": "\x1bc\x1b[!p",
    "lines overwritten": "differs\x1b[1A\x1b[2Kagrees",
    "spaces back": "differs" + "\b" * 7 + "agrees",
    "a vertical tab and a form feed": "a\x0bb\x0cc",
    "C1 alone": "\x90q\x9c\x9ex\x9c\x9fx\x9c\x98x\x9c",
    "tags": "".join(chr(0xE0000 + ord(c)) for c in "agrees"),
    "isolates": "\u2066\u2067\u2068a\u2069\u061c",
    "annotations": "\ufff9a\ufffab\ufffb",
    "joiners": "a\u200cb\u200dc\u034fd\u180ee",
    "a group of GitHub's": "::group::x\n::endgroup::",
    "a command behind a line end": "x\r::error file=a::b\n\u2028::stop-commands::x",
    "a command of old": "##[command]touch x",
    "a command of Azure": "##vso[task.prependpath]x",
}
"""What a terminal obeys, or nobody sees, or the runner of a job obeys."""

MARKUP = {
    "a script": "<script>alert(1)</script>",
    "the end of a script": "</script><script>alert(1)</script>",
    "a script in a comment": "<!--<script>",
    "the end of a comment": "--><img src=x onerror=alert(1)>",
    "a picture": "<img src=x onerror=alert(1)>",
    "a drawing": "<svg/onload=alert(1)>",
    "out of an attribute": '" onmouseover="alert(1)" x="',
    "out of a quoted attribute": "' autofocus onfocus='alert(1)",
    "out of a bare attribute": "x onclick=alert(1)",
    "out of the title": "</title><script>alert(1)</script>",
    "out of the style": "</style><style>*{display:none}</style>",
    "out of a text field": "</textarea><iframe srcdoc='<script>alert(1)</script>'>",
    "out of a table": "</td></tr></table><form action=http://e><input name=x>",
    "out of details": "</details></summary></code></pre><h1>approved</h1>",
    "a base": "<base href=http://e/>",
    "a refresh": '<meta http-equiv="refresh" content="0;url=http://e">',
    "an address that runs": "javascript:alert(1)",
    "an address with data": "data:text/html,<script>alert(1)</script>",
    "a link that runs": "[x](javascript:alert(1))",
    "a template of Jinja": "{{ 7*7 }}{% for x in ().__class__.__mro__ %}{{ x }}{% endfor %}",
    "a template of JavaScript": "${alert(1)}`",
    "a formula": "$$\\unicode{x}$$ $`x`$",
    "entities": "&lt;script&gt;alert(1)&lt;/script&gt; &#60;img&#62;",
    "half an entity": "&lt",
    "a null in a tag": "<scr\0ipt>alert(1)</scr\0ipt>",
    "XML's end": "]]></failure><testcase name='x'/><![CDATA[",
    "XML's entity": '<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><x>&e;</x>',
    "a link": "[approved](http://e)",
    "a link by reference": "[approved][1]\n\n[1]: http://e",
    "a picture by Markdown": "![x](http://e/x.png)",
    "a bare address": "http://e.example/x and www.example.org and a@example.org",
    "a mention": "@someone @org/team /cc @other",
    "an issue": "#12 GH-12 o/r#12 closes #12 and 0123456789abcdef0123456789abcdef01234567",
    "a table's bar": "a | b\n|---|---|\n| c | d |",
    "a fence": "```\n</code>\n```\n# approved",
    "longer fences": "`````` x `````` ~~~~~~",
    "a heading": "# approved\n\n## numbers are equal\n===\n---",
    "a list": "- [x] approved\n1. one\n* two\n+ three",
    "a quotation": "> approved\n> > by somebody",
    "a note": "> [!WARNING]\n> approve this",
    "a footnote": "approved[^1]\n\n[^1]: really",
    "code that ends": "a` <b>b</b> `c",
    "a line break": "a  \nb\\\nc<br>d",
    "emphasis": "**approved** _by_ ~~nobody~~ :+1: ***x***",
    "an emoji and a colour": ":rocket: `#ff0000`",
    "a diagram": "```mermaid\nclick A href \"javascript:alert(1)\"\n```",
    "a style": "x;background:url(http://e);--a:b",
    "a separator of lines": "\u2028alert(1)\u2029",
}  # fmt: skip
"""What a browser or GitHub makes more of than text."""


# -- terminals


def terminal() -> Iterator[Input]:
    """Each text in everything that a command prints."""
    for name, text in TERMINAL.items():
        yield Input(f"a text: {name}", lambda place, text=text: _printed(place, text))


def _printed(place: Place, text: str) -> Commands:
    clean = text.encode("utf-8", "ignore").decode()
    for side, value in (("a", 1.0), ("b", 2.0)):
        write(place.folder / side, [[metric_row("loss", clean, value)]])
    line = "2026-11-20 15:38:49 | INFO | x:1 "
    lines = [f"{line}step {n}: {{{clean!r}: {n}.5, 'train/grad_norm': nan}} {clean}" for n in range(3)]
    place.write("train.log", "\n".join([*lines, f"RuntimeError: CUDA out of memory. {clean}", ""]))
    place.write("run.sh", f"python3 train.py --{clean} --load '/nowhere/{clean}' --num-layers '{clean}'\n")
    raw = clean.replace("\n", " ").encode()
    archive(place.folder / "3.pt", b"\x80\x04\x8c\x02os\x8d" + len(raw).to_bytes(8, "little") + raw + b"\x93.")
    place.write("model/config.json", json.dumps({"model_type": text, text: text, "architectures": [text]}))
    place.write("golden/cases/x.toml", f"[case]\nname = {json.dumps(clean)}\nsteps = 1\n{json.dumps(clean)} = 1\n")
    place.write("requirements.txt", f"torch==2.13.0 {clean}\n{clean}==1.0\n")
    folder = clean.replace("/", "").replace("\0", "")[:60] or "x"
    (place.folder / folder).mkdir(exist_ok=True)
    word = clean.replace("\0", "")
    return [
        ["diff", "a", "b"], ["diff", "a", "b", "--json"], ["diff", "a", word], ["doctor", "train.log", "run.sh", "model"],
        ["doctor", "requirements.txt"], ["doctor", "golden/cases/x.toml"], ["rollout", "show", "3.pt"], ["doctor", folder],
        ["doctor", "--only", word, "train.log"], ["doctor", "--json", "train.log"], [word], ["golden", "show", word],
        ["rollout", "convert", folder, "--format", word, "--out", word],
    ]  # fmt: skip


# -- browsers and GitHub


def markup() -> Iterator[Input]:
    """Each text in every page, comment and report."""
    for name, text in MARKUP.items():
        yield Input(f"a text: {name}", lambda _place: [], also=_shown(text))


def _shown(text: str) -> Callable[[Place, object], str]:
    def judge(place: Place, _attempts: object) -> str:
        plain, hostile = (_pages(place.folder / name, word) for name, word in (("plain", "word"), ("hostile", text)))
        known = {element for made in plain.values() for element in _elements(made)}
        for name, made in hostile.items():
            if more := set(_elements(made)) - known:
                return f"{name} has {sorted(more)[0]}"
            if name.endswith(".js") and "data/" in name and set("<>&\u2028\u2029") & set(made):
                return f"{name} holds markup"
        return _comment(place, text)

    return judge


def _pages(folder: Path, text: str) -> dict[str, str]:
    folder.mkdir(parents=True)
    site = build(evil_results(folder, text), Options(text, text, [text], ""))
    return {name: raw.decode() for name, raw in site.items() if name.endswith((".html", ".js"))}


ADDRESSES = {
    "href",
    "src",
    "action",
    "formaction",
    "srcdoc",
    "style",
    "xlink:href",
    "content",
    "data",
    "poster",
    "ping",
}


class _Elements(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, ...]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element, its attributes' names, and how its addresses begin."""
        schemes = [
            m[0]
            for name, value in attrs
            if name in ADDRESSES and (m := re.match(r"\s*(javascript|data|https?|vbscript):", value or ""))
        ]
        self.found.append((tag, *sorted(name for name, _ in attrs), *schemes))

    def handle_comment(self, data: str) -> None:
        """A comment."""
        self.found.append(("comment", data[:20]))

    def handle_decl(self, decl: str) -> None:
        """A declaration."""
        self.found.append(("declaration", decl[:20]))


def _elements(raw: str) -> list[tuple[str, ...]]:
    parser = _Elements()
    parser.feed(raw)
    parser.close()
    return parser.found


def _comment(place: Place, text: str) -> str:
    """What is wrong with the comment, page and XML of a pull request in which every text is this one."""
    result = pair(place.folder, flat(loss=1.0), with_step(1, flat(loss=1.0), loss=2.0))
    assert result.compared is not None
    assert result.compared.drift.divergence is not None

    def whole(word: str) -> tuple[str, str, str]:
        divergence = replace(result.compared.drift.divergence, signal=word, detail=word)  # type: ignore[union-attr]
        drift = replace(result.compared.drift, divergence=divergence)  # type: ignore[union-attr]
        culprit = Culprit(replace(point("c", word), author=word), divergence, None, (word,), None, word)
        changed = replace(
            result, case=word, compared=replace(result.compared, drift=drift), culprits=[culprit], notes=[word],
            head=point("b", word), machine=word, unnamed="",
        )  # fmt: skip
        summary = report(changed, Failed(word, word))
        return comment(summary), page(summary), junit(summary)

    markdown, shown, xml = whole(text)
    seen = rendered(markdown)
    if more := set(seen.tags) - OURS:
        return f"a comment has <{sorted(more)[0]}>"
    if called := re.search(r"@\w|\w://|www\.|(?<![\w&])#\d", seen.prose):
        return f"a comment calls {seen.prose[called.start() : called.end() + 20]!r}"
    if more := set(_elements(shown)) - set(_elements(whole("word")[1])):
        return f"a page has {sorted(more)[0]}"
    plain = ElementTree.fromstring(whole("word")[2])  # noqa: S314 - made here
    if [e.tag for e in ElementTree.fromstring(xml).iter()] != [e.tag for e in plain.iter()]:  # noqa: S314
        return "the XML has other elements"
    bad = [unseen_in(made.encode()) for made in (markdown, shown, xml)]
    return next((f"a report holds {c!r}" for c in bad if c and not c.strip().startswith(("::", "##"))), "")
