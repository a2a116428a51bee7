"""Samples that a rank loads, and the threads that load them."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.fields import FieldsDataset
from megalite.data.loader import MicroBatchLoader
from megalite.data.mock_dataset import MockDataset
from megalite.data.sampler import GlobalBatchSize, equal_deal, sample_at
from megalite.errors import DataError
from megalite.training.ledger import ranges
from tests.harness.dealt import Dealt


@settings(deadline=None)
@given(st.integers(0, 10**12), st.integers(1, 5), st.integers(1, 5), st.integers(1, 6))
def test_ranks_and_micro_batches_take_every_sample_once(consumed: int, micro: int, ranks: int, count: int) -> None:
    of_ranks = [equal_deal(rank, ranks, count * ranks).samples(consumed, micro) for rank in range(ranks)]
    taken = [sample for turn in zip(*of_ranks, strict=True) for samples in turn for sample in samples]
    assert taken == list(range(consumed, consumed + micro * ranks * count))


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_a_step_has_the_same_samples_on_any_ranks(micro: int, ranks: int, count: int, other_micro: int) -> None:
    batch = micro * ranks * count * other_micro
    parts = equal_deal(0, 1, batch // other_micro).samples(7, other_micro)
    other = [sample for samples in parts for sample in samples]
    assert other == list(range(7, 7 + batch))


def test_samples_are_megatrons() -> None:
    """16 samples, 4 consumed, micro-batches of 2 on 2 ranks, as Megatron-LM's sampler gives them."""
    ranks = [[list(samples) for samples in equal_deal(rank, 2, 6).samples(4, 2)] for rank in range(2)]
    assert ranks == [[[4, 5], [8, 9], [12, 13]], [[6, 7], [10, 11], [14, 15]]]


@given(st.sets(st.integers(0, 60), max_size=20), st.integers(0, 30), st.integers(1, 3), st.integers(1, 3))
def test_samples_left_out_are_passed_over(left_out: set[int], consumed: int, micro: int, ranks: int) -> None:
    """The others are taken in order, each by one rank, and from the first one again where there are no more."""
    data = range(70)
    rest = [sample for sample in data if sample not in left_out]
    deals = [replace(equal_deal(rank, ranks, 2 * ranks), left_out=ranges(left_out)) for rank in range(ranks)]
    turns = zip(*(deal.samples(consumed, micro, data) for deal in deals), strict=True)
    taken = [sample for turn in turns for samples in turn for sample in samples]
    assert taken == [rest[place % len(rest)] for place in range(consumed, consumed + 2 * micro * ranks)]
    assert sample_at(consumed, ranges(left_out)) == [each for each in range(200) if each not in left_out][consumed]


def test_a_run_beyond_all_samples_is_refused_whatever_is_left_out() -> None:
    with MicroBatchLoader(FieldsDataset(mock(40), 49), micro_batch_size=2, vocab_size=50) as batches:
        for left_out in ((), [(4, 7)], [(0, 39)]):
            deal = replace(equal_deal(0, 1, 2), left_out=left_out)
            with pytest.raises(DataError, match="the dataset is for a shorter run"):
                batches.micro_batches(40, deal)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_left_out_are_not_read_ahead(num_workers: int) -> None:
    """They may be left out after they were read ahead. A loader of 40 samples without 8 begins again at 32."""
    dataset, deal = mock(40), equal_deal(0, 1, 2)
    fields = FieldsDataset(dataset, 49)
    with MicroBatchLoader(fields, micro_batch_size=2, vocab_size=50, num_workers=num_workers) as batches:
        batches.micro_batches(0, deal)
        without = replace(deal, left_out=[(4, 7), (20, 23)])
        for consumed, wanted in ((4, [8, 9, 10, 11]), (14, [18, 19, 24, 25]), (30, [38, 39, 0, 1])):
            loaded = batches.micro_batches(consumed, without)
            assert [sample for batch in loaded for sample in batch["sample_ids"]] == wanted
            rows = np.concatenate([batch["tokens"] for batch in loaded])
            assert np.array_equal(rows, np.stack([dataset[sample][:-1] for sample in wanted]))


def loader(
    dataset: Any, num_workers: int = 0, rank: int = 1, ranks: int = 2, replicas: int = 1, **arguments: Any
) -> Dealt:
    defaults: dict[str, Any] = {"micro_batch_size": 2, "vocab_size": 50}
    fields = FieldsDataset(dataset, 49, reset_attention_mask=True, eod_mask_loss=True)
    return Dealt(MicroBatchLoader(fields, num_workers=num_workers, **(defaults | arguments)), rank, ranks, replicas)


def mock(num_samples: int = 100) -> MockDataset:
    return MockDataset(50, 16, seed=1, num_samples=num_samples)


@pytest.mark.parametrize("num_workers", [0, 3])
def test_micro_batches_hold_the_samplers_samples(num_workers: int) -> None:
    dataset = mock()
    with loader(dataset, num_workers) as batches:
        for consumed in (0, 12, 24, 12, 60):  # on, on, back, elsewhere
            loaded = batches.micro_batches(consumed, 3)
            assert [batch["sample_ids"][0] for batch in loaded] == [consumed + 2, consumed + 6, consumed + 10]
            for batch in loaded:
                rows = [dataset[sample] for sample in batch["sample_ids"]]
                assert np.array_equal(batch["tokens"], np.stack(rows)[:, :-1])
                assert np.array_equal(batch["labels"], np.stack(rows)[:, 1:])
                assert np.array_equal(batch["loss_mask"], batch["tokens"] != 49)
                assert batch["document_ids"] is not None
                assert {array.shape for array in batch.values() if isinstance(array, np.ndarray)} == {(2, 16)}


def test_replicas_read_every_sample_of_a_step_once() -> None:
    whole = loader(mock(), micro_batch_size=8, rank=0, ranks=1).micro_batches(0, 1)
    parts = []
    for rank in range(2):
        of_rank = loader(mock(), micro_batch_size=2, rank=rank, ranks=2, replicas=2)
        parts += [each["tokens"] for each in of_rank.micro_batches(0, 2)]
    assert np.array_equal(np.concatenate(parts), whole[0]["tokens"])


def test_the_number_of_micro_batches_may_change() -> None:
    with loader(mock(), num_workers=2) as threaded, loader(mock()) as direct:
        for consumed, count in ((0, 1), (4, 3), (16, 2), (24, 5)):
            for a, b in zip(
                threaded.micro_batches(consumed, count), direct.micro_batches(consumed, count), strict=True
            ):
                assert a["sample_ids"] == b["sample_ids"]
                assert np.array_equal(a["tokens"], b["tokens"])


def test_the_next_step_is_read_ahead_and_nothing_beyond() -> None:
    read: list[int] = []
    arrived = threading.Event()

    class Recording(MockDataset):
        def __getitem__(self, sample: int) -> np.ndarray:
            read.append(sample)
            if len(read) == 4:
                arrived.set()
            return super().__getitem__(sample)

    with loader(Recording(50, 16, 1, 100), num_workers=1, rank=0, ranks=1) as batches:
        batches.micro_batches(0, 1)
        assert arrived.wait(10)
    assert read == [0, 1, 2, 3]


def test_threads_start_at_the_first_use_and_end_at_close() -> None:
    def threads() -> int:
        return sum(thread.name.startswith("loader") for thread in threading.enumerate())

    before = threads()
    batches = loader(mock(), num_workers=2)
    assert threads() == before
    batches.micro_batches(0, 2)
    assert threads() > before
    batches.close()
    batches.close()
    assert threads() == before


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_while_reading_arrives_when_its_step_is_asked_for(num_workers: int) -> None:
    class Broken(MockDataset):
        def __getitem__(self, sample: int) -> np.ndarray:
            if sample == 6:
                raise DataError("sample 6 is damaged")
            return super().__getitem__(sample)

    with loader(Broken(50, 16, 1, 100), num_workers) as batches:
        batches.micro_batches(0, 1)
        with pytest.raises(DataError, match="sample 6 is damaged"):
            batches.micro_batches(4, 1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_end_of_the_dataset_is_an_error_only_where_it_is_reached(num_workers: int) -> None:
    with loader(mock(num_samples=8), num_workers) as batches:
        batches.micro_batches(0, 2)
        with pytest.raises(DataError, match=r"reads samples 10 to 11.* has 8"):
            batches.micro_batches(8, 2)


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    with (
        loader(mock(), vocab_size=30) as batches,
        pytest.raises(DataError, match=r"vocabulary is 30.*another tokenizer"),
    ):
        batches.micro_batches(0, 3)


@pytest.mark.parametrize("place", [0, 2, 4], ids=["first input", "input and label", "last label"])
def test_the_vocabulary_ends_before_its_size(place: int) -> None:
    """Its last token is one, the size itself is none, and so is what is negative."""
    for token, refused in ((29, False), (30, True), (-1, True)):
        row = np.full(5, 3)
        row[place] = token
        data = FieldsDataset([row], 29)
        batches = Dealt(MicroBatchLoader(data, micro_batch_size=1, vocab_size=30, num_workers=0))
        with pytest.raises(DataError, match=f"{token}.*vocabulary is 30") if refused else nullcontext():
            batches.micro_batches(0, 1)


# ---------------------------------------------------------------------------------------------------- batch sizes


def test_the_ramp_is_megatrons() -> None:
    """Compare a ramp from 16 by 16 to 128, over 3000 samples, with Megatron-LM's calculator."""
    size = GlobalBatchSize(128, (16, 16, 3000))
    consumed = (0, 428, 429, 500, 1000, 1500, 2000, 2500, 3000, 3001, 10**9)
    assert [size.at(samples) for samples in consumed] == [16, 16, 32, 32, 48, 64, 80, 96, 128, 128, 128]
    assert GlobalBatchSize(128).at(0) == GlobalBatchSize(128, (128, 16, 3000)).at(0) == 128


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 12), st.integers(1, 300), st.integers(0, 500))
def test_steps_are_those_that_the_samples_allow(start: int, increment: int, count: int, over: int, total: int) -> None:
    size = GlobalBatchSize(start + count * increment, (start, increment, over))
    consumed, trail = 0, [0]
    while consumed + size.at(consumed) <= total:
        assert size.at(consumed) in size.sizes
        consumed += size.at(consumed)
        trail.append(consumed)
    for step, samples in enumerate(trail):
        assert size.steps(samples, total) == len(trail) - 1 - step


# ---------------------------------------------------------------------------------------------------- resuming


class Numbered:
    """Samples that say which they are."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, sample: int) -> np.ndarray:
        return np.full(5, sample)


def global_batch(consumed: int, size: int, micro: int, ranks: int, num_workers: int) -> list[int]:
    """The samples of a step in the order of micro-batches and ranks, from the loaders of all ranks."""
    arguments = {"micro_batch_size": micro, "ranks": ranks, "vocab_size": 10**6}
    of_ranks = []
    for rank in range(ranks):
        with loader(Numbered(), num_workers, rank=rank, **arguments) as batches:
            loaded = batches.micro_batches(consumed, size // (micro * ranks))
            assert all(list(batch["sample_ids"]) == batch["tokens"][:, 0].tolist() for batch in loaded)
            of_ranks.append([batch["tokens"][:, 0].tolist() for batch in loaded])
    return [sample for of_each in zip(*of_ranks, strict=True) for samples in of_each for sample in samples]


SPLITS = st.lists(
    st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]), st.integers(0, 2)), min_size=1, max_size=5
)
OVER = st.none() | st.integers(1, 100)


@settings(deadline=None, max_examples=25)
@given(SPLITS, OVER)
def test_any_split_may_go_on_and_the_global_batches_stay(splits: list[tuple[int, int, int]], over: int | None) -> None:
    check_splits(splits, over)


@pytest.mark.wide
@settings(deadline=None)
@given(SPLITS, OVER)
def test_many_splits_may_go_on_and_the_global_batches_stay(
    splits: list[tuple[int, int, int]], over: int | None
) -> None:
    check_splits(splits, over)


def check_splits(splits: list[tuple[int, int, int]], over: int | None) -> None:
    """Micro-batches, ranks and workers change between steps, as at a checkpoint, also while the batch grows."""
    size = GlobalBatchSize(72, None if over is None else (24, 24, over))
    consumed = 0
    for micro, ranks, num_workers in splits:
        batch = global_batch(consumed, size.at(consumed), micro, ranks, num_workers)
        assert batch == list(range(consumed, consumed + size.at(consumed)))
        consumed += len(batch)


def test_another_batch_size_goes_on_at_the_next_sample() -> None:
    assert global_batch(24, 12, 2, 3, 1) + global_batch(36, 8, 1, 4, 0) == list(range(24, 44))


def test_workers_load_the_same_in_the_same_order() -> None:
    loaded = []
    for num_workers in (0, 1, 4):
        with loader(mock(), num_workers) as batches:
            loaded.append([batches.micro_batches(consumed, 3) for consumed in (0, 12, 24, 36)])
    for other in loaded[1:]:
        for steps in zip(loaded[0], other, strict=True):
            for a, b in zip(*steps, strict=True):
                assert a["sample_ids"] == b["sample_ids"]
                assert np.array_equal(a["tokens"], b["tokens"])
