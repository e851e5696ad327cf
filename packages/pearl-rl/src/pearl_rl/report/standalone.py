"""The plots of a report as files that stand alone, with their style and a title inside."""

from collections.abc import Iterator, Sequence
from html import escape

from pearl_rl.report.charts import CHARTS
from pearl_rl.report.page import asset
from pearl_rl.report.run_record import RunRecord
from pearl_rl.report.svg import Plot

_WIDTH = 960
_HEAD_PX = 34


def standalone_plots(run: RunRecord) -> Iterator[tuple[str, str]]:
    """(name, SVG text) of every plot that the run has something for."""
    for chart in CHARTS:
        plot = chart.draw(run, _WIDTH)
        if plot is not None:
            yield chart.key, framed(plot, chart.title, chart.legend)


def framed(plot: Plot, title: str, legend: Sequence[tuple[str, str]] = ()) -> str:
    """A plot with its title, its legend (class, meaning) and its style inside."""
    width, height = plot.width, plot.height + _HEAD_PX
    swatches, x = "", 14.0 + 9.5 * len(title)
    for css, words in legend:
        swatches += (
            f'<rect class="fill {css} swatch" x="{x:.0f}" y="12" width="12" height="12"/>'
            f'<text class="axis" x="{x + 17:.0f}" y="22">{escape(words)}</text>'
        )
        x += 32 + 7 * len(words)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(plot.label)}"><style>{escape(asset("page.css"))}'
        ".swatch.ink { fill: var(--ink); } .swatch.predicted { fill: var(--predicted); } "
        ".swatch.cost { fill: var(--cost); }</style>"
        f'<rect width="{width}" height="{height}" style="fill:var(--paper)"/>'
        f'<text x="8" y="23" style="font:650 16px system-ui,sans-serif;fill:var(--ink)">{escape(title)}</text>'
        f'{swatches}<g transform="translate(0 {_HEAD_PX})">{"".join(plot.parts)}</g></svg>\n'
    )
