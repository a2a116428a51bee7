"""Micro-batches on the device, from the arrays that the loader reads: a rank's part of each sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.data.loader import MicroBatchArrays
from megalite.model.batch import FurtherTokens, MicroBatch, SampleSources, first_keys
from megalite.parallel.attention_plan import FirstKeys, balanced, work_of_chunks
from megalite.parallel.device import moved
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout, zigzag

BUSIEST = "busiest_context_parallel_rank"
"""Name of a figure in the metrics: the scores of the busiest rank of each micro-batch, over a rank's on average."""


@dataclass(frozen=True)
class Cutting:
    """Rule by which samples are cut into chunks, and chunks are dealt to the context-parallel ranks.

    Attributes:
        ranks: number of context-parallel ranks.
        rank: this rank's position among them.
        chunks_per_rank: chunks of each rank if they are dealt by the work that documents leave; None: two chunks each,
            dealt the same way in every sample.
        layers: number of layers of attention with each window and each number of ranks that exchange heads.
        depths: number of depths of multi-token prediction, whose inputs and labels are cut, too.
    """

    ranks: int = 1
    rank: int = 0
    chunks_per_rank: int | None = None
    layers: Mapping[tuple[int | None, int], int] = field(default_factory=lambda: {(None, 1): 1})
    depths: int = 0

    def layout(self, length: int, first: FirstKeys) -> SequenceLayout:
        """Return the tokens of each rank. `first`: bounds of the first key that each query sees."""
        table = zigzag(self.ranks)
        if self.ranks > 1 and self.chunks_per_rank is not None:
            windows: Counter[int | None] = Counter()
            for (window, _), layers in self.layers.items():
                windows[window] += layers
            table = balanced(length, self.ranks, self.chunks_per_rank, windows, first)
        return SequenceLayout.cut(length, table, self.rank)

    def busiest(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        """Return the scores that the busiest rank of each micro-batch computes, and those of a rank on average.

        Both are sums over the micro-batches, and over layers.
        """
        loads = [self.loads(micro_batch.layout, micro_batch.bounds) for micro_batch in micro_batches]
        return sum(map(max, loads)), sum(map(sum, loads)) / self.ranks

    def loads(self, layout: SequenceLayout, first: FirstKeys) -> list[float]:
        """Return the number of scores that each rank computes, summed over layers.

        Ranks that exchange heads share the scores of their tokens.
        """
        size, totals = len(layout.runs[0]), np.zeros(len(layout.of_ranks))
        for (window, head_ranks), layers in self.layers.items():
            work = work_of_chunks(layout.length, layout.length // size, {window: layers}, first)
            own = [sum(work[run.start // size] for run in runs) for runs in layout.of_ranks]
            totals += np.reshape(own, (-1, head_ranks)).mean(axis=1).repeat(head_ranks)
        loads: list[float] = totals.tolist()
        return loads


def to_micro_batches(
    arrays: Iterable[MicroBatchArrays],
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    cutting: Cutting = Cutting(),
    sources: int = 0,
) -> list[MicroBatch]:
    """Return micro-batches on the device, with this rank's part of each sample.

    Labels, masks and positions are those of the full samples, so no rank needs a neighbour's token. The loss mask has
    `dtype` promoted to at least fp32, so that losses are not rounded.

    `sources`: number of sources whose losses are recorded; 0: none are.
    """
    return [_to_micro_batch(fields, seed, dtype, device, cutting, sources) for fields in arrays]


def _to_micro_batch(
    fields: MicroBatchArrays, seed: int, dtype: torch.dtype, device: torch.device, cutting: Cutting, sources: int
) -> MicroBatch:
    """Return this rank's tokens of whole samples [batch, sequence], with the mask and the key that go with them."""
    first, bounds = None, FirstKeys()
    if fields["document_ids"] is not None:
        first = first_keys(torch.from_numpy(fields["document_ids"]))
        bounds = FirstKeys(first.amin(0).numpy(), first.amax(0).numpy())
    layout = cutting.layout(fields["tokens"].shape[1], bounds)

    def part(values: Tensor, dimension: int = 1) -> Tensor:
        return moved(layout.own(values, dimension), device)

    def own(array: np.ndarray) -> Tensor:
        return part(torch.from_numpy(np.ascontiguousarray(array)))

    wide = torch.promote_types(dtype, torch.float32)
    further, padding = None, fields["padding"]
    numbers, text_bytes = fields.get("sources") if sources else None, fields.get("text_bytes")
    if cutting.depths:
        whole = [torch.from_numpy(np.ascontiguousarray(fields[name])) for name in ("tokens", "labels", "loss_mask")]
        tokens, labels, mask = further_tokens(whole[0], whole[1], whole[2], first, cutting.depths)
        further = FurtherTokens(part(tokens, 2), part(labels, 2), part(mask, 2).to(wide))
    return MicroBatch(
        tokens=own(fields["tokens"]),
        positions=own(fields["positions"]),
        first_keys=None if first is None else moved(first, device),
        labels=own(fields["labels"]),
        loss_mask=own(fields["loss_mask"]).to(wide),
        padding=None if padding is None else own(padding),
        replayed=None if fields["replayed"] is None else own(fields["replayed"]),
        key=RandomKey(seed, tuple(fields["sample_ids"])),
        layout=layout,
        bounds=bounds,
        further=further,
        lengths=None if padding is None else moved((~torch.from_numpy(padding)).sum(1), device),
        sources=None if numbers is None else SampleSources(moved(torch.from_numpy(numbers), device), sources),
        text_bytes=None if text_bytes is None else own(text_bytes),
    )


def further_tokens(
    tokens: Tensor, labels: Tensor, loss_mask: Tensor, first: Tensor | None, depths: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs, the labels and the loss mask of the depths, each [depths, batch, sequence].

    A label has no weight if the sample does not have it, or if the network gives it none; and, where documents are kept
    apart, if it is not in the token's document. The last label of a sample is then taken as one of another document.

    Args:
        tokens, labels, loss_mask: those of whole samples, [batch, sequence].
        first: the first token of each token's document, [batch, sequence]; None if documents are not kept apart.
    """
    length = tokens.shape[1]
    text = F.pad(torch.cat([tokens, labels[:, -1:]], dim=1), (0, depths))
    labels, loss_mask = F.pad(labels, (0, depths)), F.pad(loss_mask, (0, depths))
    starts = None if first is None else F.pad(first, (0, depths + 1), value=-1)
    found = []
    for depth in range(1, depths + 1):
        weights = loss_mask[:, depth : depth + length]
        if starts is not None:
            weights = weights * (starts[:, depth + 1 : depth + 1 + length] == first)
        found.append((text[:, depth : depth + length], labels[:, depth : depth + length], weights))
    inputs, of_depths, masks = (torch.stack(parts) for parts in zip(*found, strict=True))
    return inputs, of_depths, masks
