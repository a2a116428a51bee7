"""Which tokenizer `--tokenizer-type` means."""

from __future__ import annotations

from megalite.data.tokenizers.bytes import ByteTokenizer
from megalite.data.tokenizers.interface import Tokenizer
from megalite.data.tokenizers.null import NullTokenizer
from megalite.data.tokenizers.sentencepiece import SentencePieceTokenizer
from megalite.errors import ConfigurationError

SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
TOKENIZER_TYPES = (*SENTENCEPIECE_TYPES, "ByteTokenizer", "NullTokenizer")


def build_tokenizer(
    tokenizer_type: str, tokenizer_model: str | None = None, vocab_size: int | None = None
) -> Tokenizer:
    """The tokenizer that the flags name.

    Args:
        tokenizer_type: one of `TOKENIZER_TYPES`.
        tokenizer_model: the SentencePiece model file.
        vocab_size: the number of ordinary tokens of a `NullTokenizer`; the other types know their own, and refuse
            another.

    Raises:
        ConfigurationError: the type is unknown, or lacks the flag it needs.
        DataError: the model file cannot be used.
    """
    if tokenizer_type == "NullTokenizer":
        if not vocab_size or vocab_size < 1:
            raise ConfigurationError("--tokenizer-type NullTokenizer needs --vocab-size, the number of tokens")
        return NullTokenizer(vocab_size)
    tokenizer: Tokenizer
    if tokenizer_type in SENTENCEPIECE_TYPES:
        if not tokenizer_model:
            raise ConfigurationError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model, a .model file")
        tokenizer = SentencePieceTokenizer(tokenizer_model)
    elif tokenizer_type == "ByteTokenizer":
        tokenizer = ByteTokenizer()
    else:
        raise ConfigurationError(
            f"--tokenizer-type {tokenizer_type} is unknown: use one of {', '.join(TOKENIZER_TYPES)}"
        )
    if vocab_size is not None and vocab_size != tokenizer.vocab_size:
        raise ConfigurationError(
            f"--vocab-size {vocab_size}, but the {tokenizer_type} has {tokenizer.vocab_size} tokens: leave "
            "--vocab-size out"
        )
    return tokenizer
