"""Cells that `wide_except` leaves to the wide stage."""

from __future__ import annotations

import pytest

from tests.harness.wide import mark_all_but_few


@pytest.mark.wide_except("kept")
@pytest.mark.parametrize("cell", ["kept", "other"])
def test_all_cells_but_those_that_are_named_are_wide(cell: str, request: pytest.FixtureRequest) -> None:
    assert (request.node.get_closest_marker("wide") is not None) == (cell == "other")


@pytest.mark.parametrize("cell", ["kept"])
def test_a_name_that_no_cell_has_ends_the_collection(cell: str, request: pytest.FixtureRequest) -> None:
    request.node.add_marker(pytest.mark.wide_except("kept", "keptt"), append=False)
    with pytest.raises(pytest.UsageError, match=r"ends_the_collection\[keptt\]"):
        mark_all_but_few([request.node])
