"""Bytes of the text of each token, of a vocabulary of Hugging Face's `tokenizers`."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np


def byte_lengths(tokenizer: Any) -> np.ndarray | None:
    """Return the bytes of text of each token, int64 [1 + largest id]; None if it is not known how texts are written.

    Special tokens have none. Known are vocabularies of bytes, and those with a mark for a space, with or without bytes
    for what is in no other token.

    `tokenizer`: a `tokenizers.Tokenizer`.
    """
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    of_kind = {step.get("type"): step for step in steps}
    space: str = of_kind["Metaspace"]["replacement"] if "Metaspace" in of_kind else ""
    if "Replace" in of_kind and of_kind["Replace"]["content"] == " ":
        space = of_kind["Replace"]["pattern"].get("String", "")
    if "ByteLevel" not in of_kind and not space:
        return None

    def length(token: str) -> int:
        if "ByteLevel" in of_kind:
            return len(token)  # a character for each byte
        if "ByteFallback" in of_kind and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return 1
        return len(token.replace(space, " ").encode())

    found = {number: length(token) for token, number in tokenizer.get_vocab(with_added_tokens=False).items()}
    for number, added in tokenizer.get_added_tokens_decoder().items():
        found[number] = 0 if added.special else len(added.content.encode())
    lengths = np.zeros(1 + max(found), np.int64)
    lengths[list(found)] = list(found.values())
    return lengths
