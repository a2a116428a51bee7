"""A run stops by itself when it is told to, and before its job ends, in time to save."""

from __future__ import annotations

from functools import partial
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.lifecycle.deadline import Pace, job_end, why_stop
from megalite.training.trainer import Trainer

SECONDS = st.floats(0.0, 1e6)


def test_the_first_step_counts_for_as_long_as_there_is_no_other() -> None:
    pace, longest = Pace(), []
    for seconds in (300.0, 2.0, 5.0, 3.0):
        pace = pace.after(seconds)
        longest.append(pace.step)
    assert longest == [300.0, 2.0, 5.0, 5.0]


@given(step=SECONDS, evaluation=SECONDS, save=SECONDS, left=SECONDS)
def test_a_run_goes_on_only_if_all_that_follows_fits(step: float, evaluation: float, save: float, left: float) -> None:
    """The last save may take twice as long as the longest, all else 15 s. And where a run stops, it would with longer
    steps, evaluations or saves, and less time.
    """
    if why_stop(left, step, evaluation, save) is None:
        assert left - step - evaluation >= 2 * save + 15 - 1e-6
        assert why_stop(left + 1.0, step, evaluation, save) is None
    else:
        assert left < step + evaluation + 2 * save + 15
        assert why_stop(left - 1.0, step, evaluation, save)
        assert why_stop(left, step + 1.0, evaluation + 1.0, save + 1.0)


def test_the_reason_has_its_figures() -> None:
    assert why_stop(97.0, step=2.0, evaluation=0.0, save=40.0) is None
    assert why_stop(96.0, step=2.0, evaluation=0.0, save=40.0) == (
        "the job ends in 96 s (SLURM_JOB_END_TIME), which may not be enough for a step of 2.0 s, 2 saves of 40.0 s and "
        "15 s to exit"
    )
    assert "an evaluation of 30.0 s" in str(why_stop(97.0, step=2.0, evaluation=30.0, save=40.0))


@pytest.mark.parametrize(
    ("text", "end", "note"),
    [
        (None, None, None),
        ("2000", 2000.0, None),
        ("999", None, "is in the past"),
        ("Unknown", None, "is not a time in Unix seconds"),
        ("-5", None, "is not a time in Unix seconds"),
        ("\N{SUPERSCRIPT TWO}", None, "is not a time in Unix seconds"),
    ],
)
def test_when_the_job_ends(text: str | None, end: float | None, note: str | None) -> None:
    found, told = job_end({} if text is None else {"SLURM_JOB_END_TIME": text}, 1000.0)
    assert found == end
    assert (told is None) == (note is None)
    assert (note or "") in (told or "")


def test_the_last_step_has_an_evaluation_too() -> None:
    """It takes time before the last save, also where it is no multiple of --eval-interval."""
    trainer = Mock(iterations=150, config=Mock(training=Mock(eval_interval=100)), task=Mock(has_validation=True))
    due = partial(Trainer.evaluation_due, trainer)
    assert [step for step in range(1, 151) if due(step)] == [100, 150]
    trainer.task.has_validation = False
    assert not due(150)
