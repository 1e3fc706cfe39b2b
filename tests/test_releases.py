"""Which versions a range holds: as an index says, in both of its forms, and as the interpreter can have them."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_kit import Index, Wheel, page, serving
from packaging.version import Version

from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.subjects.environments.origins import sources
from repro_golden.subjects.environments.releases import (
    Release,
    index_urls,
    parse_range,
    redacted,
    releases,
)

PYTHON = platform.python_version()


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a test sets says where packages come from."""
    for name in os.environ:
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.fixture
def index() -> Iterator[Index]:
    """An index with one of everything."""
    made = Index()
    made.add(
        "tiny-scale",
        Wheel("tiny_scale-0.9-py3-none-any.whl"),
        Wheel("tiny_scale-1.0-py3-none-any.whl", python=">=3"),
        Wheel("tiny-scale-1.0.tar.gz"),
        Wheel("tiny_scale-1.1-py3-none-any.whl", yanked="broken  loss"),
        Wheel("tiny_scale-1.1.1-py3-none-any.whl", yanked=True),
        Wheel("tiny_scale-1.1.2-py3-none-any.whl", yanked="one file of two"),
        Wheel("tiny-scale-1.1.2.tar.gz"),
        Wheel("tiny_scale-1.2-py2-none-any.whl", python="<3"),
        Wheel("tiny_scale-1.3-cp311-cp311-win_arm64.whl"),
        Wheel("tiny_scale-1.3.1-cp311-cp311-win_arm64.whl"),
        Wheel("tiny-scale-1.3.1.zip"),
        Wheel("tiny_scale-2.0rc1-py3-none-any.whl"),
        Wheel("tiny_scale-2.0-py3-none-any.whl"),
        Wheel("tiny_scale-10.0-py3-none-any.whl"),
        Wheel("tiny_scale-1!0.5-py3-none-any.whl"),
        Wheel("tiny_scale-nonsense.whl"),
        Wheel("tiny_scale-1.0.exe"),
        Wheel("another-1.5-py3-none-any.whl"),
    )
    made.add(
        "torchlike",
        Wheel("torchlike-2.12.0+cpu-py3-none-any.whl"),
        Wheel("torchlike-2.12.1+cpu-py3-none-any.whl"),
        Wheel("torchlike-2.13.0+cpu-py3-none-any.whl"),
        Wheel("torchlike-2.13.0+cu130-py3-none-any.whl"),
        Wheel("torchlike-2.13.0-py3-none-any.whl"),
    )
    with serving(made):
        yield made


def listed(releases: list[Release]) -> dict[str, str | None]:
    """What is wrong with each version."""
    return {str(release.version): release.problem for release in releases}


# -- what may be written


def test_a_range_is_read() -> None:
    """Names are normalised, both ends are versions, and a local label or an epoch belongs to them."""
    span = parse_range("Tiny.Scale==1.0..2.0rc1")
    assert (span.name, span.low, span.high) == ("tiny-scale", Version("1.0"), Version("2.0rc1"))
    assert str(parse_range("torch==2.12.0+cpu..2.13.0+cpu")) == "torch==2.12.0+cpu..2.13.0+cpu"
    assert parse_range("x==9..1!0.1").high.epoch == 1


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("torch", "write NAME==LOW..HIGH"),
        ("torch==2.12.0", "write NAME==LOW..HIGH"),
        ("torch>=2..3", "write NAME==LOW..HIGH"),
        ("==1..2", "write NAME==LOW..HIGH"),
        ("a b==1..2", "write NAME==LOW..HIGH"),
        ("--pre==1..2", "write NAME==LOW..HIGH"),
        ("torch==1.0..new", "'new' in .* is no version"),
        ("torch==..2.0", "'' in .* is no version"),
        ("torch==1...2", r"'\.2' in .* is no version"),
        ("torch==2.0..2.0.0", "give two that differ"),
        ("torch==2.1..2.0", r"write torch==2\.0\.\.2\.1"),
        ("torch==2.0+cpu..2.1", r"the same \+label"),
    ],
)
def test_what_is_no_range_is_refused_with_the_cure(text: str, fix: str) -> None:
    """One line says what to write instead."""
    with pytest.raises(ReproError, match=fix) as error:
        parse_range(text)
    assert "\n" not in str(error.value)


versions = st.builds(
    lambda numbers, epoch, suffix: f"{epoch}{'.'.join(map(str, numbers))}{suffix}",
    st.lists(st.integers(0, 30), min_size=1, max_size=4),
    st.sampled_from(["", "1!"]),
    st.sampled_from(["", "rc1", ".dev2", ".post3"]),
)


@given(versions, versions)
def test_a_range_is_what_it_prints(a: str, b: str) -> None:
    """Reading what a range prints gives the range, for all ends in order; any other order is refused."""
    text = f"some.Name=={a}..{b}"
    if Version(a) < Version(b):
        span = parse_range(text)
        assert parse_range(str(span)) == span
    else:
        with pytest.raises(ReproError):
            parse_range(text)


@given(st.text(alphabet="ab:/@%#?.", max_size=12), st.sampled_from(["http", "https"]))
def test_no_credential_is_printed(secret: str, scheme: str) -> None:
    """Whatever stands before the host's @ is gone, and the host stays."""
    assert redacted(f"see {scheme}://{secret}@host.invalid/simple now") == f"see {scheme}://host.invalid/simple now"


# -- what an index says


@pytest.mark.parametrize("html_only", [False, True])
def test_the_versions_of_a_range_ascend(index: Index, html_only: bool) -> None:
    """Both forms of an index give the same: by version and not by text, with what was yanked or cannot be had."""
    index.html_only = html_only
    versions = listed(releases(parse_range("tiny-scale==1.0..10.0"), index=index.url))
    assert list(versions) == ["1.0", "1.1", "1.1.1", "1.1.2", "1.2", "1.3", "1.3.1", "2.0", "10.0"]
    problems = {version: problem for version, problem in versions.items() if problem}
    tag = problems.pop("1.3")
    assert tag is not None and tag.startswith(f"has neither an sdist nor a wheel for Python {PYTHON} on ")
    assert problems == {
        "1.1": "was yanked (broken loss)",
        "1.1.1": "was yanked (no reason is given)",
        "1.2": f"needs Python <3, which {PYTHON} is not",
    }


def test_early_versions_are_asked_for_by_an_end(index: Index) -> None:
    """A release candidate is among them where one is an end; an epoch is later than any version without."""
    late = releases(parse_range("tiny-scale==2.0rc1..1!0.5"), index=index.url)
    assert list(listed(late)) == ["2.0rc1", "2.0", "10.0", "1!0.5"]


def test_local_labels_are_meant_or_left_out(index: Index) -> None:
    """A public version is any build of it, once; with a label only those builds count."""
    public = releases(parse_range("torchlike==2.12.0..2.13.0"), index=index.url)
    assert list(listed(public)) == ["2.12.0", "2.12.1", "2.13.0"]
    cpu = releases(parse_range("torchlike==2.12.0+cpu..2.13.0+cpu"), index=index.url)
    assert list(listed(cpu)) == ["2.12.0+cpu", "2.12.1+cpu", "2.13.0+cpu"]
    with pytest.raises(ReproError, match=r"has no 2\.12\.0\+cu130 .*the nearest is 2\.13\.0\+cu130"):
        releases(parse_range("torchlike==2.12.0+cu130..2.13.0+cu130"), index=index.url)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("tiny-scale==1.0.5..2.0", r"has no 1\.0\.5 on http://127.*: the nearest are 1\.0 and 1\.1$"),
        ("tiny-scale==1.0..2!1", r"has no 2!1 .*the nearest is 1!0\.5$"),
        ("tiny-scale==0.1..1.0", r"has no 0\.1 .*the nearest is 0\.9$"),
        ("tiny-scale==1.1..2.0", r"1\.1 was yanked \(broken loss\): begin or end at 1\.1\.2"),
        ("tiny-scale==1.0..1.2", r"1\.2 needs Python <3, .*: begin or end at 1\.1\.2"),
        ("tiny-scale==1.2..1.3", r"1\.2 needs Python <3, .*: no version in the range serves"),
        ("nothing==1..2", "no package nothing on http://127.*: correct its name"),
    ],
)
def test_ends_must_be_there_and_serve(index: Index, text: str, fix: str) -> None:
    """An end that cannot be tested is an error that names one that can, and never a SKIP."""
    with pytest.raises(ReproError, match=fix) as error:
        releases(parse_range(text), index=index.url)
    assert not isinstance(error.value, MachineFailureError)


def test_another_interpreter_is_asked_itself(index: Index, tmp_path: Path) -> None:
    """What can be had is asked of the interpreter that is named; one that does not start is said."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    listing = releases(
        parse_range("tiny-scale==1.0..2.0"), index=index.url, python=str(tmp_path / "v" / "bin" / "python")
    )
    assert listed(listing)["1.2"] == f"needs Python <3, which {PYTHON} is not"
    with pytest.raises(ReproError, match=r"does not start .*correct subject\.python"):
        releases(parse_range("tiny-scale==1.0..2.0"), index=index.url, python=str(tmp_path / "none"))


# -- where it is asked


def test_credentials_serve_and_are_not_printed(index: Index) -> None:
    """They come from the URL, percent-encoded, and stand in no message."""
    index.login = "me:s3/cret@x"
    url = index.url.replace("://", "://me:s3%2Fcret%40x@")
    assert len(releases(parse_range("tiny-scale==1.0..2.0"), index=url)) == 8
    with pytest.raises(ReproError, match=r"has no 1\.0\.5") as there:
        releases(parse_range("tiny-scale==1.0.5..2.0"), index=url)
    with pytest.raises(ReproError, match=r"refuses us \(401\)") as refused:
        releases(parse_range("tiny-scale==1.0..2.0"), index=url.replace("s3", "wrong"))
    assert not any("cret" in str(error.value) for error in (there, refused))


def test_what_the_network_fails_is_no_verdict(index: Index) -> None:
    """An index that fails or is not there, or is none, is the machine's failure."""
    wanted = parse_range("tiny-scale==1.0..2.0")
    for status in (500, 503, 429):
        index.status = status
        with pytest.raises(MachineFailureError, match=f"cannot read http://127.* \\({status}"):
            releases(wanted, index=index.url)
    index.status = 0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = taken.getsockname()[1]
    with pytest.raises(MachineFailureError, match=r"cannot read .*refused"):
        releases(wanted, index=f"http://me:secret@127.0.0.1:{closed}/simple")
    with pytest.raises(ReproError, match="is no index: name one that begins with"):
        releases(wanted, index="ftp://127.0.0.1/simple")


def test_a_folder_serves_as_an_index(index: Index, tmp_path: Path) -> None:
    """A file:// URL is read as pip reads it."""
    folder = tmp_path / "tiny-scale"
    folder.mkdir()
    (folder / "index.html").write_text(page(index.wheels["tiny-scale"], "../files/"))
    listing = releases(parse_range("tiny-scale==1.0..2.0"), index=tmp_path.as_uri())
    assert listing == releases(parse_range("tiny-scale==1.0..2.0"), index=index.url)
    with pytest.raises(ReproError, match="no package other on file://"):
        releases(parse_range("other==1.0..2.0"), index=tmp_path.as_uri())


def test_the_index_is_the_one_that_pip_uses(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, then of the environment, then of pip's file, then PyPI; extra ones add their versions."""
    assert index_urls() == ["https://pypi.org/simple"]
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = http://one.invalid/simple/\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    assert index_urls() == ["http://one.invalid/simple"]
    monkeypatch.setenv("PIP_INDEX_URL", "http://two.invalid/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{index.url} http://three.invalid/simple")
    assert index_urls() == ["http://two.invalid/simple", index.url, "http://three.invalid/simple"]
    assert index_urls("http://four.invalid/simple")[0] == "http://four.invalid/simple"
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PIP_INDEX_URL", empty.as_uri())
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", index.url)
    assert len(releases(parse_range("tiny-scale==1.0..2.0"))) == 8
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ReproError, match="pip is set to use no index"):
        index_urls()


def test_what_decides_files_is_told_apart(tmp_path: Path) -> None:
    """Two settings of pip that lead to other files are two, wherever they stand; credentials are no part of it."""

    def told(index: str | None = None, file: str = "", **variables: str) -> set[str]:
        conf = tmp_path / f"{len(list(tmp_path.iterdir()))}.conf"
        conf.write_text(file)
        return set(sources(index, sys.executable, {"PIP_CONFIG_FILE": str(conf), **variables}, tmp_path / "target"))

    always = told()  # what the machine's own files say
    url, other = "http://a:b@one.invalid/simple", "http://c:d@two.invalid/simple"
    assert told(file=f"[global]\nindex-url = {url}\n") - always == {"index-url=http://one.invalid/simple"}
    assert told(file="[install]\nfind-links = /wheels\n") - always == {"find-links=/wheels"}
    assert told(PIP_PRE="1", UV_INDEX="http://x.invalid") - always == {"pre=1", "UV_INDEX=http://x.invalid"}
    assert told(other, PIP_INDEX_URL=url) - always == {"index-url=http://two.invalid/simple"}
