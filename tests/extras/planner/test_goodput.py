"""Goodput under failures, beside a simulation of them."""

from __future__ import annotations

import math
import random

import pytest

from megalite.extras.planner.goodput import DAY, Failures, days


def simulated(failures: Failures, interval: float, count: int, seed: int) -> float:
    """Return the share of useful time of a run that fails at random."""
    draw = random.Random(seed).expovariate
    time = done = 0.0
    next_failure = draw(failures.rate)
    for _ in range(count):
        while True:
            end = time + interval + failures.save
            if end <= next_failure:
                time, done = end, done + interval
                break
            while True:  # restart, which may fail too
                time = next_failure
                next_failure = time + draw(failures.rate)
                if time + failures.restart <= next_failure:
                    time += failures.restart
                    break
    return done / time


@pytest.mark.parametrize(
    ("mean", "save", "restart", "interval"),
    [(3600.0, 30.0, 300.0, 465.0), (3600.0, 30.0, 300.0, 1800.0), (600.0, 60.0, 120.0, 200.0)],
)
def test_goodput_is_that_of_a_simulation(mean: float, save: float, restart: float, interval: float) -> None:
    failures = Failures(1 / mean, save, restart)
    found = simulated(failures, interval, count=40_000, seed=1)
    assert failures.goodput(interval) == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize(("mean", "save"), [(3600.0, 30.0), (600.0, 60.0), (1e6, 5.0), (100.0, 200.0)])
def test_no_other_interval_is_better(mean: float, save: float) -> None:
    failures = Failures(1 / mean, save, restart=100.0)
    best = failures.goodput(failures.interval)
    assert best == failures.best
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert failures.goodput(failures.interval * factor) < best


def test_young_and_daly_are_near_when_saves_are_short() -> None:
    mean, save = 1e6, 5.0
    interval = Failures(1 / mean, save, restart=100.0).interval
    assert interval == pytest.approx(math.sqrt(2 * save * mean), rel=2e-3)
    assert interval == pytest.approx(math.sqrt(2 * save * mean) - save, rel=1e-3)


@pytest.mark.parametrize("mean", [1e12, 1e16, 1e30])
def test_rare_failures_take_next_to_nothing(mean: float) -> None:
    failures = Failures(1 / mean, 10.0, restart=100.0)
    assert failures.interval == pytest.approx(math.sqrt(20 * mean), rel=1e-4)
    assert failures.best == pytest.approx(1.0, abs=1e-5)


def test_without_failures_or_saves_nothing_is_lost() -> None:
    assert Failures(0.0, 30.0, 300.0).best == 1.0
    assert Failures(0.0, 30.0, 300.0).interval == math.inf
    assert Failures(0.0, 30.0, 300.0).goodput(270.0) == pytest.approx(0.9)
    assert Failures(1e-4, 0.0, 100.0).best == pytest.approx(math.exp(-0.01))


def test_days() -> None:
    assert days(DAY * 2e6, 1e6) == 2.0
