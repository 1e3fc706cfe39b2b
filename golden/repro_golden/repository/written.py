"""What decides, beside a commit, what git writes into a worktree of it: settings, attributes, replaced objects.

No filter is among them: none runs where a commit is put in place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from repro_golden.base.canonical import digest
from repro_golden.repository.checkout import Checkout
from repro_golden.repository.git import Git, GitFailedError
from repro_golden.repository.submodules import fetched

__all__ = ["deciding", "written_otherwise"]

_OFF = ("false", "no", "off", "0")
_OTHER = re.compile(
    r"[-!]?(?:diff|merge|export-ignore|export-subst|whitespace|delta|conflict-marker-size|encoding|filter|lockable"
    r"|linguist-[\w-]+|gitlab-[\w-]+)(?:=.*)?"
)
"""Attributes that say how files are compared, merged, packed or shown. Any other may decide, or be a macro of some."""
_UNSET = re.compile(r"-(?:text|crlf|ident)|binary")
"""Attributes that keep git from changing anything, which by itself it does not."""


def deciding(git: Git, common: Path) -> tuple[str, ...]:
    """What decides it in a repository and its submodules that are here; nothing where all is as git has it by itself.

    Args:
        git: In the checkout's root.
        common: The repository's common git folder.
    """
    settings = _settings(git)
    facts = [*_own(git, common, settings), *(digest("attributes", *lines) for lines in _shared(git, settings) if lines)]
    for name, module in fetched(git, common).items():
        inside = git.at(module).with_options(f"--git-dir={module}", f"--work-tree={module}")
        try:
            facts += [f"{name} {fact}" for fact in _own(inside, module, _settings(inside))]
        except GitFailedError:  # what is left of one; a commit that has it is refused where it is checked out
            facts.append(f"{name} cannot be read")
    return tuple(facts)


def _own(git: Git, folder: Path, settings: Mapping[str, str]) -> Iterator[str]:
    """What of one repository decides it, with this git folder."""
    setting = settings.get("core.autocrlf", "").lower()
    if setting not in ("", "input", *_OFF):
        yield "core.autocrlf=true"
    elif setting != "input" and settings.get("core.eol", "").lower() == "crlf":
        yield "core.eol=crlf"
    if settings.get("core.symlinks", "").lower() in _OFF:
        yield "core.symlinks=false"
    if tree := settings.get("attr.tree"):
        yield f"attr.tree={git.text('rev-parse', '--verify', '--quiet', f'{tree}^{{tree}}', none=1)}"
    if lines := _lines(folder / "info" / "attributes", git, settings):
        yield digest("info/attributes", *lines)
    if settings.get("core.usereplacerefs", "").lower() not in _OFF:
        refs = git.text("for-each-ref", "--format=%(objecttype) %(refname) %(objectname)", "refs/replace").splitlines()
        if replaced := [line for line in refs if not line.startswith("commit ")]:  # a commit's tree is in each key
            yield digest("replaced", *replaced)


def _settings(git: Git) -> Mapping[str, str]:
    """Those that hold in every worktree, by name in lower case; of a checkout's own (`config.worktree`) none."""
    fields = git.names("config", "--list", "--show-scope", "-z")
    scopes = zip(fields[::2], fields[1::2], strict=True)
    entries = [entry.partition("\n") for scope, entry in scopes if scope != "worktree"]
    return {name.lower(): value if separator else "true" for name, separator, value in entries}


def _shared(git: Git, settings: Mapping[str, str]) -> Iterator[list[str]]:
    """The lines that decide in the attributes of the user and of the machine."""
    config_folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111
    named = os.path.expanduser(settings.get("core.attributesfile") or f"{config_folder}/git/attributes")  # noqa: PTH111
    yield _lines(git.folder / named, git, settings)
    yield _lines(Path("/etc/gitattributes"), git, settings)


def _converts(git: Git, settings: Mapping[str, str]) -> bool:
    """Whether settings, or attributes that any commit holds, may have git change what it writes."""
    if settings.get("core.autocrlf", "").lower() not in ("", *_OFF) or "core.eol" in settings:
        return True
    return bool(git.text("rev-list", "--all", "--max-count=1", "--", ":(top,glob)**/.gitattributes").strip())


def _lines(path: Path, git: Git, settings: Mapping[str, str]) -> list[str]:
    """The lines of a file of attributes that decide, if there is one."""
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    sets = {line: _attributes(line) for line in map(str.strip, text.splitlines()) if not line.startswith("#")}
    some = [line for line, attributes in sets.items() if not all(map(_OTHER.fullmatch, attributes))]
    if not some or _converts(git, settings):
        return some
    return [line for line in some if not all(_OTHER.fullmatch(word) or _UNSET.fullmatch(word) for word in sets[line])]


def _attributes(line: str) -> list[str]:
    """The attributes that a line sets, behind its pattern, which may stand in quotation marks."""
    return re.sub(r'^"(?:[^"\\]|\\.)*"|^\S+', "", line).split()


def written_otherwise(checkout: Checkout) -> list[str]:
    """What of a checkout may be otherwise than git keeps it; where there is nothing, a worktree has the same files."""
    entries = (entry.partition("\t") for entry in checkout.git.names("ls-files", "--eol", "-z"))
    others = [name for facts, _, name in entries if _OTHER_ENDS.match(facts)]
    return [*deciding(checkout.git, checkout.common), *([digest("other line ends", *others)] if others else [])]


_OTHER_ENDS = re.compile(r"i/(?:(?:lf|none)\s+w/(?:crlf|mixed)|(?:crlf|mixed)\s+w/(?:lf|none))\s+attr/(?!-text)")
"""What git says of a file whose lines end otherwise in the checkout than in the index. It leaves those alone that have
``-text``, as files of LFS do, whose pointers have other lines than their content."""
