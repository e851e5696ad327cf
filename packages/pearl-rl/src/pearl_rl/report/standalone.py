"""The plots of a report as files that stand alone, with their style and a title inside."""

import re
from collections.abc import Iterator, Sequence
from html import escape

from pearl_rl.report.charts import CHARTS
from pearl_rl.report.page import asset
from pearl_rl.report.run_record import RunRecord
from pearl_rl.report.svg import Plot

_WIDTH = 960
_TITLE_PX, _ROW_PX, _FOOT_PX = 34, 22, 6
_NO_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
"""Characters that no XML may hold; names of files and runs may."""
_EM_PX = 7.2
"""About how wide a letter of a legend is."""


def standalone_plots(run: RunRecord) -> Iterator[tuple[str, str]]:
    """(name, SVG text) of every plot that the run has something for."""
    for chart in CHARTS:
        plot = chart.draw(run, _WIDTH)
        if plot is not None:
            yield chart.key, framed(plot, chart.title, chart.legend)


def framed(plot: Plot, title: str, legend: Sequence[tuple[str, str]] = ()) -> str:
    """A plot with its title, its legend (class, meaning) below that, and its style inside."""
    swatches, x, row = "", 8.0, 0
    for css, words in legend:
        length = 32 + _EM_PX * len(words)
        if x > 8.0 and x + length > plot.width:
            x, row = 8.0, row + 1
        y = _TITLE_PX + row * _ROW_PX
        swatches += (
            f'<rect class="fill {css} swatch" x="{x:.0f}" y="{y}" width="12" height="12"/>'
            f'<text class="axis" x="{x + 17:.0f}" y="{y + 10}">{escape(words)}</text>'
        )
        x += length
    head = _TITLE_PX + ((row + 1) * _ROW_PX if legend else 0)
    width, height = plot.width, plot.height + head + _FOOT_PX
    return _NO_XML.sub(
        "\ufffd",
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(plot.label)}"><style>{escape(asset("page.css"))}{asset("plot.css")}</style>'
        f'<rect width="{width}" height="{height}" style="fill:var(--paper)"/>'
        f'<text x="8" y="23" style="font:650 16px system-ui,sans-serif;fill:var(--ink)">{escape(title)}</text>'
        f'{swatches}<g transform="translate(0 {head})">{"".join(plot.parts)}</g></svg>\n',
    )
