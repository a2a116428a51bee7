"""Limit on how much longer the steps of a tokenizer.json make a text: a few of them can fill a machine's memory."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from megalite.errors import DataError

MOST_GROWTH = 1000
"""Largest growth of a text, in bytes for each byte. The steps of published files have up to 500 in the worst case."""
MOST_ADDED = 2**30
"""Largest length of all added tokens after the normalizer, in bytes. Published files have less than 2**26."""
_INNER = {"normalizers", "pretokenizers", "processors", "decoders"}
_USUAL = {"ByteLevel": 4, "Metaspace": 4, "BertNormalizer": 2, "CTC": 4, "BPEDecoder": 4, "WordPiece": 4}
"""Bounds for steps whose growth does not depend on the file. Those not listed make a text longer once at most."""
_NEVER_EMPTY = re.compile(r"(?:[^\\()*?{|^$]|\\[sSdDwW.]|(?<!^)\{[1-9]\d*,?\d*\})+")
"""Some of the regular expressions that match one character or more."""


def check_growth(tokenizer: Any, file: Path, added: int) -> None:
    """Check that the steps of a tokenizer.json cannot fill the memory.

    Args:
        tokenizer: a `tokenizers.Tokenizer` with them.
        file: the file, for messages.
        added: the length in bytes of all added tokens, which its normalizer changes when they are added.

    Raises:
        DataError: they can make a text more than `MOST_GROWTH` times longer, or the added tokens `MOST_ADDED` long.
    """
    for names in (("normalizer", "pre_tokenizer"), ("post_processor",), ("decoder",)):
        growth = 1.0
        for name in names:
            step = getattr(tokenizer, name)
            growth *= 1.0 if step is None else _growth(json.loads(step.__getstate__()))
            if growth > MOST_GROWTH:
                raise DataError(
                    f'{file}: its "{name}" can make a text {growth:,.0f} times longer, which would fill the memory; '
                    f"{MOST_GROWTH:,} times is the most: shorten what it inserts"
                )
            if name == "normalizer" and growth * added > MOST_ADDED:
                raise DataError(
                    f'{file}: its "normalizer" can make the added tokens {growth * added:,.0f} bytes long, which would '
                    f"fill the memory; {MOST_ADDED:,} bytes are the most: remove tokens that are not needed"
                )


def _growth(step: Mapping[str, Any]) -> float:
    """Return the largest possible ratio of the lengths in bytes after a step and before it, at least 1."""
    kind = step["type"]
    if kind == "Sequence":
        return prod(_growth(inner) for name in _INNER for inner in step.get(name, ()))
    if kind == "Prepend":
        return 1 + len(step["prepend"].encode())
    if kind == "Replace":
        return _of_replacement(step["pattern"], len(step["content"].encode()))
    if kind == "Precompiled":  # a table, preceded by its size in 4 bytes, and the texts that it inserts
        table = base64.b64decode(step["precompiled_charsmap"])
        return max(1, *map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")))
    if kind == "TemplateProcessing":
        known = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
        pieces = (piece.get("SpecialToken") for piece in step["single"])
        return max(1, sum(1 if piece is None else known.get(piece["id"], 1) for piece in pieces))
    return _USUAL.get(kind, 1)


def _of_replacement(pattern: Mapping[str, str], inserted: int) -> float:
    text = pattern.get("String", "")
    if text:
        return max(1, inserted / len(text.encode()))
    if _NEVER_EMPTY.fullmatch(pattern.get("Regex", "")):
        return max(1, inserted)
    return 1 + 2 * inserted  # before each character and after the last
