"""Tokenizer flags that a run shares with the tools that make and show its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from megalite.config.fields import NonNegativeInt, at_most

TokenizerType = Literal[
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "TikTokenizer",
    "ByteTokenizer",
    "NullTokenizer",
]
FILES_AND_OPTIONS: Mapping[str, str] = {
    "tokenizer_model": "SentencePieceTokenizer GPTSentencePieceTokenizer Llama2Tokenizer HuggingFaceTokenizer "
    "TikTokenizer",
    "vocab_file": "GPT2BPETokenizer",
    "merge_file": "GPT2BPETokenizer",
    "tiktoken_pattern": "TikTokenizer",
    "tiktoken_num_special_tokens": "TikTokenizer",
    "tokenizer_special_tokens": "TikTokenizer",
}
"""The kind of tokenizer that reads a field, for fields that not all kinds read."""
FastEncoding = Literal["auto", "require", "off"]


@dataclass(frozen=True, kw_only=True)
class TokenizerFlags:
    """Name of a tokenizer, its files, and options that only some kinds read."""

    tokenizer_type: TokenizerType | None = None
    """Kind of tokenizer; Llama2Tokenizer is a SentencePiece model, NullTokenizer is for data already in tokens."""
    tokenizer_model: str | None = None
    """File of the tokenizer (.model, tokenizer.json, ranks)."""
    vocab_file: str | None = None
    """The vocab.json of a GPT2BPETokenizer."""
    merge_file: str | None = None
    """The merges.txt of a GPT2BPETokenizer."""
    tiktoken_pattern: str = "v2"
    """Pattern that splits text into words for a TikTokenizer: v1, v2, gpt2, cl100k, or a regular expression."""
    tiktoken_num_special_tokens: Annotated[NonNegativeInt, at_most(1_000_000)] = 1000
    """Special tokens of a TikTokenizer's .json file."""
    tokenizer_special_tokens: tuple[str, ...] = ()
    """Names of a TikTokenizer's special tokens, if they are not the usual ones; NAME=ID for a plain .tiktoken file."""


@dataclass(frozen=True, kw_only=True)
class EncodingFlags(TokenizerFlags):
    """Rules for converting records of a corpus to tokens."""

    tokenizer_type: TokenizerType = field()
    """Kind of tokenizer; the three with SentencePiece or Llama2 in their names are the same."""
    vocab_size: int | None = None
    """The number of tokens of a NullTokenizer; the number to use of a TikTokenizer."""
    tokenizer_hf_include_special_tokens: bool = True
    """Put around each document the special tokens of a HuggingFaceTokenizer's own template (often one at the
    beginning)."""
    fast_encoding: FastEncoding = "auto"
    """Faster encoding, of byte-level BPE through tiktoken and of SentencePiece BPE by words: auto, if it gives the
    same tokens; require, with an error if they might differ; or off. Other types have only one way, which is fast."""
    json_keys: tuple[str, ...] = ("text",)
    """The fields of a record to tokenize, each into files of its own."""
    append_eod: bool = False
    """End every document with the end-of-document token."""
    skip_bad_lines: bool = False
    """Leave out, name and count records that are not documents, instead of stopping."""
