"""Choice of the slowest rank, by the time that it works and not by the time that it waits."""

from __future__ import annotations

import pytest

from megalite.parallel.mesh import ParallelMesh
from megalite.run.timing import Timing, gather_timing
from megalite.watchdog.sections import DATA, FORWARD_BACKWARD, OPTIMIZER, STEP, WAITING, Sections, waiting_on

FAST, SLOW = [0.001, 0.010, 0.002, 0.025], [0.001, 0.030, 0.002, 0.004]


def test_the_slowest_rank_is_the_one_that_works_longest_and_waits_least() -> None:
    timing = Timing([FAST, FAST, SLOW, FAST], ["n0", "n0", "n1", "n1"])
    figures = timing.figures()
    assert figures["iteration_time_s/slowest_rank"] == 2
    assert figures["iteration_time_s/slowest_rank_work"] == pytest.approx(0.033)
    assert figures["iteration_time_s/forward_and_backward"] == 0.010
    assert timing.line() == (
        "ms per step, median of 4 ranks: data 1.0, forward and backward 10.0, optimizer 2.0, waiting for others 25.0; "
        "slowest: rank 2 on n1, 33.0 of work against 13.0, most of the difference in forward and backward"
    )


def test_shares_of_a_step_are_of_work_and_of_what_even_the_busiest_rank_waits() -> None:
    waits = {"dp": [0.025, 0.025, 0.004, 0.020], "world": [0.0, 0.0, 0.0, 0.005]}
    figures = Timing([FAST, FAST, SLOW, FAST], ["n0"] * 4, waits, [3.0, 9.0, 1.0, 9.0]).figures()
    assert figures["communication_share"] == pytest.approx(0.004 / 0.037)
    assert figures["scaling_efficiency"] == pytest.approx((3 * 0.013 / 0.038 + 0.033 / 0.037) / 4)
    assert [figures[f"wait_s/dp{name}"] for name in ("", "/max", "/max_rank", "/min_rank")] == [0.0225, 0.025, 0.0, 2.0]
    assert [figures[f"wait_s/world{name}"] for name in ("", "/max", "/max_rank", "/min_rank")] == [0.0, 0.005, 3.0, 0.0]
    assert [figures[f"peak_memory_bytes/{name}"] for name in ("max", "max_rank")] == [9.0, 1.0]
    on_gpus = Timing([FAST, SLOW], ["n0"] * 2, shows_waits=False).figures()
    assert not {"communication_share", "scaling_efficiency"} & on_gpus.keys()


def test_one_rank_is_slower_than_none() -> None:
    timing = gather_timing({DATA: 0.1, FORWARD_BACKWARD: 1.0, OPTIMIZER: 0.2}, 10, ParallelMesh())
    assert timing.line() == "ms per step: data 10.0, forward and backward 100.0, optimizer 20.0"


def test_what_is_waited_for_others_is_no_time_of_a_section() -> None:
    now, waits = 0.0, {"dp": 0.0}

    def pass_time(work: float, wait: float) -> None:
        nonlocal now
        now, waits["dp"] = now + work + wait, waits["dp"] + wait

    sections = Sections(waits, lambda: now)
    for _ in range(2):
        with sections(STEP):
            with sections(DATA):
                pass_time(0.5, 0.0)
            with sections(FORWARD_BACKWARD):
                pass_time(2.0, 1.0)
    own = {STEP: 5.0, DATA: 1.0, FORWARD_BACKWARD: 4.0}
    assert sections.take() == own | {WAITING: 2.0, waiting_on("dp"): 2.0}
    assert sections.take() == {}
    assert sections.longest == {STEP: 3.5, DATA: 0.5, FORWARD_BACKWARD: 3.0}
