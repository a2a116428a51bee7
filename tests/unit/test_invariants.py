"""docs/invariants.md names tests that exist, and that `make test` runs, but for those of extras."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_invariant_has_its_test(request: pytest.FixtureRequest) -> None:
    page = (ROOT / "docs" / "invariants.md").read_text()
    rows = re.findall(r"^\| (I\d+) \|.*\| (.*) \|$", page, flags=re.MULTILINE)
    assert [row[0] for row in rows] == [f"I{number}" for number in range(1, 13)]
    whole_suite = request.config.args_source is pytest.Config.ArgsSource.TESTPATHS and not request.config.option.keyword
    collected = {item.nodeid.partition("[")[0] for item in request.session.items}
    file = ""
    for path, test in re.findall(r"`((?:tests/\S+?\.py)?)::(\w+)`", page):
        file = path or file
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"
        if whole_suite and not file.startswith("tests/extras/"):
            assert f"{file}::{test}" in collected, f"{file}::{test} is not in `make test`"
    assert all("::" in tests for _, tests in rows)
