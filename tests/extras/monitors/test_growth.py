"""Growth of memory with each step is told from memory that comes and goes, or is taken once."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable

import pytest

from megalite.extras.monitors.growth import LOOK_INTERVAL, Used, growth, remember

MIB = 2**20


def looks(size: Callable[[int], float], end: int) -> list[Used]:
    return [(step, int(size(step))) for step in range(LOOK_INTERVAL, end, LOOK_INTERVAL)]


@pytest.mark.parametrize("first", range(18, 28))
def test_a_leak_is_measured_and_dated_within_50_steps(first: int) -> None:
    """Findings are told every tenth step."""
    end = (first + 49) // 10 * 10 + 1
    found = growth(looks(lambda step: 100 * MIB + max(0, step - first + 1) * MIB, end))
    assert found is not None
    assert (found.per_step, found.since, found.total) == (MIB, first, (end - first) * MIB)
    assert growth(looks(lambda step: 100 * MIB + max(0, step - first + 1) * MIB, 36)) is None


def test_a_leak_from_the_first_step_is_dated_there() -> None:
    """Before it, what the first steps take once is much less."""
    used = looks(lambda step: 100 * MIB + step * MIB, 46)
    found = growth(used)
    assert found is not None
    assert found.since == LOOK_INTERVAL
    found = growth([(1, 10 * MIB), (2, 30 * MIB), *used])
    assert found is not None
    assert found.since == 3


@pytest.mark.parametrize("end", [41, 51, 61, 71])
def test_what_comes_and_goes_beside_a_leak_does_not_hide_it(end: int) -> None:
    found = growth(looks(lambda step: step * MIB + (step % 20 == 0) * 50 * MIB, end))
    assert found is not None
    assert found.per_step == pytest.approx(MIB, rel=0.2)


def test_noise_is_none() -> None:
    draw = random.Random(0)
    used = looks(lambda step: 100 * MIB + draw.choice((0, 0, 64 * MIB)), 5000)
    assert not [end for end in range(len(used)) if growth(used[: end + 1])]


@pytest.mark.parametrize(
    "size",
    [
        lambda step: 100 * MIB,
        lambda step: 100 * MIB + (step > 20) * 64 * MIB,
        lambda step: (step // 10) * 64 * MIB if step < 30 else 192 * MIB,
        lambda step: (step // 10) * 64 * MIB,
        lambda step: 200 * MIB - 0.7 ** (step / 6) * 150 * MIB,
        lambda step: (step % 12) * 8 * MIB,
        lambda step: step * 2**15,
        lambda step: 200 * MIB - step * MIB,
    ],
    ids=["nothing", "once", "some times", "every tenth step", "less and less", "up and down", "very little", "less"],
)
def test_other_changes_are_none(size: Callable[[int], float]) -> None:
    used = looks(size, 200)
    assert not [end for end in range(len(used)) if growth(used[: end + 1])]


def test_steps_that_were_taken_back_are_forgotten() -> None:
    """The run goes back 20 steps, and what has leaked stays: memory has been more since then."""

    def course(steps: Iterable[int]) -> deque[Used]:
        used = deque[Used]()
        for number, step in enumerate(steps):
            remember(used, (step, number * LOOK_INTERVAL * MIB))
        return used

    used = course([*range(5, 65, LOOK_INTERVAL), *range(45, 90, LOOK_INTERVAL)])
    assert [step for step, _ in used] == list(range(5, 90, LOOK_INTERVAL))
    found = growth(list(used))
    assert found is not None
    assert (found.per_step, found.since, found.total) == (MIB, 41, 45 * MIB)
