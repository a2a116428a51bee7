"""The real libraries read back what a run has sent them: all of its steps, once, and none of its secrets."""

from __future__ import annotations

import gzip
import json
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from megalite.extras.sinks.description import Description
from megalite.extras.sinks.link import ServiceProcess
from megalite.extras.sinks.mlflow_run import MLflowRun
from tests.extras.sinks.records import evaluation, step

pytestmark = pytest.mark.report
SECRET = "5ecre7" * 6 + "abcd"
CONFIGURATION = """
reporting: {wandb_project: p, wandb_entity: null, wandb_exp_name: first, wandb_save_dir: null,
            otel_service_name: null, prometheus_textfile: null}
parallel: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1, context_parallel_size: 1}
optimizer: {lr: 0.25}
training: {bf16: true, micro_batch_size: 2}
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "AWS_SECRET_ACCESS_KEY", "SLURM_JOB_NAME"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())


def sent(
    folder: Path | None, service: str, *records: dict[str, Any], consumed: int = 0, close_s: float = 40
) -> list[str]:
    """Send records, and return the messages."""
    told = list[str]()
    description = Description((service,), None if folder is None else str(folder), consumed, CONFIGURATION, 8)
    sink = ServiceProcess(description, told.append, close_s=close_s)
    for record in records:
        sink.write(record)
    sink.close()
    return told


def no_secret_in(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert files
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path


def wandb_items(folder: Path) -> dict[str, list[Any]]:
    """Return the records of a run that was offline, by kind: W&B's own messages, from its file."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/wandb/offline-run-*/run-*.wandb")
    found = dict[str, list[Any]]()
    for data in log_entries(path.read_bytes()):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        found.setdefault(kind, []).append(getattr(record, kind))
    return found


def log_entries(data: bytes) -> Iterator[bytes]:
    """Yield the entries of a log as LevelDB has it, after the seven bytes of W&B's header."""
    place, entry = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:  # no header fits into the rest of the block
            place += left
            continue
        _, length, part = struct.unpack_from("<IHB", data, place)
        entry += data[place + 7 : place + 7 + length]
        place += 7 + length
        if part in (1, 4):  # whole, or the last part
            yield entry
            entry = b""


def test_wandb_gets_each_step_and_the_configuration(tmp_path: Path) -> None:
    assert sent(tmp_path, "wandb", step(1), step(2), evaluation(2, 3.75)) == []
    items = wandb_items(tmp_path)
    (run,) = items["run"][:1]
    assert (run.project, run.display_name, run.run_id) == (
        "p",
        "first",
        json.loads((tmp_path / "sinks.json").read_text())["wandb"],
    )
    configured = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert configured["optimizer"] == {"lr": 0.25}
    history = [
        {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in row.item}
        for row in items["history"]
    ]
    assert [(row["_step"], row["lm loss"]) for row in history] == [(1, 4.5), (2, 2.25)]
    assert history[1]["lm loss validation"] == 3.75
    assert history[0]["batch-size"] == 8
    no_secret_in(tmp_path)


def test_wandb_continues_the_run(tmp_path: Path) -> None:
    sent(tmp_path, "wandb", step(1))
    name = json.loads((tmp_path / "sinks.json").read_text())["wandb"]
    (tmp_path / "wandb").rename(tmp_path / "before")
    sent(tmp_path, "wandb", step(2), consumed=8)
    assert wandb_items(tmp_path)["run"][0].run_id == name


def test_wandb_that_cannot_be_reached_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B waits for its server for minutes, also at the end of a process."""
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    begin = time.monotonic()
    told = sent(tmp_path, "wandb", step(1), close_s=4)
    assert time.monotonic() - begin < 15
    assert len(told) <= 1
    no_secret_in(tmp_path)


def mlflow_run(folder: Path) -> tuple[Any, Any]:
    from mlflow import MlflowClient

    client = MlflowClient((folder / "mlflow").as_uri())
    return client, client.get_run(json.loads((folder / "sinks.json").read_text())["mlflow"])


def test_mlflow_gets_each_step_once_also_after_a_resume(tmp_path: Path) -> None:
    assert sent(tmp_path, "mlflow", step(1), step(2), evaluation(2, 3.75), step(3, **{"grad_norm/(ü)": 0.5})) == []
    client, run = mlflow_run(tmp_path)
    assert run.info.status == "FINISHED"
    assert run.data.params["optimizer.lr"] == "0.25"
    assert run.data.metrics["grad_norm/___"] == 0.5
    again = [step(3, lm_loss=9.0), step(4), evaluation(4, 3.5)]
    assert sent(tmp_path, "mlflow", *again, consumed=16) == []
    client, continued = mlflow_run(tmp_path)
    assert continued.info.run_id == run.info.run_id
    history = client.get_metric_history(run.info.run_id, "lm loss")
    assert sorted((point.step, point.value) for point in history) == [(1, 4.5), (2, 2.25), (3, 1.5), (4, 1.125)]
    evaluations = client.get_metric_history(run.info.run_id, "lm loss validation")
    assert sorted((point.step, point.value) for point in evaluations) == [(2, 3.75), (4, 3.5)]
    no_secret_in(tmp_path)


def test_mlflow_is_not_told_of_a_death_once_the_run_has_been_continued(tmp_path: Path) -> None:
    """Ranks that start again within a second are there before the process of those that were killed has ended."""
    first = MLflowRun(Description(("mlflow",), str(tmp_path), 0, CONFIGURATION, 8))
    second = MLflowRun(Description(("mlflow",), str(tmp_path), 8, CONFIGURATION, 8))
    for service in (first, second):
        service.open()
    first.close(ended=False)
    assert mlflow_run(tmp_path)[1].info.status == "RUNNING"
    second.close(ended=False)
    assert mlflow_run(tmp_path)[1].info.status == "FAILED"


def test_mlflow_begins_anew_where_its_run_is_gone(tmp_path: Path) -> None:
    (tmp_path / "sinks.json").write_text('{"mlflow": "0123456789abcdef0123456789abcdef"}')
    assert sent(tmp_path, "mlflow", step(1)) == []
    client, run = mlflow_run(tmp_path)
    assert [point.value for point in client.get_metric_history(run.info.run_id, "lm loss")] == [4.5]


def test_an_error_of_the_library_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")
    (message,) = sent(tmp_path, "mlflow", step(1))
    assert message.startswith("WARNING: mlflow is left out from here on: MlflowException: The filesystem tracking")


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[Any]]]:
    """Server that takes OTLP. Yields a function that returns what it has taken, as messages of the protocol."""
    taken: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            taken.append(ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield lambda: taken
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_collector_gets_megatrons_metrics(tmp_path: Path, collector: Callable[[], list[Any]]) -> None:
    records = step(1), step(2, skipped=True, **{"grad_norm/a b(ü)": 0.5}), evaluation(2, 3.75)
    assert sent(tmp_path, "opentelemetry", *records) == []
    last = collector()[-1].resource_metrics[0]
    attributes = {each.key: each.value for each in last.resource.attributes}
    assert attributes["service.name"].string_value == "megatron-training"
    assert attributes["dl.tensor_parallel.size"].int_value == 2
    assert attributes["dl.data_parallel.size"].int_value == 4
    assert attributes["megatron.precision"].string_value == "bf16"
    metrics = {each.name: each for each in last.scope_metrics[0].metrics}
    values = {
        "megatron.training.loss": 2.25,
        "megatron.training.throughput_tflops": 0.75,
        "megatron.training.memory_allocated_gb": (1 << 20) * 1e-9,
        "megalite.valid_loss": 3.75,
        "megalite.iteration": 2.0,
        "megalite.grad_norm/a_b___": 0.5,
    }
    for name, value in values.items():
        assert metrics[name].gauge.data_points[0].as_double == value
    durations = metrics["megatron.training.step_duration_ms"].histogram.data_points[0]
    assert (durations.count, durations.sum) == (2, 1000.0)
    assert metrics["megatron.training.skipped_iters"].sum.data_points[0].as_int == 1
    assert SECRET.encode() not in b"".join(each.SerializeToString() for each in collector())


def test_a_collector_that_is_not_there_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    begin = time.monotonic()
    sent(None, "opentelemetry", step(1), close_s=4)
    assert time.monotonic() - begin < 15
