"""Pictures as SVG, of boxes, lines, dots, words, legends and axes, and HTML pages that reference no other files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from xml.etree.ElementTree import Element, SubElement, tostring

INK, GREY, PALE = "#1d2125", "#5f6770", "#b4bac0"
DIGIT = 7.0
"""Width of a digit."""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="color-scheme" content="{schemes}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


class Picture:
    """SVG of a size in pixels, on white. Later marks lie above earlier ones, and all text is escaped.

    Marks have further attributes by name: `class_` and `stroke_width` set the attributes class and stroke-width. Words
    have the class ink and the background the class paper, for a `style` that has other colours for them.
    """

    def __init__(
        self, title: str, width: float, height: float, summary: str = "", style: str = "", top: float = 0.0
    ) -> None:
        """Begin a picture, whose upper edge is at y = `top`. `summary` describes it to those who do not see it."""
        size = {"width": number(width), "height": number(height)}
        self._root = Element("svg", xmlns="http://www.w3.org/2000/svg", attrib=size)
        self._root.attrib |= {"viewBox": f"0 {number(top)} {size['width']} {size['height']}", "role": "img"}
        self._root.attrib |= {"aria-label": title, "font-size": "12"}
        self._root.set("font-family", "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif")
        self.add("title", title)
        if summary:
            self.add("desc", summary)
        if style:
            self.add("style", style)
        self.add("rect", y=top, width="100%", height="100%", fill="#ffffff", class_="paper")

    def __str__(self) -> str:
        return tostring(self._root, encoding="unicode")

    def add(
        self, tag: str, text: str | None = None, inside: Element | None = None, **attributes: str | float
    ) -> Element:
        """Add an element to the picture, or to another element of it."""
        child = SubElement(self._root if inside is None else inside, tag)
        for name, value in attributes.items():
            child.set(name.rstrip("_").replace("_", "-"), value if isinstance(value, str) else number(value))
        child.text = text
        return child

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        colour: str,
        inside: Element | None = None,
        **attributes: str | float,
    ) -> None:
        """Draw a box, given its corner at the upper left."""
        self.add("rect", None, inside, x=x, y=y, width=width, height=height, fill=colour, **attributes)

    def line(
        self, points: Iterable[tuple[float, float]], colour: str, dashes: str = "", **attributes: str | float
    ) -> None:
        """Draw a line through points; none if there are no points."""
        path = "L".join(f"{number(x)} {number(y)}" for x, y in points)
        if path:
            drawn = self.add("path", None, None, d=f"M{path}", stroke=colour, fill="none", **attributes)
            if dashes:
                drawn.set("stroke-dasharray", dashes)

    def write(
        self,
        text: str,
        x: float,
        y: float,
        anchor: str = "start",
        colour: str = INK,
        inside: Element | None = None,
        **attributes: str | float,
    ) -> None:
        """Write words that start, end or have their middle at x. `y` is that of their base line."""
        self.add("text", text, inside, x=x, y=y, text_anchor=anchor, fill=colour, class_="ink", **attributes)

    def headline(self, text: str, x: float, y: float) -> None:
        """Write the title of a picture."""
        self.write(text, x, y, font_size="14", font_weight="600")

    def legend(self, entries: Iterable[tuple[Sequence[str], str]], x: float, y: float) -> None:
        """Draw colours, with the words that they stand for, side by side."""
        for colours, words in entries:
            for colour in colours:
                self.box(x, y, 14, 14, colour)
                x += 14
            self.write(words, x + 6, y + 11)
            x += 24 + DIGIT * len(words)

    def axes(
        self,
        across: Axis,
        up: Axis,
        marks: Sequence[Iterable[float]],
        words: tuple[str, str],
        texts: tuple[Callable[[float], str], Callable[[float], str]] = ("{:g}".format, "{:g}".format),
    ) -> None:
        """Draw two axes, with marks across and up, and the words for both: below the one, and above the other.

        `texts` return the words of a mark across and up.
        """
        self.line([(across.start, up.end), (across.start, up.start), (across.end, up.start)], GREY, class_="axis")
        for value in marks[0]:
            self.write(texts[0](value), across(value), up.start + 16, "middle", GREY)
        for value in marks[1]:
            self.write(texts[1](value), across.start - 6, up(value) + 4, "end", GREY)
        self.write(words[0], (across.start + across.end) / 2, up.start + 36, "middle", GREY)
        self.write(words[1], across.start - 30, up.end - 12, colour=GREY)


@dataclass(frozen=True)
class Axis:
    """Places in pixels, from `start` to `end`, of values from `low` to `high`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Return the place of a value."""
        low, high, value = (math.log10(each) if self.logarithmic else each for each in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (value - low) / (high - low or 1.0)

    def marks(self) -> list[float]:
        """Return a few round values; powers of ten on a logarithmic axis, if there are any."""
        if self.logarithmic:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            if powers:
                return [10.0**power for power in powers]
        step = round_step((self.high - self.low) / 4 or 1.0)
        return [step * at for at in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def round_step(least: float) -> float:
    """Return the smallest number that is at least `least`, and 1, 2 or 5 times a power of ten."""
    power = 10.0 ** max(math.floor(math.log10(least)), -300)  # a smaller one is 0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def number(value: float) -> str:
    """Return a number with at most two decimal places."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def page(title: str, style: str, body: str, schemes: str = "light") -> str:
    """Return an HTML page. `body` is HTML, and `schemes` what its colours are made for: light, dark, or both."""
    return _PAGE.format(title=escape(title), style=style, body=body, schemes=schemes)
