"""Initial weights: a pure function of (seed, name, index)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megalite.parallel import initialization
from megalite.parallel.initialization import initial_values, initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.placement import split
from megalite.parallel.sharding import Box, Constant, LogicalTensor, Normal
from tests.harness.close import assert_bits_equal
from tests.initial_weights import draw

SEED = 1234
TENSOR = LogicalTensor("tensor", (5, 3, 16384), Normal(0.02), True)  # blocks of 4 of its 15 rows
EDGES = LogicalTensor("edges", (9, 16384), Normal(1.0), True)  # blocks of 4 of its 9 rows


@pytest.fixture(scope="module")
def values() -> torch.Tensor:
    return initial_values(TENSOR, Box.whole(TENSOR.shape), SEED)


@given(
    bounds=st.tuples(
        *[st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in TENSOR.shape]
    )
)  # fmt: skip
def test_a_box_holds_what_the_whole_holds_there(bounds: tuple[list[int], ...], values: torch.Tensor) -> None:
    box = Box(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))
    assert torch.equal(initial_values(TENSOR, box, SEED), values[box.slices()])


def test_rows_on_both_sides_of_a_blocks_edge() -> None:
    values = initial_values(EDGES, Box.whole(EDGES.shape), SEED)
    for start, rows in ((3, 2), (4, 4), (0, 9), (8, 1)):
        box = Box((start, 7), (rows, 20))
        assert torch.equal(initial_values(EDGES, box, SEED), values[box.slices()])
    assert len({float(row[0]) for row in values}) == 9  # no block repeats another


@pytest.mark.parametrize("shape", [(9, 16384), (5, 3, 16384), (2, 70000), (3, 4097), (7,)], ids=str)
def test_values_are_those_of_the_documented_rule(shape: tuple[int, ...]) -> None:
    """Bit for bit, in one block and in several, the last of them short; the same in all versions."""
    tensor = LogicalTensor("layers.3.mlp.up", shape, Normal(0.02), True)
    assert_bits_equal(initial_values(tensor, Box.whole(tensor.shape), SEED), draw(tensor.name, shape, 0.02, SEED))


def test_only_the_blocks_that_are_needed_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    draw = initialization._standard_normal
    monkeypatch.setattr(initialization, "_standard_normal", lambda *key: drawn.append(key[1]) or draw(*key))
    initial_values(EDGES, Box((3, 0), (2, 5)), SEED)
    assert drawn == [0, 1]


def test_the_distribution_and_what_it_depends_on(values: torch.Tensor) -> None:
    assert values.dtype == torch.float32
    assert abs(values.mean().item()) < 0.02 * 5 / values.numel() ** 0.5
    assert abs(values.std().item() / 0.02 - 1) < 5 / values.numel() ** 0.5
    box = Box((0, 0, 0), (1, 1, 8))
    first = initial_values(TENSOR, box, SEED)
    assert torch.equal(initial_values(replace(TENSOR, initial=Normal(0.04)), box, SEED), 2 * first)
    assert not torch.equal(initial_values(TENSOR, box, SEED + 1), first)
    assert not torch.equal(initial_values(replace(TENSOR, name="other"), box, SEED), first)


def test_the_draw_leaves_the_generators_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    initial_values(EDGES, Box.whole(EDGES.shape), SEED)
    assert torch.equal(torch.get_rng_state(), before)


class Module(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        mesh = ParallelMesh(rank=rank, world_size=4, tensor_parallel_size=4)
        table = LogicalTensor("table", (5, 3), Normal(1.0), True)
        ones = LogicalTensor("ones", (8,), Constant(1.0), False)
        self.table = Parameter(split(mesh, table, {0: ("tp",)}, padded=16), torch.float64, mesh.device)
        self.ones = Parameter(split(mesh, ones, {0: ("tp",)}, columns=0), torch.float64, mesh.device)


def test_padding_starts_at_zero_and_constants_at_their_value() -> None:
    modules = [Module(rank) for rank in range(4)]
    for module in modules:
        with torch.no_grad():
            module.table.fill_(float("nan"))
        initialize(module, SEED)
        assert torch.equal(module.ones, torch.ones(2, dtype=torch.float64))
    rows = torch.cat([module.table for module in modules])
    assert rows[:5].all()
    assert not rows[5:].any()


def test_a_parameter_without_a_sharding_is_refused() -> None:
    with pytest.raises(TypeError, match="parameter weight was created without a Sharding"):
        initialize(nn.Linear(2, 2), SEED)
