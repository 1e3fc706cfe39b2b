"""Charts as self-contained SVG in the colours of the light scheme."""

from __future__ import annotations

import json
from typing import Any

from repro.report.palette import LIGHT

__all__ = ["chart_of", "svg_of"]

_FONT = "Arial, Liberation Sans, Helvetica, sans-serif"
"""Of one width wherever it is, so that the room that labels get when a plot is made is what they take when shown."""
_TEXT = {"labelColor": LIGHT["soft"], "titleColor": LIGHT["soft"]}
_CONFIG: dict[str, Any] = {
    "font": _FONT,
    "view": {"stroke": None},
    "background": "transparent",
    "axis": _TEXT | {"gridColor": LIGHT["line"], "domainColor": LIGHT["soft"], "tickColor": LIGHT["soft"]},
    "header": _TEXT,
    "legend": _TEXT,
    "title": {"color": LIGHT["soft"]},
}


def chart_of(rows: list[dict[str, Any]]) -> Any:
    """A chart over rows, to be given marks and encodings."""
    import altair as alt

    return alt.Chart.from_dict({"data": {"values": rows}, "mark": "point"}, validate=False)


def svg_of(chart: Any) -> str:
    """The chart as SVG."""
    import vl_convert

    return str(vl_convert.vegalite_to_svg(json.dumps(chart.configure(**_CONFIG).to_dict())))
