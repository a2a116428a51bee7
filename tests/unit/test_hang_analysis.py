"""Who is missing where, from the ranks' flight recorders: simulated ones, of programs stopped at any point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.process.place import ranks_text
from megalite.watchdog.hang_analysis import Diagnosis, missing
from megalite.watchdog.snapshot import COMPLETED, GroupRecord, Operation, Snapshot


def operation(number: int, name: str = "all_reduce", size: int = 4, state: str = "scheduled") -> Operation:
    return Operation(number, name, ((size,),), "float32", state, 0.0)


def group(ranks: Sequence[int], *operations: Operation, collectives: int = 0) -> GroupRecord:
    last = max((one.number for one in operations), default=collectives)
    return GroupRecord(f"group {ranks}", tuple(ranks), last, operations)


def link(source: int, destination: int, messages: int, finished: int = 0) -> GroupRecord:
    return GroupRecord(f"{source} {destination}", (source, destination), 0, (), messages, finished)


def waits(*groups: GroupRecord, waiting: bool | None = True) -> Snapshot:
    return Snapshot(waiting, groups)


def busy(*groups: GroupRecord) -> Snapshot:
    return Snapshot(False, groups)


def blamed(findings: Sequence[Diagnosis]) -> set[int]:
    assert [finding.cause for finding in findings] == sorted((finding.cause for finding in findings), reverse=True)
    return {rank for finding in findings if finding.cause for rank in finding.culprits}


# --------------------------------------------------------------------------------------- a program stopped anywhere


@dataclass(frozen=True)
class Program:
    """Operations in an order that all ranks keep, and the number of operations after which each rank waits for each."""

    world_size: int
    operations: Sequence[tuple[tuple[int, ...], bool]]
    """Ranks, and whether the operation is a message from the first to the second."""
    delays: Sequence[int]

    def steps(self, rank: int) -> list[tuple[str, int]]:
        """Return the rank's steps: begin an operation, or wait for its end."""
        own = [index for index, (ranks, _) in enumerate(self.operations) if rank in ranks]
        steps: list[tuple[str, int]] = []
        for place, index in enumerate(own):
            steps.append(("begin", index))
            steps += [("wait", past) for past in own[: place + 1] if self._waits_at(own, past) == place]
        return steps

    def _waits_at(self, own: Sequence[int], index: int) -> int:
        return min(own.index(index) + self.delays[index], len(own) - 1)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    world_size = draw(st.integers(2, 6))
    ranks = st.permutations(range(world_size))
    pool = [
        (tuple(order[:2]), True) if message else (tuple(sorted(order[:size])), False)
        for order, size, message in draw(
            st.lists(st.tuples(ranks, st.integers(2, world_size), st.booleans()), min_size=1, max_size=5)
        )
    ]
    operations = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=20))
    return Program(world_size, operations, [draw(st.integers(0, 4)) for _ in operations])


def run(program: Program, stopped: int, after: int) -> tuple[dict[int, Snapshot], bool]:
    """Return the final snapshots with rank `stopped` halted after some steps, and whether any other rank waits."""
    steps = {rank: program.steps(rank) for rank in range(program.world_size)}
    steps[stopped] = steps[stopped][:after]
    done = dict.fromkeys(steps, 0)
    begun: list[set[int]] = [set() for _ in program.operations]

    def moves(rank: int) -> bool:
        if done[rank] == len(steps[rank]):
            return False
        kind, index = steps[rank][done[rank]]
        if kind == "wait" and len(begun[index]) < len(program.operations[index][0]):
            return False
        if kind == "begin":
            begun[index].add(rank)
        done[rank] += 1
        return True

    while any(moves(rank) for rank in steps):
        pass
    waiting = {rank: done[rank] < len(steps[rank]) for rank in steps}
    snapshots = {rank: Snapshot(waiting[rank], records(program, rank, begun)) for rank in steps}
    return snapshots, any(waiting.values())


def records(program: Program, rank: int, begun: Sequence[set[int]]) -> tuple[GroupRecord, ...]:
    groups: dict[str, GroupRecord] = {}
    for (ranks, message), ranks_in in zip(program.operations, begun, strict=True):
        if rank in ranks_in:
            name = f"{ranks} {message}"
            known = groups.get(name, GroupRecord(name, ranks))
            if message:
                groups[name] = replace(known, messages=known.messages + 1)
            else:
                number = known.collectives + 1
                state = COMPLETED if len(ranks_in) == len(ranks) else "scheduled"
                groups[name] = replace(
                    known, collectives=number, operations=(*known.operations, operation(number, state=state))
                )
    return tuple(groups.values())


@given(programs(), st.integers(0, 100), st.integers(0, 100), st.booleans())
def test_the_rank_that_stopped_is_the_one_to_blame(program: Program, rank: int, after: int, silent: bool) -> None:
    stopped = rank % program.world_size
    steps = program.steps(stopped)
    snapshots, hangs = run(program, stopped, after % (len(steps) + 1))
    if silent:
        del snapshots[stopped]
        assert blamed(missing(snapshots, [stopped])) == {stopped}
        known = {rank for snapshot in snapshots.values() for group in snapshot.groups for rank in group.ranks}
        assert blamed(missing(snapshots)) == {stopped} & known
    else:
        assert not snapshots[stopped].waiting
        assert blamed(missing(snapshots)) == ({stopped} if hangs else set())


# ------------------------------------------------------------------------------------------------- what stands there


def test_a_chain_over_groups_leads_to_the_rank_that_waits_for_nobody() -> None:
    snapshots = {
        0: waits(group([0, 1], operation(1))),
        1: waits(group([0, 1]), group([1, 2], operation(1))),
        2: waits(group([1, 2]), link(3, 2, messages=5)),
        3: busy(link(3, 2, messages=4)),
    }
    findings = missing(snapshots)
    assert findings[0] == Diagnosis(
        "message #5 from rank 3 to rank 2: rank 2 waits for it, rank 3 has not reached it: the last one was #4",
        culprits=(3,),
        cause=True,
    )
    assert [finding.cause for finding in findings] == [True, False, False]


def test_two_groups_in_opposite_order_are_a_deadlock() -> None:
    first, second = group([0, 1, 2], operation(1)), GroupRecord("other", (0, 1), 1, (operation(1, "all_gather"),))
    snapshots = {0: waits(first), 1: waits(second), 2: waits(first)}
    (deadlock, *consequences) = missing(snapshots)
    assert deadlock.text == (
        "deadlock: rank 0 for rank 1 in all_reduce #1 of ranks 0-2 (float32 [4]), "
        "rank 1 for rank 0 in all_gather #1 of ranks 0, 1 (float32 [4])"
    )
    assert deadlock.culprits == (0, 1)
    assert deadlock.cause
    assert not any(finding.cause for finding in consequences)


def test_where_no_rank_can_say_whether_it_waits_a_circle_is_told_with_doubt() -> None:
    snapshots = {0: waits(link(0, 1, 2, 1), waiting=None), 1: waits(link(0, 1, 1, 1), link(1, 0, 3, 2), waiting=None)}
    assert missing(snapshots)[0].text.startswith("deadlock, unless one of them is busy with something else: see its st")


def test_each_of_two_ranks_that_differ_is_to_blame_where_no_third_decides() -> None:
    snapshots = {0: waits(group([0, 1], operation(1, size=4))), 1: waits(group([0, 1], operation(1, size=5)))}
    (finding,) = missing(snapshots)
    assert finding.culprits == (0, 1)
    assert "rank 0 is in all_reduce (float32 [4]), rank 1 is in all_reduce (float32 [5])" in finding.text


@pytest.mark.parametrize("name", ["all_to_all", "gather", "scatter"])
def test_sizes_may_differ_where_the_operation_lets_them(name: str) -> None:
    ended = {rank: busy(group([0, 1], operation(1, name, rank + 1, COMPLETED))) for rank in range(2)}
    assert missing(ended) == []


def test_one_size_may_have_several_shapes() -> None:
    flat, square = operation(1), replace(operation(1), shapes=((2, 2),))
    assert missing({0: busy(group([0, 1], flat)), 1: busy(group([0, 1], square))}) == []


def test_what_all_have_entered_and_does_not_end_is_nobodys_fault_but_told() -> None:
    snapshots = {rank: waits(group([0, 1], operation(1))) for rank in range(2)}
    snapshots[2] = waits(link(1, 2, messages=1))
    first, second = missing(snapshots)
    assert first == Diagnosis(
        "all_reduce #1 of ranks 0, 1 (float32 [4]): all ranks are in it, but it does not end on ranks 0, 1", (), True
    )
    assert second.text.startswith("message #1 from rank 1 to rank 2")
    assert not second.cause


def test_a_collective_that_has_left_the_ring_still_counts() -> None:
    snapshots = {0: waits(group([0, 1], operation(7, state="started"))), 1: busy(group([0, 1], collectives=7))}
    assert "all ranks are in it" in missing(snapshots)[0].text
    snapshots[1] = busy(group([0, 1], collectives=6))
    assert blamed(missing(snapshots)) == {1}


def test_a_message_that_has_arrived_keeps_nobody() -> None:
    """NCCL takes small messages before they are received."""
    snapshots = {0: waits(link(0, 1, messages=3, finished=3), waiting=None), 1: busy(link(0, 1, messages=2))}
    assert missing(snapshots) == []


def test_a_silent_rank_for_which_nobody_waits_comes_after_the_one_they_wait_for() -> None:
    snapshots: Mapping[int, Snapshot] = {
        0: waits(group([0, 1], operation(1))),
        1: busy(group([0, 1])),
        3: busy(group([2, 3], operation(1, state=COMPLETED))),
    }
    first, second = missing(snapshots, silent=[2])
    assert (first.culprits, first.cause) == ((1,), True)
    assert (second.culprits, second.cause) == ((2,), False)
    assert blamed(missing({3: snapshots[3]}, silent=[2])) == {2}


def test_ranks_in_words() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([5, 0, 1, 4, 3]) == "ranks 0, 1, 3-5"
    assert ranks_text(range(0, 40, 2)) == f"ranks {', '.join(map(str, range(0, 32, 2)))}, ... (20 of them)"
