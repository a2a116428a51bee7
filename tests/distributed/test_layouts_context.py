"""Context parallelism: steps against the oracle, on every way of attention, and the bits that must be the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from megalite.parallel import collectives
from tests.distributed.layout_cell import EXPERTS, LONG_SEQUENCE, Cell, make_cell
from tests.distributed.layout_expected import assert_as_expected, assert_same_bits, run, run_each
from tests.distributed.layout_run import initialized_chunks, local_micro_batches, make_meshes
from tests.harness.close import assert_number_close
from tests.harness.covering_array import Row
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[str, Row] = {
    "cp2-p2p": {"cp": 2, "loss_mask": "random", "dropout": 0.1},
    "cp2-all_gather": {"cp": 2, "way": "all_gather", "documents": True, "recompute": "uniform"},
    "cp2-a2a": {"cp": 2, "way": "a2a", "documents": True, "key_values": "few", "dropout": 0.1},
    "cp3-p2p": {"cp": 3, "documents": True, "chunks": 4, "dropout": 0.1, "micro_batch_size": 2},
    "cp3-all_gather": {"cp": 3, "way": "all_gather", "key_values": "mqa", "zero": 3, "vocabulary": "odd"},
    "cp3-a2a": {"cp": 3, "way": "a2a", "key_values": "uneven6", "zero": 1, "documents": True},
    "cp4-p2p": {"cp": 4, "documents": True, "key_values": "uneven6", "zero": 2, "overlap": "reduce"},
    "cp4-all_gather": {"cp": 4, "way": "all_gather", "chunks": 3, "documents": True, "dropout": 0.1},
    "cp4-a2a": {"cp": 4, "way": "a2a", "key_values": "uneven12", "tied": False, "fused_loss": True},
    "cp4-a2a+p2p": {"cp": 4, "way": "a2a+p2p", "key_values": "few", "documents": True, "dropout": 0.1},
    "cp2-tp2": {"cp": 2, "tp": 2, "key_values": "gqa", "recompute": "selective", "optimizer": "muon"},
    "cp2-tp2-sp": {"cp": 2, **SP, "documents": True, "chunks": 3, "qk_layernorm": True},
    "cp2-tp2-sp-a2a": {"cp": 2, **SP, "way": "a2a", "key_values": "few", "zero": 1, "dropout": 0.1},
    "cp2-dp2": {"cp": 2, "dp": 2, "zero": 3, "overlap": "reduce and gather", "documents": True},
    "cp2-dp2-instances": {"cp": 2, "dp": 2, "zero": 2, "instances": 2, "way": "all_gather"},
    "cp2-pp2": {"cp": 2, "pp": 2, "schedule": "zb-v", "documents": True, "tied": False},
    "cp2-pp2-interleaved": {"cp": 2, "pp": 2, "schedule": "interleaved-2", "way": "a2a", "dropout": 0.1},
    "cp2-pp4": {"cp": 2, "pp": 4, "schedule": "1f1b", "way": "all_gather", "documents": True},
    "cp4-tp2-sp": {"cp": 4, **SP, "way": "a2a+p2p", "key_values": "gqa", "recompute": "block"},
    "cp2-tp2-sp-pp2": {"cp": 2, **SP, "pp": 2, "schedule": "zb-h1", "zero": 1, "documents": True},
}
FAMILIES = ("gpt2", "llama", "gemma", "gemma3", "neox")


def cell_of(layout: Row, **more: Any) -> Cell:
    return make_cell({"dp": 1} | layout | more)


FEW = ("cp2-all_gather", "cp3-a2a", "cp4-a2a+p2p")
"""Layouts that have each way and each number of ranks."""


def marked(layouts: dict[str, Row]) -> list[object]:
    """Return the names for a test: most are `wide`, and those of more than four ranks `slow`, because CI runs a step of
    every family on them."""
    few, many = set(FEW), {name for name, row in layouts.items() if cell_of(row).world_size > 4}
    marks = {name: pytest.mark.slow if name in many else pytest.mark.wide for name in layouts if name not in few}
    return [pytest.param(name, marks=marks.get(name, ())) for name in layouts]


@pytest.mark.parametrize("layout", marked(LAYOUTS))
def test_steps_are_the_oracles(layout: str, rank_pools: RankPools) -> None:
    """Families take turns, two for each layout of few ranks: learned and rotary positions, windows of three keys, soft
    caps."""
    turn = list(LAYOUTS).index(layout)
    numbers = (0, 2) if cell_of(LAYOUTS[layout]).world_size < 4 else (0,)
    families = [FAMILIES[(turn + number) % len(FAMILIES)] for number in numbers]
    cells = [cell_of(LAYOUTS[layout], family=family, steps=2) for family in families]
    for cell, result in zip(cells, run(rank_pools, cells), strict=True):
        assert_as_expected(cell, result)


@pytest.mark.wide
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_of_every_family_are_the_oracles(layout: str, rank_pools: RankPools) -> None:
    """Every other family has documents, the others in the next layout."""
    turn = list(LAYOUTS).index(layout)
    cells = [
        cell_of(LAYOUTS[layout] | {"documents": (turn + number) % 2 == 1}, family=family)
        for number, family in enumerate(FAMILIES)
    ]
    for cell, result in zip(cells, run(rank_pools, cells), strict=True):
        assert_as_expected(cell, result)


SHORTEST = [(2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (2, 4)]


@pytest.mark.wide_except("2-2")
@pytest.mark.parametrize(
    ("cp", "tp"),
    [(cp, tp) if (cp, tp) in ((3, 1), (2, 2)) else pytest.param(cp, tp, marks=pytest.mark.wide) for cp, tp in SHORTEST],
)
def test_the_shortest_samples_are_the_oracles(cp: int, tp: int, rank_pools: RankPools) -> None:
    """Chunks have one token, or one per tensor-parallel rank."""
    row = {"cp": cp, "tp": tp, "sequence_parallel": tp > 1, "documents": cp == 4, "key_values": "mha"}
    cell = cell_of(row, family="llama", sequence=2 * cp * tp)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


@pytest.mark.wide
@pytest.mark.parametrize("way", wide_except(["p2p", "all_gather", "a2a"], ["p2p"]))
def test_one_token_that_counts_on_one_rank_is_enough(way: str, rank_pools: RankPools) -> None:
    cells = [
        cell_of({"cp": 2, "way": way, "loss_mask": f"only {token}"}, family="llama")
        for token in (0, 7, LONG_SEQUENCE - 1)
    ]
    for cell, result in zip(cells, run(rank_pools, cells), strict=True):
        assert_as_expected(cell, result)


EXPERT_LAYOUTS: dict[str, Row] = {
    "cp2-ep2": {"cp": 2, "ep": 2},
    "cp2-etp2-all_gather": {"cp": 2, "etp": 2, "way": "all_gather", "documents": True, "zero": 1},
    "cp4-ep2-etp2-a2a": {"cp": 4, "ep": 2, "etp": 2, "way": "a2a", "documents": True, "chunks": 2},
    "cp2-tp2-sp-ep4": {"cp": 2, **SP, "ep": 4, "recompute": "experts", "zero": 3, "key_values": "gqa"},
}
IN_TURN = (pytest.mark.wide, pytest.mark.wide, pytest.mark.slow, pytest.mark.slow)
"""The meeting of a family and a layout: CI has each of both twice."""
ALWAYS = ("switch-cp4-ep2-etp2-a2a",)
EXPERT_DATA: list[Row] = [
    {"padding": True},
    {"drop_policy": "position"},
    {"padded_experts": True, "padding": True},
    {"dropout": 0.1},
]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(
            family,
            layout,
            marks=() if f"{family}-{layout}" in ALWAYS else IN_TURN[(row + column) % 4],
            id=f"{family}-{layout}",
        )
        for row, family in enumerate(EXPERTS)
        for column, layout in enumerate(EXPERT_LAYOUTS)
    ],
)
def test_steps_with_experts_are_the_oracles(family: str, layout: str, rank_pools: RankPools) -> None:
    """Experts are split over context-parallel ranks; capacities and balancing losses are those of whole sequences."""
    turn = list(EXPERT_LAYOUTS).index(layout)
    data = EXPERT_DATA[turn] if family == "switch" else {"padding": turn % 2 == 0}
    dispatcher = ("alltoall", "allgather")[turn % 2]
    cell = cell_of(EXPERT_LAYOUTS[layout] | data, family=family, dispatcher=dispatcher, steps=2)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


SAME_BITS: dict[str, list[Row]] = {
    "schedules": [
        {"pp": pp, "schedule": schedule, "tied": False}
        for pp, schedule in [(1, "1f1b"), (2, "1f1b"), (2, "gpipe"), (2, "zb-h1"), (2, "interleaved-2"), (2, "zb-v")]
    ],
    "recomputation": [{"recompute": recompute} for recompute in ("none", "selective", "uniform", "block")],
    "stages that shard no gradients": [{"zero": zero} for zero in (0, 1)],
    "stages that shard gradients": [{"zero": zero} for zero in (2, 3)],
}


@pytest.mark.wide
@pytest.mark.parametrize("which", SAME_BITS)
@pytest.mark.parametrize("way", ["p2p", "all_gather", "a2a"])
def test_bits_are_the_same(way: str, which: str, rank_pools: RankPools) -> None:
    common = {"cp": 2, "way": way, "documents": True, "dropout": 0.1, "family": "llama"}
    cells = [cell_of(common | row, steps=2) for row in SAME_BITS[which]]
    results = run_each(rank_pools, cells)
    for cell, result in zip(cells[1:], results[1:], strict=True):
        for loss, other in zip(result.losses, results[0].losses, strict=True):
            assert_number_close(loss, other, str(cell))
        assert_same_bits(replace(result, losses=results[0].losses), results[0], str(cell))


def collectives_called(cell: Cell) -> list[tuple[int, int]]:
    """Return, for forward and backward of a micro-batch, how many collectives run, and those declared."""
    mesh = make_meshes([cell])[cell.split]
    (chunk,) = initialized_chunks(mesh, cell)
    chunk.train()
    with mock.patch.object(collectives, "launch", side_effect=collectives.launch) as launched:
        output = chunk({}, next(local_micro_batches(cell, 0, 0, mesh.coordinate("cp"))))
        forward = launched.call_count
        sum(term.sum() for term in output.terms.values() if term.requires_grad).backward()
    backward = launched.call_count - forward
    return [(forward, len(chunk.inside(backward=False))), (backward, len(chunk.inside(backward=True)))]


@pytest.mark.parametrize(
    ("way", "recompute"),
    [
        pytest.param(way, recompute, marks=[pytest.mark.wide] * ((row - column) % 3 > 0))  # in turn
        for row, way in enumerate(("p2p", "all_gather", "a2a", "a2a+p2p"))
        for column, recompute in enumerate(("block", "none", "selective"))
    ],
)
def test_what_ranks_do_together_is_declared(way: str, recompute: str, rank_pools: RankPools) -> None:
    cell = cell_of({"cp": 4, "way": way, "recompute": recompute}, family="llama")
    for rank in rank_pools(4).run(collectives_called, cell):
        for called, declared in rank:
            assert called == declared > 0


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        *(("mixtral", "block"), ("s-base", "none")),
        *(pytest.param(*case, marks=pytest.mark.wide) for case in (("mixtral", "none"), ("s-base", "block"))),
        *(
            pytest.param(family, recompute, marks=pytest.mark.wide)
            for family in ("switch", "kimi")
            for recompute in ("none", "block")
        ),
        pytest.param("mixtral", "experts", marks=pytest.mark.wide),
    ],
)
def test_what_routers_do_together_is_declared(family: str, recompute: str, rank_pools: RankPools) -> None:
    cell = cell_of({"cp": 2, "ep": 2, "way": "a2a", "recompute": recompute}, family=family)
    for rank in rank_pools(2).run(collectives_called, cell):
        for called, declared in rank:
            assert called == declared > 0


def test_ranks_with_another_cut_are_refused(rank_pools: RankPools) -> None:
    cell = cell_of({"cp": 2}, family="llama")
    assert all("cut for 1 ranks" in message for message in rank_pools(2).run(error_of_whole_samples, cell))


def error_of_whole_samples(cell: Cell) -> str:
    mesh = make_meshes([cell])[cell.split]
    (chunk,) = initialized_chunks(mesh, cell)
    with pytest.raises(ValueError) as error, torch.no_grad():
        chunk({}, next(local_micro_batches(replace(cell, cp=1), 0, 0)))
    return str(error.value)
