"""Construction of the tokenizer that `--tokenizer-type` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from megalite.config.tokenizer import FastEncoding, TokenizerType
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


@dataclass(frozen=True)
class TokenizerOptions:
    """Values of the flags that only some tokenizer types read; the fields have the names of the flags.

    Attributes:
        vocab_file, merge_file: for a `GPT2BPETokenizer`; see `load_gpt2`.
        tiktoken_pattern, tiktoken_num_special_tokens, tokenizer_special_tokens: for a `TikTokenizer`.
        tokenizer_hf_include_special_tokens: for a `HuggingFaceTokenizer`.
        fast_encoding: use of the faster encodings of documents (word by word for SentencePiece, tiktoken for Hugging
            Face's byte-level BPE). "auto": if they give the same tokens; "off": never; "require": always, with an
            error at the first document if the tokens could differ. The other types have only one encoding.
    """

    vocab_file: str | None = None
    merge_file: str | None = None
    tiktoken_pattern: str = "v2"
    tiktoken_num_special_tokens: int = 1000
    tokenizer_special_tokens: tuple[str, ...] = ()
    tokenizer_hf_include_special_tokens: bool = True
    fast_encoding: FastEncoding = "auto"

    @classmethod
    def of(cls, flags: object) -> TokenizerOptions:
        """Return the options found in the fields of a dataclass or the keys of a mapping; the others have their
        defaults."""
        given: Mapping[str, Any] = flags if isinstance(flags, Mapping) else vars(flags)
        known = {field.name: given[field.name] for field in fields(cls) if field.name in given}
        return cls(**known | {"tokenizer_special_tokens": tuple(known.get("tokenizer_special_tokens") or ())})


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
    options: TokenizerOptions | None = None,
) -> Tokenizer:
    """Return the tokenizer that the flags name.

    Args:
        tokenizer_type: one of `TOKENIZER_TYPES`.
        tokenizer_model: path of the vocabulary.
        vocab_size: number of ordinary tokens of a `NullTokenizer`, or number of tokens to use of a `TikTokenizer`. The
            other types have a fixed number and refuse a smaller one. With a larger number, the embedding gets rows
            that no token uses.
        options: flags that only some types read.

    Raises:
        ConfigurationError: the type is unknown, or a flag or a library that it needs is missing.
        DataError: a file cannot be read or is not valid.
    """
    options = options or TokenizerOptions()
    if tokenizer_type == "NullTokenizer":
        if not vocab_size or vocab_size < 1:
            raise ConfigurationError("--tokenizer-type NullTokenizer needs --vocab-size, the number of tokens")
        return NullTokenizer(vocab_size)
    tokenizer = _from_files(tokenizer_type, tokenizer_model, vocab_size, options)
    if tokenizer.vocab_size > LARGEST_VOCABULARY:
        raise DataError(
            f"the {tokenizer_type} has a token {tokenizer.vocab_size - 1}, but {LARGEST_VOCABULARY - 1} is the "
            "largest possible: its file is damaged"
        )
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ConfigurationError(
            f"--vocab-size {vocab_size}, but the {tokenizer_type} has {tokenizer.vocab_size} tokens: leave "
            "--vocab-size out, or give the tokenizer of the model that --load names"
        )
    return tokenizer


def _from_files(
    tokenizer_type: str, tokenizer_model: str | None, vocab_size: int | None, options: TokenizerOptions
) -> Tokenizer:
    if tokenizer_type == "ByteTokenizer":
        return ByteTokenizer()
    if tokenizer_type == "GPT2BPETokenizer":
        if not options.vocab_file or not options.merge_file:
            raise ConfigurationError("--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file")
        return load_gpt2(options.vocab_file, options.merge_file, options.fast_encoding)
    if tokenizer_type not in TOKENIZER_TYPES:
        known = ", ".join(TOKENIZER_TYPES)
        raise ConfigurationError(f"--tokenizer-type {tokenizer_type} is unknown: use one of {known}")
    if not tokenizer_model:
        raise ConfigurationError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model, its file")
    if tokenizer_type in SENTENCEPIECE_TYPES:
        return SentencePieceTokenizer(tokenizer_model, options.fast_encoding)
    if tokenizer_type == "HuggingFaceTokenizer":
        special = options.tokenizer_hf_include_special_tokens
        return load_tokenizer_json(tokenizer_model, special, options.fast_encoding)
    return TikTokenizer(
        tokenizer_model,
        options.tiktoken_pattern,
        options.tiktoken_num_special_tokens,
        options.tokenizer_special_tokens,
        vocab_size,
    )
