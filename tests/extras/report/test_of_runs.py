"""Reports of runs of all kinds: of parameter servers, of a custom model, on an object store, of a blend, with texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.extras.report.charts import charts
from megalite.extras.report.figures import figures
from megalite.extras.report.page import document, page
from megalite.extras.report.recorded import Recorded, read_run
from tests.end_to_end.runs import BYTES, GPT2, MOCK, PRETRAIN, ROOT, ended, words
from tests.extras.report.runs import step, validation, write_run
from tests.extras.report.test_page import HOSTILE, is_inert
from tests.harness.job import Job
from tests.harness.object_store import ObjectStore
from tests.unit.test_data_datasets import write

PROGRAM = ROOT / "tests" / "end_to_end" / "own_program.py"


def shown(run: Recorded) -> dict[str, Any]:
    """Return the document of a run, of which all can be drawn."""
    assert (run.problems, run.finished) == ((), True)
    assert is_inert(page([run]))
    found: dict[str, Any] = document([run])["runs"][0]
    return found


def test_a_run_of_parameter_servers_has_a_report(tmp_path: Path) -> None:
    flags = [*MOCK, *GPT2, *words("--asynchronous parameter-server --train-iters 6 --report --save"), tmp_path / "run"]
    with Job([PRETRAIN, *flags], 3, tmp_path / "job") as job:
        assert "with loss.svg and loss.png" in ended(job).stdout
    run = read_run(str(tmp_path / "run"))
    facts = shown(run)["facts"]
    assert facts["last_step"] == facts["planned_steps"] == 6
    assert {"staleness/mean", "staleness/max"} <= run.steps.columns.keys()


def test_a_run_of_a_custom_model_has_a_report(tmp_path: Path) -> None:
    with Job([PROGRAM, "--steps", "4", "--save", tmp_path / "run"], 2, tmp_path / "job") as job:
        assert job.wait(120.0) == [0, 0], job.stderr(0)
    run = read_run(str(tmp_path / "run"))
    facts = shown(run)["facts"]
    assert (run.facts.loss, facts["last_step"], facts["consumed_tokens"]) == ("loss", 4, None)
    assert facts["samples_per_second"] > 0
    assert facts["predicted_memory_bytes"] > 0
    assert charts([run])[0].units == ("steps", "samples", "hours")


def test_a_run_on_an_object_store_has_a_report(tmp_path: Path) -> None:
    url = f"{ObjectStore.protocol}://{tmp_path}/run"
    with Job([PRETRAIN, *MOCK, *GPT2, *words("--train-iters 3 --report --save"), url], 1, tmp_path / "job") as job:
        assert f"the report is {url}/report.html, with loss.svg and loss.png\n" in ended(job).stdout
    assert shown(read_run(url))["facts"]["last_step"] == 3
    assert "3 of 3" in (tmp_path / "run" / "report.html").read_text()
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_of_a_blend_has_its_tokens_by_source(tmp_path: Path) -> None:
    sources = [write(tmp_path / name / "text", 200, token) for name, token in (("web", 1), ("code", 2))]
    data = ["--data-path", "3", sources[0], "1", sources[1], "--split", "100,0,0", "--data-cache-path", tmp_path / "c"]
    flags = [
        *BYTES,
        *GPT2,
        *data,
        "--no-mock-data",
        "--train-iters",
        "5",
        "--save",
        tmp_path / "run",
        "--resume",
        "auto",
    ]
    for number, stop in enumerate((["--exit-interval", "3"], [])):
        with Job([PRETRAIN, *flags, *stop], 2, tmp_path / f"job{number}") as job:
            ended(job, 85 if stop else 0)
    run = read_run(str(tmp_path / "run"))
    expected, counts = {"web/text": [], "code/text": []}, [0, 0]
    for sample in range(20):
        behind = [weight * max(sample, 1) - count for weight, count in zip((0.75, 0.25), counts, strict=True)]
        counts[behind.index(max(behind))] += 1
        if sample % 4 == 3:
            for name, count in zip(expected, counts, strict=True):
                expected[name].append(16.0 * count)
    assert {name: list(run.steps.values(f"consumed_tokens/{name}")) for name in expected} == expected
    assert [step for step, _ in run.steps.pairs("predicted_memory_bytes")] == [1, 4]  # the first of each start
    assert next(chart for chart in charts([run]) if chart.base == "consumed_tokens").title == "Tokens by source"
    assert "<td>web/text</td><td>240</td><td>75 %</td>" in page([run])


def test_texts_are_shown_as_text(tmp_path: Path) -> None:
    where = {"consumed_samples": 10, "consumed_tokens": 1000, "wall_time": 1.7e9}
    lines = [step(number) | {"sample": "of no kind"} if number == 2 else step(number) for number in (1, 2)]
    lines += [{"iteration": number, **where, "sample": f"{HOSTILE} {number}"} for number in range(1, 300)]
    run = read_run(str(write_run(tmp_path, [*lines, {"iteration": 299, **where, "sample": ["a"]}], done=True)))
    assert len(run.samples) < 200
    assert (run.samples[0][0], run.samples[-2:]) == (1, ((299, f"{HOSTILE} 299"), (299, "['a']")))
    text = page([run])
    assert shown(run)["samples"][-1] == {"step": 299, "text": "['a']"}
    assert "Text after step 299</h2><pre>&lt;/title&gt;" in text
    assert "<pre>[&#x27;a&#x27;]</pre>" in text
    assert figures(run)["last_step"] == 2
    json.dumps(document([run]))


def test_of_many_sources_the_largest_are_drawn(tmp_path: Path) -> None:
    lines = [step(n, **{f"consumed_tokens/s{each}": float(n * each) for each in range(12)}) for n in (1, 2, 3)]
    run = read_run(str(write_run(tmp_path, lines)))
    chart = next(chart for chart in charts([run]) if chart.base == "consumed_tokens")
    assert not chart.is_heat_map
    assert [line.words for line in chart.lines] == [f"s{each}" for each in range(11, 3, -1)]
    assert page([run]).count("<tr><td>s") == 13  # and time in steps


def test_losses_of_sources_have_charts_and_a_table_of_their_own(tmp_path: Path) -> None:
    """Losses of a source begin where it has given tokens; those of a validation set may be of no source."""
    lines = [step(n, **{f"consumed_tokens/{name}": 10.0 * n for name in ("web", "code")}) for n in (1, 2, 3)]
    lines = [line | {"lm_loss/web": 3.0} | ({"lm_loss/code": 2.5} if line["iteration"] > 1 else {}) for line in lines]
    of_sets = {"valid_loss/web": 2.75, "valid_loss/set": 3.25, "valid_bits_per_byte/web": 1.125}
    run = read_run(str(write_run(tmp_path, [*lines, validation(3, 3.0, **of_sets)])))
    found = {chart.title: [line.key for line in chart.lines] for chart in charts([run])}
    assert found["Loss (nats per token)"] == ["lm_loss", "valid_loss"]
    assert found["Loss by source"] == ["lm_loss/web", "lm_loss/code"]
    assert found["Validation loss by source or set"] == ["valid_loss/web", "valid_loss/set"]
    assert found["Loss in bits per byte of text"] == ["valid_bits_per_byte/web"]
    rows = [
        ["web", "30", "50 %", "3.0000", "2.7500", "1.1250"],
        ["code", "30", "50 %", "2.5000", "", ""],
        ["set", "", "", "", "3.2500", ""],
    ]
    for row in rows:
        assert f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" in page([run])


@pytest.mark.parametrize("counted", [None, 2**20])
def test_counted_memory_stands_beside_the_measured(counted: int | None, tmp_path: Path) -> None:
    more = {} if counted is None else {"predicted_memory_bytes": counted}
    lines = [step(1, **more), step(2, **{"peak_memory_bytes/max": 2.0**21, "peak_memory_bytes/max_rank": 3.0})]
    text = page([read_run(str(write_run(tmp_path, lines)))])
    assert "<dd>2 MiB on rank 3</dd>" in text
    assert ("<dd>1 MiB</dd>" in text) == (counted is not None)
