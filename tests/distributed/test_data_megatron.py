"""The samples are Megatron-LM's: comparison with megatron-core, for any lengths, splits, blends and epochs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st

from megalite.config import DataConfig
from megalite.data.blend import build_blend_index, normalize
from megalite.data.dataset_spec import read_dataset_specs
from megalite.data.datasets import Samples, build_token_datasets
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.sampler import GlobalBatchSize
from megalite.data.tokenizers.null import NullTokenizer
from megalite.errors import DataError
from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from tests.distributed import megatron_data
from tests.distributed.megatron_data import Case
from tests.harness.rank_pool import RankPools

# No shrinking: it would take minutes.
many = settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
few = settings(many, max_examples=8)
LENGTHS = st.lists(st.sampled_from([1, 2, 3, 7, 20, 50]), min_size=4, max_size=30)
WEIGHTS = st.sampled_from([1.0, 2.0, 0.3, 70.0, 1e-3])
FILES = 3


def write(lengths: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the prefixes of token files in a new folder: at an old path, Megatron-LM would find the indices of other
    data."""
    folder = tmp_path_factory.mktemp("data")
    for number, documents in enumerate(lengths):
        with IndexedDatasetWriter(folder / str(number), np.uint16) as writer:
            writer.add_documents(
                (number * 333 + np.arange(sum(documents))) % 999, np.array(documents), np.ones_like(documents)
            )
            writer.finish()
    return [str(folder / str(number)) for number in range(len(lengths))]


@st.composite
def paths(draw: st.DrawFn, prefixes: list[str], weighted: bool) -> list[str]:
    chosen = draw(st.lists(st.sampled_from(prefixes), min_size=1, max_size=4))
    return [part for prefix in chosen for part in ([str(draw(WEIGHTS)), prefix] if weighted else [prefix])]


@st.composite
def cases(draw: st.DrawFn, prefixes: list[str], weighted: bool) -> Case:
    each = draw(st.booleans())
    one = paths(prefixes, weighted)
    return Case(
        path=[] if each else draw(one),
        split=draw(st.sampled_from(["969, 30, 1", "80,20", "50,25,25", "1", "1,0,1", "0.3,0.3"])),
        each=[draw(one), draw(st.just([]) | one), draw(st.just([]) | one)] if each else [],
        sizes=[draw(st.integers(1, 150)), draw(st.integers(1, 30)), draw(st.integers(1, 10))],
        sequence_length=draw(st.integers(2, 40)),
        seed=draw(st.integers(0, 10**6)),
        surplus=draw(st.sampled_from([0.005, 0.0, 0.1])),
    )


def ours(case: Case) -> Any:
    each = dict(zip(("train_data_path", "valid_data_path", "test_data_path"), case.each, strict=False))
    data = DataConfig(
        seq_length=case.sequence_length,
        data_path=case.path,
        split=case.split,
        mid_level_dataset_surplus=case.surplus,
        **each,
    )
    for part in filter(None, read_dataset_specs(data)):  # Megatron-LM never ends if a part has no tokens
        for prefix in part.prefixes:
            lengths = IndexedDataset(prefix).sequence_lengths
            within = part.sequences(len(lengths))
            if lengths[within.start : within.stop].sum() < 2:
                reject()
    samples = Samples(*(size or 0 for size in case.sizes), evaluation=1)
    return build_token_datasets(data, samples, case.seed, NullTokenizer(999))


def assert_same(found: Any, expected: np.ndarray | None, size: int | None) -> None:
    assert (found is None) == (expected is None)
    if expected is None:
        return
    count = len(expected) if size is None else size
    assert len(found) >= count
    assert len(expected) >= count
    for sample in range(count):
        assert np.array_equal(found[sample], expected[sample])


@pytest.mark.wide
@few
@given(lengths=st.lists(LENGTHS, min_size=FILES, max_size=FILES), data=st.data())
def test_samples_with_weights(
    lengths: list[list[int]], data: st.DataObject, rank_pools: RankPools, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_samples_with_weights(lengths, data, rank_pools, tmp_path_factory)


@pytest.mark.wide
@many
@given(lengths=st.lists(LENGTHS, min_size=FILES, max_size=FILES), data=st.data())
def test_more_samples_with_weights(
    lengths: list[list[int]], data: st.DataObject, rank_pools: RankPools, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_samples_with_weights(lengths, data, rank_pools, tmp_path_factory)


def check_samples_with_weights(
    lengths: list[list[int]], data: st.DataObject, rank_pools: RankPools, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = data.draw(cases(write(lengths, tmp_path_factory), weighted=True))
    sets = ours(case)
    (expected,) = rank_pools(1).run(megatron_data.samples, case)
    if isinstance(expected, str):  # its blend is longer than the run needs, by up to one sample per dataset
        assert expected.startswith("IndexError: The ")
        return
    for found, theirs, size in zip(sets, expected, case.sizes, strict=False):
        assert_same(found, theirs, size)


@pytest.mark.wide
def test_weights_are_rounded_twice(rank_pools: RankPools, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Use weights with which a blend that normalizes them only once takes the other dataset in a tie."""
    a, b = write([[1, 1, 7, 20, 2, 20], [50, 1, 20, 3, 2]], tmp_path_factory)
    case = Case(["1.0", a, "0.3", b], "1", [], [60, 0, 0], 40, 372, 0.005)
    (expected,) = rank_pools(1).run(megatron_data.samples, case)
    assert normalize(normalize([1.0, 0.3])) != normalize([1.0, 0.3])
    assert_same(ours(case).train, expected[0], 60)


@few
@given(lengths=st.lists(LENGTHS, min_size=FILES, max_size=FILES), data=st.data())
def test_samples_of_prefixes_alone(
    lengths: list[list[int]], data: st.DataObject, rank_pools: RankPools, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Megatron-LM stops if it needs more samples than a dataset has; megalite continues with the others."""
    case = data.draw(cases(write(lengths, tmp_path_factory), weighted=False))
    try:
        sets = ours(case)
    except DataError as error:
        assert "samples of its prefixes once" in str(error)  # noqa: PT017
        return
    (expected,) = rank_pools(1).run(megatron_data.samples, case)
    if isinstance(expected, str):
        assert expected.startswith(("IndexError: The ", "AssertionError"))
        return
    for found, theirs, size in zip(sets, expected, case.sizes, strict=False):
        assert_same(found, theirs, None if size is None or theirs is None else min(size, len(theirs)))


@few
@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12), size=st.integers(0, 2000))
def test_blends_with_weights(weights: list[float], size: int, rank_pools: RankPools) -> None:
    shares = normalize(weights)
    (expected,) = rank_pools(1).run(megatron_data.blend_index, shares, size)
    for found, theirs in zip(build_blend_index(shares, size).values(), expected, strict=False):
        assert found.dtype == theirs.dtype
        assert np.array_equal(found, theirs)


@few
@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=12))
def test_blends_that_take_all(sizes: list[int], rank_pools: RankPools) -> None:
    (expected,) = rank_pools(1).run(megatron_data.exhaustive_blend_index, sizes)
    for found, theirs in zip(build_blend_index(normalize(sizes), sum(sizes), sizes).values(), expected, strict=False):
        assert found.dtype == theirs.dtype
        assert np.array_equal(found, theirs)


def test_long_blends_are_the_same(rank_pools: RankPools) -> None:
    weights = normalize([0.1, 0.25, 3.7, 1e-4, 2.0])
    size = 212_345  # many blocks, the last of them shorter
    (expected,) = rank_pools(1).run(megatron_data.blend_index, weights, size)
    found = build_blend_index(weights, size)
    assert np.array_equal(found["datasets"], expected[0])
    assert np.array_equal(found["samples"], expected[1])
    sizes = [int(weight * size) for weight in weights]
    (expected,) = rank_pools(1).run(megatron_data.exhaustive_blend_index, sizes)
    found = build_blend_index(normalize(sizes), sum(sizes), sizes)
    assert np.array_equal(found["datasets"], expected[0])
    assert np.array_equal(found["samples"], expected[1])
    assert found["counts"].tolist() == sizes


@many
@given(start=st.integers(1, 9), increment=st.integers(1, 9), count=st.integers(1, 9), over=st.integers(1, 2000))
def test_batch_sizes(start: int, increment: int, count: int, over: int, rank_pools: RankPools) -> None:
    ramp, final = (start, increment, over), start + count * increment
    (steps,) = rank_pools(1).run(megatron_data.batch_sizes, ramp, final, over + 3 * final)
    size = GlobalBatchSize(final, ramp)
    assert [size.at(consumed) for consumed, _ in steps] == [batch for _, batch in steps]


def test_the_recorded_release_is_the_one_installed() -> None:
    from importlib.metadata import version

    assert version("megatron-core") == "0.16.1"
