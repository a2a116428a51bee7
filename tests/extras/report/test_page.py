"""The page has each number once, loads nothing, and shows what others have written as text alone."""

from __future__ import annotations

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megalite.extras.report.at_end import loss_png, report_at_end
from megalite.extras.report.charts import charts, few
from megalite.extras.report.figures import SAVED, SKIPPED, Mark
from megalite.extras.report.page import document, page
from megalite.extras.report.pictures import mark_text, picture, short
from megalite.extras.report.recorded import Recorded, read_run
from megalite.extras.report.tables import differences, duration
from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN, ended, words
from tests.extras.report.runs import step, validation, write_run
from tests.harness.job import Job
from tests.harness.tool import run_tool

HOSTILE = "</title></style><script>document.title='x'</script><img src=x onerror=alert(1)>\u202e\x1b[31m\udc80"


def run_of(folder: Path, count: int = 200, **others: Any) -> Recorded:
    lines = [step(number, **{"wait_s/pp": 0.1 * number, "wait_s/dp": 0.2}) for number in range(1, count + 1)]
    lines += [validation(number, 4.0 - 0.01 * number) for number in range(50, count + 1, 50)]
    return read_run(str(write_run(folder, lines, **others)))


class Tags(HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attributes


def is_inert(text: str) -> bool:
    """Tell whether a page has nothing that runs or is loaded, and can be written."""
    text.encode()
    found = Tags(text)
    names = {name for name, _ in found.attributes}
    runs = set(found.tags) & {"script", "iframe", "object", "embed", "link", "img", "a", "form", "base", "meta-refresh"}
    return not runs and not any(name.startswith("on") for name in names) and not names & {"href", "src", "xlink:href"}


def test_a_page_is_one_small_file_that_loads_nothing(tmp_path: Path) -> None:
    text = page([run_of(tmp_path, config="training:\n  train_iters: 9\n")])
    assert is_inert(text)
    assert "url(" not in text
    assert "@import" not in text
    assert len(text) < 400_000
    for shown in ("Loss (nats per token)", "Seconds of waits in a step, by axis", "training.train_iters", "200 of 9"):
        assert shown in text


def test_what_others_have_written_is_text(tmp_path: Path) -> None:
    hostile = {f"{HOSTILE}/{number}": float(number) for number in range(3)} | {f"x{HOSTILE}": 1.0}
    lines = [step(1, **hostile), step(2, **hostile)]
    ledger = [{"step": 1, "kind": HOSTILE, "why": HOSTILE}]
    config = json.dumps({HOSTILE: {HOSTILE: HOSTILE}, "data": {"path": [HOSTILE]}})
    folder = tmp_path / HOSTILE.replace("/", "_")
    run = read_run(str(write_run(folder, lines, ledger=ledger, config=config, done=True)))
    for text in (page([run]), page([run, run])):
        assert is_inert(text)
        assert not set(re.findall("[\x00-\x08\x0e-\x1f\x7f-\x9f\u202a-\u202e]", text))
    assert Tags("<p><script>x</script>").tags == ["p", "script"]  # the check itself sees them


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_short_runs_have_a_page(count: int, tmp_path: Path) -> None:
    text = page([run_of(tmp_path, count)])
    assert is_inert(text)
    assert (count == 0) == ("no step is finished yet" in text or ">empty<" in text)


@pytest.mark.parametrize("value", ["NaN", "Infinity", 1e308, -1e308, 0, 5e-324, True])
def test_values_of_any_size_are_drawn(value: object, tmp_path: Path) -> None:
    figures = ("lm_loss", "grad_norm", "iteration_time_s", "wall_time", "consumed_tokens", "peak_memory_bytes")
    lines = [step(number, **({} if number % 3 else dict.fromkeys(figures, value))) for number in range(1, 30)]
    run = read_run(str(write_run(tmp_path, lines)))
    assert is_inert(page([run]))
    json.dumps(document([run]))


def test_every_number_of_the_page_is_in_its_json(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [step(1), step(2, skipped=True, lm_loss="NaN", grad_norm="NaN"), validation(2, 3.5)])
    output = run_tool("report", tmp_path / "a", "--json")
    found = json.loads(output.stdout)  # strict: no NaN
    (run,) = found["runs"]
    assert run["facts"]["last_loss"] == "NaN"
    assert run["facts"]["best_valid_loss"] == 3.5
    assert {"step": 2, "kind": "skipped", "words": "skipped: gradients not finite"} in run["events"]
    loss = next(chart for chart in found["charts"] if chart["title"] == "Loss (nats per token)")
    assert [(line["key"], line["values"], line["steps"]) for line in loss["lines"]] == [
        ("lm_loss", [3.99], [1.0]),
        ("valid_loss", [3.5], [2.0]),
    ]
    assert loss["lines"][0]["tokens"] == [1000.0]


def test_runs_are_laid_over_each_other(tmp_path: Path) -> None:
    first = run_of(tmp_path / "a", config="training:\n  lr: 1\n  seed: 2\n")
    second = run_of(tmp_path / "b", 50, config="training:\n  lr: 3\n  seed: 2\n")
    assert differences([first, second]) == {"training.lr": ("1", "3")}
    chart = charts([first, second])[0]
    assert [(line.run, line.key) for line in chart.lines] == [
        (0, "lm_loss"), (0, "valid_loss"), (1, "lm_loss"), (1, "valid_loss"),
    ]  # fmt: skip
    text = page([first, second])
    legend = re.findall(r"</svg>([^<]*)</span>", text.partition("<figcaption")[2].partition("</figcaption>")[0])
    assert legend == ["a", "b", "lm_loss", "valid_loss"]
    legend = re.findall(
        r"</svg>([^<]*)</span>", page([first]).partition("<figcaption")[2].partition("</figcaption>")[0]
    )
    assert legend == ["lm_loss", "valid_loss"]
    assert "training.lr" in text


def test_charts_stand_in_the_order_of_the_page(tmp_path: Path) -> None:
    more = {f"max_expert_load/layer {number}": 1.0 + number for number in range(3)}
    more |= {"load_balancing_loss": 0.5, "zzz": 1.0, "iteration_time_s/slowest_rank": 3.0}
    found = charts([read_run(str(write_run(tmp_path, [step(1, **more), validation(1, 3.0, valid_other=1.0)])))])
    bases = [chart.base for chart in found]
    assert bases[:4] == ["lm_loss", "load_balancing_loss", "learning_rate", "grad_norm"]
    assert bases[-1] == "zzz"
    assert "iteration_time_s/slowest_rank" in bases
    assert [line.key for line in found[0].lines] == ["lm_loss", "valid_loss"]
    assert next(chart for chart in found if chart.base == "max_expert_load").is_heat_map


def test_many_figures_of_a_kind_are_a_heat_map_in_one_run_alone(tmp_path: Path) -> None:
    lines = [step(number, **{f"load/{each}": float(each) for each in range(12)}) for number in range(1, 5)]
    run = read_run(str(write_run(tmp_path, lines)))
    assert [chart.is_heat_map for chart in charts([run]) if chart.base == "load"] == [True]
    assert [chart.is_heat_map for chart in charts([run, run]) if chart.base == "load"] == [False]
    svg = ElementTree.fromstring(picture(next(each for each in charts([run]) if each.base == "load"), "steps"))
    titles = [each.text for each in svg.iter("{http://www.w3.org/2000/svg}title")]
    assert "3: 3" in titles


def test_curves_go_over_steps_tokens_and_hours(tmp_path: Path) -> None:
    chart = charts([run_of(tmp_path, 4)])[0]
    assert chart.units == ("steps", "tokens", "hours")
    line = chart.lines[0]
    assert line.places["tokens"] == (1000.0, 2000.0, 3000.0, 4000.0)
    assert line.places["hours"] == pytest.approx((0.0, 3 / 3600, 6 / 3600, 9 / 3600))


def test_a_long_line_has_a_trend(tmp_path: Path) -> None:
    (line, _) = charts([run_of(tmp_path, 600)])[0].lines
    assert len(line.trend) == 60
    assert line.trend[0] == pytest.approx(4.0 - 0.01 * 5.5)  # the mean of ten steps
    assert line.trend_places["steps"][:2] == (6.0, 16.0)


def test_no_more_than_some_marks_of_a_kind_are_drawn() -> None:
    events = [Mark(number, SAVED, "") for number in range(1000)] + [Mark(5, SKIPPED, "")]
    chosen = few(events)
    assert sum(mark.kind == SAVED for mark in chosen) == 60
    assert Mark(5, SKIPPED, "") in chosen


def test_numbers_as_text() -> None:
    assert [short(value) for value in (0, 0.001234, 999, 1500, 2e7, 3e9, -4e12)] == [
        "0", "0.001234", "999", "1.5k", "20M", "3B", "-4T",
    ]  # fmt: skip
    assert list(map(mark_text([100_000, 100_500]), [100_000, 100_500])) == ["100k", "100.5k"]
    assert [duration(value) for value in (0.5, 61, 3700, 90_000, math.inf)] == [
        "0.5 s", "1 min 1 s", "1 h 1 min", "1 d 1 h", "inf s",
    ]  # fmt: skip


def test_a_run_leaves_its_report(tmp_path: Path) -> None:
    flags = [
        *MOCK,
        *GPT2,
        *words("--report --train-iters 3 --eval-iters 1 --eval-interval 2"),
        "--save",
        tmp_path / "run",
    ]
    with Job([PRETRAIN, *flags], 1, tmp_path / "job") as job:
        shown = ended(job).stdout
    assert f"the report is {tmp_path / 'run' / 'report.html'}, with loss.svg and loss.png\n" in shown
    assert "3 of 3" in (tmp_path / "run" / "report.html").read_text()
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    ElementTree.parse(tmp_path / "run" / "loss.svg")


def test_what_the_records_have_does_not_fail_a_run_that_has_trained(tmp_path: Path) -> None:
    """A line that others have changed, and that a resume keeps, must change no exit code."""
    flags = [*MOCK, *GPT2, "--save", tmp_path / "run", "--report", "--resume", "auto"]
    with Job([PRETRAIN, *flags, "--train-iters", "2"], 1, tmp_path / "job1") as job:
        ended(job)
    path = tmp_path / "run" / "metrics.jsonl"
    first, *others = [json.loads(line) for line in path.read_text().splitlines()]
    first |= {"wall_time": 1e300, "tokens_per_second": 10**400, "peak_memory_bytes": "Infinity"}
    path.write_text("".join(json.dumps(line) + "\n" for line in (first, *others)))
    with Job([PRETRAIN, *flags, "--train-iters", "3"], 1, tmp_path / "job2") as job:
        assert "finished after step 3" in ended(job).stdout


@pytest.mark.parametrize(
    ("lines", "config"),
    [
        ([step(number, grad_norm=number * 5e-324) for number in range(1, 9)], "a: 1\n"),
        ([step(1), step(2)], "a: {f: {2020-01-01: x}}\n"),
        ([step(1), step(2)], "a: &a [*a]\n"),
    ],
    ids=["tiny", "date", "circle"],
)
def test_odd_runs_have_a_report(lines: list[dict[str, Any]], config: str, tmp_path: Path) -> None:
    run = read_run(str(write_run(tmp_path, lines, config=config)))
    assert is_inert(page([run]))
    json.dumps(document([run]))
    assert report_at_end(tmp_path)[1].endswith("with loss.svg and loss.png")


def test_more_losses_than_colours_are_all_in_the_picture(tmp_path: Path) -> None:
    lines = [step(number, **{f"lm_loss/{name}": 4.0 + name for name in range(12)}) for number in (1, 2, 3)]
    chart = charts([read_run(str(write_run(tmp_path, lines)))])[1]
    drawn: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.axes.Axes.plot", lambda *_, label, **__: drawn.append(label))
        patch.setattr("matplotlib.axes.Axes.legend", lambda *_, **__: None)
        assert loss_png(chart)
    assert len(drawn) == 12


def test_formulas_in_names_are_text(tmp_path: Path) -> None:
    lines = [{(r"a$\x$_loss" if key == "lm_loss" else key): value for key, value in step(n).items()} for n in (1, 2)]
    write_run(tmp_path, lines)
    assert report_at_end(tmp_path)[1].endswith("with loss.svg and loss.png")


def test_credentials_are_not_shown(tmp_path: Path) -> None:
    config = "data:\n  path: s3://KEY:SEC'RET@bucket/x\n  other: https://host/x?sig=SECRET2&part=2\n"
    run = read_run(str(write_run(tmp_path, [step(1)], config=config)))
    for text in (page([run]), json.dumps(document([run]))):
        assert "RET" not in text
        assert "s3://bucket/x" in text
        assert "part=2" in text


def test_without_matplotlib_a_note_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run_of(tmp_path)
    assert report_at_end(tmp_path)[1] == (
        f"the report is {tmp_path / 'report.html'}, with loss.svg; loss.png needs matplotlib: pip install matplotlib"
    )


def test_a_report_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    run_of(tmp_path)
    (tmp_path / "report.html").mkdir()
    assert report_at_end(tmp_path)[1].startswith("WARNING: the report could not be written (")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "missing: RUNS"),
        (("absent",), "absent: there is no such run directory, nor such a file of metrics"),
        ((".", "--output", "absent/x.html"), ""),
        (("a",) * 17, "17 runs: at most 16"),
    ],
)
def test_what_is_wrong_with_the_flags_is_said(
    arguments: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_tool("report", *arguments)
    assert done.code == (64 if expected else 0)
    assert expected in done.stdout + done.stderr
