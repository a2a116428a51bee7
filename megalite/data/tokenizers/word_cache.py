"""Faster byte-pair encoding for SentencePiece: the tokens of each word are computed once.

SentencePiece writes a space as U+2581 and merges neighbours into pieces of its vocabulary, best score first. If no
piece has two given characters side by side, no merge ever reaches across them: the text before and the text after do
not influence each other, and a text may be cut there. In nearly every model that holds for a space after another
character, and in many (Llama's, and those of megalite-train-tokenizer) for a letter next to a character that is not a
letter. So the tokens of a text are those of its words, each with the spaces before it: the same tokens, in half the
time or less, since most words are not new.

`refusal` says for which models this holds. It does not hold for a unigram model, which adds up scores over the whole
text: their rounding depends on all of it.
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
# Some twenty megabytes at most: more gains little, and longer words are seldom met again.
LARGEST_CACHE = 1 << 16
LONGEST_WORD = 48
# As the file format numbers them.
BYTE_PAIR_ENCODING = 2
NORMAL, USER_DEFINED = 1, 4


def refusal(model: bytes) -> str | None:
    """Return why words of this SentencePiece model must not be tokenized one by one, or None."""
    try:
        proto = _parsed(model)
    except Exception:  # protobuf is missing, or too new or old for SentencePiece's own file
        return "protobuf, which reads the model's settings, cannot be imported"
    if proto.trainer_spec.model_type != BYTE_PAIR_ENCODING:
        return "it is no byte-pair encoding"
    normalizer = proto.normalizer_spec
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces or not normalizer.escape_whitespaces:
        return "it rewrites the text beyond its spaces"
    if proto.trainer_spec.treat_whitespace_as_suffix:
        return "spaces end its words"
    pieces = {piece.piece: piece.type for piece in proto.pieces}
    if not all(isinstance(piece, str) for piece in pieces):
        return "its pieces are not all text"
    if pieces.get(SPACE) != NORMAL:
        return "it has no piece for a space"
    crossing = next(filter(_crosses_spaces, pieces), None)
    return crossing and f"its piece {crossing!r} has a space behind another character"


def _parsed(model: bytes) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2
    return messages.ModelProto.FromString(model)


class WordCache:
    """Tokenizer by words, for a model that `refusal` accepts.

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
        """The tokens of a text, int32."""
        words = self._cut(text)
        if not words:
            return np.empty(0, np.int32)
        first: list[int] = self._processor.encode(words[0])
        return np.fromiter(chain(first, chain.from_iterable(map(self._known.__getitem__, words[1:]))), np.int32)

    def _encode_word(self, word: str) -> list[int]:
        ids: list[int]
        if not self._adds_space:
            ids = self._processor.encode(word)
        elif word[0] in (" ", SPACE):
            # The space that the model puts before every text is the first one of this word.
            ids = self._processor.encode(word[1:]) or self._space
        else:
            # Behind a character that it is cut from.
            before = "." if word[0].isalpha() else "a"
            ids = self._processor.encode(before + word)[len(self._processor.encode(before)) :]
        return ids


def _letters_stay_apart(proto: Any) -> bool:
    """Tell whether no piece has a letter next to a character that is neither letter nor space.

    (Without bytes for such characters, unknown neighbours would become one token.)
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
