"""Construction of the tokenizer that `--tokenizer-type` names."""

from __future__ import annotations

from typing import get_args

from megalite.config.tokenizer import FastEncoding, TokenizerFlags, TokenizerType
from megalite.data.tokenizers.bytes import ByteTokenizer
from megalite.data.tokenizers.files import LARGEST_VOCABULARY
from megalite.data.tokenizers.huggingface import load_gpt2, load_tokenizer_json
from megalite.data.tokenizers.interface import Tokenizer
from megalite.data.tokenizers.null import NullTokenizer
from megalite.data.tokenizers.sentencepiece import SentencePieceTokenizer
from megalite.data.tokenizers.tiktoken import TikTokenizer
from megalite.errors import ConfigurationError, DataError

SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
TOKENIZER_TYPES = get_args(TokenizerType)


def build_tokenizer(
    flags: TokenizerFlags,
    vocab_size: int | None = None,
    *,
    include_special_tokens: bool = True,
    fast_encoding: FastEncoding = "auto",
) -> Tokenizer:
    """Return the tokenizer that the flags name; without a type, it is a `NullTokenizer`.

    Args:
        flags: type, files and options of the tokenizer.
        vocab_size: number of ordinary tokens of a `NullTokenizer`, or number of tokens to use of a `TikTokenizer`. The
            other types have a fixed number and refuse a smaller one. With a larger number, the embedding gets rows
            that no token uses.
        include_special_tokens: see `HuggingFaceTokenizer`.
        fast_encoding: use of the faster encodings of documents (word by word for SentencePiece, tiktoken for Hugging
            Face's byte-level BPE). "auto": if they give the same tokens; "off": never; "require": always, with an
            error at the first document if the tokens could differ. The other types have only one encoding.

    Raises:
        ConfigurationError: the type is unknown, or a flag or a library that it needs is missing.
        DataError: a file cannot be read or is not valid.
    """
    kind = flags.tokenizer_type or "NullTokenizer"
    if kind == "NullTokenizer":
        if not vocab_size or vocab_size < 1:
            raise ConfigurationError("--tokenizer-type NullTokenizer needs --vocab-size, the number of tokens")
        return NullTokenizer(vocab_size)
    tokenizer = _from_files(flags, vocab_size, include_special_tokens, fast_encoding)
    if tokenizer.vocab_size > LARGEST_VOCABULARY:
        raise DataError(
            f"the {kind} has a token {tokenizer.vocab_size - 1}, but {LARGEST_VOCABULARY - 1} is the "
            "largest possible: its file is damaged"
        )
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ConfigurationError(
            f"the {kind} has {tokenizer.vocab_size} tokens, more than the {vocab_size} of the model (--vocab-size, "
            "or the folder that --load names): leave --vocab-size out, or give that model's tokenizer. A model from a "
            "Hugging Face folder can grow, with --resize-vocabulary"
        )
    return tokenizer


def _from_files(
    flags: TokenizerFlags, vocab_size: int | None, include_special_tokens: bool, fast_encoding: FastEncoding
) -> Tokenizer:
    """Open the tokenizer of --tokenizer-type; a ConfigurationError names the flag that it lacks."""
    kind, model = flags.tokenizer_type, flags.tokenizer_model
    if kind == "ByteTokenizer":
        return ByteTokenizer()
    if kind == "GPT2BPETokenizer":
        if not flags.vocab_file or not flags.merge_file:
            raise ConfigurationError("--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file")
        return load_gpt2(flags.vocab_file, flags.merge_file, fast_encoding)
    if kind not in TOKENIZER_TYPES:
        raise ConfigurationError(f"--tokenizer-type {kind} is unknown: use one of {', '.join(TOKENIZER_TYPES)}")
    if not model:
        raise ConfigurationError(f"--tokenizer-type {kind} needs --tokenizer-model, its file")
    if kind in SENTENCEPIECE_TYPES:
        return SentencePieceTokenizer(model, fast_encoding)
    if kind == "HuggingFaceTokenizer":
        return load_tokenizer_json(model, include_special_tokens, fast_encoding)
    return TikTokenizer(model, flags, vocab_size)
