"""Tables of a report: what stands on the page in words and numbers, mostly closed at first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from megalite.extras.report.charts import OF_SOURCE, OF_VALIDATION, Chart
from megalite.extras.report.figures import MARKS, counted, marks, recent_mean, share_text, waits
from megalite.extras.report.pictures import short
from megalite.extras.report.recorded import Recorded, Table, flat
from megalite.process.output import printable
from megalite.training.facts import CAUSES

MOST_EVENTS = 200
"""Events in the list of a run."""


def as_text(words: object) -> str:
    return escape(printable(str(words)))


def duration(seconds: float) -> str:
    """Return a duration as text, in its two largest units."""
    if not 0 <= seconds < 1e12:
        return f"{seconds:.3g} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def constants(same: Sequence[Chart], runs: Sequence[Recorded]) -> str:
    rows = [
        [f"{runs[line.run].name}: {line.key}" if len(runs) > 1 else line.key, f"{line.values[0]:,.6g}"]
        for chart in same
        for line in chart.lines
    ]
    return details(f"{counted(len(rows), 'figure')} that did not change", [], rows)


def who_waits(runs: Sequence[Recorded]) -> str:
    """Return the table of who waits on which axis, and for whom."""

    def of(run: Recorded) -> Iterator[Sequence[str]]:
        for each in waits(run):
            longest = f"rank {each.waiting[0]} in {share_text(each.waiting[1])}, {1000 * each.longest:,.4g} ms"
            awaited = "" if each.awaited is None else f"rank {each.awaited[0]} in {share_text(each.awaited[1])}"
            yield each.axis, f"{1000 * each.seconds:,.4g} ms", longest, awaited

    header = ["axis", "a step, median rank", "who waits longest", "who waits least: others wait for it"]
    return details("Who waits, and for whom", *_by_run(runs, header, of))


def samples(run: Recorded, with_name: bool) -> str:
    """Return the texts that the network has written: the last step's open, those before closed."""
    if not run.samples:
        return ""
    last = run.samples[-1][0]
    shown = "".join(f"<pre>{as_text(text)}</pre>" for step, text in run.samples if step == last)
    of = f" of {as_text(run.name)}" if with_name else ""
    before = [[f"{step:,}", text] for step, text in reversed(run.samples) if step != last]
    return f"<h2>Text{of} after step {last:,}</h2>{shown}{details('Texts before', ['step', 'text'], before)}"


def sources(runs: Sequence[Recorded]) -> str:
    """Return the table of what runs have of each source: consumed tokens, and the last losses."""
    header = ["source", "tokens", "share", "loss", "validation loss", "bits per byte"]

    def of(run: Recorded) -> Iterator[Sequence[str]]:
        tokens = {key.removeprefix(OF_SOURCE): run.steps.last(key) or 0.0 for key in _starting(run.steps, OF_SOURCE)}
        whole = sum(tokens.values()) or 1.0
        names = dict.fromkeys(sorted(tokens, key=lambda name: -tokens[name]))
        names |= dict.fromkeys(key.removeprefix(OF_VALIDATION) for key in _starting(run.validation, OF_VALIDATION))
        for name in names:
            consumed = (short(tokens[name]), share_text(tokens[name] / whole)) if name in tokens else ("", "")
            losses = (
                recent_mean(run.steps.values(f"{run.facts.loss}/{name}")),
                run.validation.last(f"{OF_VALIDATION}{name}"),
                run.validation.last(f"valid_bits_per_byte/{name}"),
            )
            yield name, *consumed, *("" if loss is None else f"{loss:.4f}" for loss in losses)

    return details("Sources", *_by_run(runs, header, of))


def _starting(table: Table, before: str) -> list[str]:
    return [key for key in table.columns if key.startswith(before)]


def spent(runs: Sequence[Recorded]) -> str:
    """Return the table of what the time of the runs went into."""
    told = [run for run in runs if sum(run.facts.spent.values()) > 0]
    rows = [
        [cause, *(f"{duration(run.facts.spent[cause])}, {share_text(run.facts.share(cause) or 0.0)}" for run in told)]
        for cause in CAUSES
        if any(run.facts.spent[cause] for run in told)
    ]
    return details("Where the time went", ["", *(run.name for run in told)], rows)


def events(runs: Sequence[Recorded]) -> str:
    """Return the list of what happened, and what the marks on the curves mean."""
    header, rows = _by_run(runs, ["step", "what"], lambda run: [(f"{mark.step:,}", mark.words) for mark in marks(run)])
    left = f"<p class='grey'>The first {MOST_EVENTS} of {len(rows):,}.</p>" if len(rows) > MOST_EVENTS else ""
    names = ", ".join(f"{kind}: {words}" for kind, words in MARKS.items())
    after = f"{left}<p class='grey'>Marks on the curves: {as_text(names)}.</p>"
    return details(counted(len(rows), "event"), header, rows[:MOST_EVENTS], after)


def differences(runs: Sequence[Recorded]) -> dict[str, tuple[str, ...]]:
    """Return what the configurations of runs differ in: the values as text by "section.field"."""
    texts = [flat(run.config) for run in runs]
    keys = sorted({key for each in texts for key in each})
    found = {key: tuple(each.get(key, "") for each in texts) for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def differences_table(runs: Sequence[Recorded]) -> str:
    found = differences(runs)
    if len(runs) < 2:
        return ""
    if not found:
        return "<h2>Differences</h2><p>The configurations are the same.</p>"
    rows = [[key, *values] for key, values in found.items()]
    return f"<h2>Differences</h2>{table(['', *(run.name for run in runs)], rows)}"


def configuration(run: Recorded) -> str:
    return details(f"Configuration of {run.name}", [], [[key, value] for key, value in flat(run.config).items()])


def _by_run(
    runs: Sequence[Recorded], header: Sequence[str], of: Callable[[Recorded], Iterable[Sequence[str]]]
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return the header and the rows of all runs; of several, each row begins with the run's name."""
    several = len(runs) > 1
    rows = [[*([run.name] if several else []), *row] for run in runs for row in of(run)]
    return [*(["run"] if several else []), *header], rows


def details(summary: str, header: Sequence[str], rows: Sequence[Sequence[str]], after: str = "") -> str:
    """Return a table that is closed at first, or nothing if it has no rows."""
    if not rows:
        return ""
    return f"<details><summary>{as_text(summary)}</summary>{table(header, rows)}{after}</details>"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th scope='col'>{as_text(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{as_text(cell[:2000])}</td>" for cell in each) + "</tr>" for each in rows)
    return f"<div class='scroll' tabindex='0'><table>{f'<tr>{head}</tr>' if head else ''}{body}</table></div>"
