"""The proof of a ledger: it fails if a course loses or repeats a token."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from megalite.errors import DataError
from megalite.extras.mixes.course import Course, Part
from megalite.extras.mixes.ledger import proof
from tests.extras.mixes.mixed_run import MixedRun, write_files

PARTS = Course.parts


@pytest.fixture
def run(tmp_path: Path) -> MixedRun:
    prefixes = write_files(tmp_path, {"web": 200, "code": 60})
    sources = {name: {"path": prefix} for name, prefix in prefixes.items()}
    return MixedRun(tmp_path, sources, [{"weights": {"web": 1, "code": 1}}])


def spoiled(part: Part) -> Part:
    number, begin, end = part
    return (number, max(begin - 1, 0), end) if begin == 8 else part


def test_every_sample_is_looked_up(run: MixedRun) -> None:
    mix = run.open()
    assert "each of 100 samples was looked up" in proof(mix, 100, {}, {"web", "code"})


def test_a_token_that_comes_twice_is_found(run: MixedRun) -> None:
    mix = run.open()
    with (
        mock.patch.object(Course, "parts", lambda course, given: [*map(spoiled, PARTS(course, given))]),
        pytest.raises(DataError, match="has tokens twice"),
    ):
        proof(mix, 40, {}, {"web", "code"})


def test_a_token_that_is_lost_is_found(run: MixedRun) -> None:
    mix = run.open()
    with (
        mock.patch.object(Course, "parts", lambda course, given: PARTS(course, given) if given != 8 else [(0, 0, 0)]),
        pytest.raises(DataError, match="pass 0 of code is not complete"),
    ):
        proof(mix, 100, {}, {"web", "code"})
