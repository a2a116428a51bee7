"""Picture of losses against steps, bytes and simulated time, as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from megalite.extras.comparison.synchronization import Curve, Link
from megalite.svg import GREY, Axis, Picture

LEFT, TOP, WIDTH, HEIGHT, GAP, LEGEND = 50.0, 40.0, 300.0, 300.0, 60.0, 150.0
COLOURS = ("#1d2125", "#1f5fae", "#d98a1f", "#5c9a55", "#a05195", "#c8443c", "#3aa6a6")
DASHES = ("", "6 3", "2 3")
POINTS = 200


def chart(curves: Mapping[str, Curve], link: Link) -> str:
    """Return three pictures side by side, and what each line means. Losses are means over a few steps."""
    width, height = LEFT + 3 * (WIDTH + GAP) + LEGEND, max(TOP + HEIGHT + 50, TOP + 18 * len(curves) + 20)
    picture = Picture("Loss of each method against steps, bytes and simulated time", width, height)
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
    for panel, (words, positions) in enumerate(panels):
        places = {name: positions(curve) for name, curve in curves.items()}
        left, logarithmic = LEFT + panel * (WIDTH + GAP), panel == 1
        first = min(each[0] for each in places.values()) if logarithmic else 0.0
        across = Axis(first, max(each[-1] for each in places.values()), left, left + WIDTH, logarithmic)
        up = Axis(low, high, TOP + HEIGHT, TOP)
        picture.axes(across, up, (across.marks(), up.marks()), words)
        picture.write("loss", left, TOP - 12, "middle", GREY)
        for index, (name, values) in enumerate(places.items()):
            every = max(1, len(values) // POINTS)
            chosen = sorted({*range(0, len(values), every), len(values) - 1})
            pairs = [(values[at], losses[name][at]) for at in chosen if math.isfinite(losses[name][at])]
            picture.line([(across(x), up(min(loss, high))) for x, loss in pairs], *_look(index))
    for index, name in enumerate(curves):
        x, y = LEFT + 3 * (WIDTH + GAP) - 20, TOP + 18 * index
        picture.line([(x, y), (x + 30, y)], *_look(index))
        picture.write(name, x + 38, y + 4)
    return str(picture)


def _look(index: int) -> tuple[str, str]:
    """Return the colour and the dashes of a method."""
    return COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
