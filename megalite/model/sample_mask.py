"""Attention mask of a sample whose tokens are on several context-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.parallel.attention_plan import FirstKeys, Part, rounds
from megalite.parallel.sequence import Runs, SequenceLayout
from megalite_kernels.attention import Mask, block_mask, dense_mask
from megalite_kernels.attention_parts import PartMask


class MaskedRound(NamedTuple):
    """The calls of attention of one round, with their masks.

    Attributes:
        keys: the tokens whose keys and values are present.
    """

    keys: Runs
    parts: list[tuple[Part, PartMask]]


@dataclass(frozen=True, eq=False)
class SampleMask:
    """The keys that the queries of a whole sample see, in layers with one window.

    Attributes:
        layout: the tokens of the context-parallel ranks.
        first: the first key that each query sees, [batch or 1, sequence].
        first_keys: their bounds, on the host.
        whole: makes the mask for ranks that have all tokens.
        in_blocks: True if masked parts are computed by FlexAttention.

    Plans and masks of parts are made once, for all layers with this window.
    """

    layout: SequenceLayout
    first: Tensor
    first_keys: FirstKeys
    whole: Callable[[], Mask]
    in_blocks: bool
    _planned: dict[tuple[SequenceLayout, bool], list[MaskedRound]] = field(default_factory=dict)
    _masks: dict[tuple[range, range], PartMask] = field(default_factory=dict)

    @cached_property
    def of_whole(self) -> Mask:
        return self.whole()

    def rounds(self, layout: SequenceLayout, *, gathers: bool) -> list[MaskedRound]:
        """Return the parts of each round, with their masks, for ranks or groups of ranks with this layout."""
        if (layout, gathers) not in self._planned:
            planned = rounds(layout, self.first_keys, gathers=gathers)
            self._planned[layout, gathers] = [
                MaskedRound(keys, [(part, self.of_part(part, layout.runs, keys)) for part in parts])
                for keys, parts in planned
            ]
        return self._planned[layout, gathers]

    def of_part(self, part: Part, queries: Runs, keys: Runs) -> PartMask:
        """Return the mask of a part. `queries`, `keys`: the tokens of the rows that the part is taken from."""
        if part.kind != "masked":
            return part.kind
        own, others = _run_at(queries, part.queries.start), _run_at(keys, part.keys.start)
        if (own, others) not in self._masks:
            self._masks[own, others] = self._make(own, others)
        return self._masks[own, others]

    def _make(self, own: range, others: range) -> PartMask:
        """Make the mask of a chunk of queries and one of keys."""
        first = self.first[:, own.start : own.stop]
        places = torch.arange(own.start, own.stop, device=first.device)
        if self.in_blocks:
            return block_mask(first - others.start, places - others.start, len(others))
        return dense_mask(first, places, torch.arange(others.start, others.stop, device=first.device))


def _run_at(runs: Runs, row: int) -> range:
    """Return the run that begins at this row of a tensor with the runs one after the other."""
    for run in runs:
        if row == 0:
            return run
        row -= len(run)
    raise ValueError("a masked part does not begin with a chunk")
