"""SentencePiece models: Megatron-LM's `SentencePieceTokenizer`, `GPTSentencePieceTokenizer` and `Llama2Tokenizer`.

As in Megatron-LM since its core 0.16, the three are one: no beginning-of-sequence token is added.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalite.errors import DataError


class SentencePieceTokenizer:
    """A SentencePiece model.

    Args:
        model_path: the `.model` file.

    Raises:
        DataError: the file is missing, is no SentencePiece model, or has no end-of-sequence token.
    """

    def __init__(self, model_path: str) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            model = Path(model_path).read_bytes()
        except OSError as error:
            raise DataError(
                f"the tokenizer model {model_path} cannot be read ({error.strerror}): --tokenizer-model is the .model "
                "file that tools/train_tokenizer.py or the model's publisher wrote"
            ) from error
        try:
            self._processor = SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(f"{model_path} is not a SentencePiece model ({len(model)} bytes)") from error
        self.model_sha256 = hashlib.sha256(model).hexdigest()
        self.vocab_size: int = self._processor.get_piece_size()
        self.eod: int = self._processor.eos_id()
        if self.eod < 0:
            raise DataError(
                f"{model_path} has no end-of-sequence token, which ends documents: train it with an eos_id, as "
                "tools/train_tokenizer.py does"
            )
        pad = self._processor.pad_id()
        self.pad: int | None = pad if pad >= 0 else None

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ids: list[int] = self._processor.encode(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens; control tokens give none."""
        text: str = self._processor.decode([int(token) for token in ids])
        return text

    def identity(self) -> dict[str, Any]:
        """The model file's hash decides; its path does not."""
        return {"type": "SentencePieceTokenizer", "vocab_size": self.vocab_size, "model_sha256": self.model_sha256}
