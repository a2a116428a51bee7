"""docs/invariants.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_invariant_has_its_test() -> None:
    page = (ROOT / "docs" / "invariants.md").read_text()
    rows = re.findall(r"^\| (I\d+) \|.*\| (.*) \|$", page, flags=re.MULTILINE)
    assert [row[0] for row in rows] == [f"I{number}" for number in range(1, 13)]
    file = ""
    for path, test in re.findall(r"`((?:tests/\S+?\.py)?)::(\w+)`", page):
        file = path or file
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"
    assert all("::" in tests for _, tests in rows)
