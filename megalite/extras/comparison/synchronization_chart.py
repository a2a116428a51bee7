"""Picture of losses against steps, bytes and simulated time, as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from xml.etree.ElementTree import Element, SubElement, tostring

from megalite.extras.comparison.synchronization import Curve, Link

LEFT, TOP, WIDTH, HEIGHT, GAP, LEGEND = 50.0, 40.0, 300.0, 300.0, 60.0, 150.0
GREY = "#5f6770"
COLOURS = ("#1d2125", "#1f5fae", "#d98a1f", "#5c9a55", "#a05195", "#c8443c", "#3aa6a6")
DASHES = ("", "6 3", "2 3")
POINTS = 200


def chart(curves: Mapping[str, Curve], link: Link) -> str:
    """Return three pictures side by side, and what each line means. Losses are means over a few steps."""
    width, height = LEFT + 3 * (WIDTH + GAP) + LEGEND, max(TOP + HEIGHT + 50, TOP + 18 * len(curves) + 20)
    svg = Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width:.0f} {height:.0f}")
    svg.attrib |= {"role": "img", "font-family": "sans-serif", "font-size": "12"}
    SubElement(svg, "title").text = "Loss of each method against steps, bytes and simulated time"
    SubElement(svg, "rect", width="100%", height="100%", fill="#ffffff")
    losses = {name: [curve.loss_after(step + 1) for step in range(len(curve.losses))] for name, curve in curves.items()}
    shown = [loss for each in losses.values() for loss in each if math.isfinite(loss)]
    low, high = min(shown, default=0.0), min(max(shown, default=1.0), 1.2 * max(each[0] for each in losses.values()))
    panels: list[tuple[str, Callable[[Curve], Sequence[float]]]] = [
        ("steps", lambda curve: range(1, len(curve.losses) + 1)),
        (
            "megabytes sent by a rank (logarithmic)",
            lambda curve: [max(1e-3, each / 1e6) for each in curve.total_sent()],
        ),
        (f"seconds, {link.alpha:g} s a step and {8e-6 / link.beta:,.4g} Mbit/s", lambda curve: curve.times(link)),
    ]
    for number, (words, positions) in enumerate(panels):
        places = {name: positions(curve) for name, curve in curves.items()}
        _panel(svg, LEFT + number * (WIDTH + GAP), words, places, losses, (low, high), logarithmic=number == 1)
    for index, name in enumerate(curves):
        x, y = LEFT + 3 * (WIDTH + GAP) - 20, TOP + 18 * index
        _line(svg, [f"{x:.1f} {y:.1f}", f"{x + 30:.1f} {y:.1f}"], index)
        _write(svg, name, x + 38, y + 4)
    return tostring(svg, encoding="unicode")


def _panel(
    svg: Element,
    left: float,
    words: str,
    places: Mapping[str, Sequence[float]],
    losses: Mapping[str, Sequence[float]],
    bounds: tuple[float, float],
    *,
    logarithmic: bool,
) -> None:
    scale = math.log10 if logarithmic else float
    low, high = bounds
    first = scale(min(each[0] for each in places.values())) if logarithmic else 0.0
    last = scale(max(each[-1] for each in places.values()))

    def across(value: float) -> float:
        return left + WIDTH * (scale(value) - first) / (last - first or 1.0)

    def down(loss: float) -> float:
        return TOP + HEIGHT * (high - min(loss, high)) / (high - low or 1.0)

    _line(svg, [f"{left:.1f} {TOP:.1f}", f"{left:.1f} {TOP + HEIGHT:.1f}", f"{left + WIDTH:.1f} {TOP + HEIGHT:.1f}"])
    for loss in _marks(low, high):
        _write(svg, f"{loss:g}", left - 6, down(loss) + 4, "end", GREY)
    powers = [10.0**power for power in range(math.ceil(first), math.floor(last) + 1)] if logarithmic else []
    for value in powers or _marks(0.0, last):
        _write(svg, f"{value:g}", across(value), TOP + HEIGHT + 16, "middle", GREY)
    _write(svg, words, left + WIDTH / 2, TOP + HEIGHT + 36, "middle", GREY)
    _write(svg, "loss", left, TOP - 12, "middle", GREY)
    for index, (name, positions) in enumerate(places.items()):
        every = max(1, len(positions) // POINTS)
        chosen = sorted({*range(0, len(positions), every), len(positions) - 1})
        pairs = [(positions[at], losses[name][at]) for at in chosen if math.isfinite(losses[name][at])]
        _line(svg, [f"{across(x):.1f} {down(y):.1f}" for x, y in pairs], index)


def _marks(low: float, high: float) -> list[float]:
    """Return a few round numbers between two."""
    rough = (high - low) / 4 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [unit * number for number in range(math.ceil(low / unit), math.floor(high / unit) + 1)]


def _line(svg: Element, places: Sequence[str], index: int | None = None) -> None:
    """Draw a line in the colour and the dashes of a method, or an axis."""
    if not places:
        return
    colour = GREY if index is None else COLOURS[index % len(COLOURS)]
    path = SubElement(svg, "path", d="M" + "L".join(places), stroke=colour, fill="none")
    if index is not None and (dashes := DASHES[index // len(COLOURS) % len(DASHES)]):
        path.set("stroke-dasharray", dashes)


def _write(svg: Element, words: str, x: float, y: float, anchor: str = "start", colour: str = "#1d2125") -> None:
    attributes = {"x": f"{x:.1f}", "y": f"{y:.1f}", "fill": colour, "text-anchor": anchor}
    SubElement(svg, "text", attrib=attributes).text = words
