"""Scores of documents under a model, on any layout.

Documents are divided into windows that the model can read at once. Each token is predicted exactly once. The
data-parallel ranks divide the windows among themselves, and all of them get all results.
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
    """Consecutive tokens of a document. The model reads all but the last one, and predicts all but the first one.

    Attributes:
        tokens: [inputs + 1], with any integer dtype.
        counted: number of predictions that count, at the end of the window. The tokens before them are context, or are
            predicted in an earlier window.
    """

    tokens: np.ndarray
    counted: int


def sliding_windows(document: np.ndarray, context: Sequence[int], length: int, stride: int) -> Iterator[Window]:
    """Yield the windows of a document; none if the document has no tokens.

    The first window predicts as many tokens as fit. Each later window predicts the next `stride` tokens, and the last
    one the remaining tokens. All windows but the first are full, which gives the predicted tokens the longest possible
    context.

    Args:
        document: [tokens].
        context: tokens before the document, at least one. They are not predicted.
        length: number of tokens that the model reads at once, at least as many as the context has.
        stride: number from 1 to `length`. If it is `length`, each window except the last one begins with the last token
            of the window before it.
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
    """Return batches of up to `size` windows, as lists of their numbers, with the longest windows first.

    Windows in a batch have similar lengths. If a batch does not fit into memory, the first batch already fails.
    """
    order = sorted(range(len(windows)), key=lambda number: -len(windows[number].tokens))
    return [order[first : first + size] for first in range(0, len(order), size)]


@dataclass(frozen=True)
class Score:
    """Score of the predictions of a window, only those that count."""

    log_probability: float
    """Sum of the natural logarithms of the tokens' probabilities."""
    greedy: bool
    """True if every token is the most likely one at its position."""


def score_windows(
    network: Network,
    windows: Sequence[Window],
    micro_batch_size: int,
    advance: Callable[[int], None] = lambda tokens: None,
) -> list[Score]:
    """Return the score of each window. The scores are the same under every layout.

    All ranks call it with the same windows. `micro_batch_size` is the number of windows per forward and does not change
    the scores. `advance` is called with the number of predicted tokens.
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
    """Return [windows, 2] fp64: the sum of the log-probabilities, and the number of tokens that are not most likely."""
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
