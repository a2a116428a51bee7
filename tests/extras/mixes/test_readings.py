"""The order of a source: every token once in each pass, whatever the lengths of samples were and are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.extras.mixes import reading
from megalite.extras.mixes.apportionment import NO_LIMIT, Apportionment, offset_of
from megalite.extras.mixes.course import BlendOrder, Course, Cut, Part

LENGTHS = st.sampled_from((1, 2, 3, 5, 8, 13, 32))


def assert_each_once(parts: Sequence[Part], sizes: Sequence[int]) -> None:
    """Check that the parts of passes have all tokens of each but the last, and none twice, pass after pass."""
    numbers = [number for number, _, _ in parts]
    assert numbers == sorted(numbers)
    for number, of_pass in itertools.groupby(sorted(parts), key=lambda part: part[0]):
        bounds = [(begin, end) for _, begin, end in of_pass]
        assert all(begin < end for begin, end in bounds)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(bounds))
        if number < numbers[-1]:
            assert sum(end - begin for begin, end in bounds) == sizes[number]
        assert bounds[-1][1] <= sizes[number]


@settings(max_examples=400, deadline=None)
@given(
    st.integers(1, 300),
    st.lists(st.tuples(st.integers(0, 40), LENGTHS), min_size=1, max_size=5),
    st.integers(1, 60),
    st.integers(1, 40),
)
def test_a_pass_is_read_once_before_the_next(
    tokens: int, spans: list[tuple[int, int]], lane: int, most_lanes: int
) -> None:
    with mock.patch.multiple(reading, LANE=lane, MOST_LANES=most_lanes):
        cuts, at, found = list[Cut](), 0, list[Part]()
        for samples, length in spans:
            cuts.append(Cut(at, length))
            course = Course(tokens, tuple(cuts))
            for sample in range(samples):
                parts = course.parts(at + sample * length)
                assert sum(end - begin for _, begin, end in parts) == length
                found += parts
            at += samples * length
        # The past can be looked up, too, and is as it was.
        course, again, given = Course(tokens, tuple(cuts)), list[Part](), 0
        for samples, length in spans:
            for _ in range(samples):
                again += course.parts(given)
                given += length
    assert again == found
    assert_each_once(found, [tokens] * 10_000)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(2, 120),
    st.integers(1, 3),
    LENGTHS,
    st.data(),
    st.lists(st.tuples(st.integers(0, 30), LENGTHS), min_size=1, max_size=4),
)
def test_what_a_blend_has_left_comes_first(
    tokens: int, epochs: int, length: int, data: st.DataObject, spans: list[tuple[int, int]]
) -> None:
    """Samples of the blend's length keep its order; of another one, they have the tokens that it has not read."""
    total = tokens * epochs
    samples = (total - 1) // length
    order = np.random.RandomState(tokens).permutation(samples).astype(np.uint32)
    consumed = data.draw(st.integers(0, samples))
    blend = BlendOrder(order[consumed:], length, samples, total)
    found = [(0, int(sample) * length, (int(sample) + 1) * length) for sample in order[:consumed]]
    cuts, at = list[Cut](), 0
    for count, each in spans:
        cuts.append(Cut(at, each))
        course = Course(tokens, tuple(cuts), blend)
        found += [part for sample in range(count) for part in course.parts(at + sample * each)]
        at += count * each
    assert_each_once(found, [total, *[tokens] * 10_000])
    if spans[0][1] == length:
        same = min(spans[0][0], samples - consumed)
        begins = [begin for _, begin, _ in found[consumed : consumed + same]]
        assert begins == [int(sample) * length for sample in order[consumed : consumed + same]]


def test_neighbouring_samples_are_of_other_lanes() -> None:
    """Lanes of 2^20 tokens: samples that follow one another are far apart, and a lane goes on where it was."""
    course = Course(5 << 20, (Cut(0, 4096),))
    begins = [course.parts(sample * 4096)[0][1] for sample in range(10)]
    assert begins == [*(lane << 20 for lane in range(5)), *((lane << 20) + 4096 for lane in range(5))]


WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(WEIGHTS, st.data(), st.integers(1, 9000))
def test_shares_are_exact_at_every_sample(weights: list[float], data: st.DataObject, wanted: int) -> None:
    """Samples of a source are numbered without a gap, counts are those of a loop, and shares hold to a few samples."""
    limits = data.draw(
        st.lists(st.one_of(st.just(NO_LIMIT), st.integers(0, 3000)), min_size=len(weights), max_size=len(weights))
    )
    names = [f"source {number}" for number in range(len(weights))]
    found = Apportionment(names, weights, limits)
    counts, total = np.zeros(len(weights), np.int64), sum(weights)
    for sample in range(min(wanted, found.capacity)):
        source, number = found.at(sample)
        assert number == counts[source]
        counts[source] += 1
    samples = int(counts.sum())
    assert found.counts(samples).tolist() == counts.tolist()
    middle = samples // 2
    loop = np.bincount([found.at(sample)[0] for sample in range(middle)], minlength=len(weights))
    assert found.counts(middle).tolist() == loop.tolist()
    if all(limit == NO_LIMIT for limit in limits):
        shares = samples * np.array(weights) / total
        assert np.abs(counts - shares).max() <= 1 + len(weights)


def test_the_order_is_that_of_the_times() -> None:
    """The rule in plain words: samples in the order of (k + offset) / weight."""
    names, weights = ["web", "code", "math"], [5.0, 3.0, 2.0]
    found = Apportionment(names, weights, [NO_LIMIT, 40, NO_LIMIT])
    times = [
        ((number + offset_of(name)) / (weight / 10), source, number)
        for source, (name, weight) in enumerate(zip(names, weights, strict=True))
        for number in range(40 if name == "code" else 400)
    ]
    expected = [(source, number) for _, source, number in sorted(times)][:300]
    assert [found.at(sample) for sample in range(300)] == expected


def test_another_source_changes_no_offset() -> None:
    assert offset_of("web") == offset_of("web@0123abcd") != offset_of("code")
    assert 0 < offset_of("web") < 1


def test_far_samples_are_found_at_once() -> None:
    found = Apportionment([f"{n}" for n in range(5000)], [1 + n % 7 for n in range(5000)], [NO_LIMIT] * 5000)
    far = 10**12
    source, number = found.at(far)
    before, after = found.counts(far), found.counts(far + 1)
    assert int(before.sum()) == far
    assert number == before[source]
    assert (after - before).tolist() == [int(each == source) for each in range(5000)]
