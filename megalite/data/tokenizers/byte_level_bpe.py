"""Faster encoding for byte-level BPE vocabularies of Hugging Face's `tokenizers`: tiktoken with converted merges.

Both libraries merge neighbours until no rule applies, the best rule first and the leftmost place first. They differ in
their rules. In `tokenizers`, a rule is a pair of tokens. In tiktoken, any two neighbours can merge if their bytes
together are a token. The results are equal if every token can be made in one way only, because then no other two parts
of it are ever neighbours. Two conditions ensure this:

- The rules that make a token follow each other in the list, after the rules that make their parts (checked here).
- These rules merge the bytes of the token, without other text, into the token (checked with the library itself).

A rule that comes before the rules of its parts then never applies. If its bytes do not merge into a token, the token is
never the result of a merge. Such a token is left out, unless the vocabulary first looks up entire words
(`ignore_merges`). In that case its bytes must not merge into exactly two tokens. By induction over the list, every text
is in the same state after each rule in both libraries.

Only known regular expressions that cut words are accepted. The two libraries may still put a character into different
classes, since they follow different versions of Unicode. Texts with such characters, and texts that contain an added
token, are encoded by `tokenizers`. The tokens are therefore always those of `tokenizers`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from megalite.data.optional import optional_import
from megalite.data.tokenizers.interface import Ids

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
# Code points above this one are not compared: texts with them take the slow path. Unicode has few characters there.
LAST_COMPARED = 0x3FFFF
PATTERNS = {
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    LLAMA3_PATTERN.replace("{1,3}", ""),  # Qwen's
    *(  # with and without contractions, and with single digits or groups of digits: GPT-4o, Mistral and others
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{tail}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{tail}|"
        rf"\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
        for tail in ("", _CONTRACTIONS + "?")
        for digits in ("", "{1,3}")
    ),
}
"""Expressions that match every character and mean the same in both libraries, except for the classes of characters."""


class NotIdentical(ValueError):
    """Error with the reason why tiktoken could give other tokens."""


class FastByteLevelBPE:
    """Encoder that gives the same tokens as a `tokenizers.Tokenizer`.

    Args:
        tokenizer: the tokenizer.
        add_special_tokens: the argument of `tokenizer.encode_batch`.

    Raises:
        NotIdentical: some text could get other tokens.
        ConfigurationError: tiktoken is not installed.
    """

    def __init__(self, tokenizer: Any, add_special_tokens: bool) -> None:
        tiktoken = optional_import("tiktoken", "tiktoken>=0.9", "the fast encoder")
        self._tokenizer, self._add_special_tokens = tokenizer, add_special_tokens
        description = json.loads(tokenizer.to_str())
        pattern = _pattern(description)
        _check_normalizer(description)
        self._before, self._after = _surroundings(tokenizer, description, add_special_tokens)
        tokens = _reachable(description)
        self._ids = np.array([description["model"]["vocab"][token] for token in tokens], np.int32)
        ranks = {bytes(map(_BYTE_OF.__getitem__, token)): rank for rank, token in enumerate(tokens)}
        self._encoding = tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        self._disputed = _disputed(pattern, tiktoken).search
        spelled_out = "|".join(re.escape(token["content"]) for token in description["added_tokens"])
        self._added = re.compile(spelled_out).search if spelled_out else None

    def encode_documents(self, texts: Sequence[str]) -> list[Ids]:
        found = [self._encode(text) for text in texts]
        rest = [text for text, ids in zip(texts, found, strict=True) if ids is None]
        slow = self._tokenizer.encode_batch_fast(rest, add_special_tokens=self._add_special_tokens) if rest else []
        others = iter(slow)
        return [next(others).ids if ids is None else ids for ids in found]

    def _encode(self, text: str) -> np.ndarray | None:
        """Return the tokens of a text, or None if only the tokenizer itself can encode it."""
        if self._is_slow(text):
            return None
        if self._tokenizer.normalizer is not None and not text.isascii():
            text = self._tokenizer.normalizer.normalize_str(text)
            if self._is_slow(text):
                return None
        try:
            ranks = self._encoding.encode_to_numpy(text, disallowed_special=())
        except BaseException as error:
            # The stack of the regular expression engine is finite. Some versions then panic: a PanicException is not
            # an Exception.
            if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
                raise
            return None
        ids = self._ids[ranks]
        return np.concatenate([self._before, ids, self._after]) if len(self._before) + len(self._after) else ids

    def _is_slow(self, text: str) -> bool:
        added = self._added is not None and self._added(text) is not None
        return added or (not text.isascii() and self._disputed(text) is not None)


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary.

    A byte that is printable Latin-1 is written as itself; the others are written as characters from U+0100 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _pattern(description: dict[str, Any]) -> str:
    """Return the regular expression that cuts words."""
    pre = description["pre_tokenizer"] or {}
    steps = pre["pretokenizers"] if pre.get("type") == "Sequence" else [pre]
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise NotIdentical("it does not split words as a byte-level vocabulary without a leading space does")
    if len(steps) == 1 and last["use_regex"]:
        return GPT2_PATTERN
    if len(steps) == 2 and steps[0]["type"] == "Split" and not last["use_regex"]:
        split = steps[0]
        pattern: str = split["pattern"].get("Regex", "")
        if split["behavior"] == "Isolated" and not split["invert"] and pattern in PATTERNS:
            return pattern
    raise NotIdentical("the regular expression that splits its words is not a known one")


def _check_normalizer(description: dict[str, Any]) -> None:
    normalizer = description["normalizer"]
    if normalizer is None:
        return
    if normalizer["type"] not in ("NFC", "NFKC", "NFD", "NFKD"):
        raise NotIdentical(f"it changes texts by {normalizer['type']}")
    if any(token["normalized"] for token in description["added_tokens"]):
        raise NotIdentical("it looks for added tokens in the normalized text")


def _surroundings(tokenizer: Any, description: dict[str, Any], special: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that are added before and after each text."""
    post = description["post_processor"]
    steps = post["processors"] if post and post["type"] == "Sequence" else [post] if post else []
    if any(step["type"] not in ("ByteLevel", "TemplateProcessing") for step in steps):
        raise NotIdentical(f"it changes tokens by {', '.join(step['type'] for step in steps)}")
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=special).ids
    places = [i for i in range(len(whole)) if whole[i : i + len(plain)] == plain]
    if len(places) != 1:
        raise NotIdentical("it puts text tokens around each text")
    return np.array(whole[: places[0]], np.int32), np.array(whole[places[0] + len(plain) :], np.int32)


def _reachable(description: dict[str, Any]) -> list[str]:
    """Return the tokens of the tiktoken vocabulary, best first."""
    model = description["model"]
    if model["type"] != "BPE" or any(
        model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    ):
        raise NotIdentical("its model is not plain byte-pair encoding")
    vocabulary = model["vocab"]
    if missing := [byte for byte in _BYTE_OF if byte not in vocabulary]:
        raise NotIdentical(f"{len(missing)} of the 256 bytes are not in its vocabulary")
    order, merges, late = _in_order(model["merges"])
    bytes_alone = (token for token in vocabulary if token and _BYTE_OF.keys() >= set(token))
    candidates = list(order | dict.fromkeys(bytes_alone))
    alone = _merged_alone(description, merges, candidates)
    if unclear := [token for token in candidates if alone[token] > 1 and token in late]:
        raise NotIdentical(f"a merge that makes {unclear[0]!r} comes before those of its parts")
    if not model.get("ignore_merges"):
        return [token for token in candidates if alone[token] == 1]
    if unclear := [token for token in candidates if alone[token] == 2]:
        raise NotIdentical(f"the token {unclear[0]!r} is two others that do not merge")
    return candidates


def _in_order(merges: list[Any]) -> tuple[dict[str, None], list[Any], set[str]]:
    """Sort the merges into those that can apply and those that come too early.

    Returns:
        order: the tokens in the order in which merges make them, bytes first.
        kept: the merges that come after the merges of their parts.
        late: the tokens that the other merges make.
    """
    order = dict.fromkeys(_BYTE_OF)
    kept, late = list[Any](), set[str]()
    latest = ""
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        made = left + right
        if left not in order or right not in order:
            late.add(made)
            continue
        if made != latest and made in order:
            raise NotIdentical(f"the merges that make {made!r} do not follow each other")
        kept.append(merge)
        order[made] = None
        latest = made
    return order, kept, late


def _merged_alone(description: dict[str, Any], merges: list[Any], tokens: list[str]) -> dict[str, int]:
    """Return, for each token, the number of tokens that its bytes merge into, computed by the library itself."""
    tokenizers = optional_import("tokenizers", "tokenizers", "the fast encoder")
    bare = description | {"pre_tokenizer": None, "normalizer": None, "post_processor": None, "added_tokens": []}
    bare["model"] = description["model"] | {"ignore_merges": False, "merges": merges}
    bare |= {"truncation": None, "padding": None}
    encoded = tokenizers.Tokenizer.from_str(json.dumps(bare)).encode_batch_fast(tokens, add_special_tokens=False)
    return {token: len(encoding.ids) for token, encoding in zip(tokens, encoded, strict=True)}


def _disputed(pattern: str, tiktoken: Any) -> re.Pattern[str]:
    """Return a pattern that matches the characters which the two libraries may put into different classes."""
    tokenizers = optional_import("tokenizers", "tokenizers", "the fast encoder")
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, LAST_COMPARED + 1)]))
    bytes_alone = {bytes([byte]): byte for byte in range(256)}
    disputed: set[str] = set()
    for characters in sorted({*re.findall(r"\\p\{\w+\}|\\s", pattern), "(?i:[sdmtlver])"}):
        encoding = tiktoken.Encoding("", pat_str=characters, mergeable_ranks=bytes_alone, special_tokens={})
        matched = bytes(encoding.encode_ordinary(everything)).decode()
        expected = everything.translate(dict.fromkeys(map(ord, matched)))
        rest = tokenizers.normalizers.Replace(tokenizers.Regex(characters), "").normalize_str(everything)
        if rest != expected:
            disputed |= set(rest) ^ set(expected)
    return re.compile(f"[{re.escape(''.join(sorted(disputed)))}{chr(LAST_COMPARED + 1)}-{chr(sys.maxunicode)}]")
