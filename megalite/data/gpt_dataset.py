"""Samples of a fixed length cut from the documents of a token file, in the order Megatron-LM gives.

The sequences of one split are repeated for as many epochs as the samples need, shuffled and laid end to end. Sample j
of that line is the tokens [j s, (j + 1) s], one more than the sequence length s, so that neighbours share a token: the
last label of one is the first input of the next. Then the samples are shuffled. One `RandomState` draws both shuffles,
so that the order is that of Megatron-LM's `GPTDataset` for the same seed, to the sample.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from megalite.data.index_cache import Arrays, IndexCache
from megalite.data.indexed_dataset import IndexedDataset
from megalite.errors import DataError

INT32_MAX = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Epochs:
    """Number of times that the sequences are repeated.

    Attributes:
        count: epochs in the line of documents.
        samples: samples the line holds.
        samples_before_last: samples of all epochs but the last, if the last is shuffled separately; otherwise None.
    """

    count: int
    samples: int
    samples_before_last: int | None


def plan_epochs(tokens: int, num_samples: int | None, sequence_length: int) -> Epochs:
    """Apply Megatron-LM's rules for the number of epochs and for the last one.

    The last epoch is shuffled separately if less than 80 % of it is needed: mixed with the others, it would take the
    place of samples of the epochs before it, which would then not be complete.

    Args:
        tokens: tokens in one epoch, at least 1.
        num_samples: samples needed; None: those of one epoch.
        sequence_length: tokens a sample advances.
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
    """The sequences of all epochs in the order they are laid end to end, int32 [epochs * sequences]."""
    dtype = np.int32 if sequences.stop <= INT32_MAX else np.int64
    once = np.arange(sequences.start, sequences.stop, dtype=dtype)
    parts = [epochs.count] if epochs.samples_before_last is None else [epochs.count - 1, 1]
    shuffled = [np.tile(once, part) for part in parts]
    for part in shuffled:
        random.shuffle(part)
    return shuffled[0] if len(shuffled) == 1 else np.concatenate(shuffled)


def build_sample_index(lengths: np.ndarray, samples: int, sequence_length: int) -> np.ndarray:
    """Return the start of each sample: [samples + 1, 2] of (position in the document index, token offset in that
    document).

    Args:
        lengths: tokens of each document, in the order of the document index.
        samples: samples the documents hold; one row more marks the end of the last.
        sequence_length: tokens a sample advances.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    inside = np.searchsorted(ends, samples * sequence_length, side="right")
    # A document ends before sample k starts if its end, divided by the length and rounded up, is at most k: so that
    # counting takes one pass over documents and one over samples.
    counts = np.bincount(-(-ends[:inside] // sequence_length), minlength=samples + 1)
    documents = np.cumsum(counts)
    largest = max(len(lengths), int(lengths.max()))
    index = np.empty((samples + 1, 2), np.int32 if largest <= INT32_MAX else np.int64)
    index[:, 0] = documents
    begins = np.concatenate(([0], ends))
    np.subtract(np.arange(samples + 1) * sequence_length, begins[documents], out=index[:, 1], casting="same_kind")
    return index


def build_shuffle_index(epochs: Epochs, random: np.random.RandomState) -> np.ndarray:
    """The order in which the samples are seen, uint32 (int64 from 2**32 - 2 samples) [samples]."""
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
        num_samples: samples needed, which decides the number of epochs; None for one epoch. The dataset may be longer.
        sequence_length: tokens the model sees in a sample.
        seed: seed of the order; Megatron-LM uses `--seed` for every dataset of a run.
        cache: keeps the indices.

    Raises:
        DataError: the split has no tokens, or they do not make a single sample.
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
        self.indexed = indexed
        self.sequence_length = sequence_length
        tokens = int(indexed.sequence_lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
        if tokens == 0:
            raise DataError(
                f"sequences {sequences.start} to {sequences.stop} of {indexed.prefix} ({len(indexed)} in all) hold no "
                "tokens: give this part a larger share in --split, or add documents"
            )
        self.epochs = plan_epochs(tokens, num_samples, sequence_length)
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
        """The number of samples, at least as many as were asked for."""
        return len(self.shuffle_index)

    def __getitem__(self, sample: int) -> np.ndarray:
        """The tokens of a sample, int64 [sequence_length + 1].

        Raises:
            IndexError: there is no such sample.
            DataError: a part of it lies outside the .bin.
        """
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of a dataset of {len(self)}")
        place = self.shuffle_index.item(sample)
        (first, start), (last, end) = self.sample_index[place : place + 2].tolist()
        return self.indexed.join(self.document_index[first : last + 1].tolist(), start, end + 1)
