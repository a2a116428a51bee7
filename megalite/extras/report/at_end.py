"""Page and pictures of a run, written into its directory when it ends."""

from __future__ import annotations

from io import BytesIO

from megalite.extras.report.charts import Chart, charts
from megalite.extras.report.page import page
from megalite.extras.report.pictures import COLOURS, look, picture
from megalite.extras.report.recorded import Recorded, read_run
from megalite.storage import AnyPath, write_atomically
from megalite.training.facts import Facts

INSTALL = "pip install matplotlib"


def report_at_end(directory: AnyPath, metrics: AnyPath | None = None) -> tuple[Facts, str]:
    """Write report.html, loss.svg and loss.png into a run directory. Returns the facts of the run, and a line.

    A failure is told in this line: it must not end a run that has trained. `metrics`: as for `read_run`.
    """
    facts = Facts()
    try:
        run = read_run(str(directory), metrics)
        facts = run.facts
        return facts, _write(directory, run)
    except Exception as error:  # also a defect of a library that draws
        return facts, f"WARNING: the report could not be written ({error}). megalite-report {directory} writes it"


def _write(directory: AnyPath, run: Recorded) -> str:
    """Write the files, of which each is whole or not there, and return a line about them."""
    place, drawn = directory / "report.html", charts([run])
    write_atomically(place, page([run], drawn).encode())
    chart = next((each for each in drawn if each.base == run.facts.loss and each.lines), None)
    if chart is None:
        return f"the report is {place}"
    write_atomically(directory / "loss.svg", picture(chart, "steps").encode())
    png = loss_png(chart)
    if png is None:
        return f"the report is {place}, with loss.svg; loss.png needs matplotlib: {INSTALL}"
    write_atomically(directory / "loss.png", png)
    return f"the report is {place}, with loss.svg and loss.png"


def loss_png(chart: Chart) -> bytes | None:
    """Return the chart over steps as a PNG; None without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # an extra, and slow to import
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for line in chart.lines:
        colour = COLOURS[look(chart, line)[0]]
        label = line.words.replace("$", r"\$")  # a formula would begin there
        alpha = 0.4 if line.trend else 1.0
        axes.plot(line.places["steps"], line.values, color=colour, alpha=alpha, label=label)
        if line.trend:
            axes.plot(line.trend_places["steps"], line.trend, color=colour, linewidth=2)
    axes.set(title=chart.title.replace("$", r"\$"), xlabel="steps")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    data = BytesIO()
    FigureCanvasAgg(figure).print_png(data)
    return data.getvalue()
