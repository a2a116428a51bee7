"""Scores of windows by a model, on any layout: data-parallel ranks share them, and all get every result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.inference.network import Network, score_tokens
from megalite.inference.windows import Window, batches
from megalite.parallel import collectives


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
