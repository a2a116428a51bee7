"""Tokenizers with one common interface."""

from __future__ import annotations

from megalite.data.tokenizers.build import build_tokenizer
from megalite.data.tokenizers.interface import Tokenizer

__all__ = ["Tokenizer", "build_tokenizer"]
