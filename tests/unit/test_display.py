"""The screen: plain lines where nobody watches, a bar on a terminal, nothing on the other ranks."""

from __future__ import annotations

import errno
import io
import math
import os
from dataclasses import replace

import pytest

from megalite.training.display import Display, curve
from megalite.training.metrics import StepMetrics
from tests.harness.terminal import read_to_end


def step(iteration: int, *, loss: float = 2.0, skipped: bool = False, mfu: float | None = None) -> StepMetrics:
    return StepMetrics(
        iteration=iteration,
        consumed_samples=iteration,
        consumed_tokens=iteration,
        losses={"lm_loss": loss},
        grad_norm=1.0,
        learning_rate=3e-4,
        loss_scale=1.0,
        skipped=skipped,
        iteration_time_s=2.0,
        throughput={
            "tokens_per_second": 12345.6,
            "tokens_per_second_per_device": 1.0,
            "model_tflops_per_device": 1.0,
            "mfu": mfu,
        },
        peak_memory_bytes=0,
        bytes_sent=0,
    )


def test_plain_lines_come_at_the_first_step_every_interval_and_the_last() -> None:
    stream = io.StringIO()
    with Display(25, 10, stream=stream) as display:
        for iteration in range(1, 26):
            display.step(step(iteration))
    lines = stream.getvalue().splitlines()
    assert [line.split("|")[0].split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]
    assert "loss 2.0000 | lr 3.000e-04 | grad norm 1.000 | 12,346 tokens/s | 2,000 ms" in lines[1]
    assert lines[1].endswith("ETA 0:00:30")
    assert "\x1b" not in stream.getvalue()


def test_the_line_of_a_long_run_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    with Display(500_000, 1, stream=stream, start_iteration=123_455) as display:
        monkeypatch.setattr(display._console, "is_interactive", True)
        line = display._line(step(123_456, mfu=0.452))
    assert line == "step 123456 | loss 2.0000 | lr 3.000e-04 | grad norm 1.000 | 12,346 tokens/s | 2,000 ms | MFU 45.2%"
    assert len(line) <= 100


def test_a_skipped_step_is_always_said() -> None:
    stream = io.StringIO()
    with Display(100, 50, stream=stream, start_iteration=5) as display:
        display.step(step(6))
        display.step(step(7, loss=math.inf, skipped=True))
    assert "step   7/100 | loss inf" in stream.getvalue()
    assert "skipped" in stream.getvalue().splitlines()[1]


def test_without_a_last_step_no_end_is_shown() -> None:
    stream = io.StringIO()
    with Display(None, 10, stream=stream, start_iteration=5) as display:
        for iteration in range(6, 21):
            display.step(step(iteration))
    lines = stream.getvalue().splitlines()
    assert [line.split("|")[0] for line in lines] == ["step 6 ", "step 10 ", "step 20 "]
    assert lines[-1].endswith("2,000 ms")


def test_a_loss_scale_is_shown() -> None:
    """Show skipped steps of --fp16, which occur until the loss scale is small enough."""
    stream = io.StringIO()
    with Display(100, 50, stream=stream) as display:
        display.step(replace(step(1), loss_scale=65536.0, skipped=True, grad_norm=math.inf))
        display.step(step(50))
        display.step(replace(step(51), skipped=True))  # refused by an alarm
    first, second, third = stream.getvalue().splitlines()
    assert first.endswith("| loss scale 65,536 | skipped: not finite")
    assert "scale" not in second
    assert third.endswith("ms | skipped")


def test_summaries_messages_and_validation_are_shown_as_they_are() -> None:
    stream = io.StringIO()
    with Display(10, 5, stream=stream) as display:
        display.summary("megalite", {"layout": "TP 2 [dense]", "parameters": 3})
        display.message("saved run/[a]/iter_10")
        display.evaluation("validation", 10, {"loss": math.log(50), "perplexity": 50.0})
    assert stream.getvalue().splitlines() == [
        "megalite",
        "  layout      TP 2 [dense]",
        "  parameters  3",
        "saved run/[a]/iter_10",
        "validation at step 10 | loss 3.9120 | perplexity 50",
    ]


class Unwritable(io.StringIO):
    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


def test_an_output_on_a_full_disk_is_done_without_and_one_that_nobody_reads_is_not() -> None:
    with Display(25, 10, stream=Unwritable(OSError(errno.ENOSPC, "No space left on device"))) as display:
        display.summary("megalite", {"name": "value"})
        display.message("a message")
        display.step(step(1))
        assert not display._console._buffer  # what is lost is not kept
    with Display(25, 10, stream=Unwritable(BrokenPipeError())) as display, pytest.raises(BrokenPipeError):
        display.message("a message")


def test_a_rank_that_is_not_enabled_shows_nothing() -> None:
    stream = io.StringIO()
    with Display(10, 1, enabled=False, stream=stream) as display:
        display.summary("megalite", {"a": 1})
        display.message("text")
        display.step(step(1))
        display.evaluation("validation", 1, {"loss": 1.0})
    assert stream.getvalue() == ""


def test_on_a_terminal_the_bar_is_drawn_and_taken_down_even_by_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    primary, secondary = os.openpty()
    with (
        os.fdopen(secondary, "w", encoding="utf-8") as terminal,
        pytest.raises(KeyboardInterrupt),
        Display(4, 100, stream=terminal) as display,
    ):
        display.step(step(1, loss=8.0))
        display.step(step(2, loss=4.0))
        raise KeyboardInterrupt
    shown = read_to_end(primary)
    os.close(primary)
    assert "2/4" in shown
    assert "█" * 10 + "▁" * 10 in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back


def test_on_a_terminal_a_run_without_a_last_step_has_a_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    primary, secondary = os.openpty()
    with os.fdopen(secondary, "w", encoding="utf-8") as terminal, Display(None, 100, stream=terminal) as display:
        display.step(step(1, loss=4.0))
        display.step(step(2, loss=8.0))
    shown = read_to_end(primary)
    os.close(primary)
    assert "▁█" in shown
    assert "ETA" not in shown


def test_the_curve_runs_from_its_least_to_its_greatest_and_leaves_gaps() -> None:
    assert curve([0.0, 7.0, math.nan, 3.6, math.inf]) == "▁█ ▅ "
    assert curve([5.0, 5.0]) == "▁▁"
    assert curve([math.nan]) == " "
