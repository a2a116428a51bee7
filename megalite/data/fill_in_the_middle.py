"""Documents rearranged so that a model learns to fill in their middle (Bavarian et al. 2022, arXiv 2207.14255).

A document is cut at two random characters into prefix, middle and suffix, each made into tokens by itself, and given as

    PSM    <prefix> prefix <suffix> suffix <middle> middle
    SPM    <prefix> <suffix> suffix <middle> prefix middle

Both keep the order in which text is read inside each part. What happens to a sample depends on (seed, sample) alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megalite.data.blend import Dataset
from megalite.data.tokenizers import Tokenizer
from megalite.errors import ConfigurationError


@dataclass(frozen=True)
class FillInTheMiddle:
    """How often documents are rearranged, and the tokens that mark their parts.

    Attributes:
        prefix, middle, suffix: tokens before the parts.
        pad: fills a sample that has become shorter; no loss counts there.
        eod: ends a document.
        rate: share of the documents that are rearranged.
        spm_rate: share of those in SPM order; the others are in PSM order.
        separator: a token that divides documents into fragments, each rearranged by itself; None without.
        fragment_rate: share of the fragments that are rearranged, in documents that are.
        no_prefix: texts that begin so are left as they are; None for none.
    """

    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int
    rate: float = 0.5
    spm_rate: float = 0.5
    separator: int | None = None
    fragment_rate: float = 0.5
    no_prefix: str | None = None


def token_by_name(tokenizer: Tokenizer, name: str, flag: str) -> int:
    """The one token that a text is. Raises ConfigurationError, naming the flag, where it is not one."""
    try:
        ids = tokenizer.encode(name)
    except ValueError:
        ids = []
    if len(ids) != 1:
        raise ConfigurationError(
            f"{flag} {name} is not one token of the tokenizer but {len(ids)}: name one of its own, or add it to the "
            "vocabulary as a special token"
        )
    return ids[0]


class FillInTheMiddleDataset:
    """Samples of a dataset, their documents rearranged, cut or padded to the length they had.

    Args:
        tokens: samples int64 [sequence_length + 1].
        tokenizer: turns the parts into text and back.
        rules: how.
        seed: the run's.
    """

    def __init__(self, tokens: Dataset[np.ndarray], tokenizer: Tokenizer, rules: FillInTheMiddle, seed: int) -> None:
        self.tokens, self.tokenizer, self.rules, self.seed = tokens, tokenizer, rules, seed

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.tokens)

    def __getitem__(self, sample: int) -> np.ndarray:
        """The tokens of a sample, int64 [sequence_length + 1]. Raises IndexError where there is no such sample."""
        tokens = self.tokens[sample]
        random = np.random.RandomState([self.seed % 2**32, sample % 2**32, sample >> 32])
        documents = [self._document(document, random) for document in _split_at(tokens, self.rules.eod)]
        joined = _join_with(documents, self.rules.eod)[: len(tokens)]
        return np.pad(joined, (0, len(tokens) - len(joined)), constant_values=self.rules.pad)

    def _document(self, tokens: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        if random.random_sample() >= self.rules.rate:
            return tokens
        fragments = [tokens] if self.rules.separator is None else _split_at(tokens, self.rules.separator)
        if self.rules.separator is None or len(fragments) == 1:
            return self._rearranged(tokens, random)
        chosen = [random.random_sample() < self.rules.fragment_rate for _ in fragments]
        pairs = zip(fragments, chosen, strict=True)
        return _join_with([self._rearranged(f, random) if c else f for f, c in pairs], self.rules.separator)

    def _rearranged(self, tokens: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        rules, encode = self.rules, self.tokenizer.encode
        text = self.tokenizer.decode(tokens.tolist())
        # A sample may begin or end inside a character: such a piece is no text, and would not come back as it was.
        if not text or "\ufffd" in text or (rules.no_prefix and text.startswith(rules.no_prefix)):
            return tokens
        first, last = sorted(random.randint(0, len(text) + 1, size=2))
        prefix, middle, suffix = encode(text[:first]), encode(text[first:last]), encode(text[last:])
        if random.random_sample() < rules.spm_rate:
            return np.array([rules.prefix, rules.suffix, *suffix, rules.middle, *prefix, *middle], np.int64)
        return np.array([rules.prefix, *prefix, rules.suffix, *suffix, rules.middle, *middle], np.int64)


def _split_at(tokens: np.ndarray, separator: int) -> list[np.ndarray]:
    places = np.flatnonzero(tokens == separator)
    first, *others = np.split(tokens, places)
    return [first, *(part[1:] for part in others)]


def _join_with(parts: list[np.ndarray], separator: int) -> np.ndarray:
    pieces = [piece for part in parts for piece in (np.array([separator]), part)]
    return np.concatenate(pieces[1:])
