"""SentencePiece models: Megatron-LM's `SentencePieceTokenizer`, `GPTSentencePieceTokenizer` and `Llama2Tokenizer`.

The three are the same tokenizer, as in Megatron-LM since Megatron Core 0.16. No beginning-of-sequence token is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from megalite.config.tokenizer import FastEncoding
from megalite.data.optional import optional_import
from megalite.data.tokenizers.files import fingerprint, read_tokenizer_file
from megalite.data.tokenizers.interface import Ids, character_offsets
from megalite.data.tokenizers.word_cache import WordCache, refusal
from megalite.errors import ConfigurationError, DataError


class SentencePieceTokenizer:
    """SentencePiece model.

    Args:
        model_path: the `.model` file.
        fast_encoding: reuse the tokens of words in `encode_documents`. "auto": if this gives the same tokens; "off":
            never; "require": always, with an error if the tokens could differ.

    Raises:
        DataError: the file is missing, is not a SentencePiece model, or has no end-of-sequence token.
    """

    def __init__(self, model_path: str, fast_encoding: FastEncoding = "auto") -> None:
        from sentencepiece import SentencePieceProcessor

        what = "the .model file that megalite-train-tokenizer or the model's publisher wrote"
        self._model = read_tokenizer_file(model_path, "--tokenizer-model", what)
        self._fast_encoding = fast_encoding
        try:
            self._processor = SentencePieceProcessor(model_proto=self._model)
        except (RuntimeError, ValueError) as error:  # ValueError: the library's message is not valid UTF-8
            raise DataError(f"{model_path} is not a SentencePiece model ({len(self._model)} bytes)") from error
        self.vocab_size: int = self._processor.get_piece_size()
        self.eod: int = self._processor.eos_id()
        if self.eod < 0:
            raise DataError(
                f"{model_path} has no end-of-sequence token, which ends documents: train it with an eos_id, as "
                "megalite-train-tokenizer does"
            )

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        """Return the tokens of a text and their characters, without the space that the model adds before a text."""
        messages = optional_import(
            "sentencepiece.sentencepiece_pb2", "protobuf", "SentencePiece reports places in a text"
        )
        pieces = messages.SentencePieceText.FromString(self._processor.encode(text, out_type="serialized_proto")).pieces
        places = np.array([(piece.begin, piece.end) for piece in pieces], np.int64).reshape(-1, 2)
        return [piece.id for piece in pieces], character_offsets(text, places[:, 0], places[:, 1])

    def encode_documents(self, texts: Sequence[str]) -> Sequence[Ids]:
        if self._words is not None:
            return [self._words.encode(text) for text in texts]
        return self._processor.encode(list(texts), num_threads=1)

    @cached_property
    def _words(self) -> WordCache | None:
        if self._fast_encoding == "off":
            return None
        reason = refusal(self._model)
        if reason and self._fast_encoding == "require":
            raise ConfigurationError(
                f"--fast-encoding require: word by word might not give this model's tokens: {reason}"
            )
        return None if reason else WordCache(self._processor, self._model)

    def token_id(self, name: str) -> int | None:
        """Return the token of a piece, which may be a control piece."""
        token: int = self._processor.piece_to_id(name)  # the unknown piece's id if there is no such piece
        return token if self._processor.id_to_piece(token) == name else None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without control tokens."""
        return self._processor.decode([int(token) for token in ids])

    def byte_lengths(self) -> np.ndarray:
        return np.array([self._byte_length(token) for token in range(self.vocab_size)], np.int64)

    def _byte_length(self, token: int) -> int:
        """Return the bytes of a token's text; those of a text that the model does not know are not known."""
        pieces = self._processor
        if pieces.is_control(token) or pieces.is_unknown(token) or pieces.is_unused(token):
            return 0
        return 1 if pieces.is_byte(token) else len(pieces.id_to_piece(token).replace("\u2581", " ").encode())

    def identity(self) -> dict[str, Any]:
        """Return the identity: the hash of the model file, and the number of tokens."""
        sha256 = fingerprint(self._model)
        return {"type": "SentencePieceTokenizer", "vocab_size": self.vocab_size, "model_sha256": sha256}
