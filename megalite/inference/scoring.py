"""Scores of documents by a model, on any layout.

Documents are split into windows that the model can read, and each of their tokens is predicted exactly once.
Data-parallel ranks share the windows, and all get every result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megalite.inference.network import Network, score_tokens
from megalite.parallel import collectives


class Window(NamedTuple):
    """Consecutive tokens of a document: the model reads all but the last, and predicts all but the first.

    Attributes:
        tokens: [inputs + 1], integers of any type.
        counted: number of predictions that count: the last ones. The others are an earlier window's, or context.
    """

    tokens: np.ndarray
    counted: int


def sliding_windows(document: np.ndarray, context: Sequence[int], length: int, stride: int) -> Iterator[Window]:
    """Yield the windows of a document; none if it has no tokens.

    The first window predicts as much as fits, each later one `stride` more tokens, and the last one the rest. All but
    the first window are full, so that the tokens that they predict have as much context as possible.

    Args:
        document: [tokens].
        context: tokens before the document, at least one; they are not predicted.
        length: tokens that the model reads at once, more than the context has.
        stride: from 1 to `length`; with `length`, each window but the last begins with the last token of the one
            before.
    """
    size, predicted = len(document), 0
    while predicted < size:
        end = min(size, predicted + stride if predicted else length - len(context) + 1)
        start = end - length - 1
        tokens = document[max(start, 0) : end]
        if start < 0:
            tokens = np.concatenate([np.array(context[start:], document.dtype), tokens])
        yield Window(tokens, end - predicted)
        predicted = end


def batches(windows: Sequence[Window], size: int) -> list[list[int]]:
    """Return the numbers of the windows in batches of up to `size`, the longest windows first.

    So windows of a batch are about equally long, and a batch that does not fit into memory fails at once.
    """
    order = sorted(range(len(windows)), key=lambda number: -len(windows[number].tokens))
    return [order[first : first + size] for first in range(0, len(order), size)]


@dataclass(frozen=True)
class Score:
    """Score of the predictions of a window that count."""

    log_probability: float
    """The sum, natural."""
    greedy: bool
    """True if each token is the likeliest one there."""


def score_windows(
    network: Network,
    windows: Sequence[Window],
    micro_batch_size: int,
    advance: Callable[[int], None] = lambda tokens: None,
) -> list[Score]:
    """Return the score of each window, the same for every layout and `micro_batch_size` (windows per forward).

    All ranks call it with the same windows. `advance` is called with the number of tokens predicted.
    """
    mesh = network.mesh
    found = torch.zeros(len(windows), 2, dtype=torch.float64, device=mesh.device)
    for number, rows in enumerate(batches(windows, micro_batch_size * mesh.size("pp"))):
        if number % mesh.size("dp") == mesh.coordinate("dp"):
            found[rows] = _score_batch(network, [windows[row] for row in rows])
        advance(sum(windows[row].counted for row in rows))
    sums, others = collectives.all_reduce_(found, mesh.group("dp")).t().tolist()
    return [Score(total, greedy=not count) for total, count in zip(sums, others, strict=True)]


def _score_batch(network: Network, windows: Sequence[Window]) -> Tensor:
    """Return [windows, 2] fp64: the sum of the log-probabilities, and how many tokens are not the likeliest."""
    lengths = torch.tensor([len(window.tokens) for window in windows])
    tokens = torch.zeros(len(windows), int(lengths.max()), dtype=torch.int64)
    for row, window in zip(tokens, windows, strict=True):
        row[: len(window.tokens)] = torch.from_numpy(window.tokens.astype("int64"))
    # Column c predicts token c + 1.
    columns, counted = torch.arange(1, tokens.shape[1]), torch.tensor([window.counted for window in windows])
    outside = (columns >= lengths.unsqueeze(1)) | (columns < (lengths - counted).unsqueeze(1))
    scores, outside = score_tokens(network, tokens), outside.to(network.mesh.device)
    others = scores.likeliest != tokens[:, 1:].to(scores.likeliest.device)
    values = torch.stack([scores.log_probabilities.double(), others.double()], dim=-1)
    return values.masked_fill(outside.unsqueeze(-1), 0.0).sum(dim=1)
