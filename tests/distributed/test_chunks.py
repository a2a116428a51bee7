"""Several chunks on one pipeline rank: their reductions, and a tied weight with uses in two of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.mesh import Group
from megalite.pipeline.lowering import Reductions, lower
from megalite.pipeline.schedules import SCHEDULES, Action, orders_of
from megalite.pipeline.stages import Stages
from tests.distributed.chunks_run import Case, Rank, actions, trained
from tests.distributed.layout_cell import Cell, make_cell
from tests.distributed.layout_expected import assemble
from tests.distributed.layout_run import Held
from tests.harness.close import assert_bits_equal, assert_gradient_close
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

WHOLE = "F0 B0 F1 B1 F2 B2 F3 B3"
IN_TURN = "F0.0 F0.1 F1.0 F1.1 B0.1 B1.1 B0.0 F2.0 F2.1 I2.1 B1.0 F3.0 F3.1 I3.1 W2.1 W3.1 I2.0 I3.0 W2.0 W3.0"
"""Actions in which the head runs backward for its first two micro-batches before the embedding does for its first."""


def scheduled(name: str, cell: Cell) -> tuple[Action, ...]:
    """Return the actions of one pipeline rank, with its reductions."""
    schedule, v_shaped = SCHEDULES[name], name == "zb-v"
    stages = Stages(1, 2 if v_shaped or name.startswith("interleaved") else 1, v_shaped)
    reductions = Reductions(per_micro_batch=cell.zero >= 2, overlap=cell.overlap != "none")
    (found,) = lower(stages, orders_of(schedule, stages, 4), reductions)
    return tuple(found)


def tensors(ranks: Sequence[list[tuple[list[float], list[Held]]]], case: int) -> dict[str, Tensor]:
    return assemble([rank[case][1] for rank in ranks])


@pytest.mark.wide
@pytest.mark.bits
@pytest.mark.parametrize(("recompute", "tied"), [("none", True), ("uniform", False)])
def test_two_chunks_give_the_bits_of_one(recompute: str, tied: bool, rank_pools: RankPools) -> None:
    """Check without data-parallel reductions, because they depend on the cut of the buckets."""
    row = {"tp": 2, "dp": 1, "sequence_parallel": True, "tied": tied, "recompute": recompute}
    cell = make_cell(row, optimizer="adam", clip_grad=0.5, dropout=0.1)
    names = ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v")
    cases = [Case(cell, chunks, actions(order, reduce_each=False)) for chunks, order in ((1, WHOLE), (2, IN_TURN))]
    cases += [Case(cell, 1 + (name in names[3:]), scheduled(name, cell)) for name in names]
    ranks = rank_pools(2).run(trained, cases)
    first = tensors(ranks, 0)
    for number in range(1, len(cases)):
        assert ranks[0][number][0] == ranks[0][0][0], number
        for name, values in tensors(ranks, number).items():
            assert_bits_equal(values, first[name], f"{name} of case {number}")


@pytest.mark.bits
@pytest.mark.parametrize(
    ("tp", "dp", "instances", "lists"),
    [
        pytest.param(2, 2, 1, "in turn", marks=pytest.mark.wide),
        (1, 2, 1, "zb-v"),
        pytest.param(1, 4, 2, "in turn", marks=pytest.mark.wide),
        pytest.param(4, 1, 1, "in turn", marks=pytest.mark.wide),
        pytest.param(2, 2, 1, "in turn, zb-v", marks=pytest.mark.wide),
        pytest.param(1, 4, 2, "in turn, zb-v", marks=pytest.mark.wide),
    ],
)
def test_stages_and_overlap_change_no_bit(tp: int, dp: int, instances: int, lists: str, rank_pools: RankPools) -> None:
    """Compare runs with two chunks: ZeRO 0 and 1 have the same bits, and so do 2 and 3; all are close to one chunk. An
    R in the middle of a list needs no overlap.

    (Four tensor-parallel ranks test sums over more than two replicas, whose order could depend on the buckets.)
    """
    row = {"tp": tp, "dp": dp, "samples": 4 * dp, "sequence_parallel": tp > 1}
    training = {"optimizer": "adam", "clip_grad": 0.5, "dropout": 0.1}
    stages = (0,) if dp == 1 else range(0 if instances == 1 else 1, 4)
    ways = [(zero, overlap) for zero in stages for overlap in ("none", "reduce and gather" if zero else "reduce")]
    cases = []
    for zero, overlap in ways:
        kinds = {"zero": zero, "overlap": overlap, "instances": instances if zero else 1}
        cell = make_cell(row | kinds, **training)
        for name in lists.split(", "):
            in_turn = actions(IN_TURN, reduce_each=zero >= 2)
            cases.append(Case(cell, 2, in_turn if name == "in turn" else scheduled(name, cell)))
    one = Case(cases[0].cell, 1, actions(WHOLE, reduce_each=False))
    ranks = rank_pools(tp * dp).run(trained, [one, *cases])
    norms, whole = ranks[0][0][0], tensors(ranks, 0)
    firsts: dict[bool, tuple[list[float], dict[str, Tensor]]] = {}
    for number, case in enumerate(cases, start=1):
        found = tensors(ranks, number)
        first_norms, first = firsts.setdefault(case.cell.zero >= 2, (ranks[0][number][0], found))
        assert ranks[0][number][0] == first_norms, case.cell
        assert first_norms == pytest.approx(norms, rel=1e-12)
        for name, values in found.items():
            assert_bits_equal(values, first[name], f"{name} of {case.cell}")
            assert_gradient_close(values, whole[name], 1.0, name)


WAIT = "wait for the gradients' reduction"


class Record:
    """Record of the collectives that a rank begins, and of the data-parallel reductions that it waits for."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, tuple[int, ...]]] = []
        """True for a wait, and the ranks."""

    def begun(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, group: Any, **options: Any) -> Any:
            self.seen.append((False, tuple(dist.get_process_group_ranks(group))))
            return original(*arguments, group=group, **options)

        return call

    def waited_for(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, group: Group, out: Tensor | None = None) -> collectives.Pending:
            before = len(self.seen)
            pending = original(tensor, group, out)
            del self.seen[before:]

            def finish() -> Tensor:
                if group.size > 1:
                    self.seen.append((True, group.ranks))
                return pending.wait()

            return collectives.Pending(None, finish)

        return call


def said_and_done(cell: Cell) -> tuple[list[tuple[str, tuple[int, ...]]], list[tuple[bool, tuple[int, ...]]]]:
    rank = Rank.build(cell, 2, bucket_size=700)
    rank.optimizer.begin_step(4)
    record = Record()
    with (
        mock.patch.object(collectives, "reduce_scatter_async", record.waited_for(collectives.reduce_scatter_async)),
        mock.patch.object(collectives, "_all_gather_single", record.begun(collectives._all_gather_single)),
        mock.patch.object(dist, "all_to_all_single", record.begun(dist.all_to_all_single)),
        mock.patch.object(dist, "all_reduce", record.begun(dist.all_reduce)),
    ):
        behind_the_list = 0

        def count(action: Action) -> None:
            nonlocal behind_the_list
            behind_the_list = len(record.seen)

        rank.step(cell, 0, scheduled("zb-v", cell), count)
        return rank.optimizer.collectives(), record.seen[behind_the_list:]


@pytest.mark.parametrize("zero", wide_except([0, 1, 2, 3], [3]))
@pytest.mark.parametrize(
    ("optimizer", "tp", "dp", "instances"),
    [
        *(pytest.param(rule, 2, 2, 1, marks=pytest.mark.wide) for rule in ("adam", "lamb")),
        ("muon", 2, 2, 1),
        pytest.param("muon", 1, 4, 2, marks=pytest.mark.wide),
        pytest.param("adafactor", 2, 2, 1, marks=pytest.mark.wide),
    ],
)
def test_the_step_does_the_collectives_that_it_names(
    optimizer: str, tp: int, dp: int, instances: int, zero: int, rank_pools: RankPools
) -> None:
    kinds = {"zero": zero, "instances": instances if zero else 1, "sequence_parallel": tp > 1, "key_values": "mqa"}
    cell = make_cell({"tp": tp, "dp": dp, "samples": 4 * dp, "family": "llama"} | kinds, optimizer=optimizer)
    for said, done in rank_pools(tp * dp).run(said_and_done, cell):
        named = [(name == WAIT, ranks) for name, ranks in said]
        if cell.zero >= 2:  # without overlap their reductions have ended inside the list
            named = [(waited, ranks) for waited, ranks in named if not waited]
        assert named == done
        assert len([name for name, _ in said if name == "norm"]) == 1
