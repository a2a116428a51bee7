"""Arithmetic of boxes, which all resharding uses, against brute force."""

from __future__ import annotations

import itertools
import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.checkpoint.integrity import covers
from megalite.errors import CorruptCheckpointError
from megalite.parallel.sharding import Box, partition_range
from tests.harness.checkpoints import split

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


@settings(max_examples=40)
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


@settings(max_examples=40)
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


@settings(max_examples=40)
@given(st.data())
def test_covers_counts_each_element_of_the_target_once(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    target = data.draw(box_in(shape))
    boxes = data.draw(st.lists(box_in(shape), max_size=12))

    total = sum((mask(box, shape) for box in boxes), torch.zeros(shape, dtype=torch.int64))

    assert covers(boxes, target) == bool((total[target.slices()] == 1).all())


@settings(max_examples=40)
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


@settings(max_examples=40)
@given(st.data())
def test_cuts_within_cuts_cover_a_tensor_and_no_longer_when_one_box_is_moved(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    whole = Box.whole(shape)
    boxes = [whole]
    for _ in range(data.draw(st.integers(0, 20))):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        axis = data.draw(st.integers(0, len(shape) - 1))
        boxes += split(box, axis, data.draw(st.integers(0, box.size[axis])))
    boxes = data.draw(st.permutations(boxes))

    assert covers(boxes, whole)
    target = data.draw(box_in(shape))
    assert covers(boxes, target)
    one = data.draw(st.integers(0, len(boxes) - 1))
    moved = [*boxes[:one], data.draw(box_in(shape)), *boxes[one + 1 :]]
    total = sum((mask(box, shape) for box in moved), torch.zeros(shape, dtype=torch.int64))
    assert covers(moved, target) == bool((total[target.slices()] == 1).all())


WHEEL = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]


def test_boxes_around_a_box_cover_though_no_straight_line_parts_them() -> None:
    assert covers(WHEEL, Box((0, 0), (3, 3)))
    assert not covers([*WHEEL[:4], WHEEL[0]], Box((0, 0), (3, 3)))
    assert not covers([*WHEEL[:3], Box((1, 0), (1, 1)), Box((1, 1), (1, 2))], Box((0, 0), (3, 3)))


def test_boxes_with_the_right_sum_that_meet_do_not_cover() -> None:
    assert not covers([Box((0, 0), (2, 2)), Box((1, 1), (2, 2)), Box((2, 0), (1, 1))], Box((0, 0), (3, 3)))
    assert not covers([Box((), ()), Box((), ())], Box((), ()))
    assert covers([Box((), ())], Box((), ()))


def spiral(turns: int) -> list[Box]:
    """Return a row, a column of the rest, a row of the new rest, and so on."""
    boxes = []
    for start in range(turns):
        boxes += [Box((start, start), (1, turns - start)), Box((start + 1, start), (turns - start - 1, 1))]
    return boxes[:-1]


def wheels(count: int) -> list[Box]:
    """Return nested wheels of `count` boxes or more, each wheel in the middle of the one before."""
    boxes: list[Box] = []
    size = 2 * (count // 4) + 3
    for start in range(size // 2):
        long = size - 2 * start - 1
        boxes += [Box((start, start), (1, long)), Box((start, start + long), (long, 1))]
        boxes += [Box((start + long, start + 1), (1, long)), Box((start + 1, start), (long, 1))]
    return [*boxes, Box((size // 2, size // 2), (1, 1))]


def flat(columns: int, ranges: int) -> list[Box]:
    """Return columns of different widths, each split into ranges of its elements."""
    boxes = []
    for column in range(columns):
        start, length = partition_range(50 * columns - 1, columns, column)
        box = Box((0, start), (100, length))
        cuts = [partition_range(box.numel, ranges, number) for number in range(ranges)]
        boxes += [part for first, count in cuts for part, _ in box.flat_range(first, first + count)]
    return boxes


@pytest.mark.wide_except("grid", "flat")
@pytest.mark.parametrize(
    ("boxes", "shape"),
    [
        ([Box((0, column), (4, 1)) for column in range(20_000)], (4, 20_000)),
        ([Box((row, 0), (1, 4)) for row in range(20_000)], (20_000, 4)),
        ([Box((row, column), (1, 1)) for row in range(150) for column in range(150)], (150, 150)),
        (flat(16, 300), (100, 799)),
    ],
    ids=["columns", "rows", "grid", "flat"],
)
def test_many_boxes_are_told_at_once(boxes: list[Box], shape: tuple[int, ...]) -> None:
    started = time.process_time()
    assert covers(boxes, Box.whole(shape))
    assert not covers([*boxes[:-2], boxes[-1], boxes[-1]], Box.whole(shape))
    assert time.process_time() - started < 20


@pytest.mark.wide
@pytest.mark.parametrize("boxes", [spiral(8000), wheels(8000), wheels(33)])
def test_many_boxes_that_interlock_are_refused(boxes: list[Box]) -> None:
    side = max(box.offset[0] + box.size[0] for box in boxes)
    with pytest.raises(CorruptCheckpointError, match="interlock") as raised:
        covers(boxes, Box.whole((side, side)))
    assert len(str(raised.value)) < 200
