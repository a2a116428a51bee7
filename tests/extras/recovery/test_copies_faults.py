"""Copies in memory when ranks die at any moment, copies are damaged, or nodes are lost."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.manifest import Manifest, TrainingState
from megalite.checkpoint.tensors import TensorBox
from megalite.errors import ConfigurationError, CorruptCheckpointError
from megalite.extras.recovery import copies as copies_module
from megalite.extras.recovery import partner as partner_module
from megalite.extras.recovery import slot as slot_module
from megalite.extras.recovery.choice import Choice, Taken, choose
from megalite.extras.recovery.copies import Copies
from megalite.extras.recovery.interval import SHARE, Price, interval_for
from megalite.extras.recovery.partner import Links, partners_of, rounds_of
from megalite.extras.recovery.slot import FOLDER, Header, Slot, Whose, seal
from megalite.parallel.sharding import Box
from megalite.process import host
from tests.extras.recovery.memory import Life, Memory, born, train
from tests.extras.recovery.test_copies import assert_same, hosts, memory
from tests.harness.rank_pool import RankPools

__all__ = ["memory"]
EVERY = "--memory-checkpoint-interval 1"


def test_the_chosen_step_is_the_newest_that_each_rank_can_have() -> None:
    three, four = Taken(3, 9, 2, "2"), Taken(4, 9, 2, "2")
    here = {0: 0, 1: 1}
    assert choose([[(three, 0), (four, 0)], [(four, 1), (three, 1)]]) == Choice(four, here)
    assert choose([[(three, 0), (four, 0)], [(three, 1)]]) == Choice(three, here)
    assert choose([[(four, 0), (four, 1)], []]) == Choice(four, {0: 0, 1: 0})
    assert choose([[(four, 0)], [(three, 1)]]) is None
    assert choose([[(four, 1)], [(four, 1), (four, 0)]]) == Choice(four, {1: 1, 0: 1})
    assert choose([[], [], []]) is None


def test_copies_of_another_number_of_ranks_are_chosen_whole() -> None:
    of_two, of_three = Taken(5, 9, 2, "2"), Taken(6, 8, 3, "3")
    assert choose([[(of_three, 0), (of_two, 0)], [(of_three, 1), (of_two, 1)]]) == Choice(of_two, {0: 0, 1: 1})
    assert choose([[(of_three, 0), (of_three, 2)], [(of_three, 1)]]) == Choice(of_three, {0: 0, 2: 0, 1: 1})


def test_only_copies_that_partners_keep_are_fetched() -> None:
    five = Taken(5, 9, 3, "3")
    assert Choice(five, {0: 0, 1: 1, 2: 2}).fetched(None, "3") == {}
    assert Choice(five, {0: 1, 1: 1, 2: 2}).fetched((1, 2, 0), "3") == {0: 1}
    assert Choice(five, {0: 2, 1: 1, 2: 2}).fetched((1, 2, 0), "3") is None
    assert Choice(five, {0: 1, 1: 1, 2: 2}).fetched(None, "3") is None
    assert Choice(five, {0: 0, 1: 1, 2: 2}).fetched(None, "4") is None


def test_copies_of_different_starts_are_not_chosen_together() -> None:
    old, new = Taken(4, 70, 2, "2"), Taken(4, 7, 2, "2")
    older = Taken(3, 7, 2, "2")
    assert choose([[(old, 0)], [(new, 1)]]) is None
    assert choose([[(old, 0), (older, 0)], [(new, 1), (older, 1)]]) == Choice(older, {0: 0, 1: 1})


@pytest.mark.wide
def test_a_node_of_another_attempt_does_not_mix_in(memory: Any, rank_pools: RankPools, tmp_path: Path) -> None:
    """Two attempts took copies of the same step, and only one node of each is there."""
    attempts, nodes = [memory(2), memory(2)], ["a", "b"]
    for files in attempts:
        rank_pools(2).run(train, files, nodes, tmp_path, EVERY, 2, 0)
        assert all(Slot(number).header() is not None for numbers in files.files for number in numbers[:4])
        for number in (number for numbers in files.files for number in numbers[2:]):
            os.ftruncate(number, 0)
    mixed = Memory((attempts[0].files[0], attempts[1].files[1]), os.getpid())
    assert rank_pools(2).run(train, mixed, nodes, tmp_path, EVERY, 0, 0)[0][0] is None


def test_partners_are_at_the_same_position_of_another_node() -> None:
    assert partners_of("aabb", 1) == (2, 3, 0, 1)
    assert partners_of("aabbcc", 1) == (2, 3, 4, 5, 0, 1)
    assert partners_of("aabbcc", 2) == (4, 5, 0, 1, 2, 3)
    assert partners_of("abab", 1) == (1, 0, 3, 2)
    assert partners_of("aaaa", 1) is None
    assert partners_of("aaab", 1) is None
    with pytest.raises(ConfigurationError, match=r"--memory-checkpoint-partner 2: with 2 nodes, .*b has ranks 2, 3"):
        partners_of("aabb", 2)


@pytest.mark.parametrize("nodes", range(2, 10))
def test_connections_with_partners_take_three_rounds(nodes: int) -> None:
    for distance in range(1, nodes):
        partners = partners_of([f"n{node}" for node in range(nodes) for _ in range(2)], distance)
        assert partners is not None
        rounds = rounds_of(partners)
        assert {*rounds} <= {0, 1, 2}
        for own, partner in zip(rounds, partners, strict=True):
            assert own != rounds[partner]


def test_the_interval_keeps_the_price_below_the_share() -> None:
    assert interval_for(Price(0.003, 0.0, 1.0), on_device=False) == 1
    assert interval_for(Price(0.1, 0.5, 1.0), on_device=False) == 20
    assert interval_for(Price(0.1, 0.5, 1.0), on_device=True) == 4
    for blocking, background in itertools.product((0.01, 0.2, 3.0), repeat=2):
        every = interval_for(Price(blocking, background, 0.7), on_device=False)
        assert (blocking + background) / every / 0.7 <= SHARE < (blocking + background) / max(every - 1, 0.1) / 0.7


PARTS = [
    TensorBox("model/a", (6, 2), torch.float64, Box((2, 0), (3, 2))),
    TensorBox("state/b", (5,), torch.int64, Box((0,), (5,))),
]


def sealed(slot: Slot, step: int) -> Header:
    slot.allocate(20000)
    slot.discard()
    slot.memory[slot_module.HEADER : slot_module.HEADER + 200].fill_(step)
    return seal(slot, Whose(b"r" * 16, b"l" * 16, 2, 1, 5), PARTS, Manifest(TrainingState(step, 0, 0), {}, {}, {}))


def test_every_flipped_byte_of_a_slot_is_noticed() -> None:
    descriptor = os.memfd_create("slot")
    slot = Slot(descriptor)
    header = sealed(slot, 7)
    assert slot.header() == header
    assert slot.is_intact()
    assert slot.manifest().training.iteration == 7
    covered = {
        *range(slot_module.HEADER, slot_module.HEADER + 48),
        *range(slot_module.HEADER + 64, slot_module.HEADER + 104),
    }
    for at in [*range(0, slot_module.HEADER_BYTES, 5), *sorted(covered), *range(header.start, header.stop, 7)]:
        slot.memory[at] ^= 4
        assert not slot.is_intact(), at
        slot.memory[at] ^= 4
    assert slot.is_intact()
    slot.discard()
    assert slot.header() is None
    with pytest.raises(CorruptCheckpointError, match="its manifest is damaged"):
        slot.manifest()
    os.close(descriptor)


def test_a_copy_is_none_until_its_last_byte_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that dies at any system call of `seal` leaves no copy, or the whole one."""
    whole = os.pwrite
    for calls in range(3):
        descriptor = os.memfd_create("slot")
        slot, left = Slot(descriptor), [calls + 1]  # of which the first is that of `discard`

        def dying(number: int, data: bytes, at: int, left: list[int] = left) -> int:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            return whole(number, data, at)

        monkeypatch.setattr(os, "pwrite", dying)
        try:
            sealed(slot, 3)
        except KeyboardInterrupt:
            assert slot.header() is None
        else:
            assert slot.is_intact()
        monkeypatch.setattr(os, "pwrite", whole)
        os.close(descriptor)


# -------------------------------------------------------------------------------------------------- ranks that die

POINTS = {
    "while it copies": (copies_module, "seal"),
    "before the commit": (slot_module.Slot, "commit"),
    "before it sends": (Links, "exchange"),
    "while it receives": (Links, "_both"),
    "before the partner's commit": (partner_module, "_committed"),
}


def dies(
    memory: Memory, nodes: Sequence[str], folder: Path, flags: str, steps: int, point: str, victim: int
) -> tuple[Any, ...]:
    """Train, and die during the next copy at a point, as the others do at their next collective."""
    import torch.distributed as dist

    life = born(memory, nodes, folder, flags)
    life.steps(steps)
    owner, name = POINTS[point]
    with pytest.MonkeyPatch.context() as patch, life.trainer.loader:
        if dist.get_rank() == victim:

            def die(*arguments: Any) -> Any:
                raise SystemExit

            patch.setattr(owner, name, die)
        life.trainer.step()
        life.copies.after_step(busy=False)
        work = life.copies._work
        assert work is not None
        began = time.monotonic()
        while not work.done() and time.monotonic() - began < 0.5:
            time.sleep(0.01)
        if dist.get_rank() == victim:
            assert isinstance(work.exception(), SystemExit)
    return (life.how,)


@pytest.mark.wide_except("while it copies-0", "before the partner's commit-0")
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("point", POINTS)
def test_a_common_step_is_left_wherever_a_rank_dies(
    point: str, victim: int, memory: Any, rank_pools: RankPools, tmp_path: Path
) -> None:
    files, nodes = memory(2), ["a", "b"]
    rank_pools(2).run(dies, files, nodes, tmp_path, EVERY, 2, point, victim)
    slots = [Slot(number) for numbers in files.files for number in numbers]
    assert all(slot.header() is None or slot.is_intact() for slot in slots)
    ended = rank_pools(2).run(train, files, nodes, tmp_path, EVERY, 0, 1)
    assert ended[0][0] in (
        "continues from the copies in memory of step 2",
        "continues from the copies in memory of step 3",
    )
    assert len({how for how, *_ in ended}) == 1
    if point in ("while it copies", "before the commit"):
        assert ended[0][0].endswith("step 2")


def own_steps(life: Life) -> list[int]:
    return sorted(header.step for slot in life.copies._own if (header := slot.header()) is not None)


def overtakes(memory: Memory, nodes: Sequence[str], folder: Path) -> list[list[int]]:
    """Step on while a copy of rank 1 is held up. Returns the steps of the own copies after each step."""
    import threading

    import torch.distributed as dist

    from megalite.parallel.collectives import on_any_rank

    life = born(memory, nodes, folder, EVERY)
    life.steps(2)
    held, found = threading.Event(), []
    exchange = Links.exchange

    def late(*arguments: Any) -> Any:
        held.wait()
        return exchange(*arguments)

    with pytest.MonkeyPatch.context() as patch, life.trainer.loader:
        if dist.get_rank() == 1:
            patch.setattr(Links, "exchange", late)
        for _ in range(3):
            life.trainer.step()
            life.copies.after_step(busy=on_any_rank([life.copies.busy], life.trainer.mesh)[0])
            time.sleep(0.2)
            found.append(own_steps(life))
        held.set()
        life.wait()
        life.step()
    found.append(own_steps(life))
    return found


def test_no_slot_is_overwritten_before_all_ranks_have_the_other(
    memory: Any, rank_pools: RankPools, tmp_path: Path
) -> None:
    """A copy that is due while one is under way is taken at the next step."""
    for found in rank_pools(2).run(overtakes, memory(2), ["a", "b"], tmp_path):
        assert found == [[2, 3], [2, 3], [2, 3], [3, 6]]


# ------------------------------------------------------------------------------------------------ damaged copies


def flip(memory: Memory, rank: int, step: int, *, kept: bool) -> None:
    """Flip a bit in the bytes of a rank's own copy of a step, or of the one that it keeps."""
    for number in memory.files[rank][2:4] if kept else memory.files[rank][:2]:
        header = Slot(number).header()
        if header is not None and header.step == step:
            at = slot_module.HEADER + 3
            os.pwrite(number, bytes([os.pread(number, 1, at)[0] ^ 16]), at)
            return
    raise AssertionError(f"no copy of step {step}")


@pytest.mark.wide_except("both")
@pytest.mark.parametrize("how", ["own", "both", "all"])
def test_a_damaged_copy_is_not_loaded(how: str, memory: Any, rank_pools: RankPools, tmp_path: Path) -> None:
    """The partner's is used; with both damaged an older step; with all damaged nothing of them."""
    files, nodes = memory(3), ["a", "b", "c"]
    flags = f"{EVERY} --global-batch-size 6"
    through = rank_pools(3).run(train, files, nodes, tmp_path, flags, 4, 0)
    flip(files, 1, 4, kept=False)
    if how != "own":
        flip(files, 2, 4, kept=True)
    if how == "all":
        flip(files, 1, 3, kept=False)
        flip(files, 2, 3, kept=True)
    ended = rank_pools(3).run(train, files, nodes, tmp_path, flags, 0, {"own": 0, "both": 1, "all": 4}[how])
    start, notes = ended[0][:2]
    assert (
        start
        == {
            "own": "continues from the copies in memory of step 4 (rank 1's from its partner, rank 2)",
            "both": "continues from the copies in memory of step 3",
            "all": None,
        }[how]
    )
    assert "WARNING: loading the copies in memory of step 4 failed on rank 1:" in notes[0]
    assert "the checksum of" in notes[0]
    assert str(FOLDER) not in "".join(notes)
    if how != "own":
        assert notes[1] == (
            "WARNING: the copy in memory of step 4 that a partner keeps for rank 1 is damaged: it is not used"
        )
    for (_, _, _, kept), (_, _, _, found) in zip(through, ended, strict=True):
        assert all(torch.equal(found[name], values) for name, values in kept.items())


def test_copies_of_a_run_with_other_flags_are_dropped(memory: Any, rank_pools: RankPools, tmp_path: Path) -> None:
    files, nodes = memory(2), ["a", "b"]
    rank_pools(2).run(train, files, nodes, tmp_path, EVERY, 2, 0)
    assert Slot(files.files[0][0]).header() is not None
    ended = rank_pools(2).run(train, files, nodes, tmp_path, f"{EVERY} --lr 0.01", 0, 0)
    assert ended[0][0] is None
    assert all(Slot(number).header() is None for numbers in files.files for number in numbers)


def test_a_newer_checkpoint_on_disk_is_preferred(memory: Any, rank_pools: RankPools, tmp_path: Path) -> None:
    files, nodes = memory(2), ["a", "b"]
    rank_pools(2).run(train, files, nodes, tmp_path, EVERY, 2, 0)
    assert rank_pools(2).run(began, files, nodes, tmp_path, 3) == [None, None]
    rank_pools(2).run(train, files, nodes, tmp_path, EVERY, 2, 0)
    assert rank_pools(2).run(began, files, nodes, tmp_path, 1) == ["continues from the copies in memory of step 2"] * 2


def began(memory: Memory, nodes: Sequence[str], folder: Path, on_disk: int) -> str | None:
    return born(memory, nodes, folder, EVERY, on_disk=[folder / f"iter_{on_disk:07}"]).how


def refused(memory: Memory, nodes: Sequence[str], folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "memory_limit", lambda: 1 << 16)
        with pytest.raises(ConfigurationError) as error:
            born(memory, nodes, folder, EVERY)
        life = born(memory, nodes, folder, "")
    assert life.steps(4)
    assert "there are none, and a failure costs" in life.copies.notes[-1]
    return str(error.value)


def test_copies_that_a_host_has_no_room_for_are_refused(memory: Any, rank_pools: RankPools, tmp_path: Path) -> None:
    """Copies are not taken either where nobody has asked for an interval."""
    files = memory(2)
    for text in rank_pools(2).run(refused, files, ["a", "b"], tmp_path):
        assert text.startswith("host a: copies in memory need 0.00 GiB")
        assert "give --memory-checkpoint-interval 0" in text
    assert all(os.fstat(number).st_size < slot_module.HEADER for numbers in files.files for number in numbers)


def test_ranks_of_one_node_have_no_partners(memory: Any, rank_pools: RankPools, tmp_path: Path) -> None:
    files = memory(2)
    through = rank_pools(2).run(train, files, ["a", "a"], tmp_path, EVERY, 2, 0)
    assert "a lost node costs the steps since the last checkpoint on disk" in through[0][1][0]
    resumed = rank_pools(2).run(train, files, ["a", "a"], tmp_path, EVERY, 0, 0)
    assert resumed[0][0] == "continues from the copies in memory of step 2"
    for (_, _, _, kept), (_, _, _, found) in zip(through, resumed, strict=True):
        assert all(torch.equal(found[name], values) for name, values in kept.items())
    files.lose(1)
    assert rank_pools(2).run(train, files, ["a", "a"], tmp_path, EVERY, 0, 0)[0][0] is None


def notes_of(memory: Memory, nodes: Sequence[str], folder: Path) -> str:
    return born(memory, nodes, folder, EVERY, restarts="0").copies.notes[0]


@pytest.mark.wide
def test_ranks_whose_launcher_replaces_no_nodes_have_no_partners(
    memory: Any, rank_pools: RankPools, tmp_path: Path
) -> None:
    files = memory(2)
    for note in rank_pools(2).run(notes_of, files, ["a", "b"], tmp_path):
        assert "without partners, as this launcher replaces no lost node" in note
    for numbers in files.files:
        assert [os.fstat(number).st_size > slot_module.HEADER for number in numbers] == [
            True,
            True,
            False,
            False,
            False,
        ]


def test_two_positions_of_two_nodes(memory: Any, rank_pools: RankPools, tmp_path: Path) -> None:
    files, nodes, flags = memory(4), hosts(4), f"{EVERY} --tp 2 --sequence-parallel"
    through = rank_pools(4).run(train, files, nodes, tmp_path, flags, 2, 0)
    files.lose(0, 1)
    resumed = rank_pools(4).run(train, files, nodes, tmp_path, flags, 0, 0)
    assert resumed[0][0] == (
        "continues from the copies in memory of step 2 "
        "(rank 0's from its partner, rank 2; rank 1's from its partner, rank 3)"
    )
    assert_same([(0, 0, [], each[3]) for each in through], [(0, 0, [], each[3]) for each in resumed])


@pytest.mark.parametrize("late", [True, False])
def test_a_run_has_finished_without_its_last_copy(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy takes too long, or fails."""
    monkeypatch.setattr(copies_module, "_LAST_SECONDS", 0.01)
    copies = object.__new__(Copies)
    copies._work = Future()
    if not late:
        copies._work.set_exception(OSError("no memory"))
    with copies:
        pass


def test_the_interval_is_measured_and_agreed(memory: Any, rank_pools: RankPools, tmp_path: Path) -> None:
    told = rank_pools(2).run(measures, memory(2), ["a", "b"], tmp_path)
    assert told[0] == told[1]
    assert told[0] >= 1


def measures(memory: Memory, nodes: Sequence[str], folder: Path) -> int:
    life = born(memory, nodes, folder, "")
    assert life.copies.interval is None
    life.steps(4)
    assert life.copies.interval is not None
    return life.copies.interval
