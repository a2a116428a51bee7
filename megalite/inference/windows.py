"""Documents as windows that a model can read, each of their tokens predicted exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


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
