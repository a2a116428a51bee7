"""Several steps of SGD, AdamW and Muon on every family, against torch.optim and the oracle.

Every value of the factors that several steps depend on is covered, and in CI every pair of values of all factors.
docs/invariants.md: I5, and the order of sums: ZeRO 0 and 1 give the same bits, and so do 2 and 3, with and without
overlap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from tests.distributed.layout_cell import FAMILIES, LAYOUT_FACTORS, MODEL_FACTORS, Cell, make_cell, valid
from tests.distributed.layout_expected import assert_as_expected, assert_same_bits, run
from tests.distributed.test_layouts import DROPOUT, PLAINEST
from tests.harness.close import assert_number_close
from tests.harness.covering_array import Row, covering_array, uncovered
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

STEPS = 3  # each of the learning rates, and one of the decays twice: see `layout_cell.rates`
STEPS_OF_MANY = 2  # a third step only adds other rates, which do not depend on the number of ranks
FACTORS = (
    LAYOUT_FACTORS | MODEL_FACTORS | {"family": FAMILIES, "optimizer": ("sgd", "adam", "muon"), "clip_grad": (0.0, 0.5)}
)
TRIPLES = ("tp", "sequence_parallel", "pp", "zero")


def ranks(row: Row) -> int:
    return math.prod(row[name] for name in ("tp", "cp", "pp", "dp"))


def small(row: Row) -> bool:
    """Tell whether a row, perhaps incomplete, can be run on at most four ranks; each axis except data may have all."""
    return ranks(row) <= 4 and valid(row)


@cache
def rows() -> list[Row]:
    """Return rows with every pair of values. This takes two seconds, so not when the module is imported."""
    return covering_array(FACTORS, small, cost=lambda row: 1 + ranks(row), candidates=6, seed=2)


REPLICATED = PLAINEST | {"family": "llama", "tp": 2, "key_values": "uneven6", "optimizer": "muon", "clip_grad": 0.0}
"""Three values that must occur together: one of three key-value groups is on two ranks, and Muon sums parts of
matrices."""
WORLD_SIZES = (2, 3, 4)


OF_STEPS = ("ep", "etp", "zero", "instances", "overlap", "optimizer", "clip_grad")
"""Factors whose values `make test` has in several steps; it has those of all others in one step of each layout."""


@cache
def few() -> list[Row]:
    missing = {(name, value) for row in rows() for name, value in row.items() if name in OF_STEPS}
    found: list[Row] = [REPLICATED]
    while missing := missing - {item for row in found for item in row.items()}:
        found.append(max(rows(), key=lambda row: len(missing & row.items()) / (1 + ranks(row))))
    return found


@pytest.mark.wide
def test_every_pair_of_factors_is_met() -> None:
    assert not uncovered(FACTORS, small, rows())
    assert {ranks(row) for row in rows()} <= set(WORLD_SIZES)


def check(rank_pools: RankPools, rows: Sequence[Row], steps: int) -> None:
    cells = [make_cell(row, steps=steps, dropout=DROPOUT[number % 2]) for number, row in enumerate(rows)]
    for cell, result in zip(cells, run(rank_pools, cells), strict=True):
        assert_as_expected(cell, result)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_parameters_after_steps_are_the_oracles(world_size: int, rank_pools: RankPools) -> None:
    """A few rows cover each value of the factors that several steps depend on.

    The tests of one step cover the first step, with update, of all ways of communication, on more ranks and pipelines.
    """
    check(rank_pools, [row for row in few() if ranks(row) == world_size], STEPS if world_size <= 3 else STEPS_OF_MANY)


@pytest.mark.wide
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_parameters_after_steps_are_the_oracles_on_pairs(world_size: int, rank_pools: RankPools) -> None:
    rest = [row for row in rows() if row not in few() and ranks(row) == world_size]
    if not rest:
        pytest.skip(f"no row of the covering array has {world_size} ranks")
    check(rank_pools, rest, STEPS if world_size <= 3 else STEPS_OF_MANY)


@pytest.mark.wide
@pytest.mark.parametrize("world_size", [6, 8])
def test_parameters_after_steps_on_many_ranks_are_the_oracles(world_size: int, rank_pools: RankPools) -> None:
    """Check a third of the rows that cover every pair of factors."""
    found = covering_array(FACTORS, valid, cost=lambda row: 1 + ranks(row))
    check(rank_pools, [row for row in found if ranks(row) == world_size][::3], STEPS_OF_MANY)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", range(1, 9))
def test_parameters_after_steps_are_the_oracles_on_triples(world_size: int, rank_pools: RankPools) -> None:
    found = covering_array(FACTORS, valid, TRIPLES)
    check(rank_pools, [row for row in found if ranks(row) == world_size], STEPS)


OF_HEADS: dict[str, Row] = {
    "groups on two ranks": {"tp": 2, "dp": 1, "key_values": "uneven6"},
    "zero3": {"dp": 3, "zero": 3, "key_values": "mqa", "overlap": "reduce and gather"},
    "gates": {"tp": 2, "dp": 2, "zero": 1, "sequence_parallel": True, "key_values": "gqa", "output_gate": True},
    "experts": {"tp": 1, "ep": 2, "dp": 2, "family": "mixtral", "key_values": "mha"},
}
"""Layouts on which Muon has a matrix for each head, or one of all queries, keys and values."""


@pytest.mark.parametrize("name", wide_except(OF_HEADS, ["groups on two ranks"]))
def test_each_head_has_matrices_of_its_own(name: str, rank_pools: RankPools) -> None:
    row = {"cp": 1, "pp": 1, "family": "llama"} | OF_HEADS[name]
    cell = make_cell(row, optimizer="muon", per_head=True, steps=STEPS_OF_MANY)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


@pytest.mark.parametrize("name", wide_except(OF_HEADS, ["groups on two ranks"]))
def test_queries_keys_and_values_can_be_one_matrix(name: str, rank_pools: RankPools) -> None:
    row = {"cp": 1, "pp": 1, "family": "llama"} | OF_HEADS[name]
    cell = make_cell(row, optimizer="muon", fused_qkv=True, steps=STEPS_OF_MANY)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "muon"])
def test_clipping_acts_in_these_tests(optimizer: str) -> None:
    """Otherwise a missing clip would not be noticed."""
    (result,) = run(RankPools(), [Cell(steps=STEPS, optimizer=optimizer)])
    assert min(result.gradient_norms) > 0.5


@pytest.mark.bits
@pytest.mark.parametrize(
    ("tp", "dp", "optimizer", "dtype"),
    [
        pytest.param(1, 2, "adam", "float64", marks=pytest.mark.wide),
        (1, 3, "adam", "float64"),
        pytest.param(2, 2, "adam", "bfloat16", marks=pytest.mark.wide),
        pytest.param(1, 8, "adam", "float32", marks=pytest.mark.wide),
        pytest.param(2, 2, "muon", "float64", marks=pytest.mark.wide),
        pytest.param(2, 2, "lamb", "float64", marks=pytest.mark.wide),
        pytest.param(1, 3, "lars", "float32", marks=pytest.mark.wide),
    ],
)
def test_zero_and_overlap_change_no_bit(tp: int, dp: int, optimizer: str, dtype: str, rank_pools: RankPools) -> None:
    """Overlap splits the parameters into other buckets."""
    rest = {"tp": tp, "dp": dp, "sequence_parallel": tp > 1, "key_values": "mqa", "family": "llama"}
    ways = [(0, "none"), (0, "reduce"), (1, "none"), (1, "reduce"), (1, "reduce and gather")]
    training = {"steps": 2, "optimizer": optimizer, "clip_grad": 0.5, "dtype": dtype}
    first, *others = run(rank_pools, [make_cell(rest | {"zero": z, "overlap": o}, **training) for z, o in ways])
    for way, result in zip(ways[1:], others, strict=True):
        assert_same_bits(result, first, f"ZeRO and overlap {way} against {ways[0]}")


@pytest.mark.bits
@pytest.mark.parametrize(
    ("tp", "dp", "instances", "optimizer", "dtype"),
    [
        (1, 2, 1, "adam", "float64"),
        *(
            pytest.param(*case, marks=pytest.mark.wide)
            for case in ((2, 2, 1, "adam", "bfloat16"), (1, 3, 1, "adam", "float32"))
        ),
        pytest.param(1, 4, 2, "muon", "float64", marks=pytest.mark.wide),
        pytest.param(2, 4, 2, "muon", "float64", marks=pytest.mark.wide),
        pytest.param(1, 4, 2, "lars", "float64", marks=pytest.mark.wide),
    ],
)
def test_zero_2_and_3_give_the_same_bits(
    tp: int, dp: int, instances: int, optimizer: str, dtype: str, rank_pools: RankPools
) -> None:
    """They reduce every micro-batch over the ranks and then add the sums, overlapped or not."""
    rest = {"tp": tp, "dp": dp, "instances": instances, "sequence_parallel": tp > 1, "family": "llama", "tied": True}
    training = {"steps": 2, "optimizer": optimizer, "clip_grad": 0.5, "samples": 2 * dp, "dtype": dtype}
    overlaps = ("none", "reduce", "reduce and gather")
    cells = [make_cell(rest | {"zero": zero, "overlap": o}, **training) for zero in (2, 3) for o in overlaps]
    first, *others = run(rank_pools, cells)
    for cell, result in zip(cells[1:], others, strict=True):
        assert_same_bits(result, first, f"ZeRO {cell.zero} and overlap {cell.overlap}")


@pytest.mark.bits
def test_all_stages_give_the_same_bits_at_one_micro_batch(rank_pools: RankPools) -> None:
    """Then there is only one order of summation."""
    rest = {"tp": 2, "dp": 2, "sequence_parallel": True, "overlap": "reduce", "family": "gpt2"}
    training = {"steps": 2, "optimizer": "adam", "clip_grad": 0.5, "micro_batch_size": 2}
    first, *others = run(rank_pools, [make_cell(rest | {"zero": zero}, **training) for zero in range(4)])
    for stage, result in enumerate(others, start=1):
        assert_same_bits(result, first, f"ZeRO {stage} against ZeRO 0")


@pytest.mark.wide
@pytest.mark.bits
def test_a_network_without_experts_does_not_depend_on_their_view(rank_pools: RankPools) -> None:
    """The expert view only gives the ranks other names."""
    rest = {"tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True, "key_values": "mqa", "overlap": "reduce and gather"}
    views = [{"ep": ep, "etp": etp} for ep in (1, 2) for etp in (1, 2)]
    first, *others = run(
        rank_pools, [make_cell(rest | view, optimizer="muon", clip_grad=0.5, micro_batch_size=2) for view in views]
    )
    for view, result in zip(views[1:], others, strict=True):
        assert_same_bits(result, first, f"{view} against {views[0]}")


NARROW = {
    ("llama", "sgd"): [(False, None), (False, "bfloat16"), (True, None)],
    ("llama", "adam"): [(False, None), (True, "bfloat16")],
    ("gpt2", "adam"): [(True, "bfloat16")],
    ("llama", "muon"): [(False, None), (True, "bfloat16")],
    **{("llama", rule): [(False, None), (False, "bfloat16")] for rule in ("lars", "lion")},
}
"""Cases of family and optimizer, which are independent: True if optimizer state is narrow; dtype of gradients."""


@pytest.mark.wide
@pytest.mark.parametrize(("family", "optimizer"), NARROW)
def test_a_bf16_run_stays_near_fp32(family: str, optimizer: str, rank_pools: RankPools) -> None:
    """bf16 weights with masters in fp32 or fp16; 2 % is the tolerance for bf16's 8 bits and a loss of about 4."""
    layout = {"tp": 2, "dp": 2, "sequence_parallel": True, "zero": 1, "overlap": "reduce and gather"}
    wide = make_cell(layout | {"family": family, "dtype": "float32"}, optimizer=optimizer, steps=5)
    cells = [
        replace(wide, dtype="bfloat16", narrow=narrow, gradient_dtype=kind)
        for narrow, kind in NARROW[family, optimizer]
    ]
    expected, *results = run(rank_pools, [wide, *cells])
    for cell, result in zip(cells, results, strict=True):
        for step, (loss, actual) in enumerate(zip(expected.losses, result.losses, strict=True)):
            assert_number_close(actual, loss, f"[{cell}] loss of step {step}", relative=0.02)
    assert expected.losses[-1] < expected.losses[0]


@pytest.mark.bits
@pytest.mark.parametrize(
    ("tp", "pp", "dp"),
    [pytest.param(2, 1, 2, marks=pytest.mark.wide), (1, 2, 2), pytest.param(2, 2, 1, marks=pytest.mark.wide)],
)
def test_copies_are_rounded_alike_in_8_bits(tp: int, pp: int, dp: int, rank_pools: RankPools) -> None:
    """Replicas are those of a tied weight, and over tp: `run` compares their bits. A repeated run gives the same
    bits."""
    rest = {"tp": tp, "pp": pp, "dp": dp, "sequence_parallel": tp > 1, "key_values": "mqa", "family": "gpt2"}
    training = {"steps": 2, "optimizer": "adam", "dtype": "bfloat16", "eight_bits": True}
    cells = [make_cell(rest | {"zero": stage, "tied": True}, **training) for stage in (0, 1, 1)]
    whole, *sharded = run(rank_pools, cells)
    assert whole.losses == pytest.approx(sharded[0].losses, rel=0.02)
    assert_same_bits(sharded[1], sharded[0], "twice the same run")
