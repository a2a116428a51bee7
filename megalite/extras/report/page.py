"""The page of a report: HTML without scripts and without other files, for a phone and a screen, light and dark."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megalite.extras.report import tables
from megalite.extras.report.charts import UNITS, Chart, charts, is_loss
from megalite.extras.report.figures import figures, findings, marks, waits
from megalite.extras.report.pictures import COLOURS, DASHES, look, picture, short
from megalite.extras.report.recorded import Recorded, flat
from megalite.extras.report.tables import as_text, duration, table
from megalite.process.output import in_words, printable
from megalite.svg import page as html_page

_DARK = ("#6aa9ff", "#ff9d5c", "#6fc796", "#c79be0", "#ff8a80", "#5fd0d9", "#d9bd4f", "#a9b2bb")
MOST_ENTRIES = 16
"""Entries in the legend of a chart."""


def style() -> str:
    """Return the style of a page: page.css, and the colours of lines, light and dark."""
    light = "".join(f"--c{at}:{colour};" for at, colour in enumerate(COLOURS))
    dark = "".join(f"--c{at}:{colour};" for at, colour in enumerate(_DARK))
    rules = [f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"]
    rules += [f".c{at}{{stroke:var(--c{at})}}.f{at}{{fill:var(--c{at})}}" for at in range(len(COLOURS))]
    return (Path(__file__).parent / "page.css").read_text() + "".join(rules)


def _switch_style() -> str:
    """Return the style of what each position of the switch shows."""
    rules = []
    for unit in UNITS:
        label = f".switch label[for=over-{unit}]"
        rules.append(
            f"#over-{unit}:checked~main .{unit}{{display:block}}"
            f"#over-{unit}:checked~{label}{{background:var(--ink);color:var(--paper)}}"
            f"#over-{unit}:focus-visible~{label}{{outline:2px solid var(--c0)}}"
        )
    return "".join(rules)


def document(runs: Sequence[Recorded]) -> dict[str, Any]:
    """Return each number of the page, as JSON has it."""
    return {
        "runs": [
            {
                "name": run.name,
                "place": run.place,
                "facts": figures(run),
                "findings": findings(run),
                "seconds": run.facts.spent,
                "waits": [asdict(each) for each in waits(run)],
                "samples": [{"step": step, "text": text} for step, text in run.samples],
                "events": [{"step": mark.step, "kind": mark.kind, "words": mark.words} for mark in marks(run)],
                "config": flat(run.config),
            }
            for run in runs
        ],
        "differences": {key: list(values) for key, values in tables.differences(runs).items()},
        "charts": [
            {
                "title": chart.title,
                "lines": [
                    {"run": runs[line.run].name, "key": line.key, "values": line.values, **line.places}
                    for line in chart.lines
                ],
            }
            for chart in charts(runs)
        ],
    }


def page(runs: Sequence[Recorded], drawn: Sequence[Chart] | None = None) -> str:
    """Return the page of runs. `drawn`: their charts, if they are made already."""
    now = time.time()
    names = ", ".join(run.name for run in runs)
    drawn = charts(runs) if drawn is None else drawn
    units = drawn[0].units if drawn else ()
    moving = [chart for chart in drawn if not _is_constant(chart)]
    body = [
        *_switch_inputs(units),
        f"<header><h1>{as_text(names)}</h1>{_header(runs, now)}</header>",
        _switch(units),
        "<main>",
        "<section aria-label='Charts'><div class='charts'>",
        *(_figure(chart, runs) for chart in moving),
        "</div></section>",
        *(tables.samples(run, len(runs) > 1) for run in runs),
        tables.sources(runs),
        tables.constants([chart for chart in drawn if _is_constant(chart)], runs),
        tables.spent(runs),
        tables.who_waits(runs),
        tables.events(runs),
        tables.differences_table(runs),
        *(tables.configuration(run) for run in runs),
        f"<p class='grey'>Made by megalite-report at {_when(now)} from metrics.jsonl, which has every number.</p>",
        "</main>",
    ]
    title = f"{names}: megalite report"
    return html_page(printable(title), style() + _switch_style(), "\n".join(body), "light dark")


def _switch_inputs(units: Iterable[str]) -> list[str]:
    return [
        f"<input class='over' type='radio' name='over' id='over-{unit}'{' checked' if unit == 'steps' else ''}>"
        for unit in units
    ]


def _switch(units: Sequence[str]) -> str:
    if not units:
        return ""
    labels = "".join(f"<label for='over-{unit}'>{unit}</label>" for unit in units)
    return f"<div class='switch'>Over {labels}</div>"


def _header(runs: Sequence[Recorded], now: float) -> str:
    if len(runs) == 1:
        return _of_one(runs[0], now)
    shown = [dict(_shown(figures(run))) for run in runs]
    keys = list(dict.fromkeys(key for each in shown for key in each))
    rows = [[run.name, *(each.get(key, "") for key in keys)] for run, each in zip(runs, shown, strict=True)]
    parts = [table(["run", *keys], rows)]
    for run in runs:
        parts.append(_findings(run, f"{run.name}: "))
    return "".join(parts)


def _of_one(run: Recorded, now: float) -> str:
    found = figures(run)
    items = "".join(f"<div><dt>{as_text(name)}</dt><dd>{as_text(value)}</dd></div>" for name, value in _shown(found))
    written, ago = found["last_written"], ""
    if isinstance(written, float):
        ago = f" The last line is of {_when(written)}, {duration(max(0.0, now - written))} before."
    return f"<p class='grey'>{as_text(run.place)}.{ago}</p><dl class='facts'>{items}</dl>{_findings(run)}"


def _findings(run: Recorded, before: str = "") -> str:
    found = "".join(f"<li>{as_text(before + each)}</li>" for each in findings(run))
    return f"<ul class='findings'>{found}</ul>" if found else ""


def _shown(found: Mapping[str, float | int | str | None]) -> list[tuple[str, str]]:
    """Return names and texts of the facts that a run has."""
    planned = f" of {found['planned_steps']:,}" if found["planned_steps"] else ""

    def number(name: str, form: str = ",.4g") -> str:
        value = found[name]
        return "" if not isinstance(value, int | float) else format(value, form)

    def brief(name: str) -> str:
        value = found[name]
        return "" if not isinstance(value, int | float) else short(value)

    best = found["best_valid_step"]
    memory, counted = found["peak_memory_bytes"], found["predicted_memory_bytes"]
    lost = found["skipped_steps"]
    entries = [
        ("state", str(found["state"])),
        ("step", f"{number('last_step', ',')}{planned}" if found["last_step"] is not None else ""),
        ("loss, mean of the last steps", number("loss", ".4f")),
        ("best validation loss", f"{number('best_valid_loss', '.4f')} at {best:,}" if best is not None else ""),
        ("test loss", number("test_loss", ".4f")),
        ("tokens", brief("consumed_tokens")),
        ("samples", brief("consumed_samples")),
        ("time", duration(found["seconds"]) if isinstance(found["seconds"], float) else ""),
        ("tokens per second", brief("tokens_per_second")),
        ("MFU", number("mfu", ".1%")),
        ("time in steps", number("goodput", ".1%")),
        ("restarts", str(found["restarts"]) if found["restarts"] else ""),
        ("peak memory", f"{in_words(memory)} on rank {found['peak_memory_rank']}" if isinstance(memory, float) else ""),
        ("counted at the start (rank 0)", in_words(counted) if isinstance(counted, float) else ""),
        ("skipped steps", str(lost) if lost else ""),
    ]
    return [(name, value) for name, value in entries if value]


def _when(at: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))
    except (OverflowError, ValueError, OSError):
        return "an unknown time"


def _is_constant(chart: Chart) -> bool:
    return not is_loss(chart.base) and all(min(line.values) == max(line.values) for line in chart.lines)


def _figure(chart: Chart, runs: Sequence[Recorded]) -> str:
    pictures = "".join(f"<div class='{unit}'>{picture(chart, unit)}</div>" for unit in chart.units)
    entries = [] if chart.is_heat_map else _legend(chart, runs)
    more = f"<span>and {len(entries) - MOST_ENTRIES} more</span>" if len(entries) > MOST_ENTRIES else ""
    legend = "".join(f"<span>{_swatch(*drawn)}{as_text(words)}</span>" for drawn, words in entries[:MOST_ENTRIES])
    return f"<figure>{pictures}<figcaption class='legend'>{legend}{more}</figcaption></figure>"


def _legend(chart: Chart, runs: Sequence[Recorded]) -> list[tuple[tuple[int, str], str]]:
    """Return colours and dashes with what they stand for: a line, or of several runs first the run, then the figure."""
    if len(runs) == 1:
        return [(look(chart, line), line.words) for line in chart.lines]
    of_runs = {runs[line.run].name: (look(chart, line)[0], "") for line in chart.lines}
    figures = {line.words.removeprefix(printable(f"{runs[line.run].name}: ")): line for line in chart.lines}
    of_figures = {words: (len(COLOURS) - 1, look(chart, line)[1]) for words, line in figures.items()}
    shown = (of_runs, of_figures) if len(of_figures) > 1 else (of_runs,)
    return [(drawn, words) for each in shown for words, drawn in each.items()]


def _swatch(colour: int, dashes: str) -> str:
    dash = f" stroke-dasharray='{dashes}'" if dashes in DASHES and dashes else ""
    return (
        f"<svg viewBox='0 0 22 8' aria-hidden='true'><path d='M0 4H22' class='c{colour}' stroke-width='3'{dash}/></svg>"
    )
