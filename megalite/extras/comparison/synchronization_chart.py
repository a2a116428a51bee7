"""Picture of losses against steps, bytes and simulated time, as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from megalite.extras.comparison.synchronization import Curve, Link
from megalite.svg import GREY, Axis, Picture

LEFT, TOP, WIDTH, HEIGHT, GAP, LEGEND = 50.0, 72.0, 300.0, 300.0, 60.0, 150.0
COLOURS = ("#1d2125", "#1f5fae", "#d98a1f", "#5c9a55", "#a05195", "#c8443c", "#3aa6a6")
DASHES = ("", "6 3", "2 3")
POINTS = 200
TITLE = "Loss of each method against steps, bytes and simulated time"


def chart(curves: Mapping[str, Curve], link: Link) -> str:
    """Return three pictures side by side, and what each line means. Losses are means over a few steps.

    Over bytes, a line begins with the first exchange and goes on in steps, for the loss falls between exchanges, too.
    """
    width, height = LEFT + 3 * (WIDTH + GAP) + LEGEND, max(TOP + HEIGHT + 50, TOP + 18 * len(curves) + 20)
    picture = Picture(TITLE, width, height)
    losses = {name: [curve.loss_after(step + 1) for step in range(len(curve.losses))] for name, curve in curves.items()}
    shown = [loss for each in losses.values() for loss in each if math.isfinite(loss)]
    low, high = min(shown, default=0.0), min(max(shown, default=1.0), 1.2 * max(each[0] for each in losses.values()))
    picture.headline(TITLE, LEFT - 30, 22)
    panels: list[tuple[str, Callable[[Curve], Sequence[float]]]] = [
        ("steps", lambda curve: range(1, len(curve.losses) + 1)),
        ("megabytes sent by a rank (logarithmic)", lambda curve: [each / 1e6 for each in curve.total_sent()]),
        (f"seconds, {link.alpha:g} s a step and {8e-6 / link.beta:,.4g} Mbit/s", lambda curve: curve.times(link)),
    ]
    is_clipped = False
    for panel, (words, positions) in enumerate(panels):
        places = {name: positions(curve) for name, curve in curves.items()}
        left, logarithmic = LEFT + panel * (WIDTH + GAP), panel == 1
        sent = [value for each in places.values() for value in each if value > 0]
        first = min(sent, default=1e-3) if logarithmic else 0.0
        across = Axis(first, max(sent, default=1.0), left, left + WIDTH, logarithmic)
        up = Axis(low, high, TOP + HEIGHT, TOP)
        picture.axes(across, up, (across.marks(), up.marks()), (words, "loss"))
        for index, (name, values) in enumerate(places.items()):
            points = _points(values, losses[name], in_steps=logarithmic)
            picture.line([(across(x), up(min(loss, high))) for x, loss in points], *_look(index))
            above = [x for (_, before), (x, loss) in pairwise([(0.0, low), *points]) if before <= high < loss]
            for x in above:
                picture.write("▲", across(x), TOP - 2, "middle", _look(index)[0])
            is_clipped = is_clipped or bool(above)
    if is_clipped:
        picture.write("▲ a line goes on above the picture", LEFT - 30, 42, colour=GREY)
    for index, name in enumerate(curves):
        x, y = LEFT + 3 * (WIDTH + GAP) - 20, TOP + 18 * index
        picture.line([(x, y), (x + 30, y)], *_look(index))
        picture.write(name, x + 38, y + 4)
    return str(picture)


def _points(values: Sequence[float], losses: Sequence[float], *, in_steps: bool) -> list[tuple[float, float]]:
    """Return the points of a line, of which those without a finite loss, or before the first exchange, are left out."""
    every = max(1, len(values) // POINTS)
    chosen = sorted({*range(0, len(values), every), len(values) - 1})
    points = [(values[at], losses[at]) for at in chosen if math.isfinite(losses[at]) and values[at] > 0]
    if not in_steps:
        return points
    corners = [corner for (x, loss), (after, _) in pairwise(points) for corner in ((x, loss), (after, loss))]
    return corners + points[-1:]


def _look(index: int) -> tuple[str, str]:
    """Return the colour and the dashes of a method."""
    return COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
