"""Calls that may never return."""

from __future__ import annotations

import threading

import pytest

from megalite.process.bounded import within


def test_a_call_gives_what_it_returns_and_raises() -> None:
    assert within(60.0, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(60.0, lambda: 1 // 0)


def test_a_call_that_does_not_come_back_is_left_alone() -> None:
    with pytest.raises(TimeoutError):
        within(0.05, lambda: threading.Event().wait(5.0))
