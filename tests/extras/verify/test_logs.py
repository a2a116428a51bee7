"""Logs of several programs, each figure as exact as it was printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalite.errors import DataError
from megalite.extras.verify.logs import LOSS, NORM, RATE, Log, read_log
from tests.extras.verify.recorded_run import megatron_line

pytestmark = pytest.mark.extra

MEGATRON = "\n".join(
    (
        "> building train, validation, and test datasets ...",
        megatron_line(1, 10.8312, 12.5, 1.5e-4),
        "(min, max) time across ranks (ms):",
        megatron_line(10, 9.0, 2.125, 1e-3),
        megatron_line(20, 8.1, 1.0, 9e-4, skipped=2),
    )
)
TORCHTITAN = (
    "[rank0]:[titan] 2026-01-01 00:00:00,000 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss:  8.1234  "
    "\x1b[38;2;180;60;0mgrad_norm:  1.4871  \x1b[38;2;54;234;195mmemory:  0.50GiB(0.35%)  \x1b[34mtps: 1,234  \x1b[0m\n"
    "[rank0]:[titan] 2026-01-01 00:00:05,000 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  7.5000  grad_norm: 1.1\n"
)


def log_of(tmp_path: Path, text: str) -> Log:
    (tmp_path / "log").write_text(text)
    return read_log(tmp_path / "log")


def test_lines_of_megatron(tmp_path: Path) -> None:
    """Losses are means since the line before, and the rate is that of the next step: it is set before the line."""
    log = log_of(tmp_path, MEGATRON)
    assert log.rate_of_next
    first, second, third = log.rows
    assert (first.step, second.step, third.step) == (1, 10, 20)
    assert first.figures[LOSS].value == 10.8312
    assert first.figures[LOSS].half_unit == pytest.approx(5e-6)
    assert first.figures[NORM].half_unit == pytest.approx(5e-4)
    assert first.figures[RATE].value == 1.5e-4
    assert first.windows == (range(1, 2),)
    assert second.windows == (range(1, 11), range(2, 11))  # newer versions do not begin anew after the first line
    assert third.windows == (range(11, 21),)
    assert third.skipped == 2


def test_lines_of_torchtitan(tmp_path: Path) -> None:
    log = log_of(tmp_path, TORCHTITAN)
    assert [row.step for row in log.rows] == [1, 10]
    assert log.rows[0].figures[LOSS].value == 8.1234
    assert log.rows[0].figures[LOSS].half_unit == pytest.approx(5e-5)
    assert log.rows[1].figures[NORM].half_unit == pytest.approx(0.05)
    assert log.rows[1].windows == (range(10, 11),)
    assert not log.rate_of_next


def test_records_of_megalite(tmp_path: Path) -> None:
    records = [
        {"iteration": 1, "consumed_samples": 8, "lm_loss": 5.123456789012, "grad_norm": 1.5, "learning_rate": 0.001,
         "skipped": False, "iteration_time_s": 1.0},
        {"iteration": 1, "consumed_samples": 8, "valid_loss": 5.0},
        {"iteration": 2, "consumed_samples": 16, "lm_loss": "NaN", "grad_norm": "Infinity", "learning_rate": 0.002,
         "skipped": True, "iteration_time_s": 1.0},
    ]  # fmt: skip
    log = log_of(tmp_path, "\n".join(map(json.dumps, records)))
    assert log.format == "megalite's metrics"
    assert [row.step for row in log.rows] == [1, 2]
    assert log.rows[0].figures[LOSS].half_unit == 0.0
    assert [row.skipped for row in log.rows] == [0, 1]
    assert log.rows[1].figures[NORM].value == float("inf")


def test_json_lines_and_csv_have_usual_names(tmp_path: Path) -> None:
    of_lines = log_of(
        tmp_path, '{"global_step": 3, "train/loss": 2.25, "lr": 3e-4}\nnoise\n{"global_step": 4, "loss": 2}'
    )
    assert [row.step for row in of_lines.rows] == [3, 4]
    assert of_lines.rows[0].figures[RATE].value == 3e-4
    of_csv = log_of(tmp_path, "step,loss,grad_norm,lr\n3,2.25,1.5,3e-4\n4,2.1262,1.25,3e-4\n")
    assert [row.step for row in of_csv.rows] == [3, 4]
    assert of_csv.rows[0].figures[LOSS].half_unit == pytest.approx(5e-5)  # zeros at the end may be left out


def test_history_of_transformers(tmp_path: Path) -> None:
    history = [
        {"loss": 2.5, "grad_norm": 1.0, "learning_rate": 1e-3, "epoch": 0.1, "step": 5},
        {"eval_loss": 2.4, "step": 5},
        {"loss": 2.4, "grad_norm": 1.0, "learning_rate": 9e-4, "epoch": 0.2, "step": 10},
        {"train_loss": 2.45, "train_runtime": 1.0, "step": 10},
    ]
    log = log_of(tmp_path, json.dumps({"best_metric": None, "log_history": history}, indent=2))
    assert [row.step for row in log.rows] == [5, 10]
    assert log.rows[1].figures[LOSS].value == 2.4
    assert log.rows[1].windows == (range(6, 11),)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no step with a loss"):
        log_of(tmp_path, "hello\nworld\n")
    with pytest.raises(DataError, match="no step with a loss"):
        log_of(tmp_path, "")
    with pytest.raises(DataError, match="log_history"):
        log_of(tmp_path, '{\n"a": 1\n}')
    with pytest.raises(DataError, match="No such file"):
        read_log(tmp_path / "none")
    with pytest.raises(DataError, match="directory"):
        read_log(tmp_path)


@pytest.mark.parametrize("number", ["1e999999999", "1" * 5000, "-" * 100, "0x10", "1e-999999999"])
def test_numbers_of_any_size_do_no_harm(tmp_path: Path, number: str) -> None:
    line = f" iteration        1/     100 | learning rate: 1.0E-04 | lm loss: {number} | grad norm: 1.0 |\n"
    assert log_of(tmp_path, line).rows[0].figures[NORM].value == 1.0
    log_of(tmp_path, f"step,loss,lr\n1,{number},1e-4\n")
