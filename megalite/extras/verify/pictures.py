"""Pictures of a verification as SVG: how far each tensor is from the truth, in order of execution, and by rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple
from xml.etree.ElementTree import Element

from megalite.extras.report.pictures import COLOURS
from megalite.extras.verify.judgement import LIMIT, Judgement
from megalite.extras.verify.trace import Role
from megalite.extras.verify.verdict import Verdict, shown_name, shown_ratio
from megalite.process.output import printable
from megalite.svg import DIGIT, GREY, PALE, Axis, Picture

PHASES: Mapping[Role, str] = {
    "parameter": "weights before",
    "input": "forward",
    "output": "forward",
    "input_gradient": "backward",
    "output_gradient": "backward",
    "gradient": "gradients of weights",
    "main_gradient": "gradients of weights",
    "parameter_after": "weights after",
}
"""Phase of the step to which tensors of each role belong, in the order of execution."""
ROLES: Mapping[Role, str] = {
    "parameter": "parameter",
    "input": "input",
    "output": "output",
    "input_gradient": "gradient of input",
    "output_gradient": "gradient of output",
    "gradient": "gradient",
    "main_gradient": "gradient in the optimizer",
    "parameter_after": "parameter after the step",
}
_ROLE_COLOURS: Mapping[Role, int] = {
    "parameter": 7,
    "input": 5,
    "output": 0,
    "input_gradient": 6,
    "output_gradient": 3,
    "gradient": 1,
    "main_gradient": 2,
    "parameter_after": 7,
}
_GOOD, _BAD = 2, 4
"""Numbers of the colours of what rounding explains, and of what it does not."""
_SHADES = ((1.0, 0, 0.15), (LIMIT, 0, 0.45), (10.0, 4, 0.3), (100.0, 4, 0.5), (1e4, 4, 0.75), (math.inf, 4, 1.0))
"""Shades of a map: the largest ratio, the number of the colour, its opacity."""
_TITLE = "Distance of each tensor from the truth, as a multiple of what rounding explains"
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1000.0, 420.0, 50.0, 64.0, 82.0, 52.0
_MAP_WIDTH, _MAP_LEFT, _MAP_RIGHT, _MAP_TOP, _MAP_BOTTOM = 360.0, 46.0, 12.0, 34.0, 66.0
_DOT = 3.0
"""Distance in pixels from which on two dots are both drawn, if there are not too many."""
_LEAST = 0.1
"""Least ratio that the axis shows: smaller ones lie at its lower end."""
_MOST_DOTS, _MOST_ROWS, _MOST_COLUMNS = 4000, 128, 64
_MOST_LETTERS = 80
_RAISED = str.maketrans("0123456789", "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")


def ratio_of(judgement: Judgement) -> float:
    """Return the ratio; infinity if it is no number."""
    return math.inf if math.isnan(judgement.ratio) else judgement.ratio


def brief(name: str) -> str:
    """Return a name, of which only the end is left if it is long."""
    return name if len(name) <= _MOST_LETTERS else f"...{name[-_MOST_LETTERS:]}"


# ------------------------------------------------------------------------------------------------ in order


class _Column(NamedTuple):
    """Tensor, of all ranks and micro-batches, among all tensors in the order of execution."""

    phase: str
    layer: int | None
    start: float
    end: float


class _Plot:
    """Place of each judgement in the picture.

    Attributes:
        columns: by the name and the role of the tensor.
        infinite: True if there are infinite ratios, which lie at the upper end, a decade above the others.
        up: axis of powers of ten.
    """

    def __init__(self, judgements: Sequence[Judgement]) -> None:
        layers = {(each.entry.name, each.entry.role): each.layer for each in judgements}
        self.columns: dict[tuple[str, Role], _Column] = {}
        start = 0.0
        for phase in dict.fromkeys(PHASES.values()):
            keys = [key for key in layers if PHASES[key[1]] == phase]
            width = max(1.0, len(layers) / 5 / len(keys)) if keys else 0.0  # room for the words of the phase
            for key in keys:
                self.columns[key] = _Column(phase, layers[key], start, start + width)
                start += width
        finite = [ratio for ratio in map(ratio_of, judgements) if math.isfinite(ratio)]
        self.infinite = len(finite) < len(judgements)
        high = min(max(math.ceil(_power(max(finite, default=1.0)) + 0.2), 1), 307) + self.infinite
        self.across = Axis(0, start, _LEFT, _WIDTH - _RIGHT)
        self.up = Axis(_power(_LEAST), high, _HEIGHT - _BOTTOM, _TOP)

    def place(self, judgement: Judgement) -> tuple[float, float]:
        """Return x and y."""
        column = self.columns[judgement.entry.name, judgement.entry.role]
        power = min(_power(ratio_of(judgement)), self.up.high)
        return self.across((column.start + column.end) / 2), self.up(power)

    def marks(self) -> dict[float, str]:
        """Return the marks of the axis of ratios, with their words."""
        high = int(self.up.high) - self.infinite
        powers = range(0, high + 1, math.ceil(high / 6))
        ends = {self.up.low: f"\u2264 {_LEAST}"} | ({self.up.high: "\u221e"} if self.infinite else {})
        words = (f"{10**power:,}" if power < 4 else f"10{str(power).translate(_RAISED)}" for power in powers)
        return dict(zip(map(float, powers), words, strict=True)) | ends


def _power(ratio: float) -> float:
    return math.log10(max(ratio, _LEAST))


def by_order(verdict: Verdict) -> str:
    """Return how far tensors are from the truth, in order of execution: a dot for each rank and micro-batch.

    Dots that lie on each other are drawn once, with the words of the worst one. What differs first is marked.
    """
    plot = _Plot(verdict.judgements)
    svg = Picture(_TITLE, _WIDTH, _HEIGHT, printable(verdict.line[:1000]))
    svg.headline(_TITLE, 8, 18)
    _draw_legend(svg, {each.entry.role for each in verdict.judgements})
    _draw_ground(svg, plot)
    _draw_phases(svg, plot)
    groups: dict[tuple[bool, Role], Element] = {}
    for worst, others in sorted(_apart(verdict.judgements, plot), key=lambda each: ratio_of(each[0])):
        (x, y), role = plot.place(worst), worst.entry.role
        if (worst.differs, role) not in groups:
            groups[worst.differs, role] = _coloured(svg, _ROLE_COLOURS[role], 0.85)
        dot = svg.add("circle", None, groups[worst.differs, role], cx=x, cy=y, r=3.4 if worst.differs else 2.4)
        svg.add("title", _words(worst) + (f"\nand {others:,} more that lie here" if others else ""), dot)
    if verdict.first is not None:
        _mark_first(svg, plot, verdict.first)
    return str(svg)


def _apart(judgements: Sequence[Judgement], plot: _Plot) -> list[tuple[Judgement, int]]:
    """Return the worst judgement at each place of the picture, with the number of others that lie there."""
    places = [(*plot.place(each), each) for each in judgements]
    distance = _DOT
    while True:
        cells: dict[tuple[int, int, Role], list[Judgement]] = defaultdict(list)
        for x, y, each in places:
            cells[round(x / distance), round(y / distance), each.entry.role].append(each)
        if len(cells) <= _MOST_DOTS:
            return [(max(each, key=ratio_of), len(each) - 1) for each in cells.values()]
        distance *= 1.3


def _words(judgement: Judgement) -> str:
    """Return what a pointer that rests on a dot shows."""
    layer = "" if judgement.layer is None else f"layer {judgement.layer}, "
    times = f"{shown_ratio(ratio_of(judgement))} times rounding"
    return printable(f"{brief(shown_name(judgement))}: {layer}rank {judgement.entry.rank}, {times}")


def _coloured(svg: Picture, colour: int, opacity: float) -> Element:
    """Begin a group of marks of one colour."""
    return svg.add("g", fill=COLOURS[colour], class_=f"f{colour}", fill_opacity=opacity)


def _draw_legend(svg: Picture, roles: set[Role]) -> None:
    x = 14.0
    for role, words in ROLES.items():
        if role in roles:
            colour = _ROLE_COLOURS[role]
            svg.add("circle", cx=x, cy=38, r=4, fill=COLOURS[colour], class_=f"f{colour}")
            svg.write(words, x + 9, 42)
            x += 30 + 0.9 * DIGIT * len(words)


def _draw_ground(svg: Picture, plot: _Plot) -> None:
    """Draw the band of what rounding explains, the limit, and the axes."""
    across, up, limit = plot.across, plot.up, plot.up(_power(LIMIT))
    svg.box(
        across.start, up(0), across.end - across.start, up.start - up(0), COLOURS[_GOOD], class_=f"f{_GOOD}",
        fill_opacity=0.13,
    )  # fmt: skip
    svg.line([(across.start, limit), (across.end, limit)], COLOURS[_BAD], "6 4", class_=f"c{_BAD}")
    svg.write(f"limit: {LIMIT:g}", across.end + 6, limit + 4, font_size="11")
    svg.write("rounding", across.end + 6, up(up.low / 2) + 4, font_size="11")
    marks = plot.marks()
    svg.axes(across, up, ([], marks), ("", ""), (str, marks.__getitem__))


def _draw_phases(svg: Picture, plot: _Plot) -> None:
    """Draw where phases and layers begin, and numbers of layers as far as there is room for them."""
    across, up, written = plot.across, plot.up, 0.0
    for phase, members in groupby(plot.columns.values(), key=lambda each: each.phase):
        columns = list(members)
        start, end = across(columns[0].start), across(columns[-1].end)
        svg.write(phase, (start + end) / 2, up.start + 36, "middle", font_weight="600")
        if start > across.start:
            svg.line([(start, up.end), (start, up.start + 42)], GREY, class_="axis")
        named = None
        for layer, inside in groupby(columns, key=lambda each: each.layer):
            run = list(inside)
            left, right = across(run[0].start), across(run[-1].end)
            if left > start and right - left > 8:
                svg.line([(left, up.end), (left, up.start)], PALE, stroke_opacity=0.4)
            middle = (left + right) / 2
            if layer not in (None, named) and middle - written > 20:
                named, written = layer, middle
                svg.write(str(layer), middle, up.start + 16, "middle", GREY, font_size="11")
    svg.write("layer", across.start - 8, up.start + 16, "end", GREY, font_size="11")


def _mark_first(svg: Picture, plot: _Plot, first: Judgement) -> None:
    """Draw a ring around the first tensor that differs, and its name above."""
    x, y = plot.place(first)
    svg.line([(x, plot.up.end - 8), (x, y - 8)], COLOURS[_BAD], class_=f"c{_BAD}", stroke_width=1.5)
    svg.add("circle", cx=x, cy=y, r=8, stroke=COLOURS[_BAD], fill="none", class_=f"c{_BAD}", stroke_width=2)
    words, is_left = printable(f"first: {brief(shown_name(first))}"), x < _WIDTH / 2
    svg.write(words, x - 4 if is_left else x + 4, plot.up.end - 13, "start" if is_left else "end", font_weight="600")


# ------------------------------------------------------------------------------------------------ by rank


def by_rank(verdict: Verdict, phase: str) -> str:
    """Return the largest ratio of each layer on each rank in a phase as a map: the darker, the larger.

    Neighbouring layers share a row, and ranks a column, if there are too many.
    """
    judgements = [each for each in verdict.judgements if PHASES[each.entry.role] == phase]
    rows = _grouped((each.layer for each in judgements), _MOST_ROWS)
    columns = _grouped((each.entry.rank for each in judgements), _MOST_COLUMNS)
    row_of = {layer: row for row, layers in enumerate(rows) for layer in layers}
    column_of = {rank: column for column, ranks in enumerate(columns) for rank in ranks}
    cells: dict[tuple[int, int], Judgement] = {}
    for each in judgements:
        place = row_of[each.layer], column_of[each.entry.rank]
        if place not in cells or ratio_of(each) > ratio_of(cells[place]):
            cells[place] = each
    width = min(44.0, (_MAP_WIDTH - _MAP_LEFT - _MAP_RIGHT) / len(columns))
    height = min(18.0, max(4.0, 200 / len(rows)))
    below, gap = _MAP_TOP + height * len(rows), float(min(width, height) > 8)
    svg = Picture(f"Largest ratio by layer and rank: {phase}", _MAP_WIDTH, below + _MAP_BOTTOM)
    svg.headline(f"{phase.capitalize()}: the largest ratio", 4, 16)
    last = 0.0
    for row, layers in enumerate(rows):
        y = _MAP_TOP + height * (row + 0.5) + 4
        if y - last >= 11:
            svg.write("other" if layers[0] is None else str(layers[0]), _MAP_LEFT - 6, y, "end", font_size="10")
            last = y
    last = 0.0
    for column, ranks in enumerate(columns):
        x = _MAP_LEFT + width * (column + 0.5)
        if x - last >= 30:
            svg.write(str(ranks[0]), x, below + 13, "middle", font_size="10")
            last = x
    svg.write("layer", _MAP_LEFT - 6, below + 13, "end", GREY, font_size="10")
    svg.write("rank", _MAP_LEFT, below + 28, colour=GREY, font_size="10")
    groups: dict[tuple[int, float], Element] = {}
    for (row, column), worst in cells.items():
        shade = _shade(ratio_of(worst))
        if shade not in groups:
            groups[shade] = _coloured(svg, *shade)
        x, y = _MAP_LEFT + width * column, _MAP_TOP + height * row
        cell = svg.add("rect", None, groups[shade], x=x, y=y, width=width - gap, height=height - gap)
        svg.add("title", _words_of_cell(columns[column], worst), cell)
    _draw_shades(svg, below + 44)
    return str(svg)


def _grouped(values: Iterable[int | None], most: int) -> list[list[int | None]]:
    """Return the values in order, in at most `most` groups. None comes last."""
    ordered = sorted(set(values), key=lambda each: (each is None, each or 0))
    size = math.ceil(len(ordered) / most)
    return [ordered[at : at + size] for at in range(0, len(ordered), size)]


def _shade(ratio: float) -> tuple[int, float]:
    return next((colour, opacity) for most, colour, opacity in _SHADES if ratio <= most)


def _draw_shades(svg: Picture, y: float) -> None:
    x = _MAP_LEFT
    for most, colour, opacity in _SHADES:
        words = f"\u2264 {most:,g}" if math.isfinite(most) else "more"
        svg.box(x, y, 12, 12, COLOURS[colour], class_=f"f{colour}", fill_opacity=opacity)
        svg.write(words, x + 15, y + 10, font_size="10")
        x += 22 + 6.4 * len(words)


def _words_of_cell(ranks: Sequence[int | None], worst: Judgement) -> str:
    """Return what a pointer that rests on a cell shows."""
    if worst.differs or len(ranks) == 1:
        return _words(worst)
    layer = "" if worst.layer is None else f"layer {worst.layer}, "
    return f"{layer}ranks {ranks[0]}-{ranks[-1]}: {shown_ratio(ratio_of(worst))} times rounding"
