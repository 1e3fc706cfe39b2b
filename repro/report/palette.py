"""The colours of everything that is shown: reports, pull requests, the site, and the plots in them.

Every text colour meets WCAG AA on what it stands on, in both schemes; a test computes it.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["DARK", "LIGHT", "SERIES", "VERDICTS", "css", "themed"]

LIGHT: Mapping[str, str] = {
    "page": "#ffffff", "ink": "#1b2430", "soft": "#566473", "line": "#dde3e9", "code": "#f5f7f9", "link": "#1a5ba6",
    "focus": "#1a5ba6", "hover": "#eef3f8",
    "green": "#e4f2e8", "green-ink": "#1d6636", "green-line": "#2f8a50",
    "changed": "#c0392b", "changed-ink": "#ffffff", "changed-line": "#c0392b",
    "flaky": "#dccaf2", "flaky-ink": "#47217c", "flaky-line": "#7d4cb0",
    "error": "#f3c455", "error-ink": "#453000", "error-line": "#a86f00",
    "not-judged": "#e4e9ee", "not-judged-ink": "#465361", "not-judged-line": "#6f7d8a",
    "no-run": "#ffffff", "no-run-ink": "#66737f", "no-run-line": "#66737f",
    "add": "#1d6636", "add-back": "#e9f5ec", "del": "#a8281c", "del-back": "#fbeae8", "touched": "#fdf1d8",
    "series-1": "#1f63ad", "series-2": "#b0601a", "series-3": "#21786a", "series-4": "#8548ab", "series-5": "#a8375b",
    "series-6": "#5c6874",
    "heat-low": "#f3e3cf", "heat-mid": "#dd7f45", "heat-high": "#7a1414",
}  # fmt: skip
"""By name, as style sheets and charts name them."""

DARK: Mapping[str, str] = {
    "page": "#12171d", "ink": "#e2e8ee", "soft": "#9aa8b6", "line": "#2c353f", "code": "#1a2129", "link": "#82b8f2",
    "focus": "#82b8f2", "hover": "#1c242d",
    "green": "#173325", "green-ink": "#8bd6a5", "green-line": "#58b67c",
    "changed": "#ec7563", "changed-ink": "#240804", "changed-line": "#f0806e",
    "flaky": "#46305f", "flaky-ink": "#dcc8f6", "flaky-line": "#b98be8",
    "error": "#6b4f0e", "error-ink": "#ffe7b0", "error-line": "#e0b040",
    "not-judged": "#2c353f", "not-judged-ink": "#b4c0cb", "not-judged-line": "#8f9daa",
    "no-run": "#12171d", "no-run-ink": "#8996a3", "no-run-line": "#8996a3",
    "add": "#8bd6a5", "add-back": "#16261d", "del": "#f49a8c", "del-back": "#2b1a19", "touched": "#3a2f14",
    "series-1": "#6fb0f0", "series-2": "#e0a060", "series-3": "#5fc3aa", "series-4": "#c79be8", "series-5": "#ea8dab",
    "series-6": "#a9b6c2",
    "heat-low": "#3a2c22", "heat-mid": "#c8692f", "heat-high": "#ffdcae",
}  # fmt: skip

SERIES = tuple(LIGHT[f"series-{k}"] for k in range(1, 7))
"""Of lines beside each other."""

VERDICTS = {
    "GOOD": LIGHT["green-line"], "BAD": LIGHT["changed-line"], "SKIP": LIGHT["error-line"],
    "FLAKY": LIGHT["flaky-line"], "not tried": LIGHT["line"],
}  # fmt: skip
"""Of a range's commits."""


def css() -> str:
    """Both schemes as custom properties, the dark one where the reader prefers it."""
    light, dark = (" ".join(f"--{name}: {colour};" for name, colour in scheme.items()) for scheme in (LIGHT, DARK))
    return (
        f":root {{ color-scheme: light; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; {dark} }} }}\n"
    )


_MARKS = {colour: name for name, colour in LIGHT.items() if name in ("ink", "soft", "line") or name[-5:] == "-line"} | {
    colour: f"series-{k}" for k, colour in enumerate(SERIES, start=1)
}


def themed(svg: str) -> str:
    """A plot in the light colours as part of a page, whose scheme it follows."""
    for colour, name in _MARKS.items():
        svg = svg.replace(f'"{colour}"', f'"var(--{name})"')
    return svg
