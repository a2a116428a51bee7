"""Charts of a report: which figures of runs stand together, over steps, tokens or hours."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megalite.extras.report.figures import MARKS, Mark, marks, means, thinned
from megalite.extras.report.recorded import Recorded, Table
from megalite.process.output import printable

MOST_POINTS = 640
"""Points of all lines of a chart and a table together, of which a line gets its share."""
PARTS = 60
"""Parts of a run over whose means a trend goes, and columns of a heat map."""
MOST_LINES = 8
"""Lines of a chart: more figures than these are a heat map."""
MOST_MARKS = 60
"""Marks of a kind in a chart."""
UNITS = {"steps": "iteration", "tokens": "consumed_tokens", "samples": "consumed_samples", "hours": "wall_time"}
"""Units that curves may run over, each with the figure that it comes from."""
TITLES = {
    "lm_loss": "Loss (nats per token)",
    "lm_loss/": "Loss by source",
    "valid_loss/": "Validation loss by source or set",
    "bits_per_byte": "Loss in bits per byte of text",
    "learning_rate": "Learning rate",
    "grad_norm": "Norm of all gradients",
    "tokens_per_second": "Tokens per second",
    "samples_per_second": "Samples per second",
    "mfu": "Share of the peak (MFU)",
    "model_tflops_per_device": "TFLOP/s of the model, a device",
    "iteration_time_s": "Seconds of a step, by section",
    "time_s": "Seconds of data, evaluations and saves",
    "iteration_time_s/slowest_rank": "Slowest rank",
    "wait_s": "Seconds of waits in a step, by axis",
    "communication_share": "Share of a step in which all wait",
    "scaling_efficiency": "Share of a step that ranks work",
    "bytes_sent": "Bytes that rank 0 sends in a step",
    "peak_memory_bytes": "Peak memory (bytes)",
    "peak_memory_bytes/max_rank": "Rank with the most memory",
    "host_memory_bytes": "Memory of the host (bytes)",
    "consumed_tokens": "Tokens by source",
    "max_expert_load": "Load of the busiest expert, by layer",
    "min_expert_load": "Load of the idlest expert, by layer",
}
"""Titles of charts by what their figures begin with, in the order of the page: other losses second, the rest last."""
BESIDE = {"data_time_s", "evaluation_time_s", "save_time_s"}
"""Figures of some lines alone, which stand in one chart as dots."""
HIDDEN = {"iteration", "consumed_samples", "consumed_tokens", "wall_time", "skipped", "start_time_s"}
"""Figures that are places or marks of a chart, no lines."""
OF_SOURCE, OF_VALIDATION = "consumed_tokens/", "valid_loss/"
"""Beginnings of the tokens of a source, and of the validation loss of a source or set."""
HEAT_MAPS = ("max_expert_load", "min_expert_load")


@dataclass(frozen=True)
class Line:
    """Figure of a run in a chart: its thinned values and their places, by unit.

    `trend` has a value and a place for each of some equal parts of a long noisy line: their means.
    """

    run: int
    key: str
    words: str
    values: tuple[float, ...]
    places: Mapping[str, tuple[float, ...]]
    trend: tuple[float, ...] = ()
    trend_places: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Chart:
    """Lines of figures that belong together."""

    base: str
    title: str
    lines: tuple[Line, ...]
    is_heat_map: bool = False
    marks: tuple[tuple[int, Mark], ...] = ()
    """Events, each with the number of its run."""
    units: tuple[str, ...] = ("steps",)


def charts(runs: Sequence[Recorded]) -> list[Chart]:
    """Return the charts of runs, laid over each other, in the order of the page."""
    groups: dict[str, list[tuple[int, Table, str]]] = {}
    for number, run in enumerate(runs):
        for table in (run.steps, run.validation, run.test):
            for key in table.columns:
                if not _is_hidden(key) and not (table is run.test and len(table.values(key)) < 2):
                    groups.setdefault(_base(key, run), []).append((number, table, key))
    units = [unit for unit, key in UNITS.items() if unit == "steps" or any(key in run.steps.columns for run in runs)]
    if "tokens" in units:
        units.remove("samples")
    events = tuple((number, mark) for number, run in enumerate(runs) for mark in few(marks(run)))
    return [
        _chart(base, groups[base], runs, tuple(units), events) for base in sorted(groups, key=lambda base: _order(base))
    ]


def _is_hidden(key: str) -> bool:
    """Tell whether a figure is no line: a place or a mark, or a rank that the table of waits has."""
    return key in HIDDEN or (key.startswith("wait_s/") and key.endswith("_rank"))


def _base(key: str, run: Recorded) -> str:
    """Return what the figures of a chart begin with."""
    if key in BESIDE:
        return "time_s"
    if key.endswith("_rank"):
        return key
    base, _, part = key.partition("/")
    if part and (key.startswith(OF_VALIDATION) or base == run.facts.loss):
        return f"{base}/"
    for before in ("valid_", "test_"):
        if base.startswith(before):
            base = base.removeprefix(before)
            return run.facts.loss if base == "loss" else base
    return base


def _order(base: str) -> tuple[float, str]:
    """Return the place of a chart in the page: a loss, other losses, what has a title, and the rest."""
    if base in TITLES:
        return float(list(TITLES).index(base)), base
    return 0.0 if base == "loss" else 0.5 if is_loss(base) else float(len(TITLES)), base


def _chart(
    base: str,
    members: Sequence[tuple[int, Table, str]],
    runs: Sequence[Recorded],
    units: tuple[str, ...],
    events: tuple[tuple[int, Mark], ...],
) -> Chart:
    """Return the chart of some figures. `events`: marks, each with the number of its run."""
    if base == "consumed_tokens":  # heat maps are of levels, and these grow
        members = sorted(members, key=lambda each: -(each[1].last(each[2]) or 0.0))[:MOST_LINES]
    keys = {key for _, _, key in members}
    is_map = len(runs) == 1 and (base in HEAT_MAPS or len(keys) > MOST_LINES)
    most = max(8, MOST_POINTS // len(members))
    lines = tuple(_line(number, table, key, base, runs, units, 0 if is_map else most) for number, table, key in members)
    title = TITLES.get(base) or printable(base.replace("_", " ").replace("/", ": ").capitalize())
    return Chart(base, title, tuple(line for line in lines if line.values), is_map, events, units)


def _line(
    number: int, table: Table, key: str, base: str, runs: Sequence[Recorded], units: Sequence[str], most: int
) -> Line:
    """Return a line of a figure with about `most` values; 0: with its trend alone."""
    column, run = table.columns[key], runs[number]
    words = key if "/" not in key or not key.startswith(base) else key.split("/", 1)[1].replace("_", " ")
    if len(runs) > 1:
        words = f"{run.name}: {words}"
    words = printable(words)
    parts = means(column.values, PARTS)
    trend = tuple(mean for _, mean in parts)
    size = len(column.values)
    middle = [column.lines[(2 * part + 1) * size // (2 * min(PARTS, size))] for part, _ in parts]
    trend_places = {unit: _places(table, middle, unit, run) for unit in units}
    if not most:
        return Line(number, key, words, trend, trend_places)
    chosen = thinned(column.values, most)
    rows = [column.lines[place] for place in chosen]
    places = {unit: _places(table, rows, unit, run) for unit in units}
    values = tuple(column.values[place] for place in chosen)
    if size < 2 * PARTS:
        return Line(number, key, words, values, places)
    return Line(number, key, words, values, places, trend, trend_places)


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


def is_dotted(base: str) -> bool:
    """Tell whether a chart has dots in place of lines: its figures are numbers of ranks, or of few steps."""
    return base.endswith("_rank") or base == "time_s"


def is_loss(base: str) -> bool:
    """Tell whether the figures of a chart are losses."""
    return base.endswith("loss")
