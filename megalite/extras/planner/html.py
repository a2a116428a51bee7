"""Page with plans, which references no other files: the table, memory by stage, where the time goes, the time line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from megalite.extras.planner.plan import GIB, Plan
from megalite.extras.planner.report import ENTRIES, MEMORY, row, together
from megalite.pipeline.drawing import STYLE, to_svg
from megalite.pipeline.timeline import TimeLine
from megalite.svg import INK, Picture
from megalite.svg import page as html_page

_COLOURS = ("#1f5fae", "#2f8f5b", "#8a4ca6", "#d98a1f", "#b8443a", "#7d858d")
_LEFT, _TOP, _ROW, _WIDTH = 110.0, 34.0, 26.0, 640.0
_OF_PIPELINE = "<p>Its forwards and backwards alone; what the step does after the last one is not drawn.</p><div>"
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 100em; padding: 0 1em; color: #1d2125;
background: #fff; }
table { border-collapse: collapse; } div { overflow-x: auto; } p { max-width: 60em; }
th, td { padding: .25em .45em; text-align: right; border-bottom: 1px solid #d5dade; }
th { vertical-align: bottom; font-size: 13px; } td { white-space: nowrap; }
pre { background: #f3f5f7; padding: .8em; overflow-x: auto; }
@media (prefers-color-scheme: dark) {
  body { color: #e6e8ea; background: #16191d; } th, td { border-color: #3a4046; } pre { background: #23282e; }
  .limit { stroke: #e6e8ea; }
}
"""


def page(title: str, plans: Sequence[Plan], time_line: TimeLine, commands: Iterable[str], notes: Iterable[str]) -> str:
    """Return the page. The time line and the commands are those of the first plan."""
    best = plans[0]
    cost = best.step.cost
    causes = [(words, getattr(cost, name)) for name, words in ENTRIES.items() if getattr(cost, name) > 0]
    causes.sort(key=lambda each: -each[1])
    rows = [row(plan) for plan in plans]
    parts = [
        f"<h1>{escape(title)}</h1>",
        _table(list(rows[0]), [list(map(str, each.values())) for each in rows]),
        "".join(f"<p>{escape(note)}</p>" for note in notes),
        "<h2>Memory of the first layout</h2>",
        bars(best),
        "<h2>Time of its step</h2>",
        _table(
            ["", "seconds", "share"], [[words, f"{value:.3f}", f"{value / cost.total:.1%}"] for words, value in causes]
        ),
        *(("<h2>Pipeline</h2>", _OF_PIPELINE, to_svg(time_line), "</div>") if best.layout.pipeline > 1 else ()),
        "<h2>Command</h2>",
        "".join(f"<pre>{escape(command)}</pre>" for command in commands),
    ]
    return html_page(title, _STYLE + STYLE, "\n".join(parts), "light dark")


def bars(plan: Plan) -> str:
    """Return a picture of the memory of each pipeline stage as SVG; the line is what the GPU has."""
    stages = together(plan.memory)
    most = max(plan.room, *(memory.total for _, memory in stages))
    scale, height = _WIDTH / most, _TOP + _ROW * len(stages) + 24
    svg = Picture("Memory by pipeline stage", _LEFT + _WIDTH + 90, height)
    svg.legend((([colour], words) for colour, words in zip(_COLOURS, MEMORY.values(), strict=True)), _LEFT, 6)
    for index, (name, memory) in enumerate(stages):
        x, y = _LEFT, _TOP + _ROW * index
        svg.write(name, 4, y + 15)
        for colour, size in zip(_COLOURS, memory.of_device, strict=True):
            svg.box(x, y, size * scale, _ROW - 6, colour)
            x += size * scale
        svg.write(f"{memory.total / GIB:.1f} GiB", x + 6, y + 15)
    end = _LEFT + plan.room * scale
    svg.line([(end, _TOP - 4), (end, height - 20)], INK, class_="limit")
    svg.write(f"{plan.room / GIB:.1f} GiB", end - 40, height - 6)
    return str(svg)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in each) + "</tr>" for each in rows)
    return f"<div><table><tr>{head}</tr>{body}</table></div>"
