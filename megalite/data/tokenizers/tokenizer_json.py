"""Opening of a tokenizer.json with what would end the process, or fill its memory, refused before the library has it.

Most errors of a file are errors of the library, which `library_errors` reports. These are none: the library cuts a text
in the middle of a character, runs out of stack, or asks for more memory than there is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.data.tokenizers.growth import check_growth
from megalite.data.tokenizers.library_errors import library_errors
from megalite.errors import DataError
from megalite.small_files import parse_json, shown

LONGEST_TOKEN = 10_000
"""Largest length in bytes of a token of a Unigram model: the library's tree of them is as deep, and takes the stack."""
_MOST_MARKS = 10_000_000
"""Limit of `parse_json`: vocabularies of two million tokens, with their merges."""
_SMALL_MODEL = {"type": "WordLevel", "vocab": {}, "unk_token": ""}


def open_tokenizer_json(tokenizers: Any, content: bytes, file: Path, declared: int) -> Any:
    """Return the `tokenizers.Tokenizer` of a tokenizer.json, which neither cuts nor pads texts.

    Args:
        tokenizers: the library.
        content: the file's content.
        file: the file, for messages.
        declared: the length in bytes of the tokens that are added to it later.

    Raises:
        DataError: the library cannot read it, would end the process, or could make texts far too long.
    """
    with library_errors(f"{file} is not a tokenizer.json of Hugging Face's tokenizers"):
        fields = parse_json(content, most_marks=_MOST_MARKS, larger_numbers=True)
        _check_model(fields["model"], file)
        added = [token["content"] for token in fields.get("added_tokens") or ()]
        # First without tokens: those that are added pass the normalizer while the file is read.
        steps = tokenizers.Tokenizer.from_str(json.dumps(fields | {"model": _SMALL_MODEL, "added_tokens": []}))
        check_growth(steps, file, declared + sum(len(text.encode()) for text in added))
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        # Some files enable truncation, which would cut documents, or padding, to lengths without a limit.
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


def _check_model(model: Mapping[str, Any], file: Path) -> None:
    """Raise DataError for merges that the library would cut wrongly, and tokens too long for its stack."""
    prefix = model.get("continuing_subword_prefix") or ""
    for merge in model.get("merges", ()) if prefix else ():
        second = (merge.split(" ") if isinstance(merge, str) else merge)[-1]
        if not second.startswith(prefix):  # the library cuts off as many bytes, whatever they are
            raise DataError(
                f'{file}: "merges" of its "model" has {shown(merge)}, whose second part does not begin with the '
                f'"continuing_subword_prefix" {shown(prefix)}: copy it again or save it with transformers'
            )
    vocabulary = model.get("vocab")
    for token, *_ in vocabulary if isinstance(vocabulary, list) else ():
        if (size := len(token.encode())) > LONGEST_TOKEN:
            raise DataError(
                f'{file}: "vocab" of its "model" has a token of {size:,} bytes, {shown(token)}, but {LONGEST_TOKEN:,} '
                f"are allowed: remove it"
            )
