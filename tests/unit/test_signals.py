"""Stop signals set a flag, however often they come, and leave everything as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from megalite.process.signals import StopRequest

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_is_seen_and_survived_several_times(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert stop.local_request() == 0
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert stop.local_request() == number


def test_the_first_signal_is_the_one_reported() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.local_request() == signal.SIGUSR1


def test_the_handlers_from_before_come_back() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with pytest.raises(ZeroDivisionError), StopRequest():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


@pytest.mark.wide_except("stop.answered()")
@pytest.mark.parametrize("stopped", ["os.kill(os.getpid(), signal.SIGTERM)", "stop.answered()"])
def test_signals_after_a_stop_are_ignored_while_the_process_ends(stopped: str) -> None:
    program = f"""
import os, signal, sys
from megalite.process.signals import StopRequest
with StopRequest() as stop:
    {stopped}
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    os.kill(os.getpid(), number)
sys.exit(85)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=240, check=False).returncode == 85


def test_a_process_that_is_waiting_finishes_its_step_before_it_stops() -> None:
    program = """
import sys, time
from megalite.process.signals import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while not stop.local_request():
        time.sleep(0.01)
    print("step done", flush=True)
sys.exit(85)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    for _ in range(3):
        child.send_signal(signal.SIGTERM)
    output, _ = child.communicate(timeout=240)
    assert (output, child.returncode) == ("step done\n", 85)


@pytest.mark.wide
def test_a_process_whose_main_thread_does_not_come_to_a_signal_says_its_last_words() -> None:
    program = """
import ctypes, os, signal, threading
from megalite.process.signals import exit_on_stop_signals, last_words
exit_on_stop_signals()
last_words(lambda: print("farewell", flush=True))
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
lock, c = ctypes.create_string_buffer(64), ctypes.CDLL(None)
c.pthread_mutex_lock(lock)
c.pthread_mutex_lock(lock)  # for ever, and no signal interrupts it
"""
    ended = subprocess.run([sys.executable, "-c", program], timeout=30, check=False, stdout=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stdout) == (85, "farewell\n")


@pytest.mark.wide
def test_a_signal_during_a_finalizer_ends_the_process_and_prints_nothing() -> None:
    program = """
import os, signal, time
from megalite.process.signals import exit_on_stop_signals
class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)
exit_on_stop_signals()
Finalized()
time.sleep(60)
"""
    result = subprocess.run([sys.executable, "-c", program], timeout=240, check=False, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (85, "", "")
