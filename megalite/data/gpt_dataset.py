"""Samples of a fixed length cut from the documents of a token file, in Megatron-LM's order.

The sequences of one split are repeated for as many epochs as the samples need, shuffled, and concatenated into one
stream of tokens. Sample j has the tokens j s to (j + 1) s of this stream, both included, where s is the sequence
length. These are s + 1 tokens, so neighbouring samples share one: the last label of a sample is the first input of the
next. Then the samples are shuffled. One `RandomState` draws both shuffles. With the same seed, the order of the samples
is exactly that of Megatron-LM's `GPTDataset`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from megalite.data.index_cache import Arrays, IndexCache
from megalite.data.indexed_dataset import IndexedDataset
from megalite.errors import DataError

INT32_MAX = np.iinfo(np.int32).max
MOST_ENTRIES = 1 << 34
"""Most entries of an index, which would take a hundred GB: no run has as many, but a number that is wrong may."""


@dataclass(frozen=True)
class Epochs:
    """Number of times that the sequences are repeated.

    Attributes:
        count: number of epochs.
        samples: number of samples in all epochs together.
        samples_before_last: samples of all epochs except the last, if the last is shuffled separately; otherwise None.
    """

    count: int
    samples: int
    samples_before_last: int | None


def plan_epochs(tokens: int, num_samples: int | None, sequence_length: int) -> Epochs:
    """Apply Megatron-LM's rules for the number of epochs and for the last one.

    The last epoch is shuffled separately if less than 80 % of it is needed. If it were mixed with the others, its
    samples would replace samples of the earlier epochs, which would then be incomplete.

    Args:
        tokens: tokens in one epoch, at least 1.
        num_samples: number of samples needed; None: as many as one epoch has.
        sequence_length: tokens from the start of a sample to the start of the next.
    """
    needed = 0 if num_samples is None else num_samples * sequence_length + 1
    count = max(1, -(-needed // tokens))
    samples = (count * tokens - 1) // sequence_length
    if count == 1 or num_samples is None:
        return Epochs(count, samples, None)
    before_last = ((count - 1) * tokens - 1) // sequence_length
    samples_of_one = (tokens - 1) // sequence_length
    apart = num_samples - before_last < int(0.80 * samples_of_one)
    return Epochs(count, samples, before_last if apart else None)


def build_document_index(sequences: range, epochs: Epochs, random: np.random.RandomState) -> np.ndarray:
    """Return the sequences of all epochs in the order of concatenation, int32 or int64 [epochs * sequences]."""
    dtype = np.int32 if sequences.stop <= INT32_MAX else np.int64
    once = np.arange(sequences.start, sequences.stop, dtype=dtype)
    parts = [epochs.count] if epochs.samples_before_last is None else [epochs.count - 1, 1]
    shuffled = [np.tile(once, part) for part in parts]
    for part in shuffled:
        random.shuffle(part)
    return shuffled[0] if len(shuffled) == 1 else np.concatenate(shuffled)


def build_sample_index(lengths: np.ndarray, samples: int, sequence_length: int) -> np.ndarray:
    """Return the start of each sample, [samples + 1, 2]: position in the document index, and token offset in that
    document.

    Args:
        lengths: tokens of each document, in the order of the document index.
        samples: number of samples; an additional last row marks the end of the last sample.
        sequence_length: tokens from the start of a sample to the start of the next.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    inside = np.searchsorted(ends, samples * sequence_length, side="right")
    # A document ends at or before the start of sample k if its end, divided by the length and rounded up, is at most
    # k. Counting therefore takes one pass over the documents and one over the samples.
    counts = np.bincount(-(-ends[:inside] // sequence_length), minlength=samples + 1)
    documents = np.cumsum(counts)
    largest = max(len(lengths), int(lengths.max()))
    index = np.empty((samples + 1, 2), np.int32 if largest <= INT32_MAX else np.int64)
    index[:, 0] = documents
    begins = np.concatenate(([0], ends))
    np.subtract(np.arange(samples + 1) * sequence_length, begins[documents], out=index[:, 1], casting="same_kind")
    return index


def build_shuffle_index(epochs: Epochs, random: np.random.RandomState) -> np.ndarray:
    """Return the order in which the samples are read, uint32 [samples] (int64 for 2**32 - 2 or more samples)."""
    dtype = np.int64 if epochs.samples >= np.iinfo(np.uint32).max - 1 else np.uint32
    order = np.arange(epochs.samples, dtype=dtype)
    split = epochs.samples if epochs.samples_before_last is None else epochs.samples_before_last
    random.shuffle(order[:split])
    if split < epochs.samples:
        random.shuffle(order[split:])
    return order


class GPTDataset:
    """Samples of `sequence_length + 1` tokens.

    Args:
        indexed: the token file.
        sequences: the sequences of the file that belong to this split.
        num_samples: number of samples needed, which determines the number of epochs; None: one epoch. The dataset may
            be longer.
        sequence_length: number of input tokens in a sample.
        seed: seed of the order; Megatron-LM uses `--seed` for every dataset of a run.
        cache: cache for the indices.

    Raises:
        DataError: the split has no tokens.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequences: range,
        num_samples: int | None,
        sequence_length: int,
        seed: int,
        cache: IndexCache,
    ) -> None:
        self.indexed, self.num_samples = indexed, num_samples
        self.sequence_length = sequence_length
        tokens = int(indexed.sequence_lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
        if tokens == 0:
            raise DataError(
                f"sequences {sequences.start} to {sequences.stop} of {indexed.prefix} ({len(indexed)} in all) have no "
                "tokens: give this part a larger share in --split, or add documents"
            )
        self.epochs = plan_epochs(tokens, num_samples, sequence_length)
        if max(self.epochs.samples, self.epochs.count * len(sequences)) > MOST_ENTRIES:
            raise DataError(
                f"{num_samples} samples of {sequence_length} tokens are {self.epochs.count:,} epochs of "
                f"{indexed.prefix}, and an index of more than {MOST_ENTRIES:,} entries: ask for fewer samples"
            )
        description = {
            "kind": "GPT samples",
            "version": 1,
            "sequence_lengths": indexed.lengths_sha256,
            "sequences": [sequences.start, sequences.stop],
            "epochs": asdict(self.epochs),
            "sequence_length": sequence_length,
            "seed": seed,
        }
        indices = cache.get(indexed.prefix, description, lambda: self._build_indices(sequences, seed))
        self.document_index, self.sample_index = indices["document_index"], indices["sample_index"]
        self.shuffle_index = indices["shuffle_index"]

    def _build_indices(self, sequences: range, seed: int) -> Arrays:
        random = np.random.RandomState(seed)
        document_index = build_document_index(sequences, self.epochs, random)
        lengths = self.indexed.sequence_lengths[document_index]
        return {
            "document_index": document_index,
            "sample_index": build_sample_index(lengths, self.epochs.samples, self.sequence_length),
            "shuffle_index": build_shuffle_index(self.epochs, random),
        }

    def __len__(self) -> int:
        """Return the number of samples, at least the requested number."""
        return len(self.shuffle_index)

    def __getitem__(self, sample: int) -> np.ndarray:
        """Return the tokens of a sample, int64 [sequence_length + 1].

        Raises:
            IndexError: there is no such sample.
            DataError: a part of it is outside the .bin.
        """
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of a dataset of {len(self)}")
        place = self.shuffle_index.item(sample)
        (first, start), (last, end) = self.sample_index[place : place + 2].tolist()
        return self.indexed.join(self.document_index[first : last + 1].tolist(), start, end + 1)
