"""Messages about ranks that are dead or hang, whatever they have reported before."""

from __future__ import annotations

import time

import pytest

from megalite.watchdog.hang_dump import Dumps, RankDump
from megalite.watchdog.hang_report import death, hang, hang_report
from megalite.watchdog.link import Peer, alarm_of
from megalite.watchdog.snapshot import GroupRecord, Operation, Snapshot

LATE = {"overdue": ["step", 61.0, 60.0]}


def peers(count: int) -> dict[int, Peer]:
    return {rank: Peer(rank, "n0", 4000 + rank, 1, "here", "step", 7) for rank in range(count)}


def culprit(stacks: str, shapes: tuple[tuple[int, ...], ...] = ()) -> dict[int, RankDump]:
    """The dumps of two ranks, of which rank 1 has not come to the second collective."""
    first, second = (Operation(number, "all_reduce", shapes, "float32", "started", 1.5) for number in (1, 2))
    waits = Snapshot(True, (GroupRecord("0", (0, 1), 2, (first, second)),))
    lags = Snapshot(False, (GroupRecord("0", (0, 1), 1, (first,)),))
    return {0: RankDump(0, 2, flight_recorder=waits), 1: RankDump(1, 2, stacks=stacks, flight_recorder=lags)}


def test_a_hang_of_many_ranks_is_told_in_some_lines() -> None:
    message = hang(0, LATE, peers(900), {}, dict.fromkeys(range(1, 900), 9.0), None, range(900, 1000))
    assert message.count("\n") < 25
    assert "rank 6 (process 4006 on n0) has not answered" in message
    assert "... and 893 more like that" in message


def test_a_death_of_many_ranks_names_all_in_a_line() -> None:
    message = death([(peer, 1.0) for peer in peers(500).values()])
    assert "rank 15 (process 4015 on n0) and ranks 16-499 have ended without a message" in message
    assert len(message) < 1500


def test_a_rank_makes_no_line_long() -> None:
    message = hang(0, LATE, peers(2), culprit("", ((1,) * 10_000,)), {}, None)
    assert "all_reduce #2 of ranks 0, 1 (float32 [1, 1, 1" in message
    assert max(map(len, message.split("\n"))) <= 502


def test_what_a_rank_says_draws_nothing_on_the_terminal() -> None:
    why = alarm_of({"lost": "reset\nby \x1b[2J peer" + "\n" * 10_000})
    message = hang(0, why, peers(1), {}, {}, None)
    assert message.splitlines()[0] == 'rank 0 (process 4000 on n0), in step 7, "step": reset by ?[2J peer ...'


HOSTILE = {
    "empty lines": "\n" * 50_000,
    "files": '  File "' * 12_000,
    "folders": '  File "x/' * 800,
    "threads": "\nthread " * 12_000,
    "frames": '\n  File "", line 1' * 6_000,
}
"""The first three took 15 to 30 seconds, and the square or cube of their length."""


@pytest.mark.parametrize("begin", ["x", "x\n\nthread y:\n"], ids=["main thread", "another"])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_stacks_are_looked_at_in_time_in_proportion_to_their_length(begin: str, text: str) -> None:
    dumps = culprit(f"{begin}{text}x")
    began = time.thread_time()
    hang(0, LATE, peers(2), dumps, {}, None)
    hang_report(Dumps(dumps, (), ())).as_text()
    assert time.thread_time() - began < 2.0
