"""Vocabularies of ranked bytes: Megatron-LM's `TikTokenizer`, through the tiktoken library.

The file is Megatron-LM's JSON, a list of {"rank", "token_bytes" (base64), "token_str"}, whose ranks follow the special
tokens: these are <unk>, <s>, </s>, <mask>, <pad>, <cls>, <sep> (or those of --tokenizer-special-tokens, which must hold
them) and <SPECIAL_7> and so on up to --tiktoken-num-special-tokens. Documents end with </s>. Or it is a plain .tiktoken
file, base64 and rank on each line, whose ranks are the tokens: its special tokens, <|endoftext|> unless others are
given, follow the last rank, and documents end with the first of them.

As in Megatron-LM's core, special tokens that are spelled out in a text are recognized in it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from megalite.data.optional import optional_import
from megalite.data.tokenizers.byte_level_bpe import GPT2_PATTERN, LLAMA3_PATTERN, LOWER, UPPER
from megalite.data.tokenizers.files import LARGEST_VOCABULARY, fingerprint, read_tokenizer_file
from megalite.data.tokenizers.interface import Ids, character_offsets
from megalite.errors import ConfigurationError, DataError
from megalite.small_files import parse_json, reason

PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt2": GPT2_PATTERN,
    "cl100k": LLAMA3_PATTERN,
}
"""Regular expressions that cut words: Megatron-LM's two under their names there, and two of published vocabularies."""
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
MEGATRON_VOCABULARY = 1 << 17


class TikTokenizer:
    """Vocabulary of ranked bytes.

    Args:
        path: the file, .json or .tiktoken.
        pattern: one of `PATTERNS`, or a regular expression.
        num_special_tokens: special tokens of a .json file.
        special_tokens: their names; if empty, the default names above.
        vocab_size: the tokens to take of a .json file, special ones included; None: all, but at most 2^17, as in
            Megatron-LM.

    Raises:
        DataError: the file cannot be read.
        ConfigurationError: the numbers do not fit each other.
    """

    def __init__(
        self,
        path: str,
        pattern: str = "v2",
        num_special_tokens: int = 1000,
        special_tokens: Sequence[str] = (),
        vocab_size: int | None = None,
    ) -> None:
        tiktoken = optional_import("tiktoken", "tiktoken>=0.9", "--tokenizer-type TikTokenizer")
        content = read_tokenizer_file(path, "--tokenizer-model", "a .json or .tiktoken file of ranks")
        try:
            is_json = content.lstrip()[:1] == b"["
            ranks = _json_ranks(content) if is_json else _plain_ranks(content)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} is neither Megatron-LM's JSON of ranks nor a .tiktoken file ({reason(error)})"
            ) from error
        if is_json:
            ordinary = (vocab_size or min(MEGATRON_VOCABULARY, len(ranks) + num_special_tokens)) - num_special_tokens
            if not 256 <= ordinary <= len(ranks):
                raise ConfigurationError(
                    f"--vocab-size {ordinary + num_special_tokens} less --tiktoken-num-special-tokens "
                    f"{num_special_tokens} is not from 256 to the {len(ranks)} tokens of {path}"
                )
            self._special = _special_before(special_tokens or SPECIAL_TOKENS, num_special_tokens)
            ranks = {token: rank + num_special_tokens for token, rank in ranks.items() if rank < ordinary}
            self.eod = self._special["</s>"]
        else:
            first = max(ranks.values()) + 1
            names = special_tokens or ("<|endoftext|>",)
            self._special = {name: first + i for i, name in enumerate(names)}
            self.eod = first
        self.vocab_size = 1 + max(*ranks.values(), *self._special.values())
        if vocab_size not in (None, self.vocab_size):
            raise ConfigurationError(
                f"--vocab-size {vocab_size}, but {path} has {self.vocab_size} tokens: leave it out"
            )
        self._pattern = PATTERNS.get(pattern, pattern)
        try:
            self._encoding = tiktoken.Encoding(
                "", pat_str=self._pattern, mergeable_ranks=ranks, special_tokens=self._special
            )
        except ValueError as error:
            names = ", ".join(PATTERNS)
            raise ConfigurationError(
                f"--tiktoken-pattern {pattern} is none of {names} and no regular expression ({error})"
            ) from error
        self._special_ids = frozenset(self._special.values())
        self._content = fingerprint(content)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ids: list[int] = self._encoding.encode(text, allowed_special="all")
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        """The tokens of a text and their characters."""
        ids = self.encode(text)
        ends = np.cumsum([len(token) for token in self._encoding.decode_tokens_bytes(ids)], dtype=np.int64)
        return ids, character_offsets(text, np.concatenate([[0], ends[:-1]])[: len(ids)], ends)

    def encode_documents(self, texts: Sequence[str]) -> list[Ids]:
        """The tokens of texts."""
        return [self._encoding.encode_to_numpy(text, allowed_special="all") for text in texts]

    def token_id(self, name: str) -> int | None:
        """Return the special token of a name, or the token of a text that is a single token."""
        try:
            return self._encoding.encode_single_token(name)
        except KeyError:
            return None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        text: str = self._encoding.decode([int(token) for token in ids if int(token) not in self._special_ids])
        return text

    def identity(self) -> dict[str, Any]:
        """Return the identity: the file's hash, the expression and the special tokens."""
        return {
            "type": "TikTokenizer",
            "model_sha256": self._content,
            "pattern": self._pattern,
            "special_tokens_sha256": fingerprint(json.dumps(self._special).encode()),
            "vocab_size": self.vocab_size,
        }


def _json_ranks(content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for rank, entry in enumerate(parse_json(content)):
        if entry["rank"] != rank:
            raise ValueError(f"entry {rank} has the rank {entry['rank']}")
        ranks[base64.b64decode(entry["token_bytes"])] = rank
    return _complete(ranks)


def _plain_ranks(content: bytes) -> dict[bytes, int]:
    pairs = (line.split() for line in content.splitlines() if line)
    return _complete({base64.b64decode(token, validate=True): int(rank) for token, rank in pairs})


def _complete(ranks: dict[bytes, int]) -> dict[bytes, int]:
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"{len(missing)} of the 256 bytes have no rank")
    if not 0 <= min(ranks.values()) <= max(ranks.values()) < LARGEST_VOCABULARY:
        raise ValueError(f"ranks from {min(ranks.values())} to {max(ranks.values())}")
    if len(set(ranks.values())) != len(ranks):
        raise ValueError("two tokens have one rank")
    return ranks


def _special_before(names: Sequence[str], count: int) -> dict[str, int]:
    if not set(SPECIAL_TOKENS) <= set(names) or len(set(names)) != len(names):
        raise ConfigurationError(f"--tokenizer-special-tokens must hold each of {' '.join(SPECIAL_TOKENS)} once")
    if not len(names) <= count < LARGEST_VOCABULARY:
        raise ConfigurationError(
            f"--tiktoken-num-special-tokens {count} is not from the {len(names)} special tokens to {LARGEST_VOCABULARY}"
        )
    return {name: i for i, name in enumerate([*names, *(f"<SPECIAL_{i}>" for i in range(len(names), count))])}
