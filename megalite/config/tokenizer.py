"""Tokenizer flags that a run shares with the tools that make and show its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    """Name of a tokenizer, and its files."""

    tokenizer_type: TokenizerType | None = None
    """Kind of tokenizer; Llama2Tokenizer is a SentencePiece model, NullTokenizer is for data already in tokens."""
    tokenizer_model: str | None = None
    """Its file: .model of SentencePiece, tokenizer.json (or its folder) of Hugging Face, ranks of a TikTokenizer."""
    vocab_file: str | None = None
    """The vocab.json of a GPT2BPETokenizer."""
    merge_file: str | None = None
    """The merges.txt of a GPT2BPETokenizer."""
    tiktoken_pattern: str = "v2"
    """Pattern that splits text into words for a TikTokenizer: v1, v2, gpt2, cl100k, or a regular expression."""
    tiktoken_num_special_tokens: Annotated[NonNegativeInt, at_most(1_000_000)] = 1000
    """Special tokens of a TikTokenizer's .json file."""
    tokenizer_special_tokens: tuple[str, ...] = ()
    """The names of a TikTokenizer's special tokens, if they are not the usual ones."""
