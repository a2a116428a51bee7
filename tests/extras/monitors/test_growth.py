"""Growth of memory with each step is told from memory that comes and goes, or is taken once."""

from __future__ import annotations

import random

import pytest

from megalite.extras.monitors.growth import growth

MIB = 2**20


def test_a_leak_is_measured_and_dated() -> None:
    used = [(step, 100 * MIB + max(0, step - 17) * MIB) for step in range(1, 51)]
    found = growth(used)
    assert found is not None
    assert (found.per_step, found.since, found.total) == (MIB, 18, 33 * MIB)
    assert growth(used[:30]) is None


def test_a_leak_from_the_first_step_is_dated_there() -> None:
    """Before it, what the first steps take once is much less."""
    used = [(step, 100 * MIB + step * MIB) for step in range(1, 41)]
    found = growth(used)
    assert found is not None
    assert found.since == 1
    found = growth([(1, 10 * MIB), (2, 30 * MIB), *used[2:]])
    assert found is not None
    assert found.since == 3


def test_what_comes_and_goes_beside_a_leak_does_not_hide_it() -> None:
    draw = random.Random(0)
    used = [(step, step * MIB + draw.choice((0, 0, 50 * MIB))) for step in range(1, 60)]
    found = growth(used)
    assert found is not None
    assert found.per_step == pytest.approx(MIB, rel=0.2)


@pytest.mark.parametrize(
    "size",
    [
        lambda step: 100 * MIB,
        lambda step: 100 * MIB + (step > 20) * 64 * MIB,
        lambda step: (step // 10) * 64 * MIB if step < 30 else 192 * MIB,
        lambda step: 200 * MIB - 0.7 ** (step / 6) * 150 * MIB,
        lambda step: (step % 12) * 8 * MIB,
        lambda step: step * 2**15,
        lambda step: 200 * MIB - step * MIB,
    ],
    ids=["nothing", "once", "some times", "less and less", "up and down", "very little", "less"],
)
def test_other_changes_are_none(size: object) -> None:
    assert callable(size)
    used = [(step, int(size(step))) for step in range(1, 100)]
    assert not [end for end in range(1, 100) if growth(used[:end])]
