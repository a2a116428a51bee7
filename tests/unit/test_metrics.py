"""metrics.jsonl and the TensorBoard events hold the same full-precision numbers, and one trajectory after a resume."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.errors import CheckpointError
from megalite.storage import open_directory
from megalite.training.metrics import (
    MetricsWriter,
    Recorded,
    SampleMetrics,
    StepMetrics,
    ValidationMetrics,
    Value,
    has_test_loss,
    read_records,
    truncate_after,
)
from tests.harness.object_store import ObjectStore


def step(iteration: int, **changes: object) -> StepMetrics:
    metrics = StepMetrics(
        iteration=iteration,
        consumed_samples=8 * iteration,
        consumed_tokens=512 * iteration,
        losses={"lm_loss": 1 / 3},
        grad_norm=0.1,
        learning_rate=1e-4,
        loss_scale=1.0,
        skipped=False,
        iteration_time_s=0.5,
        throughput={
            "tokens_per_second": 1024.0,
            "tokens_per_second_per_device": 512.0,
            "model_tflops_per_device": 0.01,
            "mfu": None,
        },
        peak_memory_bytes=1 << 20,
        bytes_sent=0,
    )
    return dataclasses.replace(metrics, **changes)  # type: ignore[arg-type]


def test_an_object_has_all_lines_whenever_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = open_directory(f"objects://{tmp_path}/run/metrics.jsonl")
    file = tmp_path / "run" / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for iteration in (1, 2, 3):
            writer.write(step(iteration))
            if iteration == 2:
                writer.publish()
        assert iterations(file) == [1, 2]
    assert iterations(file) == [1, 2, 3]

    def refuse(what: str, name: str) -> None:
        raise ConnectionError("no route")

    writer = MetricsWriter(path, resume_iteration=2)
    writer.write(step(3, losses={"lm_loss": 2.0}))
    writer.write(step(4))
    writer.publish()
    assert iterations(file) == [1, 2, 3, 4]
    monkeypatch.setattr(ObjectStore, "before_change", staticmethod(refuse))
    writer.publish()
    with pytest.raises(CheckpointError, match=rf"writing metrics to {path} failed: ConnectionError: no route"):
        writer.close()
    with pytest.raises(KeyError), MetricsWriter(path):
        raise KeyError("is told, and not that the metrics cannot be written, either")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def iterations(path: Path) -> list[object]:
    return [record["iteration"] for record in read_metrics(path)]


def test_a_line_has_exactly_the_documented_fields(tmp_path: Path) -> None:
    MetricsWriter(tmp_path / "metrics.jsonl").write(step(1, extra={"params_norm": 2.5}))
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    documented = """iteration consumed_samples consumed_tokens lm_loss grad_norm learning_rate loss_scale skipped
        iteration_time_s tokens_per_second tokens_per_second_per_device model_tflops_per_device mfu peak_memory_bytes
        bytes_sent"""
    assert list(record) == [*documented.split(), "params_norm", "wall_time"]
    assert record["wall_time"] == pytest.approx(time.time(), abs=600)
    assert record["mfu"] is None
    assert record["skipped"] is False


@given(value=st.floats())
def test_every_float_comes_back_exactly(value: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    MetricsWriter(path).write(step(1, losses={"lm_loss": value}))
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    read = float(read_metrics(path)[0]["lm_loss"])
    assert read == value or (math.isnan(read) and math.isnan(value))


def test_each_record_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for iteration in (1, 2):
        writer.write(step(iteration))
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == iteration


def test_a_resumed_run_leaves_one_trajectory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for iteration in range(1, 6):
        writer.write(step(iteration, losses={"lm_loss": 1.0}))
        writer.write(ValidationMetrics(iteration, 8 * iteration, 512 * iteration, valid_loss=3.0))
    writer.close()
    path.write_text(path.read_text() + '{"iteration": 6, "lm_lo')  # killed in the middle of a line

    resumed = MetricsWriter(path, resume_iteration=3)
    resumed.write(step(4, losses={"lm_loss": 2.0}))
    records = read_metrics(path)
    assert [record["iteration"] for record in records] == [1, 1, 2, 2, 3, 3, 4]
    assert [record["lm_loss"] for record in records if "lm_loss" in record] == [1.0, 1.0, 1.0, 2.0]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("damage", [b"\xff\xfe{", b"5", b"{}", b"[]", b'{"iteration": "2"}', b"\0\0\0", b"[" * 99999])
def test_a_damaged_line_is_left_out_and_told(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsWriter(path).write(step(1))
    whole = path.read_bytes()
    path.write_bytes(whole + damage + b"\n")
    assert MetricsWriter(path, resume_iteration=1).note == (
        f"WARNING: {path} has 1 damaged line: it was changed, or could not be written. "
        "The run continues, and keeps what can be read of it"
    )
    assert path.read_bytes() == whole
    assert MetricsWriter(path, resume_iteration=1, recorded=Recorded(1, True, False)).note is None


@pytest.mark.parametrize(
    ("recorded", "lacks"),
    [
        (Recorded(6, from_first=True, evaluated=True), ["steps 1, 2, 4, 6", "the evaluation after step 6"]),
        (Recorded(6, from_first=False, evaluated=False), ["steps 4, 6"]),
        (Recorded(5, from_first=False, evaluated=True), ["step 4"]),
    ],
)
def test_what_the_records_lack_is_told(recorded: Recorded, lacks: list[str]) -> None:
    assert recorded.lacks({3, 5}, {5}) == lacks


def test_a_run_from_the_start_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsWriter(path).write(step(7))
    MetricsWriter(path).write(step(1))
    assert [record["iteration"] for record in read_metrics(path)] == [1]


def test_truncating_a_missing_file_makes_none(tmp_path: Path) -> None:
    truncate_after(tmp_path / "metrics.jsonl", 3)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/metrics\.jsonl.*--metrics-path"):
        MetricsWriter(tmp_path / "file" / "metrics.jsonl")


def test_what_is_no_regular_file_is_neither_waited_for_nor_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    assert not has_test_loss(path, 1)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl failed: not a regular file, but a pipe.*--metrics-path"):
        MetricsWriter(path)
    assert path.is_fifo()


def test_sinks_get_figures_and_no_texts(tmp_path: Path) -> None:
    class Kept(list[Mapping[str, Value]]):
        def write(self, record: Mapping[str, Value]) -> None:
            self.append(record)

        def close(self) -> None:
            pass

    sink, path = Kept(), tmp_path / "metrics.jsonl"
    with MetricsWriter(path, open_sinks=lambda: [sink]) as writer:
        writer.write(ValidationMetrics(1, 4, 64, 3.0))
        writer.write(SampleMetrics(1, 4, 64, 'two\nlines of "text"\x00 \N{SNOWMAN}'))
    assert [list(record) for record in sink] == [["iteration", "consumed_samples", "consumed_tokens", "valid_loss"]]
    assert [record.get("sample") for record in read_records(path)] == [None, 'two\nlines of "text"\x00 \N{SNOWMAN}']
