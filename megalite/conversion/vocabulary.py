"""More tokens for a model that another program has saved: new rows of its embedding and of its output layer.

Every new row is the mean of the old ones, so that at first no new token is more likely than the average, as in
transformers' `resize_token_embeddings`, but without its random part, which is 10^-9 of the old rows' covariance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megalite.checkpoint.tensors import Kind, Source
from megalite.conversion.opened import OpenedModel, logical_tensors
from megalite.parallel.sharding import Box

_ROWS = 4096
"""Rows to read at a time."""


def with_more_tokens(opened: OpenedModel, tokens: int | None) -> OpenedModel:
    """Return the model with this number of tokens, if that is more than it has."""
    has = opened.config.vocab_size
    if has is None or tokens is None or tokens <= has:
        return opened
    config = replace(opened.config, vocab_size=tokens)
    before, after = logical_tensors(opened.config), logical_tensors(config)
    grown = {name: shape for name, shape in after.items() if shape != before[name]}
    rows = f"row {has}" if tokens == has + 1 else f"rows {has} to {tokens - 1}"
    note = f"note: --resize-vocabulary: {rows} of {' and '.join(grown)} begin as the mean of the {has} saved rows"
    return replace(opened, config=config, source=_Grown(opened.source, grown), notes=(*opened.notes, note))


class _Grown:
    """Tensors of a source, some of them with more rows (a `Source`)."""

    def __init__(self, source: Source, grown: Mapping[str, tuple[int, ...]]) -> None:
        self._source, self._means = source, dict[str, Tensor]()
        more = {name: replace(source.tensors[name], shape=shape) for name, shape in grown.items()}
        self.tensors: Mapping[str, Kind] = {**source.tensors, **more}

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        saved = box.intersection(self._source.tensors[name].whole)
        count = 0 if saved is None else saved.size[0]
        if saved is not None:
            self._source.fill(name, saved, values[:count])
        if count < box.size[0]:
            values[count:] = self._mean(name)[box.slices()[1:]]

    def _mean(self, name: str) -> Tensor:
        if name not in self._means:
            rows, *rest = self._source.tensors[name].shape
            total = torch.zeros(rest, dtype=torch.float64)
            for first in range(0, rows, _ROWS):
                part = torch.empty(min(_ROWS, rows - first), *rest, dtype=torch.float64)
                self._source.fill(name, Box((first, *(0 for _ in rest)), tuple(part.shape)), part)
                total += part.sum(0)
            self._means[name] = total / rows
        return self._means[name]
