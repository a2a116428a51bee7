"""Vocabularies of ranked byte strings: Megatron-LM's `TikTokenizer`, with the tiktoken library.

The file has one of two formats:

- Megatron-LM's JSON: a list of {"rank", "token_bytes" (base64), "token_str"}. The special tokens come first: <unk>,
  <s>, </s>, <mask>, <pad>, <cls>, <sep> (or those of --tokenizer-special-tokens, which must include these), then
  <SPECIAL_7> and so on, up to --tiktoken-num-special-tokens tokens. The ranks follow. Documents end with </s>.
- A plain .tiktoken file: base64 and rank on each line. The ranks are the tokens. The file does not say which special
  tokens there are, so they are given as NAME=ID. Without any, they are those of `PUBLISHED`, if the file is one of
  these, and otherwise <|endoftext|>, after the last rank. Documents end with the first of them.

As in Megatron Core, a text that contains the name of a special token is encoded with this token.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megalite.config.tokenizer import TokenizerFlags
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
"""Regular expressions that cut words: Megatron-LM's two, with their names there, and two of published vocabularies."""
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
MEGATRON_VOCABULARY = 1 << 17
END_OF_TEXT = "<|endoftext|>"
_OF_LLAMA_3 = ("end_of_text", 1), ("begin_of_text", 0), ("start_header_id", 6), ("end_header_id", 7), ("eot_id", 9)
_OF_CL100K = ("endoftext", 1), ("fim_prefix", 2), ("fim_middle", 3), ("fim_suffix", 4), ("endofprompt", 20)
PUBLISHED: Mapping[tuple[int, int], Mapping[str, int]] = {
    (50_256, 50_255): {END_OF_TEXT: 50_256},  # r50k, of GPT-2 and GPT-3
    (50_280, 50_280): {END_OF_TEXT: 50_256},  # p50k, whose ranks leave out this number
    (100_256, 100_255): {f"<|{name}|>": 100_256 + place for name, place in _OF_CL100K},
    (128_000, 127_999): {f"<|{name}|>": 128_000 + place for name, place in _OF_LLAMA_3},
    (199_998, 199_997): {END_OF_TEXT: 199_999, "<|endofprompt|>": 200_018},  # o200k
}
"""Special tokens of published .tiktoken files, by the number of ranks and the last rank; the first ends documents."""


class TikTokenizer:
    """Tokenizer with a vocabulary of ranked byte strings.

    Args:
        path: the file, in either format.
        flags: `tiktoken_pattern` is a name in `PATTERNS` or a regular expression; `tiktoken_num_special_tokens` is for
            a .json file; without `tokenizer_special_tokens`, special tokens have their default names.
        vocab_size: number of tokens to use of a .json file, including special tokens; None: all, but at most 2^17, as
            in Megatron-LM. A plain file has a fixed number.

    Raises:
        DataError: the file cannot be read.
        ConfigurationError: the numbers contradict each other or the file, or the pattern is not valid.
    """

    def __init__(self, path: str, flags: TokenizerFlags, vocab_size: int | None) -> None:
        num_special_tokens, special_tokens = flags.tiktoken_num_special_tokens, flags.tokenizer_special_tokens
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
                    f"--vocab-size {ordinary + num_special_tokens} minus --tiktoken-num-special-tokens "
                    f"{num_special_tokens} is not from 256 to the {len(ranks)} tokens of {path}"
                )
            self._special: Mapping[str, int] = _special_before(special_tokens or SPECIAL_TOKENS, num_special_tokens)
            ranks = {token: rank + num_special_tokens for token, rank in ranks.items() if rank < ordinary}
            self.eod = self._special["</s>"]
        else:
            self._special = _special_after(ranks, special_tokens, path)
            self.eod = next(iter(self._special.values()))
        self.vocab_size = 1 + max(*ranks.values(), *self._special.values())
        if is_json and vocab_size not in (None, self.vocab_size):
            raise ConfigurationError(
                f"--vocab-size {vocab_size}, but {path} has {self.vocab_size} tokens: leave it out"
            )
        self._pattern = PATTERNS.get(flags.tiktoken_pattern, flags.tiktoken_pattern)
        try:
            self._encoding = tiktoken.Encoding(
                "", pat_str=self._pattern, mergeable_ranks=ranks, special_tokens=dict(self._special)
            )
        except ValueError as error:
            known = ", ".join(PATTERNS)
            raise ConfigurationError(
                f"--tiktoken-pattern {flags.tiktoken_pattern} is not one of {known}, and not a regular expression "
                f"({error})"
            ) from error
        self._with_text = frozenset(ranks.values())  # numbers between special tokens may be none
        self._content = fingerprint(content)

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode(text, allowed_special="all")

    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        """Return the tokens of a text and their characters."""
        ids = self.encode(text)
        ends = np.cumsum([len(token) for token in self._encoding.decode_tokens_bytes(ids)], dtype=np.int64)
        return ids, character_offsets(text, np.concatenate([[0], ends[:-1]])[: len(ids)], ends)

    def encode_documents(self, texts: Sequence[str]) -> list[Ids]:
        return [self._encoding.encode_to_numpy(text, allowed_special="all") for text in texts]

    def token_id(self, name: str) -> int | None:
        """Return the special token with this name, or the token that is this text; None if there is none."""
        try:
            return self._encoding.encode_single_token(name)
        except KeyError:
            return None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens and numbers that no token has."""
        return self._encoding.decode([int(token) for token in ids if int(token) in self._with_text])

    def byte_lengths(self) -> np.ndarray:
        lengths = np.zeros(self.vocab_size, np.int64)
        tokens = sorted(self._with_text)
        lengths[tokens] = [len(token) for token in self._encoding.decode_tokens_bytes(tokens)]
        return lengths

    def identity(self) -> dict[str, Any]:
        """Return the identity: the file's hash, the regular expression, the special tokens and the number of tokens."""
        return {
            "type": "TikTokenizer",
            "model_sha256": self._content,
            "pattern": self._pattern,
            "special_tokens_sha256": fingerprint(json.dumps(dict(self._special)).encode()),
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
        raise ValueError("two tokens have the same rank")
    return ranks


def _special_before(names: Sequence[str], count: int) -> dict[str, int]:
    if not set(SPECIAL_TOKENS) <= set(names) or len(set(names)) != len(names):
        raise ConfigurationError(f"--tokenizer-special-tokens must have each of {' '.join(SPECIAL_TOKENS)} once")
    if not len(names) <= count < LARGEST_VOCABULARY:
        raise ConfigurationError(
            f"--tiktoken-num-special-tokens {count} is not from the {len(names)} special tokens to {LARGEST_VOCABULARY}"
        )
    return {name: i for i, name in enumerate([*names, *(f"<SPECIAL_{i}>" for i in range(len(names), count))])}


def _special_after(ranks: Mapping[bytes, int], given: Sequence[str], path: str) -> Mapping[str, int]:
    """Return the special tokens of a plain file."""
    last = max(ranks.values())
    if not given:
        return PUBLISHED.get((len(ranks), last), {END_OF_TEXT: last + 1})
    pairs = [name.rpartition("=") for name in given]
    if not all(name and number.isascii() and number.isdigit() and len(number) < 10 for name, _, number in pairs):
        published = PUBLISHED.get((len(ranks), last), {})
        numbers = {name: published.get(name, last + 1 + i) for i, name in enumerate(given)}
        example = " ".join(f"'{name}={number}'" for name, number in numbers.items() if "=" not in name)
        whose = "published ones" if published.keys() >= set(given) else "numbers after the last rank"
        raise ConfigurationError(
            f"--tokenizer-special-tokens: {path} does not say the numbers of special tokens: give NAME=ID for each, "
            f"such as {example or END_OF_TEXT + f'={last + 1}'} ({whose})"
        )
    special = {name: int(number) for name, _, number in pairs}
    taken = set(ranks.values())
    if len(set(special.values())) < len(given):
        raise ConfigurationError("--tokenizer-special-tokens has a name or a number twice")
    for name, number in special.items():
        if number in taken or number >= LARGEST_VOCABULARY:
            why = "is the rank of another token" if number in taken else f"is not below {LARGEST_VOCABULARY}"
            raise ConfigurationError(f"--tokenizer-special-tokens {name}={number}: {number} {why} of {path}")
    return special
