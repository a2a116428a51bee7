"""Pictures of charts as SVG: curves with marks, and heat maps."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from megalite.extras.report.charts import MOST_LINES, PARTS, Chart, Line, is_dotted, is_loss
from megalite.extras.report.figures import DECIDED, LEFT_OUT, NOT_FINITE, RESTARTED, SAVED, SKIPPED, Mark
from megalite.svg import GREY, PALE, Axis, Picture

COLOURS = ("#1f5fae", "#c2570c", "#2f7d4f", "#8a4ca6", "#b3352c", "#0e7c86", "#8a6d00", "#5f6770")
"""Colours of lines on white; the page has others for dark screens, by the classes c0 to c7."""
DASHES = ("", "7 3", "2 3", "9 3 2 3")
MARK_COLOURS = {
    **dict.fromkeys((SKIPPED, NOT_FINITE), "#b3352c"),
    **dict.fromkeys((DECIDED, LEFT_OUT), "#c2570c"),
    RESTARTED: "#1f5fae",
    SAVED: "#5f6770",
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360.0, 230.0, 54.0, 20.0, 30.0, 46.0
"""Sizes of a chart in pixels: as wide as a phone."""
LOGARITHMIC_FROM = 300.0
"""Ratio of the greatest to the least value of a chart from which its axis is logarithmic."""


def short(value: float, digits: int = 4) -> str:
    """Return a number in short, as a mark of an axis has it: 1.5k, 20M, 3B."""
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.{digits}g}{letter}"
    return f"{value:.{digits}g}"


def mark_text(values: Sequence[float]) -> Callable[[float], str]:
    """Return the text of the marks of an axis, with as many digits as tell them apart."""
    digits = next((each for each in range(3, 12) if len({short(value, each) for value in values}) == len(values)), 12)
    return partial(short, digits=digits)


def look(chart: Chart, line: Line) -> tuple[int, str]:
    """Return the number of a line's colour and its dashes: a colour a run, or a figure if there is one run."""
    keys = list(dict.fromkeys(each.key for each in chart.lines))
    several = len({each.run for each in chart.lines}) > 1
    colour, dashes = (line.run, keys.index(line.key)) if several else (keys.index(line.key), 0)
    return colour % len(COLOURS), DASHES[dashes % len(DASHES)]


def picture(chart: Chart, unit: str) -> str:
    """Return a chart over a unit as SVG."""
    return _heat_map(chart, unit) if chart.is_heat_map else _curves(chart, unit)


def _curves(chart: Chart, unit: str) -> str:
    """Draw lines with their trends, and marks below them."""
    drawn = [
        (line, [(x, y) for x, y in zip(line.places[unit], line.values, strict=True) if math.isfinite(x)])
        for line in chart.lines
    ]
    across, up = _axes(chart, [points for _, points in drawn])
    svg = Picture(f"{chart.title} over {unit}", WIDTH, HEIGHT, _summary(chart))
    svg.headline(chart.title, 4, 16)
    svg.axes(across, up, (across.marks(), up.marks()), (unit, ""), (mark_text(across.marks()), mark_text(up.marks())))
    clipped = False
    of_steps = _StepPlaces(chart, unit)
    for number, mark in chart.marks:
        place = of_steps(number, mark.step)
        if place is not None and across.low <= place <= across.high:
            _draw_mark(svg, mark, across(place), up)
    for line, points in drawn:
        colour, dashes = look(chart, line)
        shown = [(across(x), up(min(max(y, up.low), up.high))) for x, y in points]
        clipped = clipped or any(y > up.high for _, y in points)
        if is_dotted(chart.base) or len(shown) == 1:
            for x, y in shown:
                svg.box(x - 1.5, y - 1.5, 3, 3, COLOURS[colour], class_=f"f{colour}")
            continue
        faint = 0.4 if line.trend else 1.0
        svg.line(
            shown, COLOURS[colour], dashes, class_=f"c{colour}", stroke_width=1.2 if line.trend else 1.5,
            stroke_linejoin="round", stroke_opacity=faint,
        )  # fmt: skip
        trend = zip(line.trend_places.get(unit, ()), line.trend, strict=True) if line.trend else ()
        svg.line(
            [(across(x), up(min(y, up.high))) for x, y in trend if math.isfinite(x)],
            COLOURS[colour], dashes, class_=f"c{colour}", stroke_width=2, stroke_linejoin="round",
        )  # fmt: skip
    if clipped:
        svg.write("▲ goes on above", WIDTH - RIGHT, TOP + 8, "end", GREY, font_size="10")
    _add_strips(svg, drawn, across, up, unit)
    return str(svg)


def _axes(chart: Chart, drawn: Iterable[Sequence[tuple[float, float]]]) -> tuple[Axis, Axis]:
    """Return the axes of lines. A loss is shown from what it is after the first steps; it may begin above."""
    points = [point for each in drawn for point in each]
    xs = [x for x, _ in points]
    low, high = min(xs, default=0.0), max(xs, default=1.0)
    across = Axis(low, high if high > low else low + 1, LEFT, WIDTH - RIGHT)
    late = [y for x, y in points if x >= low + 0.04 * (high - low)] if is_loss(chart.base) else []
    values = late or [y for _, y in points]
    least, most = min((y for _, y in points), default=0.0), max(values, default=1.0)
    is_level = not is_loss(chart.base) and chart.base != "consumed_tokens"
    logarithmic = least > 0 and is_level and most / least > LOGARITHMIC_FROM
    if most <= least:
        most, least = most + (abs(most) or 1.0) * 0.1, least - (abs(least) or 1.0) * 0.1
    elif logarithmic:
        most, least = most * 1.25, least / 1.25
    else:
        most, least = most + 0.03 * (most - least), least - 0.03 * (most - least)
    return across, Axis(least, most, HEIGHT - BOTTOM, TOP, logarithmic)


def _summary(chart: Chart) -> str:
    """Describe a chart to those who do not see it."""
    return "; ".join(
        f"{line.words}: from {short(line.values[0])} to {short(line.values[-1])}" for line in chart.lines[:MOST_LINES]
    )


class _StepPlaces:
    """Place of a step of a run on the axis of a unit, from the lines of a chart."""

    def __init__(self, chart: Chart, unit: str) -> None:
        self._known: dict[int, tuple[list[float], list[float]]] = {}
        for line in chart.lines:
            if line.run not in self._known:
                self._known[line.run] = (list(line.places["steps"]), list(line.places[unit]))

    def __call__(self, run: int, step: int) -> float | None:
        steps, places = self._known.get(run, ([], []))
        if not steps:
            return None
        at = bisect_left(steps, step)
        if at == 0 or at == len(steps):
            return places[min(at, len(steps) - 1)] if steps[0] <= step <= steps[-1] else None
        share = (step - steps[at - 1]) / ((steps[at] - steps[at - 1]) or 1.0)
        return places[at - 1] + share * (places[at] - places[at - 1])


def _draw_mark(svg: Picture, mark: Mark, x: float, up: Axis) -> None:
    colour = MARK_COLOURS[mark.kind]
    end = up.end + 5 if mark.kind == SAVED else up.start
    group = svg.add("g")
    svg.add("title", f"step {mark.step:,}: {mark.words}", group)
    svg.add(
        "path", None, group, d=f"M{x:.1f} {up.end:.1f}V{end:.1f}", stroke=colour, class_=f"m-{_slug(mark.kind)}",
        stroke_width=1, stroke_opacity=0.8,
    )  # fmt: skip


def _slug(kind: str) -> str:
    return kind.replace(" ", "-")


def _add_strips(
    svg: Picture, drawn: Sequence[tuple[Line, Sequence[tuple[float, float]]]], across: Axis, up: Axis, unit: str
) -> None:
    """Let a pointer that rests on a strip of the chart show the values there."""
    width = (across.end - across.start) / PARTS
    strips: dict[int, tuple[float, dict[str, float]]] = {}
    for line, points in drawn:
        for x, y in points:
            cell = min(PARTS - 1, int((across(x) - across.start) / width))
            strips.setdefault(cell, (x, {}))[1][line.words] = y
    for cell, (x, values) in strips.items():
        group = svg.add("g", None, None, class_="strip")
        shown = [f"{words} {value:.5g}" for words, value in values.items()]
        svg.add("title", "\n".join([f"{unit} {short(x)}", *shown[:12]]), group)
        svg.box(across.start + cell * width, up.end, width, up.start - up.end, "#000", group, fill_opacity=0)


def _heat_map(chart: Chart, unit: str) -> str:
    """Draw a row a figure and a column a part of the run: the darker, the greater."""
    lines = chart.lines
    row = max(6.0, min(18.0, (HEIGHT - TOP - BOTTOM) / len(lines)))
    height = TOP + row * len(lines) + BOTTOM
    svg = Picture(f"{chart.title} over {unit}", WIDTH, height, _summary(chart))
    svg.headline(chart.title, 4, 16)
    xs = [x for line in lines for x in line.places[unit] if math.isfinite(x)]
    low, high = min(xs, default=0.0), max(xs, default=1.0)
    across = Axis(low, high if high > low else low + 1, LEFT, WIDTH - RIGHT)
    values = [value for line in lines for value in line.values]
    least, most = min(values, default=0.0), max(values, default=1.0)
    width = (across.end - across.start) / PARTS
    for number, line in enumerate(lines):
        y = TOP + row * number
        if row >= 10 or number % math.ceil(10 / row) == 0:
            svg.write(line.words[-8:], LEFT - 4, y + row - 2, "end", font_size="9")
        cells: dict[int, list[float]] = {}
        for x, value in zip(line.places[unit], line.values, strict=True):
            if math.isfinite(x):
                cells.setdefault(min(PARTS - 1, int((across(x) - across.start) / width)), []).append(value)
        taken = sorted(cells)
        for place, cell in enumerate(taken):
            until = taken[place + 1] if place + 1 < len(taken) else PARTS
            value = max(cells[cell])
            share = (value - least) / ((most - least) or 1.0)
            group = svg.add("g")
            svg.add("title", f"{line.words}: {value:.4g}", group)
            svg.box(
                across.start + cell * width, y, (until - cell) * width, row, COLOURS[0], group,
                fill_opacity=0.06 + 0.94 * share, class_="f0",
            )  # fmt: skip
    below = TOP + row * len(lines)
    svg.line([(across.start, below), (across.end, below)], PALE)
    for value in across.marks():
        svg.write(short(value), across(value), below + 14, "middle", GREY)
    svg.write(
        f"{unit}; from {least:.3g} (pale) to {most:.3g}", (across.start + across.end) / 2, below + 32, "middle", GREY
    )
    return str(svg)
