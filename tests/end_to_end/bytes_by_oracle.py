"""Texts whose bytes are the tokens: the oracle's log-probabilities in windows, and a tokenizer for Hugging Face."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from torch import Tensor

from tests.oracle import Oracle, Weights

LLAMA = Oracle(normalization="RMSNorm", activation="swiglu", position_embedding_type="rope")
EOD = 256


def next_scores(oracle: Oracle, weights: Weights, tokens: Sequence[int]) -> Tensor:
    """Return the log-probabilities `[tokens, vocabulary]` of the token after each token."""
    read = torch.tensor([tokens])
    return oracle.logits(weights, read, torch.arange(len(tokens))[None])[0, :, : EOD + 1].log_softmax(-1)


def log_probabilities(oracle: Oracle, weights: Weights, text: str, length: int, stride: int) -> list[float]:
    """Return the log-probability of each byte of a document, after an end of document, within its window."""
    tokens, found, read_to = [EOD, *text.encode()], [], 0
    for place in range(1, len(tokens)):
        windows = max(math.ceil((place - length) / stride), 0)  # windows before the one that predicts it
        end = min(length + windows * stride, len(tokens) - 1)  # end of the tokens that this window reads
        begin = max(end - length, 0)
        if end > read_to:
            scores, read_to = next_scores(oracle, weights, tokens[begin:end]), end
        found.append(scores[place - 1 - begin, tokens[place]].item())
    return found


def write_byte_tokenizer(folder: Path) -> None:
    """Write a ByteTokenizer in Hugging Face's format: GPT-2's characters for bytes, without merges."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    vocabulary = {character: byte for byte, character in characters.items()} | {"<|endoftext|>": EOD}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
