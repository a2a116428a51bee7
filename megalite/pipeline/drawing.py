"""Picture of a time line, as SVG or as an HTML page: one row per rank, one box per action."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from xml.etree.ElementTree import Element

from megalite.atomic_files import write_atomically
from megalite.pipeline.schedules import Kind
from megalite.pipeline.simulator import Span, lanes
from megalite.pipeline.timeline import COMPUTATIONS, TimeLine, medians_by_kind
from megalite.pipeline.trace import to_trace
from megalite.svg import DIGIT, GREY, PALE, Picture, number, page, round_step

LEFT, RIGHT, TOP, ROW, GAP = 70.0, 24.0, 76.0, 32.0, 12.0
WIDTHS = 760.0, 4000.0
FITTED = 1150.0
"""Largest width of the rows in a page that is not asked for the full width: it fits a window of 1280 pixels."""
MOST_MESSAGES = 400
"""Largest number of messages that are drawn: more would look like a grey band."""

Colour = tuple[int, int, int]
COLOURS: dict[Kind, Colour] = {"F": (47, 111, 187), "B": (24, 118, 76), "I": (232, 148, 32), "W": (138, 76, 166)}
WORDS: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward for the input",
    "W": "backward for the weights",
}
STYLE = """
.box:hover rect { stroke: #000; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
  .paper { fill: #16191d; } .row { fill: #23282e; } .ink { fill: #e6e8ea; } .faint { stroke: #7d858d; }
  .communication { fill: #aab2ba; } .box rect { stroke: #16191d; } .box:hover rect { stroke: #fff; }
}
"""
PAGE_STYLE = """
body { margin: 16px; background: #fff; color: #1d2125; font: 12px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif; }
h1 { font-size: 16px; } .key { display: inline-block; width: 14px; height: 14px; vertical-align: middle; }
.entry { margin-right: 24px; white-space: nowrap; } .words { margin-left: 6px; }
main { overflow-x: auto; } svg { display: block; }
.fitted svg { max-width: 100%; min-width: 640px; height: auto; }
body:not(:has(#whole:checked)) .whole, body:has(#whole:checked) .fitted { display: none; }
@media (prefers-color-scheme: dark) { body { background: #16191d; color: #e6e8ea; } }
"""
SUFFIXES = (".svg", ".html", ".json")


def write(time_line: TimeLine, path: Path) -> None:
    """Write a picture, an HTML page or a trace, depending on the suffix of `path`."""
    forms = dict(zip(SUFFIXES, (to_svg, to_html, to_trace), strict=True))
    write_atomically(path, forms[path.suffix](time_line).encode())


def write_timeline(directory: Path, name: str, time_line: TimeLine) -> list[Path]:
    """Write an HTML page and a trace; returns their paths."""
    paths = [directory / f"{name}.html", directory / f"{name}.json"]
    for path in paths:
        write(time_line, path)
    return paths


def to_html(time_line: TimeLine) -> str:
    """Return an HTML page that references no other files, with a picture that fits the window."""
    entries = [
        "".join(f'<span class="key" style="background: {colour}"></span>' for colour in colours)
        + f'<span class="words">{escape(words)}</span>'
        for colours, words in _legend(time_line)
    ]
    scale = _scale(time_line)
    fitted = min(scale, FITTED / time_line.end)
    charts = f'<div class="fitted">{_chart(time_line, fitted)}</div>'
    note = "Boxes show their actions under the pointer; arrows are messages."
    if fitted < scale:
        charts += f'\n<div class="whole">{_chart(time_line, scale)}</div>'
        note += ' <label><input type="checkbox" id="whole"> full width</label>'
    body = [
        f"<h1>{escape(time_line.title)}</h1>",
        "<p>" + "\n".join(f'<span class="entry">{entry}</span>' for entry in entries) + "</p>",
        f"<p>{note}</p>",
        f'<main tabindex="0" aria-label="{escape(time_line.title)}">\n{charts}\n</main>',
        *(f"<p>{escape(line)}</p>" for line in _summary(time_line)),
    ]
    return page(time_line.title, PAGE_STYLE, "\n".join(body), "light dark")


def to_svg(time_line: TimeLine) -> str:
    """Return the picture as SVG. Positions and widths along the x axis are proportional to time."""
    lines = _summary(time_line)
    svg = _chart(time_line, _scale(time_line), above=TOP, below=20.0 * len(lines) + 12, legend=_legend(time_line))
    svg.write(time_line.title, 16, 28, font_size=16, font_weight=600)
    svg.legend(_legend(time_line), 16, 43)
    for index, line in enumerate(lines):
        svg.write(line, 16, _top(len(time_line.spans)) + 62 + 20 * index)
    return str(svg)


def _chart(
    time_line: TimeLine,
    scale: float,
    above: float = 8.0,
    below: float = 0.0,
    legend: Iterable[tuple[Sequence[str], str]] = (),
) -> Picture:
    """Draw the rows and their axis, with `above` and `below` pixels around them, and at least as wide as the legend.

    `scale`: pixels per unit of time.
    """
    bottom = _top(len(time_line.spans))
    widest = sum(24 + 14 * len(colours) + DIGIT * len(words) for colours, words in legend)
    width = max(LEFT + RIGHT + max(time_line.end * scale, WIDTHS[0]), 16 + widest)
    height, summary = above + bottom - TOP + 44 + below, "; ".join(_summary(time_line))
    svg = Picture(time_line.title, width, height, summary, STYLE, TOP - above)
    _draw_axis(svg, time_line, scale, bottom)
    for rank, spans in enumerate(time_line.spans):
        _draw_rank(svg, time_line, rank, spans, scale)
    _draw_messages(svg, time_line, scale)
    return svg


def _summary(time_line: TimeLine) -> list[str]:
    show, bubble, ideal = time_line.show, time_line.bubble, time_line.ideal
    times = f"A step takes {show(bubble + ideal)}: computation {show(ideal)}, bubble {show(bubble)}"
    times += f" ({100 * bubble / ideal:.1f} % of the computation)"
    chunks = "" if time_line.stages.chunks == 1 else f", of one of {time_line.stages.chunks} chunks each"
    peaks = ", ".join(f"rank {rank}: {peak}" for rank, peak in enumerate(time_line.peaks))
    return [times, f"Peak activations (micro-batches{chunks}): {peaks}"]


def _scale(time_line: TimeLine) -> float:
    """Return pixels per unit of time, such that a typical short box has room for its number, if the page allows it."""
    lengths = medians_by_kind(span for rank in time_line.computation for span in rank if span.end > span.start)
    room = 5 + DIGIT * max(2, len(str(time_line.micro_batches - 1)))
    narrowest, widest = (width / time_line.end for width in WIDTHS)
    return min(max(room / min(lengths.values()), narrowest), widest)


def _legend(time_line: TimeLine) -> list[tuple[list[str], str]]:
    """Return colours and what they stand for, of all that is drawn."""
    kinds = {span.action.kind for rank in time_line.spans for span in rank}
    chunks = time_line.stages.chunks
    more = f", chunks 0 to {chunks - 1}" if chunks > 1 else ""
    entries = [
        ([_hexadecimal(_colour(kind, chunk, chunks)) for chunk in range(chunks)], WORDS[kind] + more)
        for kind in COMPUTATIONS
        if kind in kinds
    ]
    communication = [([GREY], "communication")] if kinds - set(COMPUTATIONS) else []
    return [*entries, *communication]


def _draw_rank(svg: Picture, time_line: TimeLine, rank: int, spans: Sequence[Span], scale: float) -> None:
    y = _top(rank)
    row = svg.add("g")
    svg.write(f"rank {rank}", LEFT - 10, y + ROW / 2 + 4, "end", inside=row)
    svg.box(LEFT, y, time_line.end * scale, ROW, "#eef0f2", class_="row", inside=row)
    for span in sorted(spans, key=lambda span: span.action.kind in COMPUTATIONS):  # computation on top
        _draw_box(svg, row, time_line, rank, span, scale)


def _draw_box(svg: Picture, row: Element, time_line: TimeLine, rank: int, span: Span, scale: float) -> None:
    """Draw an action as a box with its micro-batch, or a message as a line."""
    action, chunks = span.action, time_line.stages.chunks
    x, y, width = LEFT + span.start * scale, _top(rank), (span.end - span.start) * scale
    box = svg.add("g", inside=row, class_="box")
    times = f"{time_line.show(span.start)} to {time_line.show(span.end)}"
    svg.add("title", f"{action}: rank {rank}, stage {time_line.stages.stage(rank, action.chunk)}, {times}", box)
    if action.kind not in COMPUTATIONS:
        svg.box(x, y + ROW / 2 - 2, width, 4, GREY, class_="communication", inside=box)
        return
    colour = _colour(action.kind, action.chunk, chunks)
    svg.box(x, y, width, ROW, _hexadecimal(colour), stroke="#ffffff", stroke_width=0.8, inside=box)
    words = str(action.micro_batch)
    if width >= DIGIT * len(words):
        middle = {"x": x + width / 2, "y": y + ROW / 2 + 4}
        svg.add("text", words, box, text_anchor="middle", fill=_readable_on(colour), **middle)


def _draw_messages(svg: Picture, time_line: TimeLine, scale: float) -> None:
    """Draw arrows between neighbouring rows, from the end of the action that sends a message to the start of the action
    that uses it."""
    arrows = list(_messages(time_line))
    if len(arrows) > MOST_MESSAGES:
        return
    group = svg.add("g", stroke=GREY, class_="faint", fill="none")
    for source, end, target, start in arrows:
        down = target > source
        x, y = LEFT + start * scale, _top(target) + (0 if down else ROW)
        begin = _top(source) + (ROW if down else 0)
        tip = -3 if down else 3
        path = f"M{number(LEFT + end * scale)} {number(begin)}L{number(x)} {number(y)}"
        svg.add("path", None, group, d=f"{path}m-2.5 {tip}l2.5 {-tip}l2.5 {tip}", stroke_width=0.8)


def _messages(time_line: TimeLine) -> Iterator[tuple[int, float, int, float]]:
    """Yield messages of neighbouring ranks: rank and time at which each is ready, rank and time at which it is used."""
    tables = [lanes(time_line.stages, rank) for rank in range(time_line.stages.ranks)]
    sent: dict[tuple[int, int], tuple[int, float]] = {}  # by lane and micro-batch: rank and time
    for rank, spans in enumerate(time_line.computation):
        for (kind, micro_batch, chunk, _), _, end in spans:
            gives = tables[rank][kind, chunk].gives
            if gives is not None:
                sent[gives, micro_batch] = rank, end
    for rank, spans in enumerate(time_line.computation):
        for (kind, micro_batch, chunk, _), start, _ in spans:
            needs = tables[rank][kind, chunk].needs
            if needs is not None and (needs, micro_batch) in sent:
                source, end = sent[needs, micro_batch]
                if abs(source - rank) == 1:
                    yield source, end, rank, start


def _draw_axis(svg: Picture, time_line: TimeLine, scale: float, bottom: float) -> None:
    factor, unit = time_line.unit
    step = round_step(80 / scale * factor)
    for index in range(int(time_line.end * factor / step + 1e-9) + 1):
        x = LEFT + index * step / factor * scale
        svg.add("path", d=f"M{number(x)} {number(TOP - 4)}V{number(bottom)}", stroke=PALE, class_="faint")
        svg.write(f"{index * step:.6g}", x, bottom + 14, "middle")
    svg.write(f"time ({unit})" if unit else "time", LEFT, bottom + 32)


def _top(rank: int) -> float:
    return TOP + rank * (ROW + GAP)


def _colour(kind: Kind, chunk: int, chunks: int) -> Colour:
    """Return the colour of a kind; each chunk is lighter than the previous one."""
    white = 0.6 * chunk / max(chunks - 1, 1)
    red, green, blue = (round(value + (255 - value) * white) for value in COLOURS[kind])
    return red, green, blue


def _readable_on(colour: Colour) -> str:
    """Return black or white, whichever has more contrast (WCAG's relative luminance)."""
    linear = [((value / 255 + 0.055) / 1.055) ** 2.4 for value in colour]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if (luminance + 0.05) ** 2 < 1.05 * 0.05 else "#000000"


def _hexadecimal(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
