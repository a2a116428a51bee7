"""Charts of a report: which figures of runs stand together, and their pictures as SVG over steps, tokens or hours."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megalite.extras.report.figures import DECIDED, MARKS, NOT_FINITE, RESTARTED, SAVED, SKIPPED, Mark, marks, thinned
from megalite.extras.report.recorded import Recorded, Table
from megalite.svg import GREY, PALE, Axis, Picture

COLOURS = ("#1f5fae", "#c2570c", "#2f7d4f", "#8a4ca6", "#b3352c", "#0e7c86", "#8a6d00", "#5f6770")
"""Colours of lines on white; the page has others for dark screens, by the classes c0 to c7."""
DASHES = ("", "7 3", "2 3", "9 3 2 3")
MARK_COLOURS = {SKIPPED: "#b3352c", NOT_FINITE: "#b3352c", RESTARTED: "#1f5fae", DECIDED: "#c2570c", SAVED: "#5f6770"}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360.0, 230.0, 52.0, 10.0, 30.0, 46.0
"""Of a chart, in pixels: as wide as a phone."""
MOST_POINTS = 640
"""Points of all lines of a chart and a table together, of which a line gets its share."""
MOST_LINES = 8
"""Lines of a chart: more figures than these are a heat map."""
CELLS = 60
"""Columns of a heat map, and strips of a chart that show values where a pointer rests."""
MOST_MARKS = 60
"""Marks of a kind in a chart."""
UNITS = {"steps": "iteration", "tokens": "consumed_tokens", "samples": "consumed_samples", "hours": "wall_time"}
"""What curves may run over, and the figure that it comes from."""
TITLES = {
    "lm_loss": "Loss (nats per token)",
    "learning_rate": "Learning rate",
    "grad_norm": "Norm of all gradients",
    "tokens_per_second": "Tokens per second",
    "samples_per_second": "Samples per second",
    "mfu": "Share of the peak (MFU)",
    "model_tflops_per_device": "TFLOP/s of the model, a device",
    "iteration_time_s": "Seconds of a step, by section",
    "wait_s": "Seconds of waits in a step, by axis",
    "bytes_sent": "Bytes that rank 0 sends in a step",
    "peak_memory_bytes": "Peak memory (bytes)",
    "host_memory_bytes": "Memory of the host (bytes)",
    "max_expert_load": "Load of the busiest expert, by layer",
    "min_expert_load": "Load of the idlest expert, by layer",
}
"""Titles of charts by what their figures begin with, in the order of the page; others come before the last six, by name."""
HIDDEN = {"iteration", "consumed_samples", "consumed_tokens", "wall_time", "skipped"}
"""Figures that are places or marks of a chart, no lines."""
HEAT_MAPS = ("max_expert_load", "min_expert_load")
LOGARITHMIC_FROM = 300.0
"""Ratio of the greatest to the least value of a chart from which its axis is logarithmic."""


@dataclass(frozen=True)
class Line:
    """Figure of a run in a chart: its thinned values and their places, by unit."""

    run: int
    key: str
    words: str
    values: tuple[float, ...]
    places: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Chart:
    """Lines of figures that belong together."""

    base: str
    title: str
    lines: tuple[Line, ...]
    is_heat_map: bool = False
    marks: tuple[tuple[int, Mark], ...] = ()
    """Events, each with the number of its run."""
    units: tuple[str, ...] = field(default=("steps",))


def charts(runs: Sequence[Recorded]) -> list[Chart]:
    """Return the charts of runs, laid over each other, in the order of the page."""
    groups: dict[str, list[tuple[int, Table, str]]] = {}
    for number, run in enumerate(runs):
        for table in (run.steps, run.validation, run.test):
            for key in table.columns:
                if key not in HIDDEN and not (table is run.test and len(table.values(key)) < 2):
                    groups.setdefault(_base(key, run), []).append((number, table, key))
    units = [unit for unit, key in UNITS.items() if unit == "steps" or any(key in run.steps.columns for run in runs)]
    if "tokens" in units:
        units.remove("samples")
    events = tuple((number, mark) for number, run in enumerate(runs) for mark in few(marks(run)))
    return [
        _chart(base, groups[base], runs, tuple(units), events) for base in sorted(groups, key=lambda base: _order(base))
    ]


def _base(key: str, run: Recorded) -> str:
    """Return what the figures of a chart begin with."""
    if key.endswith("rank"):
        return key
    base = key.split("/", 1)[0]
    for before in ("valid_", "test_"):
        if base.startswith(before):
            base = base.removeprefix(before)
            return run.loss if base == "loss" else base
    return base


def _order(base: str) -> tuple[int, str]:
    known = list(TITLES)
    if base not in TITLES:
        return (0 if base == "loss" else known.index("learning_rate") if "loss" in base else len(known)), base
    return known.index(base), base


def _chart(
    base: str,
    members: Sequence[tuple[int, Table, str]],
    runs: Sequence[Recorded],
    units: tuple[str, ...],
    events: tuple[tuple[int, Mark], ...],
) -> Chart:
    most = max(8, MOST_POINTS // len(members))
    lines = tuple(_line(number, table, key, base, runs, units, most) for number, table, key in members)
    lines = tuple(line for line in lines if line.values)
    title = TITLES.get(base) or base.replace("_", " ").replace("/", ": ").capitalize()
    is_map = base in HEAT_MAPS or len({line.key for line in lines}) > MOST_LINES
    return Chart(base, title, lines, is_map and len(runs) == 1, events, units)


def _line(
    number: int, table: Table, key: str, base: str, runs: Sequence[Recorded], units: Sequence[str], most: int
) -> Line:
    column = table.columns[key]
    chosen = thinned(column.values, most)
    rows = [column.lines[place] for place in chosen]
    places = {unit: _places(table, rows, unit, runs[number]) for unit in units}
    words = key if "/" not in key or not key.startswith(base) else key.split("/", 1)[1].replace("_", " ")
    if len(runs) > 1:
        words = f"{runs[number].name}: {words}"
    return Line(number, key, words, tuple(column.values[place] for place in chosen), places)


def _places(table: Table, rows: Sequence[int], unit: str, run: Recorded) -> tuple[float, ...]:
    """Return where lines of a table are. Hours count from the first line of the run."""
    if unit == "steps":
        return tuple(float(table.steps[row]) for row in rows)
    column = table.columns.get(UNITS[unit])
    if column is None:
        return tuple(math.nan for _ in rows)
    if len(column.lines) == len(table):
        found = [column.values[row] for row in rows]
    else:  # a damaged file
        last = len(column.lines) - 1
        found = [column.values[min(bisect_left(column.lines, row), last)] for row in rows]
    if unit == "hours":
        began = run.steps.values("wall_time")
        return tuple((value - began[0]) / 3600 if began else math.nan for value in found)
    return tuple(found)


def few(events: Sequence[Mark]) -> list[Mark]:
    """Return at most `MOST_MARKS` events of each kind, evenly chosen."""
    found: list[Mark] = []
    for kind in MARKS:
        own = [mark for mark in events if mark.kind == kind]
        found += own if len(own) <= MOST_MARKS else [own[at * len(own) // MOST_MARKS] for at in range(MOST_MARKS)]
    return found


# ---------------------------------------------------------------------------------------------------- pictures


def short(value: float) -> str:
    """Return a number as a mark of an axis has it: 1.5k, 20M, 3B."""
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{letter}"
    return f"{value:.4g}"


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
    drawn = [
        (line, [(x, y) for x, y in zip(line.places[unit], line.values, strict=True) if math.isfinite(x)])
        for line in chart.lines
    ]
    across, up = _axes(chart, [points for _, points in drawn], unit)
    svg = Picture(f"{chart.title} over {unit}", WIDTH, HEIGHT, _summary(chart))
    svg.headline(chart.title, 4, 16)
    svg.axes(across, up, (across.marks(), up.marks()), (unit, ""), short)
    clipped = False
    of_steps = _StepPlaces(chart, unit)
    for number, mark in chart.marks:
        place = of_steps(number, mark.step)
        if place is not None and across.low <= place <= across.high:
            _draw_mark(svg, mark, across(place), up)
    for line, points in drawn:
        colour, dashes = look(chart, line)
        dots = chart.base.endswith("rank")
        shown = [(across(x), up(min(max(y, up.low), up.high))) for x, y in points if not up.logarithmic or y > 0]
        clipped = clipped or any(y > up.high for _, y in points)
        if dots or len(shown) == 1:
            for x, y in shown:
                svg.box(x - 1.5, y - 1.5, 3, 3, COLOURS[colour], class_=f"f{colour}")
        else:
            svg.line(shown, COLOURS[colour], dashes, class_=f"c{colour}", stroke_width=1.5, stroke_linejoin="round")
    if clipped:
        svg.write("▲ goes on above", WIDTH - RIGHT, TOP + 8, "end", GREY, font_size="10")
    _add_strips(svg, drawn, across, up, unit)
    return str(svg)


def _axes(chart: Chart, drawn: Iterable[Sequence[tuple[float, float]]], unit: str) -> tuple[Axis, Axis]:
    points = [point for each in drawn for point in each]
    xs = [x for x, _ in points]
    low, high = min(xs, default=0.0), max(xs, default=1.0)
    across = Axis(low, high if high > low else low + 1, LEFT, WIDTH - RIGHT)
    late = [y for x, y in points if x >= low + 0.04 * (high - low)] if "loss" in chart.base else []
    values = late or [y for _, y in points]
    least, most = min((y for _, y in points), default=0.0), max(values, default=1.0)
    positive = [y for _, y in points if y > 0]
    logarithmic = least > 0 and "loss" not in chart.base and most / least > LOGARITHMIC_FROM and bool(positive)
    if most <= least:
        most, least = most + (abs(most) or 1.0) * 0.1, least - (abs(least) or 1.0) * 0.1
    elif not logarithmic:
        most, least = most + 0.03 * (most - least), least - 0.03 * (most - least)
    return across, Axis(least, most, HEIGHT - BOTTOM, TOP, logarithmic)


def _summary(chart: Chart) -> str:
    """Describe a chart to those who do not see it."""
    return "; ".join(f"{line.words}: from {short(line.values[0])} to {short(line.values[-1])}" for line in chart.lines[:8])


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
    width = (across.end - across.start) / CELLS
    for cell in range(CELLS):
        left = across.start + cell * width
        words: list[str] = []
        at = None
        for line, points in drawn:
            inside = [(x, y) for x, y in points if left <= across(x) < left + width or (cell == CELLS - 1 and x == across.high)]
            if inside:
                at = inside[-1][0]
                words.append(f"{line.words} {inside[-1][1]:.5g}")
        if at is not None:
            group = svg.add("g", None, None, class_="strip")
            svg.add("title", f"{unit} {short(at)}\n" + "\n".join(words[:12]), group)
            svg.box(left, up.end, width, up.start - up.end, "#000", group, fill_opacity=0)


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
    width = (across.end - across.start) / CELLS
    for number, line in enumerate(lines):
        y = TOP + row * number
        if row >= 10 or number % math.ceil(10 / row) == 0:
            svg.write(line.words[-8:], LEFT - 4, y + row - 2, "end", font_size="9")
        cells: dict[int, list[float]] = {}
        for x, value in zip(line.places[unit], line.values, strict=True):
            if math.isfinite(x):
                cells.setdefault(min(CELLS - 1, int((across(x) - across.start) / width)), []).append(value)
        taken = sorted(cells)
        for place, cell in enumerate(taken):
            until = taken[place + 1] if place + 1 < len(taken) else CELLS
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
    svg.write(f"{unit}; from {least:.3g} (pale) to {most:.3g}", (across.start + across.end) / 2, below + 32, "middle", GREY)
    return str(svg)
