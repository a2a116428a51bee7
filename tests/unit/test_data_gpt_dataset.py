"""Sample order: against Megatron-LM's own, recorded, and against a walk token by token."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config import DataConfig
from megalite.data.datasets import Samples, build_token_datasets
from megalite.data.fields import FieldsDataset
from megalite.data.gpt_dataset import (
    Epochs,
    GPTDataset,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)
from megalite.data.index_cache import IndexCache
from megalite.data.indexed_dataset import HEADER, MAGIC, IndexedDataset
from megalite.data.tokenizers.null import NullTokenizer
from megalite.errors import DataError
from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from tests.harness.token_files import add_document

CASES = json.loads((Path(__file__).parent / "megatron_samples.json").read_text())


def documents(count: int, shift: int) -> list[np.ndarray]:
    """Documents by formula, some of them empty, tokens in [0, 1000): what the recorded cases were made from."""
    lengths = [(i * 7919 + 13 * shift) % 61 for i in range(count)]
    starts = np.cumsum([0, *lengths])
    return [(np.arange(s, s + n, dtype=np.int64) ** 2 * 31 + shift * 7) % 1000 for s, n in zip(starts, lengths)]  # noqa: B905


def write(prefix: Path, texts: list[np.ndarray]) -> None:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for tokens in texts:
            add_document(writer, tokens)
        writer.finish()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['data_path']}-{case['split']}-{case['seed']}")
def test_samples_are_those_of_megatron(tmp_path: Path, case: dict[str, Any]) -> None:
    """Files, tokens, labels, loss masks, positions and attention masks, through splits, epochs and blends.

    `megatron_samples.json` was made by running the wheel megatron-core 0.16.1 over the same documents: its
    IndexedDatasetBuilder for the files, its BlendedMegatronDatasetBuilder with GPTDataset for the samples (all masks
    on, mid_level_dataset_surplus 0.005, end of document 999), and recording hashes of what it gave.
    """
    path = list(case["data_path"])
    places = range(len(path)) if len(path) == len(case["documents"]) else range(1, len(path), 2)
    for place, (number, count) in zip(places, enumerate(case["documents"]), strict=True):
        path[place] = str(tmp_path / str(number))
        write(Path(path[place]), documents(count, number))
        files = [sha256(Path(f"{path[place]}.{suffix}").read_bytes()) for suffix in ("bin", "idx")]
        assert files == case["files_sha256"][number]
    sets = build_token_datasets(
        DataConfig(seq_length=case["sequence_length"], data_path=tuple(path), split=case["split"]),
        Samples(*case["samples"]),
        case["seed"],
        NullTokenizer(999),
    )
    for dataset, expected, count in zip(sets[:3], case["splits"], case["samples"], strict=True):
        if expected is None:
            assert dataset is None
            continue
        assert dataset is not None
        assert dataset[0][:6].tolist() == expected["first_tokens"]
        tokens, masks = hashlib.sha256(), hashlib.sha256()
        for sample in range(count):
            fields = FieldsDataset(dataset, 999, True, True, True)[sample]
            tokens.update(fields["tokens"].tobytes() + fields["labels"].tobytes())
            ids, order = fields["document_ids"], np.arange(case["sequence_length"])
            assert ids is not None
            hidden = (ids[:, None] != ids[None]) | (order[:, None] < order[None])
            masks.update(fields["loss_mask"].tobytes() + fields["positions"].tobytes() + hidden[None].tobytes())
        assert tokens.hexdigest() == expected["tokens_sha256"]
        assert masks.hexdigest() == expected["masks_sha256"]


def walk(lengths: list[int], order: list[int], samples: int, sequence_length: int) -> list[list[tuple[int, int]]]:
    """The (document, offset) of every token of every sample, by walking token by token and stepping back one."""
    line = [(document, offset) for document in order for offset in range(lengths[document])]
    starts = [sample * sequence_length for sample in range(samples)]
    return [line[start : start + sequence_length + 1] for start in starts]


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) > 0),
    num_samples=st.none() | st.integers(0, 40),
    sequence_length=st.integers(1, 13),
    seed=st.integers(0, 2**32 - 1),
)
def test_samples_are_those_of_the_naive_walk(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    num_samples: int | None,
    sequence_length: int,
    seed: int,
) -> None:
    prefix = tmp_path_factory.mktemp("data") / "tokens"
    # The token says which document and which place it comes from.
    write(prefix, [document * 10 + np.arange(length) for document, length in enumerate(lengths)])
    kept = [(document, length) for document, length in enumerate(lengths) if length]
    dataset = GPTDataset(IndexedDataset(prefix), range(len(kept)), num_samples, sequence_length, seed, IndexCache())

    needed, total, count = (num_samples or 0) * sequence_length + 1, sum(lengths), 1
    while num_samples is not None and count * total < needed:
        count += 1
    assert dataset.epochs.count == count
    assert len(dataset) == (count * total - 1) // sequence_length >= (num_samples or 0)
    assert sorted(dataset.document_index) == sorted(list(range(len(kept))) * count)
    assert sorted(dataset.shuffle_index) == list(range(len(dataset)))

    order = [int(i) for i in dataset.document_index]
    expected = walk([length for _, length in kept], order, len(dataset), sequence_length)
    for sample in range(len(dataset)):
        tokens = [kept[document][0] * 10 + offset for document, offset in expected[int(dataset.shuffle_index[sample])]]
        assert dataset[sample].tolist() == tokens
        assert dataset[sample].dtype == np.int64
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_last_epoch_is_apart_when_little_of_it_is_needed() -> None:
    # 100 tokens an epoch, 10 a sample: 9 samples in one epoch, 19 in two.
    assert plan_epochs(100, 9, 10) == Epochs(1, 9, None)
    assert plan_epochs(100, 15, 10) == Epochs(2, 19, 9)
    assert plan_epochs(100, 16, 10) == Epochs(2, 19, None)  # 7 of 9 is not less than int(0.8 * 9)
    assert plan_epochs(100, None, 10) == Epochs(1, 9, None)
    assert plan_epochs(5, 3, 10) == Epochs(7, 3, None)


def test_epoch_apart_comes_after_the_others(tmp_path: Path) -> None:
    write(tmp_path / "tokens", [np.full(10, document) for document in range(10)])
    dataset = GPTDataset(IndexedDataset(tmp_path / "tokens"), range(10), 12, 10, 1, IndexCache())
    assert dataset.epochs.samples_before_last == 9
    assert sorted(dataset.document_index[:10]) == list(range(10))
    assert sorted(dataset.shuffle_index[:9]) == list(range(9))


def test_indices_beyond_32_bits() -> None:
    """More than 2**31 tokens in few documents: offsets need 64 bits only where a document is that long."""
    half = np.array([2**31 - 1, 2**31 - 1, 7], dtype=np.int64)
    samples = (int(half.sum()) - 1) // 2**20
    index = build_sample_index(half, samples, 2**20)
    assert index.dtype == np.int32
    flat = np.concatenate(([0], np.cumsum(half)))[index[:, 0]] + index[:, 1]
    assert np.array_equal(flat, np.arange(samples + 1) * 2**20)
    assert build_sample_index(np.array([2**31 + 5]), 4, 2**29).dtype == np.int64


@pytest.mark.parametrize("mmap", [True, False])
def test_files_beyond_2_to_the_31_tokens_and_bytes(tmp_path: Path, mmap: bool) -> None:
    """4.3 billion tokens in 8.6 GB, nearly all of them holes; what is read at marked places is what stands there."""
    lengths = np.array([2**31 - 1, 5, 2**31 - 1], np.int32)
    ends = np.cumsum(lengths, dtype=np.int64)
    marks = {int(place): 7 + number for number, place in enumerate([0, 2**30, *(ends - 1), 2**31 + 9, 2**32 - 99])}
    with (tmp_path / "tokens.bin").open("wb") as file:
        file.truncate(2 * int(ends[-1]))
        for place, mark in marks.items():
            file.seek(2 * place)
            file.write(np.uint16(mark).tobytes())
    with (tmp_path / "tokens.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, 3, 4) + lengths.tobytes())
        file.write((2 * (ends - lengths)).tobytes() + np.arange(4, dtype=np.int64).tobytes())

    indexed, length = IndexedDataset(tmp_path / "tokens", mmap), 2**18
    dataset = GPTDataset(indexed, range(3), None, length, 1, IndexCache())
    assert indexed.tokens > 2**32
    assert len(dataset) == (int(ends[-1]) - 1) // length
    starts = dict(
        zip(dataset.document_index.tolist(), np.cumsum([0, *lengths[dataset.document_index][:2]]), strict=True)
    )
    order = np.argsort(dataset.shuffle_index)
    for place, mark in marks.items():
        document = int(np.searchsorted(ends, place, side="right"))
        offset = place - int(ends[document] - lengths[document])
        sample, within = divmod(int(starts[document]) + offset, length)
        if mmap or lengths[document] < 2**31 - 1:  # without a map, a document is read entirely: seconds for 4.3 GB
            assert indexed.get(document)[offset] == mark
        if sample < len(dataset):  # what does not fill a sample is left out
            assert dataset[int(order[sample])][within] == mark


def test_shuffle_keeps_32_bits_while_they_suffice() -> None:
    assert build_shuffle_index(Epochs(1, 10, None), np.random.RandomState(0)).dtype == np.uint32


def test_no_tokens_is_an_error_and_not_an_endless_loop(tmp_path: Path) -> None:
    write(tmp_path / "tokens", [np.arange(3)])
    with pytest.raises(DataError, match="have no tokens: give this part a larger share in --split"):
        GPTDataset(IndexedDataset(tmp_path / "tokens"), range(1, 1), 5, 4, 0, IndexCache())


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("pointer", [10**6, -4, 2**62])
def test_a_pointer_outside_the_tokens_is_an_error_where_it_is_read(tmp_path: Path, mmap: bool, pointer: int) -> None:
    write(tmp_path / "tokens", [np.arange(9), np.arange(5), np.arange(9)])
    with (tmp_path / "tokens.idx").open("r+b") as index:
        index.seek(HEADER.size + 3 * 4 + 8)  # the second sequence's
        index.write(np.int64(pointer).tobytes())
    indexed = IndexedDataset(tmp_path / "tokens", mmap, check=False)
    dataset = GPTDataset(indexed, range(3), None, 22, 1, IndexCache())
    with pytest.raises(DataError, match=r"tokens\.idx is damaged .*expected sequences .* inside the \.bin"):
        dataset[0]


@pytest.mark.parametrize("mmap", [True, False])
def test_sequences_without_tokens_are_passed_over(tmp_path: Path, mmap: bool) -> None:
    """Our writer writes none, other writers may."""
    lengths = np.array([3, 0, 4, 0], np.int32)
    (tmp_path / "tokens.bin").write_bytes(np.arange(7, dtype=np.uint16).tobytes())
    with (tmp_path / "tokens.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, 4, 5) + lengths.tobytes())
        file.write(np.array([0, 6, 6, 14]).tobytes() + np.arange(5).tobytes())
    dataset = GPTDataset(IndexedDataset(tmp_path / "tokens", mmap), range(4), None, 6, 1, IndexCache())
    assert sorted(dataset[0].tolist()) == list(range(7))
