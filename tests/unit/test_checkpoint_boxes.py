"""The arithmetic of boxes that every reshard stands on, against brute force."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.checkpoint.manifest import covers
from megalite.parallel.sharding import Box

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def box_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    starts = [draw(st.integers(0, length - 1)) for length in shape]
    sizes = [draw(st.integers(1, length - start)) for start, length in zip(starts, shape, strict=True)]
    return Box(tuple(starts), tuple(sizes))


def mask(box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    filled = torch.zeros(shape, dtype=torch.int64)
    filled[box.slices()] = 1
    return filled


@given(st.data())
def test_a_flat_range_is_cut_into_few_boxes_that_hold_exactly_its_elements(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    box = data.draw(box_in(shape))
    stop = data.draw(st.integers(0, box.numel))
    start = data.draw(st.integers(0, stop))
    whole = torch.arange(math.prod(shape)).view(shape)
    flat = whole[box.slices()].flatten()

    parts = box.flat_range(start, stop)

    assert len(parts) <= 2 * len(shape) - 1
    assert [position for _, position in parts] == sorted(position for _, position in parts)
    for part, position in parts:
        assert torch.equal(whole[part.slices()].flatten(), flat[position : position + part.numel])
    assert sum(part.numel for part, _ in parts) == stop - start
    assert not parts or parts[0][1] == start


@given(st.data())
def test_an_intersection_is_what_both_masks_share(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    a, b = data.draw(box_in(shape)), data.draw(box_in(shape))

    both = a.intersection(b)

    expected = mask(a, shape) * mask(b, shape)
    assert torch.equal(expected, mask(both, shape) if both is not None else torch.zeros_like(expected))
    if both is not None:
        whole = torch.arange(math.prod(shape)).view(shape)
        inside = whole[a.slices()][both.relative_to(a).slices()]
        assert torch.equal(inside, whole[both.slices()])


@given(st.data())
def test_covers_counts_each_element_of_the_target_once(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    target = data.draw(box_in(shape))
    boxes = data.draw(st.lists(box_in(shape), max_size=4))

    total = sum((mask(box, shape) for box in boxes), torch.zeros(shape, dtype=torch.int64))

    assert covers(boxes, target) == bool((total[target.slices()] == 1).all())


@given(st.data())
def test_the_parts_of_a_cut_tensor_cover_it_and_no_longer_when_one_is_lost_or_doubled(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    whole = Box((0,) * len(shape), shape)
    cuts = sorted(data.draw(st.sets(st.integers(1, whole.numel - 1), max_size=4))) if whole.numel > 1 else []
    edges = [0, *cuts, whole.numel]
    parts = [part for a, b in itertools.pairwise(edges) for part, _ in whole.flat_range(a, b)]
    one = data.draw(st.integers(0, len(parts) - 1))

    assert covers(data.draw(st.permutations(parts)), whole)
    assert not covers(parts[:one] + parts[one + 1 :], whole)
    assert not covers([*parts, parts[one]], whole)
