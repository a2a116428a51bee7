"""Generated data that a model can learn: for `--mock-data`, benchmarks and tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MockDataset:
    """Samples that are a pure function of (seed, stream, sample), the same on every platform and numpy version.

    Most tokens are the token before plus 1. One token in ten, and the first of each document, is drawn at random. The
    loss of a model that learns therefore falls from log(vocab_size) to about a tenth of that. Documents end with `eod`
    at random places, on average four per sample.

    Attributes:
        vocab_size: number of tokens, at least 2; tokens are in [0, vocab_size).
        sequence_length: number of input tokens in a sample; the sample has one token more.
        seed: the run's seed.
        num_samples: number of samples.
        eod: token that ends a document; None: the last token of the vocabulary, as in `NullTokenizer`.
        stream: number that makes the splits of a run different from each other.
    """

    vocab_size: int
    sequence_length: int
    seed: int
    num_samples: int
    eod: int | None = None
    stream: int = 0

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, sample: int) -> np.ndarray:
        """Return the tokens of a sample, int64 [sequence_length + 1].

        Raises:
            IndexError: there is no such sample.
        """
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of a dataset of {len(self)}")
        # The numbers of RandomState are frozen. Those of numpy's newer generators may change with its version.
        random = np.random.RandomState([self.seed % 2**32, self.stream, sample % 2**32, sample >> 32])
        length, ordinary = self.sequence_length + 1, self.vocab_size - 1
        eod = ordinary if self.eod is None else self.eod
        ends = random.random_sample(length) < min(0.25, 4 / length)
        jumps = random.random_sample(length) < 0.1
        jumps[1:] |= ends[:-1]
        steps = np.where(jumps, random.randint(ordinary, size=length), 1)
        tokens = np.cumsum(steps) % ordinary
        tokens += tokens >= eod
        tokens[ends] = eod
        return tokens.astype(np.int64)
