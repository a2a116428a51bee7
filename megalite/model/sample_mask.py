"""Attention mask of a sample whose tokens are on several context-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megalite.parallel.attention_plan import FirstKeys, Part
from megalite.parallel.sequence import Runs, SequenceLayout
from megalite_kernels.attention import Mask, block_mask, dense_mask
from megalite_kernels.attention_parts import PartMask


@dataclass(frozen=True, eq=False)
class SampleMask:
    """The keys that the queries of a whole sample see, in layers with one window.

    Attributes:
        layout: the tokens of the context-parallel ranks.
        first: the first key that each query sees, [batch or 1, sequence].
        first_keys: their bounds, on the host.
        whole: makes the mask for ranks that have all tokens.
        in_blocks: True if masked parts are computed by FlexAttention.
    """

    layout: SequenceLayout
    first: Tensor
    first_keys: FirstKeys
    whole: Callable[[], Mask]
    in_blocks: bool

    @cached_property
    def of_whole(self) -> Mask:
        return self.whole()

    def of_part(self, part: Part, queries: Runs, keys: Runs) -> PartMask:
        """Return the mask of a part. `queries`, `keys`: the tokens of the rows that the part is taken from."""
        if part.kind != "masked":
            return part.kind
        own, others = _run_at(queries, part.queries.start), _run_at(keys, part.keys.start)
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
