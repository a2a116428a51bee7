"""Groups of horizontal bars as SVG, with nothing to install."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree.ElementTree import Element, SubElement, tostring

LEFT, WIDTH, BAR, GAP, TOP = 330, 560, 11, 10, 64
COLOURS = ("#1f5fae", "#9aa3ad", "#d98a1f", "#5c9a55", "#a05195")


def bar_chart(title: str, groups: Mapping[str, Mapping[str, float]], mark: float, marked: str) -> str:
    """A bar for each share of each group, the same colour for the same name; a line at `mark`, which says `marked`."""
    names = list(dict.fromkeys(name for shares in groups.values() for name in shares))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    scale = WIDTH / max([1.0, *(share for shares in groups.values() for share in shares.values())])
    height = TOP + sum(len(shares) * BAR + GAP for shares in groups.values()) + GAP
    size = {"width": str(LEFT + WIDTH + 70), "height": str(height)}
    svg = Element("svg", xmlns="http://www.w3.org/2000/svg", attrib=size | {"font-family": "sans-serif"})
    SubElement(svg, "rect", width="100%", height="100%", fill="#ffffff")
    _text(svg, title, 12, 22, "15")
    for index, name in enumerate(names):
        _box(svg, 12 + 150 * index, 36, 10, colours[name])
        _text(svg, name, 28 + 150 * index, 45)
    y = TOP
    for group, shares in groups.items():
        _text(svg, group, 12, y + 9)
        for name, share in shares.items():
            _box(svg, LEFT, y, share * scale, colours[name])
            _text(svg, f"{share:.0%}", LEFT + share * scale + 4, y + 9)
            y += BAR
        y += GAP
    x = f"{LEFT + mark * scale:.1f}"
    SubElement(svg, "path", d=f"M{x} {TOP - 6}V{height - GAP}", stroke="#b02a2a")
    _text(svg, marked, LEFT + mark * scale + 4, TOP - 4)
    return tostring(svg, encoding="unicode")


def _box(svg: Element, x: float, y: float, width: float, colour: str) -> None:
    SubElement(svg, "rect", x=f"{x:.1f}", y=f"{y:.1f}", width=f"{width:.1f}", height=str(BAR - 1), fill=colour)


def _text(svg: Element, words: str, x: float, y: float, size: str = "11") -> None:
    SubElement(svg, "text", attrib={"x": f"{x:.1f}", "y": f"{y:.1f}", "font-size": size}).text = words
