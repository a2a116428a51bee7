"""The micro-batches of a step, assembled from what each rank has seen of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megalite.data.fields import SampleFields
from megalite.data.loader import MicroBatchArrays, MicroBatchLoader
from megalite.data.sampler import equal_deal
from megalite.errors import DataError
from megalite.extras.verify.command import Command
from megalite.extras.verify.cuts import tokens_of
from megalite.extras.verify.trace import LAST, RecordedBatch, Trace
from megalite.training.data import global_batch_size, open_data


@dataclass(frozen=True)
class StepBatches:
    """Micro-batches of a step, whole samples.

    Attributes:
        arrays: the micro-batches of data-parallel rank 0, then those of rank 1, and so on.
        numbers: the number of each in `arrays`, by the data-parallel rank and the number of the micro-batch there.
        replica_of: the place of each rank among the data-parallel ones, if it is not 0.
        per_rank: micro-batches of each data-parallel rank.
        replicas: number of data-parallel ranks.
        whole: True if these are all micro-batches of the step.
        notes: what was assumed.
    """

    arrays: tuple[MicroBatchArrays, ...]
    numbers: Mapping[tuple[int, int], int]
    per_rank: int
    replicas: int
    whole: bool
    replica_of: Mapping[int, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def from_trace(trace: Trace) -> StepBatches | None:
    """Return the micro-batches that a trace has; None if it has none.

    Raises DataError if ranks that must have the same tokens have others, or parts of a sample are missing.
    """
    if not trace.batches:
        return None
    replicas, dp_of, notes = _replicas(trace)
    per_rank = 1 + max(batch.micro_batch for batch in trace.batches)
    parts: dict[int, list[RecordedBatch]] = {}
    for batch in trace.batches:
        parts.setdefault(dp_of[batch.rank] * per_rank + batch.micro_batch, []).append(batch)
    found = {number: _assembled(trace, parts[number], number) for number in sorted(parts)}
    places = {number: place for place, number in enumerate(found)}
    numbers = {divmod(number, per_rank): place for number, place in places.items()}
    numbers |= {(dp, LAST): place for (dp, at), place in numbers.items() if at == per_rank - 1}
    whole = len(found) == replicas * per_rank and trace.figures.get("micro_batches", per_rank) == per_rank
    return StepBatches(tuple(found.values()), numbers, per_rank, replicas, whole, dp_of, notes)


def _replicas(trace: Trace) -> tuple[int, dict[int, int], tuple[str, ...]]:
    """Return the number of data-parallel ranks, the place of each rank among them, and notes."""
    ranks = sorted({*trace.coordinates, *(entry.rank for entry in trace.entries), *(b.rank for b in trace.batches)})
    known = {rank: trace.coordinates.get(rank, {}) for rank in ranks}
    if any("dp" in axes for axes in known.values()):
        dp = {rank: axes.get("dp", (0, 1)) for rank, axes in known.items()}
        return max(count for _, count in dp.values()), {rank: index for rank, (index, _) in dp.items()}, ()
    if len(ranks) == 1 or any(axes for axes in known.values()):
        return 1, dict.fromkeys(ranks, 0), ()
    note = f"the trace does not say how its {len(ranks)} ranks are divided: they are taken as data-parallel"
    return len(ranks), {rank: place for place, rank in enumerate(ranks)}, (note,)


def _assembled(trace: Trace, parts: Iterable[RecordedBatch], number: int) -> MicroBatchArrays:
    """Put the parts of context-parallel ranks together, and check that other ranks have the same tokens."""
    by_cp: dict[int, RecordedBatch] = {}
    ranks = 1
    for part in parts:
        index, ranks = trace.coordinates.get(part.rank, {}).get("cp", (0, 1))
        first = by_cp.setdefault(index, part)
        if not torch.equal(first.tokens, part.tokens):
            raise DataError(
                f"micro-batch {part.micro_batch}: ranks {first.rank} and {part.rank} have the same place on the axes "
                "dp and cp, and other tokens"
            )
    if missing := [index for index in range(ranks) if index not in by_cp]:
        raise DataError(f"micro-batch {number}: no rank with place {missing[0]} of {ranks} on axis cp is in the trace")
    batch, length = by_cp[0].tokens.shape[0], by_cp[0].tokens.shape[1] * ranks

    def whole(name: str) -> Tensor | None:
        values = [getattr(by_cp[index], name) for index in range(ranks)]
        if any(each is None for each in values):
            return None
        found = values[0].new_empty(batch, length)
        for index, each in enumerate(values):
            found[:, tokens_of((index, ranks), length)] = each
        return found

    samples = by_cp[0].sample_ids
    tokens, labels, mask = whole("tokens"), whole("labels"), whole("loss_mask")
    positions, documents = whole("positions"), whole("document_ids")
    assert tokens is not None
    if labels is None:  # the next token, and none for the last one
        labels = tokens.roll(-1, 1)
        mask = torch.ones(batch, length) if mask is None else mask.clone()
        mask[:, -1] = 0.0
    if positions is None:
        positions = torch.arange(length).expand(batch, length)
    return MicroBatchArrays(
        tokens=_array(tokens, np.int64),
        labels=_array(labels.clamp(min=0), np.int64),
        loss_mask=_array((labels >= 0).double() if mask is None else mask, np.float64),
        positions=_array(positions, np.int64),
        document_ids=None if documents is None else _array(documents, np.int64),
        padding=None,
        sample_ids=range(number * batch, (number + 1) * batch) if samples is None else samples.tolist(),
        replayed=None,
    )


def _array(values: Tensor, dtype: type) -> np.ndarray:
    return np.ascontiguousarray(values.numpy().astype(dtype))


@dataclass(frozen=True)
class RecordedSamples:
    """Dataset of the samples that a run has consumed in recorded steps, by their numbers in the run.

    Attributes:
        first: number of the first one.
        rows: their fields.
    """

    first: int
    rows: Sequence[SampleFields]

    def __len__(self) -> int:
        return self.first + len(self.rows)

    def __getitem__(self, sample: int) -> SampleFields:
        """Return the fields of a sample. Raises IndexError if it is of no recorded step."""
        if not self.first <= sample < len(self):
            raise IndexError(f"sample {sample} is of no recorded step")
        return self.rows[sample - self.first]


def recorded_samples(steps: Iterable[StepBatches], first: int) -> RecordedSamples:
    """Return the samples of consecutive steps, of which the first one begins at sample `first`."""
    rows: list[SampleFields] = []
    for step in steps:
        for number in range(step.per_rank):  # in the order in which samples are dealt to data-parallel ranks
            for replica in range(step.replicas):
                rows += _rows(step.arrays[step.numbers[replica, number]])
    return RecordedSamples(first, rows)


def _rows(arrays: MicroBatchArrays) -> Iterator[SampleFields]:
    for row in range(len(arrays["tokens"])):
        documents, padding = arrays["document_ids"], arrays["padding"]
        yield SampleFields(
            tokens=arrays["tokens"][row],
            labels=arrays["labels"][row],
            loss_mask=arrays["loss_mask"][row].astype(np.float32),
            positions=arrays["positions"][row],
            document_ids=None if documents is None else documents[row],
            padding=None if padding is None else padding[row],
        )


def consumed_before(command: Command, step: int) -> int:
    """Return the number of samples that a run has consumed before a step, which counts from 1."""
    sizes, consumed = global_batch_size(command.config), 0
    if len(sizes.sizes) == 1:
        return (step - 1) * sizes.final
    for _ in range(step - 1):
        consumed += sizes.at(consumed)
    return consumed


def from_data(command: Command, step: int, most: int | None = None) -> StepBatches:
    """Return the micro-batches that the data of a command give for a step, counted from 1.

    `most`: number of micro-batches of each data-parallel rank, the last ones of the step; None: all.

    Raises DataError or ConfigurationError if the data are not here, or end before.
    """
    config = command.config
    data = open_data(config)
    sizes, consumed = global_batch_size(config), consumed_before(command, step)
    replicas, length = command.sizes["dp"], config.training.micro_batch_size
    slots = sizes.at(consumed) // length
    per_rank = slots // replicas
    kept = range(per_rank if most is None else min(most, per_rank))
    skipped = per_rank - len(kept)
    arrays: list[MicroBatchArrays] = []
    with MicroBatchLoader(data.train, micro_batch_size=length, vocab_size=data.tokenizer.vocab_size) as loader:
        for rank in range(replicas):
            arrays += loader.micro_batches(consumed, equal_deal(rank, replicas, slots))[skipped:]
    numbers: dict[tuple[int, int], int] = {}
    for replica in range(replicas):
        numbers |= {(replica, skipped + at): replica * len(kept) + at for at in kept}
        numbers[replica, LAST] = replica * len(kept) + kept[-1]
    return StepBatches(tuple(arrays), numbers, per_rank, replicas, whole=skipped == 0)
