"""Tests of what no step needs, a folder a room: `make test` leaves them out but for one of each in test_smoke.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.conftest import run, start

__all__ = ["run", "start"]

FOLDER = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the rooms aside in a run of the whole suite without them: each worker would import them for nothing."""
    whole_suite = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    without = whole_suite and "not extra" in config.option.markexpr
    return True if without and collection_path.parent == FOLDER and collection_path.is_dir() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the rooms."""
    of_rooms = {path for path in {item.path for item in items} if FOLDER in path.parents[1:]}
    for item in items:
        if item.path in of_rooms:
            item.add_marker(pytest.mark.extra)
