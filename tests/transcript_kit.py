"""Command-line transcripts as tests read them: what is typed, and what must be printed.

``$ command`` is typed; the lines after it are what must be printed, both streams together. ``...`` inside a line stands
for any text, alone on a line for any lines; ``? N`` is a non-zero exit code.
"""

from __future__ import annotations

import re


def pattern(expected: list[str]) -> re.Pattern[str]:
    """The expected lines as one regular expression."""
    parts = [
        r"(?:.*\n)*?" if line == "..." else ".*?".join(map(re.escape, line.rstrip().split("..."))) + r"[ ]*\n"
        for line in expected
    ]
    return re.compile("".join(parts) + r"\Z")


def typed(text: str) -> list[tuple[str, list[str], int]]:
    """Commands with their expected lines and exit codes."""
    commands: list[tuple[str, list[str], int]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], [], 0))
        elif line.startswith("? "):
            command, lines, _ = commands.pop()
            commands.append((command, lines, int(line[2:])))
        elif line or commands[-1][1]:
            commands[-1][1].append(line)
    return commands
