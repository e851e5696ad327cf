"""Plots as PNG: draws the SVG text that `pearl_rl.report.standalone` makes, in the page's light colours."""

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final
from xml.etree import ElementTree

from PIL import Image, ImageDraw, ImageFont

from pearl_rl.report.page import asset

SCALE: Final = 2
"""Pixels of the image for one of the drawing."""
_FINER: Final = 2
"""How much finer it is drawn than kept, so that edges are smooth."""
_RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
_SELECTOR = re.compile(r"([a-z]*)((?:\.[a-z]+)*)")
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}
Style = dict[str, str]
Colour = tuple[int, int, int]


def png(svg: str) -> bytes:
    """The image of a plot, `SCALE` times as wide and high as the drawing says."""
    root = ElementTree.fromstring(svg)
    size = (int(float(root.attrib["width"])), int(float(root.attrib["height"])))
    paper = _colour("var(--paper)")
    assert paper is not None
    image = Image.new("RGB", (size[0] * SCALE * _FINER, size[1] * SCALE * _FINER), paper)
    pen = _Pen(ImageDraw.Draw(image), paper, SCALE * _FINER)
    for element, down in _elements(root, 0.0):
        pen.draw(element, down)
    kept = image.resize((size[0] * SCALE, size[1] * SCALE), Image.Resampling.LANCZOS)
    written = io.BytesIO()
    kept.save(written, "PNG")
    return written.getvalue()


def _elements(parent: ElementTree.Element, down: float) -> Iterator[tuple[ElementTree.Element, float]]:
    """Every mark, and how far the groups around it move it down."""
    for element in parent:
        if element.tag.endswith("}g"):
            moved = re.fullmatch(r"translate\(0 ([\d.]+)\)", element.get("transform", ""))
            yield from _elements(element, down + (float(moved[1]) if moved else 0.0))
        else:
            yield element, down


@dataclass(frozen=True, slots=True)
class _Pen:
    """Draws marks of a drawing, `scale` pixels for one of its own."""

    on: ImageDraw.ImageDraw
    paper: Colour
    scale: int

    def draw(self, element: ElementTree.Element, down: float) -> None:
        """Draw one mark, `down` lower than it says."""
        kind, style = element.tag.rpartition("}")[2], _style(element)
        fill, stroke = self._ink(style, "fill"), self._ink(style, "stroke")
        width = max(1, round(float(style.get("stroke-width", "1")) * self.scale))
        if kind == "rect":
            (x, y), (w, h) = self._at(element, "x", "y", down), self._at(element, "width", "height", 0.0)
            self.on.rectangle((x, y, max(x, x + w - 1), max(y, y + h - 1)), fill=fill)
        elif kind == "circle":
            (x, y), radius = self._at(element, "cx", "cy", down), float(element.get("r", "0")) * self.scale
            if fill is not None:
                self.on.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
        elif kind == "line":
            ends = (*self._at(element, "x1", "y1", down), *self._at(element, "x2", "y2", down))
            self.on.line(ends, fill=stroke, width=width)
        elif kind in ("polyline", "polygon"):
            points = [
                (float(x) * self.scale, (float(y) + down) * self.scale)
                for x, y in (pair.split(",") for pair in element.get("points", "").split())
            ]
            if kind == "polygon":
                self.on.polygon(points, fill=fill)
            else:
                self.on.line(points, fill=stroke, width=width, joint="curve")
        elif kind == "text" and element.text:
            anchor = _ANCHORS[element.get("text-anchor", "start")]
            font = _font(round(_font_px(style) * self.scale))
            self.on.text(self._at(element, "x", "y", down), element.text, fill=fill, font=font, anchor=anchor)

    def _at(self, element: ElementTree.Element, x: str, y: str, down: float) -> tuple[float, float]:
        return float(element.get(x, "0")) * self.scale, (float(element.get(y, "0")) + down) * self.scale

    def _ink(self, style: Style, name: str) -> Colour | None:
        """A colour as it looks on the paper."""
        colour, opacity = _colour(style.get(name, "none")), float(style.get("opacity", "1"))
        if colour is None:
            return None
        red, green, blue = (round(c * opacity + p * (1.0 - opacity)) for c, p in zip(colour, self.paper, strict=True))
        return red, green, blue


def _style(element: ElementTree.Element) -> Style:
    """What the page's style and the element's own say of it."""
    kind, classes = element.tag.rpartition("}")[2], set(element.get("class", "").split())
    found: dict[str, str] = {}
    for _, tag, needed, properties in _rules():
        if tag in ("", kind) and needed <= classes:
            found |= properties
    return found | _properties(element.get("style", ""))


@cache
def _rules() -> tuple[tuple[int, str, frozenset[str], Style], ...]:
    """(weight, element, classes, properties) of the style's rules for marks, the weightiest last."""
    rules = []
    for selectors, body in _RULE.findall(f"{asset('page.css')} {asset('plot.css')}"):
        for selector in selectors.split(","):
            parts = _SELECTOR.fullmatch(selector.strip())
            if parts and parts[2]:
                classes = frozenset(parts[2].split(".")[1:])
                rules.append((2 * len(classes) + bool(parts[1]), parts[1], classes, _properties(body)))
    return tuple(sorted(rules, key=lambda rule: rule[0]))


def _properties(body: str) -> Style:
    pairs = (item.split(":", 1) for item in body.split(";") if ":" in item)
    return {name.strip(): value.strip() for name, value in pairs}


@cache
def _colour(value: str) -> Colour | None:
    """The colour of a style's value; None for none."""
    named = re.fullmatch(r"var\(--([a-z]+)\)", value)
    if named:
        light = _RULE.search(asset("page.css"))
        assert light is not None
        return _colour(_properties(light[2])[f"--{named[1]}"])
    if not value.startswith("#"):
        return None
    digits = value[1:] if len(value) == 7 else "".join(2 * digit for digit in value[1:])
    return int(digits[:2], 16), int(digits[2:4], 16), int(digits[4:], 16)


def _font_px(style: Style) -> float:
    given = re.search(r"([\d.]+)px", style.get("font-size") or style.get("font", ""))
    return float(given[1]) if given else 12.0


@cache
def _font(px: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(px)
