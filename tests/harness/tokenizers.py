"""Tokenizers from the values of their flags."""

from __future__ import annotations

from typing import Any

from megalite.config.tokenizer import FastEncoding, TokenizerFlags
from megalite.data.tokenizers import Tokenizer, build_tokenizer


def named_tokenizer(
    kind: Any,
    model: str | None = None,
    vocab_size: int | None = None,
    *,
    include_special_tokens: bool = True,
    fast_encoding: FastEncoding = "auto",
    **flags: Any,
) -> Tokenizer:
    """Return the tokenizer of this type, with its other flags by their names."""
    return build_tokenizer(
        TokenizerFlags(tokenizer_type=kind, tokenizer_model=model, **flags),
        vocab_size,
        include_special_tokens=include_special_tokens,
        fast_encoding=fast_encoding,
    )
