"""Sections of a rank, and their time limits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.watchdog.sections import (
    DATA,
    EVALUATION,
    FORWARD_BACKWARD,
    MEETING,
    PROFILE,
    SAVE,
    START,
    STEP,
    WAITING,
    Limits,
    OpenSection,
    Sections,
    waiting_on,
)

SECONDS = st.floats(0.0, 1e6)


class Clock:
    """Clock that a test advances."""

    def __init__(self) -> None:
        self.now, self.waits = 100.0, {"tp": 0.0, "pp": 0.0}

    def wait(self, axis: str, seconds: float) -> None:
        self.now, self.waits[axis] = self.now + seconds, self.waits[axis] + seconds

    def sections(self) -> Sections:
        return Sections(self.waits, lambda: self.now)


@given(least=SECONDS, unlearnt=SECONDS, longest=SECONDS)
def test_a_limit_is_a_multiple_of_the_longest_and_never_below_the_least(
    least: float, unlearnt: float, longest: float
) -> None:
    limits = Limits(least, unlearnt)
    learnt = limits.of(STEP, {STEP: longest, EVALUATION: 1e9})
    assert learnt == max(least, 5 * longest)
    assert limits.of(MEETING, {}) == math.inf
    assert limits.of(STEP, {EVALUATION: longest}) == max(least, unlearnt)
    for name in (SAVE, PROFILE):
        assert limits.of(name, {name: longest}) == max(learnt, unlearnt)
    assert limits.of(START, {}) == max(3600.0, unlearnt)


@given(seconds=st.lists(st.tuples(st.sampled_from([START, STEP, FORWARD_BACKWARD, SAVE]), SECONDS), max_size=4))
def test_the_innermost_section_that_is_late_is_overdue(seconds: list[tuple[str, float]]) -> None:
    limits, longest = Limits(10.0, 20.0), {STEP: 1.0, FORWARD_BACKWARD: 3.0}
    sections = [OpenSection(*section) for section in seconds]
    late = [section for section in sections if section.seconds > limits.of(section.name, longest)]
    assert limits.overdue(sections, longest) == (late[-1] if late else None)


def test_sections_are_nested_and_the_longest_of_each_is_kept() -> None:
    clock = Clock()
    sections = clock.sections()
    for seconds in (3.0, 5.0, 4.0):
        with sections(STEP):
            clock.now += 1.0
            with sections(FORWARD_BACKWARD):
                clock.now += seconds
                assert sections.open() == [OpenSection(STEP, 1.0 + seconds), OpenSection(FORWARD_BACKWARD, seconds)]
        assert sections.open() == []
    assert sections.longest == {STEP: 6.0, FORWARD_BACKWARD: 5.0}


def test_a_section_that_fails_is_left_and_teaches_nothing() -> None:
    clock = Clock()
    sections = clock.sections()
    with pytest.raises(OSError), sections(STEP), sections(SAVE):
        clock.now += 1000.0
        raise OSError
    assert sections.open() == []
    assert sections.longest == {}
    assert sections.take() == {}
    assert sections.failed == SAVE
    with pytest.raises(OSError), sections(STEP):
        raise OSError
    assert sections.failed == STEP


def test_a_time_in_which_the_process_stood_still_does_not_count() -> None:
    clock = Clock()
    sections = clock.sections()
    with sections(STEP):
        clock.now += 1000.0
        sections.was_stopped(998.0)
        assert sections.open() == [OpenSection(STEP, 2.0)]
    with sections(SAVE):  # nor does it count against what comes later
        clock.now += 3.0
        assert sections.open() == [OpenSection(SAVE, 3.0)]
    assert sections.longest == {STEP: 2.0, SAVE: 3.0}


def test_what_is_waited_for_others_is_left_out_of_a_ranks_own_time() -> None:
    clock = Clock()
    sections = clock.sections()
    with sections(STEP):
        clock.now += 2.0
        clock.wait("tp", 3.0)
    with sections(STEP):
        clock.now += 1.0
    with sections(DATA):  # a process that stood still in a collective has waited longer than it was there
        clock.wait("pp", 60.5)
        sections.was_stopped(60.0)
    assert sections.longest == {STEP: 5.0, DATA: 0.5}
    assert sections.take() == {
        STEP: 3.0,
        WAITING: 3.0,
        DATA: 0.0,
        waiting_on("tp"): 3.0,
        waiting_on("pp"): 0.0,
    }
    assert sections.take() == {}
