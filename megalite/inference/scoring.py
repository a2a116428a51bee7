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
        counted: so many of its predictions count, the last ones: the others are an earlier window's, or context.
    """

    tokens: np.ndarray
    counted: int


def sliding_windows(document: np.ndarray, context: Sequence[int], length: int, stride: int) -> Iterator[Window]:
    """The windows of a document, none where it has no tokens.

    The first predicts as much as fits; each one after it goes on by `stride` tokens, the last by what is left. All but
    the first have as much before what they predict as the model can read.

    Args:
        document: [tokens].
        context: what stands before the document, one token or more; nothing predicts it.
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
    """The numbers of the windows, up to `size` at a time, the longest first: alike ones together, and what does not fit
    into memory fails at once."""
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
    """The score of each window, whatever the layout and `micro_batch_size`, the windows in one forward of a stage.

    All ranks call it with the same windows. `advance` is told of the tokens that were predicted.
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
    """[windows, 2] fp64: the sum of the log-probabilities, and how many tokens are not the likeliest."""
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
