"""No service can stop or delay a run: one that raises, hangs or is slow is told once, and waits are bounded."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megalite.config.parse import parse_arguments
from megalite.config.reporting import ReportingConfig
from megalite.config.validate import resolve
from megalite.errors import ConfigurationError
from megalite.extras.sinks import libraries
from megalite.extras.sinks.background import Background, Record
from megalite.extras.sinks.description import Description
from megalite.extras.sinks.from_flags import sinks
from megalite.extras.sinks.identity import keep_name, kept_name
from megalite.extras.sinks.link import ServiceProcess
from megalite.extras.sinks.masking import masked
from tests.end_to_end.runs import GPT2, MOCK
from tests.extras.sinks.records import step


class Faulty:
    """Service that keeps what it gets, and calls `on_send` with it."""

    interval_s = 0.01

    def __init__(self, name: str = "faulty", on_send: Callable[[Sequence[Record]], object] = len) -> None:
        self.name, self._on_send = name, on_send
        self.got: list[object] = []

    def open(self) -> None:
        self.got.append("open")

    def send(self, records: Sequence[Record]) -> None:
        self._on_send(records)
        self.got += [record["iteration"] for record in records]

    def close(self, *, ended: bool) -> None:
        self.got.append("close" if ended else "killed")


def raises(_: Sequence[Record]) -> None:
    raise SystemExit("no key for https://user:secret@host/x")


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    assert holds()


def test_every_record_arrives_in_order() -> None:
    service, told = Faulty(), list[str]()
    sink = Background([service], told.append)
    for iteration in range(1, 101):
        sink.write(step(iteration))
    sink.close()
    assert service.got == ["open", *range(1, 101), "close"]
    assert not told


def told_by(sink: Background, told: list[str], count: int) -> None:
    """Write records until there are so many messages."""

    def write() -> bool:
        sink.write(step(1))
        return len(told) >= count

    until(write)


def test_a_service_that_raises_is_told_once_and_the_others_go_on() -> None:
    whole, told = Faulty("whole"), list[str]()
    sink = Background([Faulty(on_send=raises), whole], told.append)
    told_by(sink, told, 1)
    sink.write(step(2))
    sink.close()
    assert told[0] == (
        "WARNING: faulty takes no records: SystemExit: no key for https://host/x. It is tried again while the run "
        "continues, and metrics.jsonl has all records"
    )
    assert re.fullmatch(r"faulty: (\d+) of \1 records were lost: it failed or was too slow", told[1])
    assert len(told) == 2
    assert whole.got[-2:] == [2, "close"]


def test_a_service_that_works_again_gets_records_again() -> None:
    calls = list[int]()

    def fail_twice(records: Sequence[Record]) -> None:
        calls.append(len(records))
        if len(calls) <= 2:
            raise ConnectionError("restarted")

    service, told = Faulty(on_send=fail_twice), list[str]()
    sink = Background([service], told.append)
    told_by(sink, told, 2)
    sink.write(step(2))
    sink.close()
    assert "takes no records: ConnectionError: restarted" in told[0]
    assert told[1] == "faulty takes records again"
    assert told[2].startswith(f"faulty: {sum(calls[:2])} of {sum(calls)} records were lost")
    assert service.got[-2:] == [2, "close"]


def test_a_service_that_cannot_be_opened_is_left_out() -> None:
    class Closed(Faulty):
        def open(self) -> None:
            raise ConnectionError("no such server")

    service, told = Closed(), list[str]()
    sink = Background([service], told.append)
    told_by(sink, told, 1)
    sink.close()
    assert told == [
        "WARNING: faulty is left out from here on: ConnectionError: no such server. The run continues, and "
        "metrics.jsonl has all records"
    ]
    assert not service.got


def test_a_service_that_hangs_is_told_once_and_is_not_waited_for() -> None:
    stuck, told = threading.Event(), list[str]()
    sink = Background([Faulty(on_send=lambda _: stuck.wait(60))], told.append, patience_s=0.2, close_s=0.2)
    told_by(sink, told, 1)
    begin = time.monotonic()
    sink.close()
    assert time.monotonic() - begin < 5
    assert "faulty takes no records: it has not answered for 0 s" in told[0]
    assert told[1:] == ["WARNING: faulty has not taken all records within 0.2 s after the last step"]
    stuck.set()


def test_records_wait_for_a_service_that_hung() -> None:
    stuck, told = threading.Event(), list[str]()
    service = Faulty(on_send=lambda _: stuck.wait(60))
    sink = Background([service], told.append, patience_s=0.2)
    sink.write(step(1))
    until(lambda: not sink._workers[0]._queue)
    told_by(sink, told, 1)
    stuck.set()
    told_by(sink, told, 2)
    sink.close()
    assert told[1:] == ["faulty takes records again"]
    assert service.got.count(1) == sink._workers[0]._put


def test_a_full_queue_drops_the_oldest_and_counts_them() -> None:
    goes_on, told = threading.Event(), list[str]()
    service = Faulty(on_send=lambda _: goes_on.wait(60))
    sink = Background([service], told.append, queue=10)
    sink.write(step(1))
    until(lambda: not sink._workers[0]._queue)
    for iteration in range(2, 32):
        sink.write(step(iteration))
    goes_on.set()
    sink.close()
    assert service.got == ["open", 1, *range(22, 32), "close"]
    assert told == [
        "WARNING: faulty is slower than the run: 10 records wait for it, and the oldest are dropped. metrics.jsonl has "
        "all of them",
        "faulty: 20 of 31 records were lost: it failed or was too slow",
    ]


def description(folder: Path | None, *wanted: str, textfile: Path | None = None) -> Description:
    text = f"reporting:\n  prometheus_textfile: {'null' if textfile is None else textfile}\n"
    return Description(wanted, None if folder is None else str(folder), 0, text, 1)


def test_the_process_passes_on_records_and_messages(tmp_path: Path) -> None:
    told = list[str]()
    (tmp_path / "file").touch()
    sink = ServiceProcess(description(tmp_path, "prometheus"), told.append)
    beside = ServiceProcess(description(None, "prometheus", textfile=tmp_path / "file" / "a.prom"), told.append)
    for each in (sink, beside):
        each.write(step(1))
        each.write(step(2))
        each.close()
    assert 'megalite_iteration{run="' + tmp_path.name + '"} 2.0\n' in (tmp_path / "metrics.prom").read_text()
    (message,) = told
    assert "prometheus is left out from here on: FileError" in message
    assert "a.prom cannot be written" in message


def test_all_that_waits_at_the_end_arrives(tmp_path: Path) -> None:
    """Even what the pipe could not take while the process had not begun to read."""
    told = list[str]()
    sink = ServiceProcess(description(tmp_path, "prometheus"), told.append)
    for iteration in range(1, 301):
        sink.write(step(iteration, **{f"max_expert_load/layer {number}": 1.0 for number in range(60)}))
    assert sink._waiting
    sink.close()
    assert not told
    text = (tmp_path / "metrics.prom").read_text()
    assert 'megalite_iteration{run="' + tmp_path.name + '"} 300.0\n' in text
    assert "megalite_running{run=" in text
    assert text.split("megalite_running{")[1].split("\n")[0].endswith(" 0.0")


def test_a_run_that_is_killed_has_not_ended(tmp_path: Path) -> None:
    sink = ServiceProcess(description(tmp_path, "prometheus"), print)
    sink.write(step(1))
    assert sink._process.stdin is not None
    sink._process.stdin.write(b'{"iteration": 2, "gra')
    sink._process.stdin.close()
    assert sink._process.wait(30) == 0
    assert " 1.0" in (tmp_path / "metrics.prom").read_text().split("megalite_running{")[1].split("\n")[0]
    sink.close()


def test_a_process_that_cannot_start_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr("megalite.extras.sinks.link.start", full)
    told = list[str]()
    flags = [*MOCK, *GPT2, "--train-iters", "1", "--save", str(tmp_path)]
    config = resolve(parse_arguments(flags).config, 1)
    assert sinks(config, ("prometheus",), tmp_path, 0, 0, 1, told.append) == []
    assert "could not start (Resource temporarily unavailable)" in told[0]


def test_a_process_that_is_killed_is_told_once() -> None:
    told = list[str]()
    sink = ServiceProcess(description(None), told.append)
    sink._process.kill()
    sink._process.wait()
    for iteration in (1, 2, 3):
        sink.write(step(iteration))
    sink.close()
    (message,) = told
    assert "the process of the services of --report-to has ended (Broken pipe)" in message


def test_a_process_that_is_suspended_delays_nothing_and_is_ended() -> None:
    told = list[str]()
    sink = ServiceProcess(description(None), told.append, close_s=-1.5)
    sink._process.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    for iteration in range(1, 4001):
        sink.write(step(iteration))
    sink.close()
    assert time.monotonic() - begin < 10
    assert sink._process.returncode == -signal.SIGKILL
    assert "records were dropped: the process of the services of --report-to hung" in told[-1]


def test_names_are_kept_and_checked(tmp_path: Path) -> None:
    assert kept_name(tmp_path, "wandb") is None
    keep_name(tmp_path, "wandb", "a1")
    keep_name(tmp_path, "mlflow", "b2")
    assert (kept_name(tmp_path, "wandb"), kept_name(tmp_path, "mlflow")) == ("a1", "b2")
    for damage in ('{"wandb": "../x"}', "[", '["wandb"]', '{"wandb": 1}', '{"wandb": "' + "a" * 5000 + '"}'):
        (tmp_path / "sinks.json").write_text(damage)
        assert kept_name(tmp_path, "wandb") is None


def test_a_message_has_no_credentials_and_one_line() -> None:
    assert masked("at s3://key:pass@host\nis  wrong") == "at s3://host is wrong"
    assert len(masked("a" * 1000)) == 303


@pytest.mark.parametrize(
    ("sink", "advice"),
    [
        ("wandb", "--report-to wandb needs a library that is not installed: pip install wandb"),
        ("mlflow", "pip install mlflow-skinny"),
        ("opentelemetry", "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"),
    ],
)
def test_a_missing_library_is_refused(sink: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=advice):
        libraries.require_libraries(ReportingConfig(report_to=(sink,)))  # type: ignore[arg-type]
    libraries.require_libraries(ReportingConfig())
