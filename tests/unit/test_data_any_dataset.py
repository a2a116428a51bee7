"""Samples of a dataset of the user's own: places, order, epochs, randomness, and what is refused."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import active_children
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from megalite.data.any_dataset import AnyDatasetLoader, Batch, SampleSource, _checksum, check
from megalite.data.sample_source import seed_generators
from megalite.errors import DataError
from megalite.training.unequal_shares import deal_of
from tests.harness.dealt import Dealt


class Numbered:
    """Samples that say which they are, in which epoch."""

    def __init__(self, length: int = 10) -> None:
        self.length, self.epoch = length, -1

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.epoch, index


class Augmented(Numbered):
    """Samples with random transforms by all three generators."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), float(torch.rand(()))], dtype=torch.float64)


class Stream(IterableDataset[Any]):
    """Stream of samples with random transforms; epoch e has `lengths[e]`, and then the last of these again."""

    def __init__(self, *lengths: int) -> None:
        self.lengths, self.epoch, self.passes = lengths, -1, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int, float]]:
        self.passes += 1
        for item in range(self.lengths[min(self.epoch, len(self.lengths) - 1)]):
            yield self.epoch, item, random.random()


class StreamWithLength(Stream):
    def __len__(self) -> int:
        return 4


def as_list(rows: list[Any]) -> list[Any]:
    return rows


def doubled(rows: list[Any]) -> list[Any]:
    return [rows, rows]


def source(dataset: Any, **arguments: Any) -> SampleSource:
    return SampleSource.of(dataset, **({"seed": 7, "collate": as_list} | arguments))


def loader(samples: SampleSource, micro: int = 2, rank: int = 0, ranks: int = 1) -> Dealt:
    return Dealt(AnyDatasetLoader(samples, micro_batch_size=micro), rank, ranks)


def rows_of(batches: list[Batch]) -> dict[int, Any]:
    return {n: row for batch in batches for n, row in zip(batch.sample_ids, batch.values, strict=True)}


def read(samples: SampleSource, consumed: int = 0, count: int = 6) -> list[Any]:
    return list(rows_of(loader(samples, 1).micro_batches(consumed, count)).values())


# ---------------------------------------------------------------------------------------------------- places


@pytest.mark.parametrize("lengths", [(7,), (3, 8, 5)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_the_samples_in_order(lengths: tuple[int, ...], ranks: int) -> None:
    expected = read(source(Stream(*lengths)), count=24)
    found: dict[int, Any] = {}
    for rank in range(ranks):
        with loader(source(Stream(*lengths)), 2, rank, ranks) as batches:
            rows = rows_of(batches.micro_batches(0, 12 // ranks))
            assert not found.keys() & rows.keys()
            found |= rows
    assert [found[n] for n in range(24)] == expected


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_the_places_of_a_dataset_in_order(ranks: int, shuffle: bool) -> None:
    expected = read(source(Numbered(7), shuffle=shuffle), count=24)
    found: dict[int, Any] = {}
    for rank in range(ranks):
        rows = rows_of(loader(source(Numbered(7), shuffle=shuffle), 2, rank, ranks).micro_batches(0, 12 // ranks))
        assert not found.keys() & rows.keys()
        found |= rows
    assert [found[n] for n in range(24)] == expected


SOURCES: dict[str, Callable[[], SampleSource]] = {
    "in order": lambda: source(Numbered(7)),
    "shuffled": lambda: source(Numbered(7), shuffle=True),
    "stream": lambda: source(Stream(3, 8, 5)),
    "length": lambda: source(StreamWithLength(4)),
}
EXPECTED = {name: read(make(), 0, 60) for name, make in SOURCES.items()}


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(list(SOURCES)),
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_a_run_goes_on_anywhere(name: str, places: list[int], micro: int, ranks: int, rank: int) -> None:
    """The first place is a resume, the others are jumps of a loader that has read elsewhere."""
    with loader(SOURCES[name](), micro, rank % ranks, ranks) as batches:
        for consumed in places:
            rows = rows_of(batches.micro_batches(consumed, 2))
            assert len(rows) == 2 * micro
            assert all(EXPECTED[name][n] == row for n, row in rows.items())


@pytest.mark.parametrize("name", list(SOURCES))
@pytest.mark.parametrize("workers", [0, 1])
def test_unequal_shares_are_dealt_once_and_in_order(name: str, workers: int) -> None:
    """Ranks have 1, 4 and 2 micro-batches of a step, then 3, 3 and 1, then the first shares, from a sample on."""
    found: dict[int, Any] = {}
    for rank in range(3):
        samples = SOURCES[name]()
        with AnyDatasetLoader(replace(samples, num_workers=workers), micro_batch_size=2) as batches:
            consumed = 6
            for counts in ((1, 4, 2), (3, 3, 1), (1, 4, 2)):
                rows = rows_of(batches.micro_batches(consumed, deal_of(counts, rank, counts[rank])))
                assert len(rows) == 2 * counts[rank]
                assert not found.keys() & rows.keys()
                found |= rows
                consumed += 14
    assert [found[n] for n in range(6, 48)] == [EXPECTED[name][n] for n in range(6, 48)]


def test_another_batch_goes_on_at_the_next_sample() -> None:
    with loader(source(Stream(5))) as two, loader(source(Stream(5)), 3) as three:
        rows = rows_of(two.micro_batches(0, 1) + two.micro_batches(2, 3) + three.micro_batches(8, 2))
    assert list(rows.values()) == read(source(Stream(5)), 0, 14)


def test_values_are_what_collate_returns() -> None:
    with loader(source(Augmented(), collate=None)) as batches:
        assert batches.micro_batches(0, 1)[0].values.shape == (2, 4)
    with loader(source(Numbered(), collate=doubled)) as batches:
        assert batches.micro_batches(4, 1) == [Batch([[(0, 4), (0, 5)]] * 2, range(4, 6))]


# ---------------------------------------------------------------------------------------------------- epochs


def test_epochs_are_permutations_that_differ() -> None:
    samples = source(Numbered(50), shuffle=True)
    rows = read(samples, 0, 150)
    orders = [[index for epoch, index in rows if epoch == each] for each in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert [epoch for epoch, _ in rows] == [samples.epoch_of(n) for n in range(150)] == [0] * 50 + [1] * 50 + [2] * 50
    assert read(source(Numbered(50), shuffle=True, seed=8), 0, 50) != rows[:50]


def test_the_order_stays_that_of_saved_runs() -> None:
    assert [index for _, index in read(source(Numbered(8), shuffle=True), 0, 8)] == [6, 4, 3, 0, 7, 5, 1, 2]


def test_a_stream_is_read_again_as_the_next_epoch() -> None:
    samples = source(Stream(3, 2))
    assert samples.length is None
    assert [row[:2] for row in read(samples, 0, 7)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [samples.epoch_of(n) for n in range(6)] == [0, 0, 0, 1, 1, 2]


def test_all_ranks_know_the_epoch_at_the_end_of_a_step() -> None:
    samples = source(Stream(3))
    with loader(samples, 2, 0, 2) as first:
        first.micro_batches(0, 1)
    assert samples.epoch_of(3) == 1


# ---------------------------------------------------------------------------------------------------- randomness


def test_transforms_depend_on_the_sample_alone() -> None:
    expected = [row.tolist() for row in read(source(Augmented(4)), 0, 24)]
    assert len({row[k] for row in expected for k in (1, 2, 3)}) == 72
    for rank in range(2):
        with loader(source(Augmented(4)), 3, rank, 2) as batches:
            for n, row in rows_of(batches.micro_batches(6, 3)).items():
                assert row.tolist() == expected[n]


def test_randomness_of_set_epoch_depends_on_the_epoch_alone() -> None:
    class Redrawn(Numbered):
        def set_epoch(self, epoch: int) -> None:
            self.drawn = random.random()

        def __getitem__(self, index: int) -> Any:
            return self.drawn

    rows = read(source(Redrawn(4)), 0, 12)
    assert len(set(rows)) == 3
    assert read(source(Redrawn(4)), 6, 6) == rows[6:]


def test_the_generators_of_the_run_stay_as_they_are() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), float(torch.rand(()))

    for dataset in (Augmented(), Stream(5)):
        seed_generators(0, 1, 2)
        expected = draw()
        seed_generators(0, 1, 2)
        read(source(dataset))
        assert draw() == expected


@pytest.mark.parametrize("dataset", [Numbered, Stream])
def test_randomness_of_collate_depends_on_the_samples_alone(dataset: Callable[[int], Any]) -> None:
    def masked(rows: list[Any]) -> list[float]:
        return [random.random(), float(torch.rand(()))]

    def drawn(consumed: int, count: int, rank: int = 0, ranks: int = 1) -> list[Any]:
        with loader(source(dataset(5), collate=masked), 2, rank, ranks) as batches:
            return [batch.values for batch in batches.micro_batches(consumed, count)]

    expected = drawn(0, 4)
    assert drawn(4, 2) == expected[2:]
    assert drawn(0, 2, 0, 2) == expected[::2]
    assert drawn(0, 2, 1, 2) == expected[1::2]


# ---------------------------------------------------------------------------------------------------- workers


def test_worker_processes_read_the_same() -> None:
    """Read ahead, jump, outlive stop signals for the whole job, name errors, and end at close."""
    before = set(active_children())
    with loader(source(Augmented(9), shuffle=True, num_workers=2)) as batches:
        torch.manual_seed(3)
        expected = torch.rand(2)
        torch.manual_seed(3)
        for consumed in (0, 6, 12, 3):
            direct = loader(source(Augmented(9), shuffle=True)).micro_batches(consumed, 3)
            rows = rows_of(batches.micro_batches(consumed, 3))
            assert {n: row.tolist() for n, row in rows.items()} == {n: r.tolist() for n, r in rows_of(direct).items()}
            for worker in set(active_children()) - before:
                os.kill(worker.pid or 0, signal.SIGTERM)
        assert torch.equal(torch.rand(2), expected)
    assert set(active_children()) == before


class Broken(Stream):
    def __iter__(self) -> Iterator[Any]:
        for row in super().__iter__():
            if self.epoch == 1 and row[1] == 2:
                raise ValueError("no such picture")
            yield row


def test_a_worker_process_reads_a_stream_and_names_its_errors() -> None:
    samples = source(Broken(5), num_workers=3)
    with loader(samples) as batches:
        rows = rows_of(batches.micro_batches(0, 3))
        assert list(rows.values()) == read(source(Broken(5)), 0, 6)
        assert samples.epoch_of(5) == 1
        for _ in range(2):
            with pytest.raises(DataError) as caught:
                batches.micro_batches(6, 1)
            message = "reading sample 7 (index 2 of epoch 1) of the dataset failed: ValueError: no such picture"
            assert str(caught.value) == message
            assert "in __iter__" in caught.value.__notes__[0]
        assert list(rows_of(batches.micro_batches(2, 2)).values()) == list(rows.values())[2:]


# ---------------------------------------------------------------------------------------------------- DataLoader


def test_a_dataloader_says_how_its_dataset_is_read() -> None:
    given = DataLoader(Numbered(), batch_size=3, shuffle=True, collate_fn=doubled, drop_last=True, num_workers=2)
    samples = SampleSource.of(given, seed=7)
    assert (samples.dataset, samples.collate, samples.batch_size) == (given.dataset, doubled, 3)
    assert (samples.shuffle, samples.num_workers, samples.length, samples.notes) == (True, 2, 10, ())
    assert not SampleSource.of(DataLoader(Numbered()), seed=7).shuffle
    assert SampleSource.of(DataLoader(Stream(3), batch_size=4), seed=7).batch_size == 4
    changed = SampleSource.of(given, seed=7, shuffle=False, collate=as_list, num_workers=0)
    assert read(changed, 0, 3) == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampler": DistributedSampler(Numbered(), 2, 0)}, "DistributedSampler.*leave it out.*shuffle=True"),
        ({"sampler": WeightedRandomSampler([1.0] * 10, 10)}, "WeightedRandomSampler.*leave it out"),
        ({"sampler": RandomSampler(Numbered(), replacement=True)}, "RandomSampler.*leave it out"),
        ({"sampler": RandomSampler(Numbered(), num_samples=5)}, "RandomSampler.*leave it out"),
        ({"sampler": SequentialSampler(range(5))}, "SequentialSampler.*Subset"),
        ({"batch_sampler": BatchSampler(SequentialSampler(Numbered()), 2, False)}, "batch_sampler of its own"),
        ({"batch_size": None}, "batch_size=None: give it a batch_size"),
    ],
)
@pytest.mark.parametrize("shuffle", [None, True])
def test_other_samplers_are_refused(arguments: dict[str, Any], message: str, shuffle: bool | None) -> None:
    with pytest.raises(DataError, match=message):
        source(DataLoader(Numbered(), **arguments), shuffle=shuffle)


# ---------------------------------------------------------------------------------------------------- resuming


def test_a_resumed_stream_replays_its_epoch_alone() -> None:
    first = source(Stream(3, 8, 5))
    assert "cannot seek" in first.notes[0]
    assert "replays" in first.notes[0]
    with loader(first) as batches:
        batches.micro_batches(0, 7)
        remembered = json.loads(json.dumps(batches.remember(14)))
    again = source(Stream(3, 8, 5))
    assert check(again, remembered) == ()
    assert again.epoch_of(14) == 2
    assert read(again, 14, 3) == read(source(Stream(3, 8, 5)), 0, 17)[14:]
    assert again.dataset.passes == 2  # epochs 2 and 3


def remembered_after(samples: SampleSource, consumed: int) -> dict[str, Any]:
    with loader(samples) as batches:
        for step in range(0, consumed, 2):
            batches.micro_batches(step, 1)
        return dict(json.loads(json.dumps(batches.remember(consumed))))


def test_the_same_dataset_is_known_again() -> None:
    remembered = remembered_after(source(Augmented(10), shuffle=True), 60)
    assert 4 <= len(remembered["checksums"]) <= 8
    assert remembered["checksums"][0][0] == 0
    assert check(source(Augmented(10), shuffle=True), remembered) == ()
    assert check(source(Augmented(10)), {}) == ()  # saved by a run without a dataset


@pytest.mark.parametrize("changed", [{"seed": 8}, {"shuffle": False}])
def test_other_samples_are_noted(changed: dict[str, Any]) -> None:
    remembered = remembered_after(source(Augmented(10), shuffle=True), 8)
    (note,) = check(source(Augmented(10), **({"shuffle": True} | changed)), remembered)
    assert "is another now" in note


@pytest.mark.parametrize(
    ("now", "message"),
    [(Numbered(900), "had 1,000 samples when the run was saved and has 900 samples now"), (Stream(3), "has no length")],
)
def test_another_length_is_refused(now: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"{message}.*Give the dataset of the saved run"):
        check(source(now), remembered_after(source(Numbered(1000)), 4))


def test_checksums_see_every_part_of_a_sample() -> None:
    @dataclass
    class Sample:
        picture: Any
        label: Any

    def sample(picture: Any = 1, label: Any = "a", last: Any = None) -> dict[str, Any]:
        return {"x": Sample(torch.tensor(picture, dtype=torch.bfloat16), np.array([label])), "y": (last, 3)}

    assert _checksum(sample()) == _checksum(sample())
    others = [sample(2), sample(label="b"), sample(last=1), {"z": 1}, [np.array([object()])], torch.eye(2).to_sparse()]
    assert len({_checksum(other) for other in [sample(), *others]}) == 7


# ---------------------------------------------------------------------------------------------------- bad input


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "arguments", "message"),
    [
        (Stream(3), {"shuffle": True}, "shuffle=True needs a dataset with __getitem__"),
        (iter([1, 2]), {}, "list_iterator.*only once"),
        (NoLength(), {}, "NoLength.*length is unknown.*add __len__"),
        (5, {}, "int is not a dataset"),
        ([], {}, "empty"),
    ],
)
def test_what_is_no_dataset_is_refused(dataset: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        source(dataset, **arguments)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Stream(0), "epoch 0 has no samples"),
        (Stream(3, 0), "epoch 1 has no samples"),
        (StreamWithLength(3), "__len__ of the dataset is 4, but epoch 0 has 3"),
        (StreamWithLength(5), "__len__ of the dataset is 4, but epoch 0 has more"),
    ],
)
def test_a_wrong_length_is_found_while_reading(dataset: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(source(dataset))


def test_a_length_that_changes_between_epochs_is_refused() -> None:
    class Growing(Numbered):
        def set_epoch(self, epoch: int) -> None:
            self.length += epoch

    with pytest.raises(DataError, match=r"had 10 samples at the start and has 11 in epoch 1"):
        read(source(Growing()), 0, 12)


def test_a_stream_that_is_not_the_same_again_is_refused() -> None:
    samples = source(Stream(3))
    read(samples, 0, 7)
    samples.dataset.lengths = (2,)
    with pytest.raises(DataError, match=r"epoch 1 of the dataset began at sample 3 and now begins at 2"):
        read(samples, 0, 7)


def test_errors_name_the_sample() -> None:
    class Damaged(Numbered):
        def __getitem__(self, index: int) -> Any:
            raise ValueError("no such picture")

    with pytest.raises(DataError, match=r"sample 17 \(index 7 of epoch 1\).*failed: ValueError: no such") as caught:
        read(source(Damaged()), 17, 1)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(DataError, match=r"collate failed for samples 4 to 5: TypeError.*give a collate function"):
        loader(source([None] * 9, collate=None)).micro_batches(4, 1)


def test_errors_of_set_epoch_are_named() -> None:
    class Unready(Numbered):
        def set_epoch(self, epoch: int) -> None:
            raise OSError("no list for the epoch")

    with pytest.raises(DataError, match=r"set_epoch\(1\) of the dataset failed: OSError: no list"):
        read(source(Unready()), 10, 1)
