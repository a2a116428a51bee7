"""What the oracle says of texts whose bytes are the tokens, in windows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.oracle import Oracle, Weights

LLAMA = Oracle(normalization="RMSNorm", activation="swiglu", position_embedding_type="rope")
EOD = 256


def next_scores(oracle: Oracle, weights: Weights, tokens: Sequence[int]) -> Tensor:
    """The log-probabilities `[tokens, vocabulary]` of what comes after each token."""
    read = torch.tensor([tokens])
    return oracle.logits(weights, read, torch.arange(len(tokens))[None])[0, :, : EOD + 1].log_softmax(-1)


def log_probabilities(oracle: Oracle, weights: Weights, text: str, length: int, stride: int) -> list[float]:
    """Of each byte of a document, after the end of the one before and as much as its window has."""
    tokens, found, read_to = [EOD, *text.encode()], [], 0
    for place in range(1, len(tokens)):
        windows = max(math.ceil((place - length) / stride), 0)  # before the one that predicts it
        end = min(length + windows * stride, len(tokens) - 1)  # of what that one reads
        begin = max(end - length, 0)
        if end > read_to:
            scores, read_to = next_scores(oracle, weights, tokens[begin:end]), end
        found.append(scores[place - 1 - begin, tokens[place]].item())
    return found
