"""Tests of what no step needs, a folder a room: `make test` leaves them out but for one of each in test_smoke.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.conftest import run, start

__all__ = ["run", "start"]

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the rooms."""
    of_rooms = {path for path in {item.path for item in items} if FOLDER in path.parents[1:]}
    for item in items:
        if item.path in of_rooms:
            item.add_marker(pytest.mark.extra)
