"""`repro report publish`: the static site of all nights and pull requests."""

from __future__ import annotations

from pathlib import Path

import click

from repro.output import emit, json_option

__all__ = ["publish"]


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder for the site; an earlier one in it is replaced.",
)
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    default=Path("golden/nights"),
    show_default=True,
    help="Folder of the nights' results.",
)
@click.option(
    "--pull",
    "pulls",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A report.json of `repro report pr`; may be repeated.",
)
@click.option("--title", help="Title of the first page.")
@click.option("--repository", metavar="URL", default="", help="Such as https://github.com/o/r: makes commits links.")
@json_option
def publish(
    out: Path, results: Path, pulls: tuple[Path, ...], title: str | None, repository: str, as_json: bool
) -> int:
    """Write a static site of every night and pull request into a folder.

    It needs no server and no network: open its index.html. The same results give the same bytes.
    """
    from repro.site.build import DEFAULT_TITLE, Options, build
    from repro.site.folder import check, replace
    from repro.site.results import read_results
    from repro_golden.base.extras import require

    require("the site", "report")
    options = Options(title or DEFAULT_TITLE, str(results), [str(pull) for pull in pulls], repository)
    check(out)
    site_results = read_results(results, pulls)
    files = build(site_results, options)
    replace(out, files)
    counts = {
        "nights": len(site_results.runs),
        "cases": sum(name.startswith("cases/") for name in files),
        "comparisons": len(site_results.comparisons),
        "files": len(files),
        "bytes": sum(len(content) for content in files.values()),
    }
    index = out / "index.html"
    data = counts | {"index": str(index), "paths": sorted(str(out / name) for name in files)}
    data |= {"newest": site_results.newest, "reproduce": (again := options.command_into(str(out)))}
    summary = ", ".join(
        f"{counts[key]} {key if counts[key] != 1 else key[:-1]}" for key in ("nights", "cases", "comparisons")
    )
    emit(as_json, data, f"{summary}, up to {site_results.newest}\npage: {index}\nreproduce with: {again}")
    return 0
