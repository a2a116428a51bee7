"""Runs are read as their directories have them, whatever is damaged or missing."""

from __future__ import annotations

import math
from pathlib import Path

import fsspec
import pytest

from megalite.errors import ConfigurationError
from megalite.extras.report import recorded
from megalite.extras.report.recorded import flat, read_run
from tests.extras.report.runs import step, validation, write_run


def test_a_run_has_a_table_for_each_kind_of_line(tmp_path: Path) -> None:
    lines = [
        step(1),
        step(2, grad_norm="Infinity"),
        validation(2, 3.5),
        step(3),
        {**validation(3, 0.0), "test_loss": 3.25},
    ]
    del lines[-1]["valid_loss"]
    run = read_run(str(write_run(tmp_path / "mine", lines, config="training:\n  train_iters: 5\n", done=True)))
    assert (run.name, run.facts.loss, run.finished, run.problems) == ("mine", "lm_loss", True, ())
    assert list(run.steps.steps) == [1, 2, 3]
    assert list(run.steps.pairs("grad_norm")) == [(1, 2.0), (2, math.inf), (3, 1.0 + 1.0 / 3)]
    assert list(run.steps.values("skipped")) == [0.0] * 3
    assert "mfu" not in run.steps.columns  # it is null
    assert list(run.validation.pairs("valid_loss")) == [(2, 3.5)]
    assert run.test.last("test_loss") == 3.25
    assert run.config == {"training": {"train_iters": 5}}


def test_a_figure_of_some_lines_keeps_their_steps(tmp_path: Path) -> None:
    lines = [step(number, **({"wait_s/pp": float(number)} if number % 3 == 0 else {})) for number in range(1, 8)]
    run = read_run(str(write_run(tmp_path, lines)))
    assert list(run.steps.pairs("wait_s/pp")) == [(3, 3.0), (6, 6.0)]
    assert run.steps.last("absent") is None


def test_steps_that_were_run_again_replace_those_before(tmp_path: Path) -> None:
    lines = [step(1), step(2, once=1.0), step(3, once=2.0), step(2, lm_loss=9.0), step(3)]
    run = read_run(str(write_run(tmp_path, lines)))
    assert list(run.steps.steps) == [1, 2, 3]
    assert list(run.steps.values("lm_loss")) == [3.99, 9.0, 3.97]
    assert list(run.steps.values("once")) == []


@pytest.mark.parametrize(
    ("after", "steps", "problem"),
    [
        (b'{"iteration": 3, "gra', 2, "1 damaged line,"),
        (b"\x00\xff\n[]\n" + b"[" * 100_000 + b"\n", 2, "3 damaged lines,"),
        (b'{"iteration": true}\n{"iteration": 1}\n', 2, "2 damaged lines,"),
        (b'{"iteration": 99999999999999999999999, "grad_norm": 1}\n', 2, "1 damaged line,"),
        (b'{"iteration": 3, "grad_norm": 1e999, "x": 1' + b"0" * 400 + b', "y": {"z": 1}, "w": "text"}\n', 3, ""),
    ],
)
def test_damaged_lines_are_left_out_and_told(after: bytes, steps: int, problem: str, tmp_path: Path) -> None:
    run = read_run(str(write_run(tmp_path, [step(1), step(2)], after=after)))
    assert len(run.steps) == steps
    assert [problem in line for line in run.problems] == [True] * bool(problem)
    assert set(run.steps.columns) <= {*step(1), "x"}


def test_a_run_without_lines_is_empty(tmp_path: Path) -> None:
    run = read_run(str(tmp_path))
    assert (len(run.steps), run.facts.loss) == (0, "")
    assert "no step is finished yet" in run.problems[0]


@pytest.mark.parametrize(
    "config", ["a: [", "&a [*a, *a]", "- 1", "x: !!python/object/apply:os.system [true]", "a: " + "[" * 5000, "\x00"]
)
def test_a_configuration_that_cannot_be_read_loses_nothing_else(config: str, tmp_path: Path) -> None:
    run = read_run(str(write_run(tmp_path, [step(1)], config=config)))
    assert len(run.steps) == 1
    assert run.config == {}


def test_too_many_figures_and_lines_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MOST_KEYS", 20)
    monkeypatch.setattr(recorded, "MOST_LINES", 3)
    lines = [step(number, **{f"x/{each}": 1.0 for each in range(30)}) for number in range(1, 6)]
    run = read_run(str(write_run(tmp_path, lines)))
    assert (len(run.steps), len(run.steps.columns)) == (3, 20)
    assert "more than 3 lines" in run.problems[0]
    assert "more than 20 figures" in run.problems[1]


def test_no_such_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no such run directory"):
        read_run(str(tmp_path / "absent"))


def test_a_metrics_file_and_an_object_store_are_read_as_a_directory(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [step(1), validation(1, 2.0)], config="a:\n  b: 1\n", done=True)
    alone = read_run(str(tmp_path / "run" / "metrics.jsonl"))
    assert (alone.name, len(alone.steps), alone.config) == ("metrics.jsonl", 1, {})
    store = fsspec.filesystem("memory")
    for name in ("metrics.jsonl", "config.yaml", "DONE"):
        store.pipe(f"/reports/run/{name}", (tmp_path / "run" / name).read_bytes())
    run = read_run("memory://reports/run")
    assert (run.name, len(run.steps), run.config, run.finished) == ("run", 1, {"a": {"b": 1}}, True)


def test_a_configuration_is_flat_text() -> None:
    assert flat({"a": {"b": 1, "c": "x", "d": None, "e": [1, 2]}, "f": True}) == {
        "a.b": "1",
        "a.c": "x",
        "a.d": "null",
        "a.e": "[1, 2]",
        "f": "true",
    }
