"""Faster byte-pair encoding for SentencePiece: the tokens of each word are computed once.

SentencePiece writes a space as U+2581 and merges neighbours into pieces of its vocabulary, best score first. If no
piece has two given characters next to each other, no merge joins them. Then the text before this place and the text
after it do not influence each other, and the text may be cut there. In nearly every model this is true between a
character and a space after it. In many models (Llama's, and those of megalite-train-tokenizer) it is also true between
a letter and a character that is not a letter. The tokens of a text are then the tokens of its words, each with the
spaces before it. The result is the same, in half the time or less, since most words have occurred before.

`refusal` returns why a model does not have this property. A unigram model does not have it: its scores are summed over
the entire text, so their rounding depends on all of it.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

import numpy as np

SPACE = "\u2581"
_LETTER, _OTHER = r"[^\W\d_]", rf"(?:[^\w {SPACE}]|[\d_])"
_crosses_spaces = re.compile(f"[^{SPACE}]{SPACE}").search
_crosses_letters = re.compile(f"{_LETTER}{_OTHER}|{_OTHER}{_LETTER}").search
_words = re.compile(f"[ {SPACE}]*[^ {SPACE}]+|[ {SPACE}]+").findall
_letters_and_others = re.compile(f"[ {SPACE}]*(?:{_LETTER}+|{_OTHER}+)|[ {SPACE}]+").findall
# These limits keep the cache below about 20 MB. A larger cache gains little, and longer words seldom occur again.
LARGEST_CACHE = 1 << 16
LONGEST_WORD = 48
# Codes in SentencePiece's file format.
BYTE_PAIR_ENCODING = 2
NORMAL, USER_DEFINED = 1, 4


def refusal(model: bytes) -> str | None:
    """Return why texts must not be tokenized word by word with this SentencePiece model; None if they may be."""
    try:
        proto = _parsed(model)
    except Exception:  # protobuf is missing, or too new or too old for SentencePiece's own module
        return "protobuf, which reads the model's settings, cannot be imported"
    if proto.trainer_spec.model_type != BYTE_PAIR_ENCODING:
        return "it is not a byte-pair encoding"
    normalizer = proto.normalizer_spec
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces or not normalizer.escape_whitespaces:
        return "it changes more of the text than its spaces"
    if proto.trainer_spec.treat_whitespace_as_suffix:
        return "spaces end its words"
    pieces = {piece.piece: piece.type for piece in proto.pieces}
    if not all(isinstance(piece, str) for piece in pieces):
        return "its pieces are not all text"
    if pieces.get(SPACE) != NORMAL:
        return "it has no piece for a space"
    crossing = next(filter(_crosses_spaces, pieces), None)
    return crossing and f"its piece {crossing!r} has a space after another character"


def _parsed(model: bytes) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2
    return messages.ModelProto.FromString(model)


class WordCache:
    """Tokenizer that works word by word, for a model without a `refusal`.

    Args:
        processor: the `sentencepiece.SentencePieceProcessor`.
        model: the model's bytes.
    """

    def __init__(self, processor: Any, model: bytes) -> None:
        proto = _parsed(model)
        self._processor = processor
        self._adds_space: bool = proto.normalizer_spec.add_dummy_prefix
        self._space: list[int] = [processor.piece_to_id(SPACE)]
        self._cut = _letters_and_others if _letters_stay_apart(proto) else _words
        self._known = _Known(self._encode_word)

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, int32."""
        words = self._cut(text)
        if not words:
            return np.empty(0, np.int32)
        first: list[int] = self._processor.encode(words[0])
        return np.fromiter(chain(first, chain.from_iterable(map(self._known.__getitem__, words[1:]))), np.int32)

    def _encode_word(self, word: str) -> list[int]:
        if not self._adds_space:
            return self._processor.encode(word)
        if word[0] in (" ", SPACE):
            # The model adds a space before every text. It replaces the first space of this word.
            return self._processor.encode(word[1:]) or self._space
        # Encoded after another character, so that the model does not add a space before the word.
        before = "." if word[0].isalpha() else "a"
        return self._processor.encode(before + word)[len(self._processor.encode(before)) :]


def _letters_stay_apart(proto: Any) -> bool:
    """Tell whether no piece has a letter next to a character that is neither letter nor space.

    The model must also encode unknown characters as bytes: otherwise unknown neighbours would become one token.
    """
    texts = (piece.piece for piece in proto.pieces if piece.type in (NORMAL, USER_DEFINED))
    return proto.trainer_spec.byte_fallback and not any(map(_crosses_letters, texts))


class _Known(dict[str, list[int]]):
    def __init__(self, encode: Any) -> None:
        self._encode = encode

    def __missing__(self, word: str) -> list[int]:
        ids: list[int] = self._encode(word)
        if len(word) <= LONGEST_WORD:
            if len(self) >= LARGEST_CACHE:
                self.clear()
            self[word] = ids
        return ids
