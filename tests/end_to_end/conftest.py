"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.end_to_end.runs import MOCK, PRETRAIN, Ended, Run, Start, ended
from tests.harness.job import Job


@pytest.fixture
def start(spawn: Callable[..., Job]) -> Start:
    """Starts training on mock data: `start("--flag", value, world_size=2)`."""

    def start_training(*flags: Any, world_size: int = 1, data: tuple[Any, ...] = MOCK) -> Job:
        return spawn([PRETRAIN, *data, *flags], world_size)

    return start_training


@pytest.fixture
def run(start: Start) -> Run:
    """Trains to the end; see `runs.Run`."""

    def run_training(*flags: Any, world_size: int = 1, expected: int | None = 0, **more: Any) -> Ended:
        return ended(start(*flags, world_size=world_size, **more), expected)

    return run_training
