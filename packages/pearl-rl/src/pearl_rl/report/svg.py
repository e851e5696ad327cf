"""Drawing of plots as SVG text: scales, axes, lines, areas, bars. Colours are classes, which the page's style fills."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, isfinite, isnan, log10

Point = tuple[float, float]

_FONT_PX = 12
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_TIME_STEPS = (1.0, 2.0, 5.0, 10.0, 15.0, 30.0)
_TIME_UNITS = ((1.0, "s", 240.0), (60.0, "min", 3 * 3600.0), (3600.0, "h", float("inf")))


def number(value: float) -> str:
    """A number for people: at most three significant digits, thousands separated."""
    if not isfinite(value):
        return "no number" if isnan(value) else "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    digits = max(0, 2 - floor(log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` round values in [low, high]."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / max(1, most)
    power = 10.0 ** floor(log10(raw))
    step = next(power * factor for factor in _STEPS if power * factor >= raw * 0.999999)
    first = ceil(low / step - 1e-9)
    return [n * step for n in range(first, floor(high / step + 1e-9) + 1)]


def time_ticks(low_s: float, high_s: float, most: int) -> list[tuple[float, str]]:
    """Round times in [low, high] seconds, in the unit that suits, with their labels."""
    unit_s, unit, _ = next(entry for entry in _TIME_UNITS if high_s <= entry[2])
    if unit == "h":
        values = ticks(low_s / unit_s, high_s / unit_s, most)
    else:
        raw = (high_s - low_s) / unit_s / max(1, most)
        step = next((s for s in _TIME_STEPS if s >= raw), _TIME_STEPS[-1] * ceil(raw / _TIME_STEPS[-1]))
        values = [n * step for n in range(ceil(low_s / unit_s / step), floor(high_s / unit_s / step + 1e-9) + 1)]
    return [(value * unit_s, f"{number(value)} {unit}") for value in values]


@dataclass(slots=True)
class Plot:
    """One drawing of `width` × `height` pixels with a frame for data. Data coordinates, y upwards."""

    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]
    label: str
    """What it shows, for those who cannot see it."""
    left: int = 44
    right: int = 12
    top: int = 10
    bottom: int = 24
    parts: list[str] = field(default_factory=list[str])

    def px(self, x: float) -> float:
        """Horizontal position in pixels."""
        low, high = self.x
        inner = self.width - self.left - self.right
        return self.left + inner * ((x - low) / (high - low) if high > low else 0.5)

    def py(self, y: float) -> float:
        """Vertical position in pixels."""
        low, high = self.y
        inner = self.height - self.top - self.bottom
        return self.height - self.bottom - inner * ((y - low) / (high - low) if high > low else 0.5)

    # ---- axes -------------------------------------------------------------------------------------------------------

    def y_axis(self, title: str = "", *, right: bool = False, scale: float = 1.0, grid: bool = True) -> None:
        """Ticks and grid lines; `scale` turns data into the axis' own unit (a second axis on the right)."""
        low, high = self.y
        room = max(2, (self.height - self.top - self.bottom) // 36)
        for value in ticks(low * scale, high * scale, room):
            y = self.py(value / scale)
            if grid:
                self.parts.append(
                    f'<line class="grid" x1="{self.left}" x2="{self.width - self.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
                )
            x = self.width - self.right + 6 if right else self.left - 6
            self.text(x, y + 4, number(value), anchor="start" if right else "end")
        if title:
            x = self.width - 2 if right else 2
            self.text(x, self.top - 6, title, anchor="end" if right else "start", css="axis title")

    def time_axis(self) -> None:
        """The run's clock along the bottom."""
        for value, text in time_ticks(*self.x, most=max(2, (self.width - self.left - self.right) // 90)):
            self.x_tick(value, text)

    def x_axis(self, title: str = "") -> None:
        """Numbers along the bottom."""
        for value in ticks(*self.x, max(2, (self.width - self.left - self.right) // 70)):
            if value == round(value):
                self.x_tick(value, number(value))
        if title:
            self.text(self.width - self.right, self.top - 6, f"by {title}", anchor="end", css="axis title")

    def x_tick(self, value: float, text: str) -> None:
        """One mark along the bottom."""
        x, y = self.px(value), self.height - self.bottom
        self.parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 4}"/>')
        half = len(text) * _FONT_PX * 0.28
        anchor = "end" if x + half > self.width else "start" if x - half < 0 else "middle"
        self.text(x, y + 17, text, anchor=anchor)

    # ---- marks ------------------------------------------------------------------------------------------------------

    def line(self, points: Sequence[Point], css: str, *, dots: bool = False) -> None:
        """A polyline through the points."""
        if len(points) > 1:
            path = " ".join(f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in points)
            self.parts.append(f'<polyline class="line {css}" points="{path}"/>')
        if dots or len(points) == 1:
            for x, y in points:
                self.parts.append(f'<circle class="dot {css}" cx="{self.px(x):.1f}" cy="{self.py(y):.1f}" r="2.5"/>')

    def band(self, edges: Sequence[tuple[float, float, float]], end: float, css: str) -> None:
        """The area between two step functions: (from x on, lower, upper), up to `end`."""
        if not edges:
            return
        upper, lower = [], []
        edges = self._apart(edges)
        for (x, low, high), following in zip(edges, [*edges[1:], (end, 0.0, 0.0)], strict=True):
            a, b = self.px(x), self.px(max(x, following[0]))
            upper.append(f"{a:.1f},{self.py(high):.1f} {b:.1f},{self.py(high):.1f}")
            lower.append(f"{b:.1f},{self.py(low):.1f} {a:.1f},{self.py(low):.1f}")
        self.parts.append(f'<polygon class="fill {css}" points="{" ".join(upper)} {" ".join(reversed(lower))}"/>')

    def _apart(self, edges: Sequence[tuple[float, float, float]]) -> Sequence[tuple[float, float, float]]:
        """Without those that end where they begin, to the half pixel."""
        kept = [edges[0]]
        for edge in edges[1:]:
            if self.px(edge[0]) - self.px(kept[-1][0]) < 0.5:
                kept[-1] = (kept[-1][0], edge[1], edge[2])
            else:
                kept.append(edge)
        return kept

    def bar(self, x0: float, x1: float, y0: float, y1: float, css: str, title: str = "") -> None:
        """A rectangle in data coordinates; `title` is its tooltip."""
        a, b = sorted((self.px(x0), self.px(x1)))
        c, d = sorted((self.py(y0), self.py(y1)))
        self.rect(a, c, b - a, d - c, css, title)

    def rect(self, x: float, y: float, width: float, height: float, css: str, title: str = "") -> None:
        """A rectangle in pixels."""
        tip = f"<title>{escape(title)}</title>" if title else ""
        self.parts.append(
            f'<rect class="fill {css}" x="{x:.1f}" y="{y:.1f}" width="{max(0.4, width):.1f}" '
            f'height="{max(0.4, height):.1f}"' + (f">{tip}</rect>" if tip else "/>")
        )

    def dot(self, x: float, y: float, css: str, title: str = "") -> None:
        """A point with a tooltip."""
        tip = f"<title>{escape(title)}</title>" if title else ""
        self.parts.append(f'<circle class="dot {css}" cx="{self.px(x):.1f}" cy="{self.py(y):.1f}" r="4">{tip}</circle>')

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", css: str = "axis") -> None:
        """Text at a position in pixels."""
        self.parts.append(f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def svg(self, css: str = "", *, cursor: bool = False) -> str:
        """The drawing; `cursor` lets the page's script move a line over it."""
        data = ""
        if cursor:
            low, high = self.x
            data = (
                f' data-x0="{low:.3f}" data-x1="{high:.3f}" data-left="{self.left}" '
                f'data-right="{self.width - self.right}" data-top="{self.top}" '
                f'data-bottom="{self.height - self.bottom}"'
            )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="plot {css}" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" aria-label="{escape(self.label)}"{data}>'
            f"{''.join(self.parts)}</svg>"
        )
