"""Picture of a time line, as SVG or as an HTML page: one row per rank, one box per action."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, tostring

from megalite.atomic_files import write_atomically
from megalite.pipeline.schedules import Kind
from megalite.pipeline.simulator import Span, lanes
from megalite.pipeline.timeline import COMPUTATIONS, TimeLine, medians_by_kind
from megalite.pipeline.trace import to_trace

LEFT, RIGHT, TOP, ROW, GAP = 70.0, 24.0, 76.0, 32.0, 12.0
DIGIT = 7.0
"""Width of a digit of the numbers in the boxes."""
WIDTHS = 760.0, 4000.0
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
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
body {{ margin: 0; background: #fff; }} main {{ overflow-x: auto; }} svg {{ display: block; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #16191d; }} }}
</style>
</head>
<body>
<main tabindex="0" aria-label="{title}">
{svg}
</main>
</body>
</html>
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
    """Return an HTML page that references no other files."""
    return PAGE.format(title=escape(time_line.title), svg=to_svg(time_line))


def to_svg(time_line: TimeLine) -> str:
    """Return the picture as SVG. Positions and widths along the x axis are proportional to time."""
    scale = _scale(time_line)
    bottom = TOP + len(time_line.spans) * (ROW + GAP)
    width, height = LEFT + RIGHT + max(time_line.end * scale, WIDTHS[0]), bottom + 96
    svg = Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {_number(width)} {_number(height)}")
    svg.attrib |= {"width": _number(width), "height": _number(height)}
    svg.attrib |= {"role": "img", "aria-labelledby": "title", "aria-describedby": "summary"}
    svg.attrib |= {"font-family": "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif", "font-size": "12"}
    _add(svg, "title", time_line.title, id="title")
    _add(svg, "desc", "; ".join(_summary(time_line)), id="summary")
    _add(svg, "style", STYLE)
    _add(svg, "rect", width="100%", height="100%", fill="#ffffff", class_="paper")
    _write(svg, time_line.title, 16, 28, font_size=16, font_weight=600)
    _draw_legend(svg, time_line)
    _draw_axis(svg, time_line, scale, bottom)
    for rank, spans in enumerate(time_line.spans):
        _draw_rank(svg, time_line, rank, spans, scale)
    _draw_messages(svg, time_line, scale)
    for index, line in enumerate(_summary(time_line)):
        _write(svg, line, 16, bottom + 62 + 20 * index)
    return tostring(svg, encoding="unicode")


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


def _draw_legend(svg: Element, time_line: TimeLine) -> None:
    kinds = {span.action.kind for rank in time_line.computation for span in rank}
    chunks = time_line.stages.chunks
    x = 16.0
    for kind in (kind for kind in COMPUTATIONS if kind in kinds):
        for chunk in range(chunks):
            _add(svg, "rect", x=x, y=43, width=14, height=14, fill=_hexadecimal(_colour(kind, chunk, chunks)))
            x += 14
        words = WORDS[kind] + (f", chunks 0 to {chunks - 1}" if chunks > 1 else "")
        _write(svg, words, x + 6, 54)
        x += 24 + DIGIT * len(words)


def _draw_rank(svg: Element, time_line: TimeLine, rank: int, spans: Sequence[Span], scale: float) -> None:
    y = _top(rank)
    row = _add(svg, "g")
    _write(row, f"rank {rank}", LEFT - 10, y + ROW / 2 + 4, text_anchor="end")
    _add(row, "rect", x=LEFT, y=y, width=time_line.end * scale, height=ROW, fill="#eef0f2", class_="row")
    for span in sorted(spans, key=lambda span: span.action.kind in COMPUTATIONS):  # computation on top
        _draw_box(row, time_line, rank, span, scale)


def _draw_box(row: Element, time_line: TimeLine, rank: int, span: Span, scale: float) -> None:
    action, chunks = span.action, time_line.stages.chunks
    x, y, width = LEFT + span.start * scale, _top(rank), (span.end - span.start) * scale
    box = _add(row, "g", class_="box")
    times = f"{time_line.show(span.start)} to {time_line.show(span.end)}"
    _add(box, "title", f"{action}: rank {rank}, stage {time_line.stages.stage(rank, action.chunk)}, {times}")
    if action.kind not in COMPUTATIONS:
        _add(box, "rect", x=x, y=y + ROW / 2 - 2, width=width, height=4, fill="#5f6770", class_="communication")
        return
    colour = _colour(action.kind, action.chunk, chunks)
    _add(box, "rect", x=x, y=y, width=width, height=ROW, fill=_hexadecimal(colour), stroke="#ffffff", stroke_width=0.8)
    number = str(action.micro_batch)
    if width >= DIGIT * len(number):
        _add(box, "text", number, x=x + width / 2, y=y + ROW / 2 + 4, text_anchor="middle", fill=_readable_on(colour))


def _draw_messages(svg: Element, time_line: TimeLine, scale: float) -> None:
    """Draw arrows between neighbouring rows, from the end of the action that sends a message to the start of the action
    that uses it."""
    arrows = list(_messages(time_line))
    if len(arrows) > MOST_MESSAGES:
        return
    group = _add(svg, "g", stroke="#5f6770", class_="faint", fill="none")
    for source, end, target, start in arrows:
        down = target > source
        x, y = LEFT + start * scale, _top(target) + (0 if down else ROW)
        begin = _top(source) + (ROW if down else 0)
        tip = -3 if down else 3
        path = f"M{_number(LEFT + end * scale)} {_number(begin)}L{_number(x)} {_number(y)}"
        _add(group, "path", d=f"{path}m-2.5 {tip}l2.5 {-tip}l2.5 {tip}", stroke_width=0.8)


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


def _draw_axis(svg: Element, time_line: TimeLine, scale: float, bottom: float) -> None:
    factor, unit = time_line.unit
    step = _tick(80 / scale * factor)
    for index in range(int(time_line.end * factor / step + 1e-9) + 1):
        x = LEFT + index * step / factor * scale
        _add(svg, "path", d=f"M{_number(x)} {_number(TOP - 4)}V{_number(bottom)}", stroke="#b4bac0", class_="faint")
        _write(svg, f"{index * step:.6g}", x, bottom + 14, text_anchor="middle")
    _write(svg, f"time ({unit})" if unit else "time", LEFT, bottom + 32)


def _tick(least: float) -> float:
    """Return the smallest number that is at least `least`, and 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


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


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _write(parent: Element, text: str, x: float, y: float, **attributes: str | float) -> None:
    _add(parent, "text", text, x=x, y=y, fill="#1d2125", class_="ink", **attributes)


def _add(parent: Element, tag: str, text: str | None = None, **attributes: str | float) -> Element:
    """Add a child element; `class_` and `stroke_width` set the attributes class and stroke-width."""
    child = SubElement(parent, tag)
    for name, value in attributes.items():
        child.set(name.rstrip("_").replace("_", "-"), value if isinstance(value, str) else _number(value))
    child.text = text
    return child
