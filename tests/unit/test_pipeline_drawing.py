"""The time line of a step: drawn, written as a trace and read back, and the command that does so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.errors import DataError
from megalite.pipeline import drawing
from megalite.pipeline.lowering import Reductions, lower
from megalite.pipeline.schedules import SCHEDULES, Action, Kind, orders_of
from megalite.pipeline.simulator import Span, bubble, durations, simulate
from megalite.pipeline.stages import Stages
from megalite.pipeline.timeline import COMPUTATIONS, TimeLine, measured_durations
from megalite.pipeline.trace import read_trace, to_trace
from tests.harness.tool import Ended, run_tool

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"
PIPELINES = [
    ("gpipe", Stages(8), 32),
    ("1f1b", Stages(4), 8),
    ("1f1b", Stages(1), 1),
    ("interleaved-1f1b", Stages(8, 2), 32),
    ("interleaved-1f1b", Stages(2, 4), 3),
    ("zb-h1", Stages(3), 5),
    ("zb-v", Stages(4, 2, v_shaped=True), 8),
]


def time_line(name: str, stages: Stages, micro_batches: int, in_seconds: bool = False, unit: float = 1.0) -> TimeLine:
    orders = orders_of(SCHEDULES[name], stages, micro_batches)
    spans = simulate(stages, orders, durations(unit, 1.25 * unit, 0.5 * unit), 0.25 * unit)
    return TimeLine(f"{name} <&> it", stages, spans, in_seconds)


def measured(name: str, stages: Stages, micro_batches: int) -> TimeLine:
    """Return a time line in milliseconds, with the communication that the engine also measures after each
    computation."""
    computed = time_line(name, stages, micro_batches, in_seconds=True, unit=0.003)
    lists = lower(stages, orders_of(SCHEDULES[name], stages, micro_batches), Reductions(overlap=True))
    spans: list[list[Span]] = []
    for actions, computations in zip(lists, computed.spans, strict=True):
        times = {span.action: span for span in computations}
        now, rank = 0.0, []
        for action in actions:
            rank.append(times.get(action, Span(action, now, now + 1e-5)))
            now = rank[-1].end
        spans.append(rank)
    return TimeLine("step 7", stages, spans, in_seconds=True)


def boxes(svg: str) -> dict[tuple[str, str, str], list[tuple[ElementTree.Element, str | None]]]:
    """Return rectangles and their number by the words before the time: action, rank and stage."""
    found: dict[tuple[str, str, str], list[tuple[ElementTree.Element, str | None]]] = {}
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        if group.get("class") == "box":
            action, place = str(group.findtext(f"{SVG}title")).split(": ")
            rank, stage, _ = place.split(", ")
            rectangle = group.find(f"{SVG}rect")
            assert rectangle is not None
            found.setdefault((action, rank, stage), []).append((rectangle, group.findtext(f"{SVG}text")))
    return found


@pytest.mark.parametrize(("name", "stages", "micro_batches"), PIPELINES)
def test_each_action_has_one_box_where_and_when_it_runs(name: str, stages: Stages, micro_batches: int) -> None:
    drawn = time_line(name, stages, micro_batches)
    found = boxes(drawing.to_svg(drawn))
    assert len(found) == sum(map(len, drawn.spans))
    scale = float(found["F of micro-batch 0, chunk 0", "rank 0", "stage 0"][0][0].get("width", 0))  # F takes 1
    assert scale >= 14  # two digits
    for rank, spans in enumerate(drawn.spans):
        end = 0.0
        for span in spans:
            action = span.action
            stage = f"stage {stages.stage(rank, action.chunk)}"
            [(rectangle, number)] = found[str(action), f"rank {rank}", stage]
            x, y, width = (float(rectangle.attrib[key]) for key in ("x", "y", "width"))
            assert x == pytest.approx(drawing.LEFT + span.start * scale, abs=0.02 * span.start + 0.02)
            assert width == pytest.approx((span.end - span.start) * scale, abs=0.03)
            assert y == drawing.TOP + rank * (drawing.ROW + drawing.GAP)
            assert x >= end - 0.02, "boxes overlap"
            end = x + width
            assert number == str(action.micro_batch) or (number is None and action.kind == "W")
            colour = drawing._hexadecimal(drawing._colour(action.kind, action.chunk, stages.chunks))
            assert rectangle.get("fill") == colour


def test_messages_between_neighbours_are_arrows_unless_they_are_too_many() -> None:
    def arrows(drawn: TimeLine) -> list[str]:
        paths = ElementTree.fromstring(drawing.to_svg(drawn)).iter(f"{SVG}path")
        return [path.attrib["d"] for path in paths if "l" in path.attrib["d"]]

    assert len(arrows(time_line("1f1b", Stages(4), 8))) == 2 * 3 * 8
    assert len(arrows(time_line("zb-v", Stages(2, 2, v_shaped=True), 4))) == 2 * 2 * 4  # the turn stays on its rank
    assert not arrows(time_line("gpipe", Stages(8), 32))
    two = simulate(Stages(2), orders_of(SCHEDULES["gpipe"], Stages(2), 1), durations())
    back, forth = ([*map(float, re.findall(r"[\d.]+", arrow)[:4])] for arrow in arrows(TimeLine("", Stages(2), two)))
    scale, edges = drawing.WIDTHS[0] / 6, (drawing.TOP + drawing.ROW, drawing.TOP + drawing.ROW + drawing.GAP)
    assert forth == pytest.approx([drawing.LEFT + scale, edges[0], drawing.LEFT + scale, edges[1]], abs=0.01)
    assert back == pytest.approx([drawing.LEFT + 4 * scale, edges[1], drawing.LEFT + 4 * scale, edges[0]], abs=0.01)


def charts(page: str) -> dict[str, ElementTree.Element]:
    """Return the pictures of a page by the class of what is around each."""
    found = re.findall(r'<div class="(\w+)">(<svg.*?</svg>)', page, re.DOTALL)
    return {name: ElementTree.fromstring(svg) for name, svg in found}


@pytest.mark.parametrize(("micro_batches", "wide"), [(2, False), (64, True)])
def test_a_page_fits_a_window_and_has_the_full_width_on_request(micro_batches: int, wide: bool) -> None:
    drawn = time_line("zb-v", Stages(4, 2, v_shaped=True), micro_batches)
    page = drawing.to_html(drawn)
    found = charts(page)
    assert found.keys() == ({"fitted", "whole"} if wide else {"fitted"})
    assert ('id="whole"' in page) is wide
    assert float(found["fitted"].attrib["width"]) <= 1280 - 2 * 16  # a window without the margins of the page
    for chart in found.values():
        titles = [group.findtext(f"{SVG}title") for group in chart.iter(f"{SVG}g") if group.get("class") == "box"]
        assert len(titles) == sum(map(len, drawn.spans))
        assert all(titles)


def test_the_legend_names_all_that_is_drawn_and_stands_in_the_picture() -> None:
    step = measured("zb-v", Stages(2, 2, v_shaped=True), 1)  # its legend is wider than its rows
    page, svg = drawing.to_html(step), ElementTree.fromstring(drawing.to_svg(step))
    texts = {str(text.text): float(text.attrib["x"]) for text in svg.iter(f"{SVG}text")}
    for words in ("forward, chunks 0 to 1", "backward for the weights, chunks 0 to 1", "communication"):
        assert f'<span class="words">{words}</span>' in page
        assert texts[words] + 7 * len(words) <= float(svg.attrib["width"])
    assert ">communication<" not in drawing.to_html(time_line("1f1b", Stages(2), 2))


def test_what_is_written_under_the_picture() -> None:
    stages = Stages(4)
    drawn = TimeLine("1f1b", stages, simulate(stages, orders_of(SCHEDULES["1f1b"], stages, 8), durations()))
    texts = [text.text for text in ElementTree.fromstring(drawing.to_svg(drawn)).iter(f"{SVG}text")]
    assert "A step takes 33: computation 24, bubble 9 (37.5 % of the computation)" in texts
    assert "Peak activations (micro-batches): rank 0: 4, rank 1: 3, rank 2: 2, rank 3: 1" in texts
    assert {"forward", "backward", "time", "1f1b"} <= set(texts)


@pytest.mark.parametrize(("unit", "name"), [(0.5, "s"), (5e-3, "ms"), (5e-6, "µs")])
def test_the_axis_has_a_readable_number_of_ticks_in_any_unit(unit: float, name: str) -> None:
    drawn = time_line("1f1b", Stages(4), 8, in_seconds=True, unit=unit)
    root = ElementTree.fromstring(drawing.to_svg(drawn))
    grid = [path for path in root.iter(f"{SVG}path") if "V" in path.attrib["d"]]
    assert 5 <= len(grid) <= 12
    assert f"time ({name})" in [text.text for text in root.iter(f"{SVG}text")]
    assert drawn.show(drawn.bubble).endswith(f" {name}")


def test_a_rank_that_is_never_idle_has_no_bubble(tmp_path: Path) -> None:
    drawing.write_timeline(tmp_path, "step", time_line("1f1b", Stages(1), 50, in_seconds=True, unit=0.0021))
    read = read_trace(tmp_path / "step.json")  # whose times are rounded
    assert bubble(read.computation) != 0
    assert read.bubble == 0


def test_numbers_can_be_read_on_every_colour() -> None:
    def luminance(colour: str) -> float:
        values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for kind in COMPUTATIONS:
        for chunk in range(8):
            colour = drawing._colour(kind, chunk, 8)
            pair = sorted(map(luminance, (drawing._hexadecimal(colour), drawing._readable_on(colour))))
            assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5


@pytest.mark.parametrize(("name", "stages", "micro_batches"), PIPELINES)
def test_a_trace_is_valid_and_comes_back(tmp_path: Path, name: str, stages: Stages, micro_batches: int) -> None:
    written = measured(name, stages, micro_batches)
    trace = json.loads(to_trace(written))
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {(e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert {event["ph"] for event in trace["traceEvents"]} == {"X", "M"}
    assert names == {(rank, f"rank {rank}") for rank in range(stages.ranks)}
    assert len(complete) == sum(map(len, written.spans))
    for event in complete:
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert event["tid"] == (0 if event["cat"] in COMPUTATIONS else 1)
        assert event["args"]["stage"] == stages.stage(event["pid"], event["args"]["chunk"])

    (tmp_path / "trace.json").write_text(to_trace(written))
    read = read_trace(tmp_path / "trace.json")
    assert (read.title, read.stages, read.in_seconds) == (written.title, stages, True)
    for there, back in zip(written.spans, read.spans, strict=True):
        assert [span.action for span in back] == [span.action for span in there]
        assert [span.start for span in back] == pytest.approx([span.start for span in there])
        assert [span.end for span in back] == pytest.approx([span.end for span in there])


def test_training_writes_a_page_and_a_trace(tmp_path: Path) -> None:
    written = measured("interleaved-1f1b", Stages(4, 2), 8)
    paths = drawing.write_timeline(tmp_path / "profile", "pipeline_step_000007", written)
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == sorted(path.name for path in paths)
    assert [path.name for path in paths] == ["pipeline_step_000007.html", "pipeline_step_000007.json"]
    page = paths[0].read_text()
    assert re.findall(r"(?:href|src|url\(|@import)", page) == []  # nothing is fetched
    found = boxes(page[page.rindex("<svg") : page.rindex("</div>")])
    for rank, spans in enumerate(written.spans):
        for span in spans:
            [(rectangle, number)] = found[
                str(span.action), f"rank {rank}", f"stage {written.stages.stage(rank, span.action.chunk)}"
            ]
            thin = span.action.kind not in COMPUTATIONS
            assert (float(rectangle.attrib["height"]) < 6, number is None) == (thin, thin)
    assert read_trace(paths[1]).peaks == [11, 9, 7, 5]


@settings(deadline=None, max_examples=50)
@given(stages=st.builds(Stages, st.integers(1, 4), st.integers(1, 3)), ranks=st.integers(1, 6), data=st.data())
def test_measured_durations_cover_the_model_whatever_its_stages(
    stages: Stages, ranks: int, data: st.DataObject
) -> None:
    times = data.draw(st.lists(st.floats(0.1, 9), min_size=3 * stages.count, max_size=3 * stages.count))
    of: dict[Kind, int] = {"F": 0, "I": 1, "W": 2}
    spans: list[list[Span]] = [[] for _ in range(stages.ranks)]
    for rank in range(stages.ranks):
        for chunk in range(stages.chunks):
            for kind, index in of.items():
                usual = times[3 * stages.stage(rank, chunk) + index]
                for m, time in enumerate((usual, usual, 100.0)):  # a slow one does not count
                    spans[rank].append(Span(Action(kind, m, chunk), 0.0, time))
    line = TimeLine("", stages, spans)
    same = measured_durations(line, stages)
    for kind, index in of.items():
        assert [same(stage, kind) for stage in range(stages.count)] == pytest.approx(times[index::3])
        other = measured_durations(line, Stages(ranks))
        assert sum(other(stage, kind) for stage in range(ranks)) == pytest.approx(sum(times[index::3]))
    assert same(0, "B") == pytest.approx(times[1] + times[2])


def test_a_backward_measured_whole_is_halved_and_one_not_measured_is_refused() -> None:
    def line(*kinds: Kind) -> TimeLine:
        return TimeLine("", Stages(1), [[Span(Action(kind, 0), 0.0, 3.0) for kind in kinds]])

    duration = measured_durations(line("F", "B"), Stages(1, 2))
    assert [duration(1, kind) for kind in ("F", "B", "I", "W")] == [1.5, 1.5, 0.75, 0.75]
    for kinds in (("F",), ("F", "I"), ("B",)):
        with pytest.raises(DataError, match="stage 0 was not measured forward and backward"):
            measured_durations(line(*kinds), Stages(1))  # type: ignore[arg-type]


def damage(header: object = None, **change: object) -> str:
    trace = json.loads(to_trace(time_line("1f1b", Stages(2), 2)))
    trace["otherData"] = header or trace["otherData"]
    event = next(event for event in trace["traceEvents"] if event["ph"] == "X")
    event["args"] |= {key: value for key, value in change.items() if key in event["args"]}
    event |= {key: value for key, value in change.items() if key in event}
    return json.dumps(trace)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"traceEvents": []}',
        damage(header={"title": "", "stages": {"ranks": 1, "size": 2}, "in_seconds": True}),
        damage(header={"title": "", "stages": {"ranks": 1}, "in_seconds": True}),  # the second rank's are left over
        damage(kind="G"),
        damage(chunk=1),
        damage(micro_batch=-1),
        damage(micro_batch="0"),
        damage(pid=2),
        damage(dur=-1),
        damage(ts=float("nan")),
        damage(dur=float("inf")),
        json.dumps(json.loads(damage()) | {"traceEvents": []}),
    ],
)
def test_what_is_no_trace_of_a_step(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(DataError, match=r"trace\.json is not a trace of --profile-pipeline"):
        read_trace(tmp_path / "trace.json")


# ------------------------------------------------------------------------------------------------- the command


def run(folder: Path, *arguments: object) -> Ended:
    with chdir(folder):
        return run_tool("draw_schedule", *arguments)


def size(schedule: str, ranks: int = 4, micro_batches: int = 8) -> list[object]:
    pipeline = ["--pipeline-schedule", schedule, "--pipeline-model-parallel-size", ranks]
    return [*pipeline, "--num-micro-batches", micro_batches]


@pytest.mark.wide
def test_the_command_draws_and_prints(tmp_path: Path) -> None:
    arguments = map(str, (*size("1f1b"), "--output", "a.svg", "b/a.html", "a.json"))
    command = [sys.executable, str(ROOT / "tools/draw_schedule.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "1f1b: 4 ranks, 8 micro-batches",
        "time of a step  33",
        "ideal time      24",
        "bubble          9 (37.5 % of the ideal time)",
        "rank  computes  peak activations",
        "   0        24                 4",
        "   1        24                 3",
        "   2        24                 2",
        "   3        24                 1",
    ]
    assert len(boxes((tmp_path / "a.svg").read_text())) == 64
    assert (tmp_path / "b/a.html").read_text().startswith("<!doctype html>")
    assert read_trace(tmp_path / "a.json").bubble == pytest.approx(9)


TWO = ("--num-virtual-stages-per-pipeline-rank", 2)
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"


@pytest.mark.parametrize(
    ("schedule", "more", "step"),
    [
        ("gpipe", ("--forward", 2, "--backward-input", 3, "--backward-weight", 1, "--transfer", 1), 72),
        ("interleaved-1f1b", (*TWO, GROUP, 8), 57),
        ("zb-h1", (), 27),
        ("zb-v", TWO, 51),
    ],
)
def test_every_schedule_is_drawn(tmp_path: Path, schedule: str, more: tuple[object, ...], step: int) -> None:
    result = run(tmp_path, *size(schedule), *more, "--output", "a.svg")
    assert result.code == 0, result.stderr
    assert f"time of a step  {step}\n" in result.stdout


def test_a_measured_step_is_drawn_and_simulated_under_another_schedule(tmp_path: Path) -> None:
    line = measured("1f1b", Stages(4), 8)
    drawing.write_timeline(tmp_path, "step", line)
    result = run(tmp_path, "--measured", "step.json", "--output", "same.svg", "same.json")
    assert result.code == 0, result.stderr
    assert f"step 7\ntime of a step  {line.show(line.ideal + line.bubble)}\n" in result.stdout
    assert (tmp_path / "same.svg").read_text() == drawing.to_svg(read_trace(tmp_path / "step.json"))

    result = run(tmp_path, "--measured", "step.json", "--pipeline-schedule", "zb-v", "--output", "zb-v.json")
    assert result.code == 0, result.stderr
    assert "zb-v: 4 ranks × 2 chunks, 8 micro-batches" in result.stdout
    other = read_trace(tmp_path / "zb-v.json")
    assert other.ideal == pytest.approx(line.ideal)
    assert other.bubble < line.bubble / 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([*size("dual"), "--output", "a.svg"], "dual"),
        ([*size("zb-h1"), *TWO, "--output", "a.svg"], "zb-h1 has 1 chunks a rank"),
        ([*size("zb-v"), TWO[0], 3, "--output", "a.svg"], "zb-v has 2 chunks a rank"),
        ([*size("interleaved-1f1b"), "--output", "a.svg"], "needs 2 or more --num-virtual-stages-per-pipeline-rank"),
        ([*size("interleaved-1f1b", 1), *TWO, "--output", "a.svg"], "on 2 or more --pipeline-model-parallel-size"),
        ([*size("gpipe", 0), "--output", "a.svg"], "--pipeline-model-parallel-size 0: must be at least 1"),
        ([*size("gpipe", micro_batches=0), "--output", "a.svg"], "--num-micro-batches 0: must be at least 1"),
        ([*size("gpipe")[:4], "--output", "a.svg"], "--num-micro-batches must be given, 1 or more"),
        ([*size("gpipe"), "--output", "a.pdf"], "--output a.pdf: the name must end in .svg, .html, .json"),
        ([*size("gpipe"), "--forward", 0, "--output", "a.svg"], "--forward 0.0: must be above 0"),
        ([*size("gpipe"), "--transfer", -1, "--output", "a.svg"], "--transfer -1.0: must be at least 0"),
        (
            [*size("gpipe"), "--backward-input", "nan", "--output", "a.svg"],
            "--backward-input 'nan': expected a finite",
        ),
        ([*size("gpipe"), GROUP, 4, "--output", "a.svg"], "drop it"),
        (
            [*size("interleaved-1f1b"), *TWO, GROUP, 3, "--output", "a.svg"],
            "3 must be at least --pipeline-model-parallel-size 4",
        ),
        (["--output", "a.svg"], "give --pipeline-schedule, or --measured"),
        (["--measured", "none.json", "--output", "a.svg"], "none.json cannot be read (No such file or directory)"),
        (
            ["--measured", "step.json", "--num-micro-batches", 3, "--output", "a.svg"],
            "the measured step is drawn",
        ),
        (["--measured", "step.json", "--forward", 3, "--output", "a.svg"], "the times are those of --measured"),
        (["--measured", "step.html", "--output", "a.svg"], "step.html is not a trace of --profile-pipeline"),
    ],
)
def test_bad_input_ends_with_64_and_a_reason(tmp_path: Path, arguments: list[object], problem: str) -> None:
    drawing.write_timeline(tmp_path, "step", time_line("1f1b", Stages(2), 2))
    result = run(tmp_path, *arguments)
    assert result.code == 64
    assert problem in result.stderr + result.stdout
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.glob("a.*"))
