"""Vocabularies of Hugging Face's `tokenizers` library: `HuggingFaceTokenizer` and `GPT2BPETokenizer`.

As in Megatron-LM, the end of a document is the vocabulary's end-of-sequence token, and a text that contains the name of
a special token is encoded with this token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megalite.config.tokenizer import FastEncoding
from megalite.data.optional import optional_import
from megalite.data.tokenizers.byte_lengths import byte_lengths
from megalite.data.tokenizers.byte_level_bpe import FastByteLevelBPE, NotIdentical
from megalite.data.tokenizers.files import fingerprint, read_tokenizer_file
from megalite.data.tokenizers.folder import read_folder
from megalite.data.tokenizers.interface import Ids
from megalite.data.tokenizers.library_errors import library_errors
from megalite.data.tokenizers.tokenizer_json import open_tokenizer_json
from megalite.errors import ConfigurationError, DataError
from megalite.small_files import parse_json

END_OF_TEXT = "<|endoftext|>"
# End-of-document tokens to look for if no configuration file names one.
USUAL_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")


class HuggingFaceTokenizer:
    """Tokenizer of the `tokenizers` library, made by `load_tokenizer_json` or `load_gpt2`.

    Args:
        tokenizer: the `tokenizers.Tokenizer`, which neither cuts nor pads texts.
        eod: the token that ends a document.
        identity: the result of `identity`, without the number of tokens and the end of a document.
        source: the file or files, for messages.
        include_special_tokens: in `encode_documents`, add the special tokens of the vocabulary's own template around
            each text, such as a token for the beginning.
        fast_encoding: use tiktoken in `encode_documents`. "auto": if the tokens are the same; "off": never; "require":
            always, with an error if the tokens could differ.

    Raises:
        DataError: two tokens have one id. Every method raises it, too, if the library fails.
    """

    def __init__(
        self,
        tokenizer: Any,
        eod: int,
        identity: dict[str, Any],
        source: str,
        include_special_tokens: bool = True,
        fast_encoding: FastEncoding = "auto",
    ) -> None:
        ordinary = tokenizer.get_vocab(with_added_tokens=False)
        if len(set(ordinary.values())) < len(ordinary):
            raise DataError(f"two tokens of the {identity['type']} have the same id: its file is damaged")
        self._tokenizer = tokenizer
        self.eod = eod
        self._identity = identity
        self._fails = f"Hugging Face's tokenizers fails with {source}: copy it again or save it with transformers"
        self._include_special_tokens, self._fast_encoding = include_special_tokens, fast_encoding
        # The largest id plus 1, not the number of tokens: ids may have gaps.
        self.vocab_size: int = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        with library_errors(self._fails):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        """Return the tokens of a text and their characters."""
        with library_errors(self._fails):
            encoding = self._untrimmed.encode(text, add_special_tokens=False)
        return encoding.ids, np.array(encoding.offsets, np.int64).reshape(-1, 2)

    @cached_property
    def _untrimmed(self) -> Any:
        """Tokenizer without post-processing, which in some files excludes spaces from the offsets."""
        description = json.loads(self._tokenizer.to_str()) | {"post_processor": None}
        untrimmed = type(self._tokenizer).from_str(json.dumps(description))
        untrimmed.encode_special_tokens = self._tokenizer.encode_special_tokens  # no part of the description
        return untrimmed

    def encode_documents(self, texts: Sequence[str]) -> Sequence[Ids]:
        special = self._include_special_tokens
        with library_errors(self._fails):
            if self.fast is not None:
                return self.fast.encode_documents(texts)
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
        return [encoding.ids for encoding in encodings]

    @cached_property
    def fast(self) -> FastByteLevelBPE | None:
        """Fast encoder, or None if it could give other tokens.

        Raises:
            ConfigurationError: it is required and could give other tokens, or tiktoken is not installed.
        """
        if self._fast_encoding == "off":
            return None
        try:
            return FastByteLevelBPE(self._tokenizer, self._include_special_tokens)
        except NotIdentical as error:
            if self._fast_encoding == "require":
                raise ConfigurationError(
                    f"--fast-encoding require: tiktoken may not give this vocabulary's tokens: {error}"
                ) from error
        except ConfigurationError:
            if self._fast_encoding == "require":
                raise
        return None

    def token_id(self, name: str) -> int | None:
        """Return the token with this spelling in the vocabulary; None if there is none."""
        return self._tokenizer.token_to_id(name)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        with library_errors(self._fails):
            return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)

    def byte_lengths(self) -> np.ndarray | None:
        with library_errors(self._fails):
            return byte_lengths(self._tokenizer)

    def identity(self) -> dict[str, Any]:
        """Return the identity: the hash of the vocabulary file, the number of tokens, and the end of a document."""
        return self._identity | {"vocab_size": self.vocab_size, "eod": self.eod}


def load_tokenizer_json(path: str, include_special_tokens: bool, fast_encoding: FastEncoding) -> HuggingFaceTokenizer:
    """Load a `tokenizer.json`, given by its path or its folder, with the tokens that the files beside it declare.

    The end of a document is named in these files, such as tokenizer_config.json.

    Raises:
        DataError: it cannot be read, or can make texts far too long, the files beside it have what cannot be applied,
            or it is not clear which token ends a document.
    """
    tokenizers = _tokenizers("HuggingFaceTokenizer")
    folder = Path(path) if Path(path).is_dir() else None
    file = folder / "tokenizer.json" if folder else Path(path)
    what = "a tokenizer.json or its folder, on this machine (nothing is downloaded)"
    content = read_tokenizer_file(file, "--tokenizer-model", what, folder)
    beside = read_folder(file.parent)
    tokenizer = open_tokenizer_json(tokenizers, content, file, beside.size)
    identity = {"type": "HuggingFaceTokenizer", "model_sha256": fingerprint(content)}
    with library_errors(f"{file} does not encode, with the tokens of the files beside it"):
        identity |= beside.apply(tokenizer, tokenizers.AddedToken)
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    ends = [name for name in USUAL_ENDS if name in added] if beside.end is None else [beside.end]
    if len(ends) != 1 or tokenizer.token_to_id(ends[0]) is None:
        found = f"{' and '.join(ends)} could be it" if ends else "none of its special tokens is a usual one"
        raise DataError(
            f"{file} does not say which token ends a document ({found}): put a tokenizer_config.json next to it, with "
            f'{{"eos_token": "{END_OF_TEXT}"}} or another one'
        )
    eod = tokenizer.token_to_id(ends[0])
    return HuggingFaceTokenizer(tokenizer, eod, identity, str(file), include_special_tokens, fast_encoding)


def load_gpt2(vocab_file: str, merge_file: str, fast_encoding: FastEncoding) -> HuggingFaceTokenizer:
    """Load a vocabulary from GPT-2's two files. Documents end with <|endoftext|>; no token is added before them.

    Raises:
        DataError: a file cannot be read, or has wrong contents.
    """
    tokenizers = _tokenizers("GPT2BPETokenizer")
    vocabulary = read_tokenizer_file(vocab_file, "--vocab-file", "the vocab.json of a byte-level BPE")
    merges = read_tokenizer_file(merge_file, "--merge-file", "the merges.txt of a byte-level BPE")
    files = f"{vocab_file} and {merge_file}"
    with library_errors(f"{files} are not vocab.json and merges.txt of a BPE"):
        ids = parse_json(vocabulary)
        lines = [line for line in merges.decode().split("\n") if line and not line.startswith("#version")]
        model = tokenizers.models.BPE(vocab=ids, merges=[tuple(line.split(" ")) for line in lines])
    if END_OF_TEXT not in ids:
        raise DataError(f"{vocab_file} has no {END_OF_TEXT}, which ends documents")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    identity = {"type": "GPT2BPETokenizer", "model_sha256": fingerprint(vocabulary, merges)}
    return HuggingFaceTokenizer(tokenizer, ids[END_OF_TEXT], identity, files, False, fast_encoding)


def _tokenizers(tokenizer_type: str) -> Any:
    return optional_import(
        "tokenizers", "tokenizers", f"--tokenizer-type {tokenizer_type} reads its files with a library"
    )
