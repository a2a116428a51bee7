"""The record of a parameter's place: shares, placements, key-value runs, boxes and matrix views."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.model.attention import key_value_runs
from megalite.parallel.context import ParallelContext
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.placement import replicated, split, stacked
from megalite.parallel.sharding import Box, LogicalTensor, Normal, Sharding, partition_range

sizes = st.integers(1, 12)


def logical(shape: tuple[int, ...], matrices: str | None = None) -> LogicalTensor:
    return LogicalTensor("tensor", shape, Normal(1.0), True, matrices)


@given(total=st.integers(0, 100), parts=sizes)
def test_shares_deal_everything_in_order(total: int, parts: int) -> None:
    shares = [partition_range(total, parts, index) for index in range(parts)]
    assert [element for start, count in shares for element in range(start, start + count)] == list(range(total))
    run = -(-total // parts)
    counts = [count for _, count in shares]
    assert counts == sorted(counts, reverse=True)
    assert sum(0 < count < run for count in counts) <= 1  # the last run alone is short


@given(ranks=st.sampled_from([1, 2, 4]), shape=st.tuples(sizes, sizes, sizes), dimension=st.integers(0, 2))
def test_split_boxes_tile_the_tensor_and_its_local_matrices(
    ranks: int, shape: tuple[int, int, int], dimension: int
) -> None:
    shape = (*shape[:dimension], shape[dimension] * ranks, *shape[dimension + 1 :])
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for columns in (1, 2) if dimension < 2 else (1, 2, 3):
        seen = torch.zeros(shape, dtype=torch.int)
        for rank in range(ranks):
            mesh = ParallelMesh(rank=rank, world_size=ranks, tensor_parallel_size=ranks)
            sharding = split(mesh, logical(shape), {dimension: ("tp",)}, columns=columns)
            (piece,) = sharding.pieces
            local = torch.zeros(sharding.local_shape, dtype=whole.dtype)
            piece.view(local).copy_(whole[piece.box.slices()])
            assert torch.equal(local.flatten(), whole.chunk(ranks, dimension)[rank].flatten())
            assert piece.splits == ((dimension, "tp"),)
            assert (sharding.replica_ranks, sharding.partial_group) == ((rank,), ())
            seen[piece.box.slices()] += 1
        assert (seen == 1).all()


@given(ranks=st.sampled_from([1, 2, 4]), length=st.integers(1, 20), local=st.integers(1, 20))
def test_a_padded_split_holds_the_true_rows_first(ranks: int, length: int, local: int) -> None:
    local = max(local, -(-length // ranks))
    rows = []
    for rank in range(ranks):
        mesh = ParallelMesh(rank=rank, world_size=ranks, tensor_parallel_size=ranks)
        sharding = split(mesh, logical((length, 3)), {0: ("tp",)}, padded=local * ranks)
        (piece,) = sharding.pieces
        assert sharding.local_shape == (local, 3)
        assert piece.view(torch.zeros(sharding.local_shape)).shape == piece.box.size == (piece.rows, 3)
        rows += range(piece.box.offset[0], piece.box.offset[0] + piece.rows)
    assert rows == list(range(length))


@given(
    ep=st.sampled_from([1, 2, 3]),
    etp=st.sampled_from([1, 2]),
    edp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    experts=st.integers(1, 3),
    width=st.integers(1, 3),
    splits=st.sampled_from([{0: ("ep",), 1: ("etp",)}, {0: ("ep", "etp")}, {0: ("ep",)}, {2: ("etp",), 0: ("ep",)}]),
)
def test_a_split_over_axes_of_the_expert_view_tiles_the_tensor(
    ep: int, etp: int, edp: int, pp: int, experts: int, width: int, splits: dict[int, tuple[str, ...]]
) -> None:
    shape = (experts * ep * etp, width * etp, 2 * etp)
    tensor, world_size = logical(shape), ep * etp * edp * pp
    held = torch.zeros(world_size, *shape, dtype=torch.int)
    copies = {}
    for rank in range(world_size):
        mesh = ParallelMesh(
            rank=rank,
            world_size=world_size,
            pipeline_parallel_size=pp,
            expert_parallel_size=ep,
            expert_tensor_parallel_size=etp,
        )
        sharding = split(mesh, tensor, splits, columns=1)
        (piece,) = sharding.pieces
        assert sharding.expert
        assert piece.view(torch.zeros(sharding.local_shape)).shape == piece.box.size
        assert piece.splits == tuple((dimension, axis) for dimension, axes in splits.items() for axis in axes)
        held[rank][piece.box.slices()] += 1
        copies[rank] = sharding.replica_ranks
    both = {"ep", "etp"} <= {axis for axes in splits.values() for axis in axes}
    assert (held.sum(0) == edp * pp * (1 if both else etp)).all()
    for rank, those in copies.items():
        assert len(those) == (1 if both else etp)
        assert all(torch.equal(held[rank], held[other]) for other in those)


@pytest.mark.parametrize(
    "splits",
    [
        {0: ("ep", "tp")},
        {0: ("ep",), 1: ("tp",)},
        {0: ("tp",), 1: ("tp",)},
        {0: ("etp", "etp")},
        {0: ("dp",)},
        {0: ("cp",)},
        {0: ("edp",)},
        {0: ("pp",)},
    ],
    ids=str,
)
def test_axes_that_cannot_cut_a_weight_are_refused(splits: dict[int, tuple[str, ...]]) -> None:
    """Refuse axes of two views, repeated axes, and replicas: boxes would be missing, or gradients of others added."""
    with pytest.raises(ValueError, match=r"^tensor split over .*: give each axis once"):
        split(ParallelMesh(), logical((4, 4)), splits)


def test_a_dimension_that_does_not_divide_is_refused() -> None:
    mesh = ParallelMesh(world_size=4, tensor_parallel_size=4)
    with pytest.raises(ValueError, match=r"^dimension 1 of tensor, 6 long, cannot be divided among 4 ranks of tp"):
        split(mesh, logical((4, 6)), {1: ("tp",)})
    with pytest.raises(ValueError, match=r"^dimension 0 of tensor, 6 long, cannot be divided among 4 ranks of tp"):
        split(mesh, logical((6, 4)), {0: ("tp",)})
    assert split(mesh, logical((6, 4)), {0: ("tp",)}, padded=8).local_shape == (2, 4)


def test_replicated_has_a_partial_group_only_where_its_gradient_is_partial() -> None:
    mesh = ParallelMesh(rank=5, world_size=8, tensor_parallel_size=4)
    assert replicated(mesh, logical((6,)), grad_is_partial=False).partial_group == ()
    assert replicated(mesh, logical((6,)), grad_is_partial=True).partial_group == (4, 5, 6, 7)
    alone = ParallelMesh(rank=5, world_size=8, tensor_parallel_size=1)
    assert replicated(alone, logical((6,)), grad_is_partial=True).partial_group == ()


def test_stacked_pieces_stand_one_under_the_other() -> None:
    mesh = ParallelMesh()
    first, second = split(mesh, logical((2, 3, 4)), {0: ("tp",)}), split(mesh, logical((5, 4)), {0: ("tp",)})
    together = stacked([first, second])
    assert together.local_shape == (11, 4)
    local = torch.arange(44).view(11, 4)
    assert torch.equal(together.pieces[0].view(local), local[:6].view(2, 3, 4))
    assert torch.equal(together.pieces[1].view(local), local[6:])


@given(ranks=st.sampled_from([1, 2, 3, 4, 6, 8]), groups=st.integers(1, 12), ratio=st.integers(1, 6))
def test_key_value_runs_serve_every_head(ranks: int, groups: int, ratio: int) -> None:
    """Check any numbers of groups and ranks: a rank has the groups of its heads, and knows who shares a group."""
    heads = groups * ratio * ranks
    per_group, per_rank = heads // groups, heads // ranks
    sharers_of: dict[int, set[tuple[int, ...]]] = {}
    for rank in range(ranks):
        runs = key_value_runs(heads, groups, ranks, rank)
        held = [group for first, count, _ in runs for group in range(first, first + count)]
        needed = sorted({head // per_group for head in range(rank * per_rank, (rank + 1) * per_rank)})
        assert held == needed
        for first, count, sharers in runs:
            assert rank in sharers
            for group in range(first, first + count):
                sharers_of.setdefault(group, set()).add(sharers)
    for group in range(groups):
        (sharers,) = sharers_of[group]  # the same in the eyes of all of them
        owners = {head // per_rank for head in range(group * per_group, (group + 1) * per_group)}
        assert set(sharers) == owners


boxes = st.tuples(*[st.tuples(st.integers(0, 6), st.integers(1, 6))] * 3).map(
    lambda pairs: Box(tuple(start for start, _ in pairs), tuple(length for _, length in pairs))
)


@pytest.mark.wide
@given(first=boxes, second=boxes)
def test_an_intersection_is_what_both_hold(first: Box, second: Box) -> None:
    masks = [torch.zeros(12, 12, 12, dtype=torch.bool) for _ in range(3)]
    masks[0][first.slices()] = True
    masks[1][second.slices()] = True
    common = first.intersection(second)
    if common is not None:
        masks[2][common.slices()] = True
        values = torch.arange(12**3).view(12, 12, 12)
        inside = values[first.slices()][common.relative_to(first).slices()]
        assert torch.equal(inside, values[common.slices()])
    assert torch.equal(masks[0] & masks[1], masks[2])


@given(outer=boxes, inner=boxes)
def test_runs_of_a_part_are_its_elements_in_order(outer: Box, inner: Box) -> None:
    part = outer.intersection(inner)
    if part is not None:
        values = torch.arange(12**3).view(12, 12, 12)
        flat = values[outer.slices()].flatten()
        runs = list(outer.runs_of(part))
        assert torch.equal(torch.cat([flat[start:stop] for start, stop in runs]), values[part.slices()].flatten())
        assert list(outer.runs_of(outer)) == [(0, outer.numel)]


def test_matrices_in_a_box() -> None:
    """Each with what the box has of it; dimensions of one matrix are not cut into numbers."""
    shape = (4, 2, 3, 5)
    tensor = logical(shape, "experts two ffn hidden -> (experts two) ffn hidden")
    values, box = torch.arange(120).view(shape), Box((1, 0, 1, 0), (2, 2, 2, 5))
    found = list(tensor.matrices_in(box))
    assert tensor.matrix_dimensions == (0, 1)
    assert [whole.offset for whole, _ in found] == [(1, 0, 0, 0), (1, 1, 0, 0), (2, 0, 0, 0), (2, 1, 0, 0)]
    for number, (whole, part) in enumerate(found, start=2):
        assert torch.equal(values[whole.slices()].flatten(), tensor.as_matrices(values)[number].flatten())
        assert part == whole.intersection(box)
    two = logical((3, 2, 4, 5), "groups two width hidden -> two (groups width) hidden")
    whole, _ = next(iter(two.matrices_in(Box((1, 0, 0, 0), (1, 2, 4, 5)))))
    assert (whole, two.matrix_dimensions) == (Box((0, 0, 0, 0), (3, 1, 4, 5)), (1,))
    one = logical((3, 4), "a b -> 1 a b")
    assert [whole for whole, _ in one.matrices_in(Box((1, 0), (1, 4)))] == [Box((0, 0), (3, 4))]
    with pytest.raises(ValueError, match="no matrix view"):
        logical((3,)).matrix_dimensions  # noqa: B018


def test_indices_of_a_box_in_its_matrices() -> None:
    """Each matrix of the box is the whole matrix at these rows and columns."""
    for shape, view in (
        ((4, 2, 3, 5), "experts two ffn hidden -> (experts two) ffn hidden"),
        ((4, 2, 3, 5), "groups two width hidden -> two (groups width) hidden"),
        ((4, 2, 3, 5), "hidden two heads width -> 1 (hidden two) (heads width)"),
    ):
        tensor, values, box = logical(shape, view), torch.arange(120).view(shape), Box((1, 0, 1, 0), (2, 2, 2, 4))
        matrices, rows, columns = tensor.matrix_indices(box)
        cut = tensor.as_matrices(values)[matrices][:, rows][:, :, columns]
        assert torch.equal(cut, tensor.as_matrices(values[box.slices()])), view


def test_matrix_views() -> None:
    key_value = logical((3, 2, 4, 5), "groups two width hidden -> two (groups width) hidden")
    values = torch.arange(120).view(3, 2, 4, 5)
    assert torch.equal(
        key_value.as_matrices(values), torch.stack([values[:, 0].reshape(12, 5), values[:, 1].reshape(12, 5)])
    )
    assert torch.equal(key_value.from_matrices(key_value.as_matrices(values), values.shape), values)
    one = values[:, 1:]
    assert torch.equal(key_value.from_matrices(key_value.as_matrices(one), one.shape), one)
    with pytest.raises(ValueError, match="tensor has no matrix view"):
        logical((3,)).as_matrices(torch.zeros(3))


def test_a_sharding_has_no_default() -> None:
    with pytest.raises(TypeError):
        Sharding()  # type: ignore[call-arg]


def test_one_rank_splits_no_sequence() -> None:
    with pytest.raises(ValueError, match="nothing to split along the sequence"):
        ParallelContext(ParallelMesh(), sequence_parallel=True)
