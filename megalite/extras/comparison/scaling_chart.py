"""Picture of the speed-up over ranks, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element, SubElement, tostring

from megalite.extras.comparison.scaling import Point

LEFT, TOP, SIDE, BOTTOM = 60.0, 56.0, 360.0, 48.0
COLOURS = {"strong": "#1f5fae", "weak": "#d98a1f"}


def chart(series: Mapping[str, Sequence[Point]]) -> str:
    """Return the speed-up of each series over its ranks: lines with dots, dashed as the planner expects, grey ideal."""
    points = [point for each in series.values() for point in each]
    first, most = points[0].ranks, max(point.ranks for point in points)
    highest = max(most / first, *(point.speed_up for point in points))
    width, height = LEFT + SIDE + 30, TOP + SIDE + BOTTOM
    svg = Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width:.0f} {height:.0f}")
    svg.attrib |= {"role": "img", "font-family": "sans-serif", "font-size": "12"}
    SubElement(svg, "title").text = "Speed-up over ranks"
    SubElement(svg, "rect", width="100%", height="100%", fill="#ffffff")

    def place(ranks: float, speed_up: float) -> str:
        return f"{LEFT + SIDE * ranks / most:.1f} {TOP + SIDE * (1 - speed_up / highest):.1f}"

    _path(svg, [place(0, 0), place(most, 0)], "#5f6770")
    _path(svg, [place(0, 0), place(0, highest)], "#5f6770")
    _path(svg, [place(first, 1), place(most, most / first)], "#b4bac0")
    for ranks in sorted({point.ranks for point in points}):
        x, y = place(ranks, 0).split()
        _write(svg, str(ranks), x, f"{float(y) + 16:.1f}", "middle")
        x, y = place(0, ranks / first).split()
        _write(svg, f"{ranks / first:g}", f"{float(x) - 6:.1f}", f"{float(y) + 4:.1f}", "end")
    _write(svg, "ranks", f"{LEFT + SIDE / 2:.1f}", f"{height - 10:.1f}", "middle")
    for number, (kind, each) in enumerate(series.items()):
        colour = COLOURS[kind]
        _write(svg, f"{kind} scaling", f"{LEFT + 150 * number:.1f}", "22", "start", colour)
        _path(svg, [place(point.ranks, point.speed_up) for point in each], colour)
        for point in each:
            x, y = place(point.ranks, point.speed_up).split()
            SubElement(svg, "circle", cx=x, cy=y, r="4", fill=colour)
        expected = [
            place(point.ranks, point.speed_up * point.seconds / point.predicted) for point in each if point.predicted
        ]
        if len(expected) > 1:
            _path(svg, expected, colour, dashed=True)
    _write(svg, "dashed: the planner; grey: ideal", f"{LEFT:.1f}", "40", "start", "#5f6770")
    return tostring(svg, encoding="unicode")


def _path(svg: Element, places: Sequence[str], colour: str, *, dashed: bool = False) -> None:
    path = SubElement(svg, "path", d="M" + "L".join(places), stroke=colour, fill="none")
    if dashed:
        path.set("stroke-dasharray", "5 4")


def _write(svg: Element, words: str, x: str, y: str, anchor: str, colour: str = "#1d2125") -> None:
    SubElement(svg, "text", attrib={"x": x, "y": y, "fill": colour, "text-anchor": anchor}).text = words
