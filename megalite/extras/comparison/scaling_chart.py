"""Picture of the speed-up over ranks, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megalite.extras.comparison.scaling import Point
from megalite.svg import GREY, PALE, Axis, Picture

LEFT, TOP, SIDE, BOTTOM = 60.0, 100.0, 360.0, 48.0
COLOURS = {"strong": "#1f5fae", "weak": "#d98a1f"}


def chart(series: Mapping[str, Sequence[Point]]) -> str:
    """Return the speed-up of each series over its ranks: lines with dots, dashed as planned, and broad the ideal."""
    points = [point for each in series.values() for point in each]
    first, most = points[0].ranks, max(point.ranks for point in points)
    across = Axis(0, most, LEFT, LEFT + SIDE)
    up = Axis(0, max(most / first, *(point.speed_up for point in points)), TOP + SIDE, TOP)
    picture = Picture("Speed-up over ranks", LEFT + SIDE + 30, TOP + SIDE + BOTTOM)
    ranks = sorted({point.ranks for point in points})
    picture.headline(f"Speed-up over {first} rank{'s' * (first > 1)}", LEFT - 30, 22)
    picture.axes(across, up, (ranks, [each / first for each in ranks]), ("ranks", "speed-up (samples per second)"))
    ideal = [(across(first), up(1)), (across(most), up(most / first))]
    picture.line(ideal, PALE, stroke_width=5, opacity="0.6")  # broad, as others may lie on it
    for index, (kind, each) in enumerate(series.items()):
        colour = COLOURS[kind]
        picture.write(f"{kind} scaling", LEFT - 30 + 150 * index, 44, colour=colour)
        picture.line([(across(point.ranks), up(point.speed_up)) for point in each], colour)
        for point in each:
            picture.add("circle", cx=across(point.ranks), cy=up(point.speed_up), r=4, fill=colour)
        expected = [
            (across(point.ranks), up(point.speed_up * point.seconds / point.predicted))
            for point in each
            if point.predicted
        ]
        if len(expected) > 1:
            picture.line(expected, colour, "5 4")
    picture.write("dashed: the planner; broad: ideal", LEFT - 30, 62, colour=GREY)
    return str(picture)
