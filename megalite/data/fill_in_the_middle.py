"""Documents rearranged so that a model learns to fill in their middle (Bavarian et al. 2022, arXiv 2207.14255).

A document is cut at two random characters into prefix, middle and suffix. Each part is tokenized separately. The parts
are arranged in one of two orders:

    PSM    <prefix> prefix <suffix> suffix <middle> middle
    SPM    <prefix> <suffix> suffix <middle> prefix middle

Both keep the order of the text within each part. Tokens that the tokenizer put before the text of a document stay
first. The changes to a sample depend only on (seed, sample).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from megalite.data.blend import Dataset
from megalite.data.tokenizers import Tokenizer
from megalite.errors import ConfigurationError


@dataclass(frozen=True)
class FillInTheMiddle:
    """Rates at which documents are rearranged, and the tokens that mark their parts.

    Attributes:
        prefix, middle, suffix: tokens before the parts.
        pad: token that fills a sample that has become shorter; these places do not count in the loss.
        eod: token that ends a document.
        rate: fraction of the documents that are rearranged.
        spm_rate: fraction of the rearranged documents that are in SPM order; the others are in PSM order.
        separator: token that divides documents into fragments, each rearranged separately; None: no fragments.
        fragment_rate: fraction of the fragments that are rearranged, in documents that are rearranged.
        no_prefix: texts that begin with this text are not rearranged; None: all texts may be.

    Raises:
        ConfigurationError: two of the tokens are equal.
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

    def __post_init__(self) -> None:
        meanings = dict[int | None, str]()
        for meaning in ("eod", "prefix", "middle", "suffix", "pad", "separator"):
            token = getattr(self, meaning)
            if token is not None and meanings.setdefault(token, meaning) != meaning:
                flags = " and ".join(_FLAGS[name] for name in (meanings[token], meaning))
                raise ConfigurationError(
                    f"{flags} are the same token, {token}, so one could be taken for another and get no loss: "
                    "give each a token of its own"
                )


_FLAGS = {
    "eod": "the end of a document (--fim-eod-token)",
    "separator": "--fim-split-sample",
    **{name: f"--fim-{name}-token" for name in ("prefix", "middle", "suffix", "pad")},
}


def token_by_name(tokenizer: Tokenizer, name: str, flag: str) -> int:
    """Return the token whose name is `name`, or the token of the text `name` if it is a single token.

    Raises:
        ConfigurationError: there is no such token; the message names the flag.
    """
    token = tokenizer.token_id(name)
    if token is not None:
        return token
    try:
        ids = tokenizer.encode(name)
    except ValueError:
        ids = []
    if len(ids) != 1 or tokenizer.decode(ids) != name:
        raise ConfigurationError(
            f"{flag} {name} is not a token of the vocabulary: give one that is, or add it as a special token"
        )
    return ids[0]


class FillInTheMiddleDataset:
    """Samples of a dataset with rearranged documents; each sample is then cut or padded to its original length.

    Args:
        tokens: samples int64 [sequence_length + 1].
        tokenizer: converts the parts to text and back.
        rules: rules for rearranging.
        seed: the run's seed.
    """

    def __init__(self, tokens: Dataset[np.ndarray], tokenizer: Tokenizer, rules: FillInTheMiddle, seed: int) -> None:
        self.tokens, self.tokenizer, self.rules, self.seed = tokens, tokenizer, rules, seed
        self.some_text = tokenizer.encode("1")

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, sample: int) -> np.ndarray:
        """Return the tokens of a sample, int64 [sequence_length + 1]. Raises IndexError if there is no such sample."""
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
        """Return the tokens with the middle of their text last, or as they are if they begin inside a character."""
        rules, encode = self.rules, self.tokenizer.encode
        begin = sum(1 for _ in takewhile(self._is_no_text, tokens.tolist()))
        text = self.tokenizer.decode(tokens[begin:].tolist())
        # A sample may begin or end inside a character. Decoding and encoding would change such an incomplete character.
        if not text or "\ufffd" in text or (rules.no_prefix and text.startswith(rules.no_prefix)):
            return tokens
        first, last = sorted(random.randint(0, len(text) + 1, size=2))
        prefix, middle, suffix = encode(text[:first]), encode(text[first:last]), encode(text[last:])
        before = [*tokens[:begin], rules.prefix]
        if random.random_sample() < rules.spm_rate:
            return np.array([*before, rules.suffix, *suffix, rules.middle, *prefix, *middle], np.int64)
        return np.array([*before, *prefix, rules.suffix, *suffix, rules.middle, *middle], np.int64)

    def _is_no_text(self, token: int) -> bool:
        """Tell whether a token before a text adds no text.

        The token is decoded together with a text, because SentencePiece decodes a lone space to an empty text.
        """
        decode = self.tokenizer.decode
        return decode([token, *self.some_text]) == decode(self.some_text)


def _split_at(tokens: np.ndarray, separator: int) -> list[np.ndarray]:
    places = np.flatnonzero(tokens == separator)
    first, *others = np.split(tokens, places)
    return [first, *(part[1:] for part in others)]


def _join_with(parts: list[np.ndarray], separator: int) -> np.ndarray:
    pieces = [piece for part in parts for piece in (np.array([separator]), part)]
    return np.concatenate(pieces[1:])
