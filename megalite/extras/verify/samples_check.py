"""Comparison of recorded batches with the samples that the data flags give, and a search for what they are instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalite.config import RunConfig
from megalite.config.fields import flag_of
from megalite.data.blend import Dataset
from megalite.data.fields import FieldsDataset, SampleFields
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.sampler import equal_deal
from megalite.errors import DataError, MegaliteError
from megalite.extras.verify.command import Command, one_process
from megalite.extras.verify.trace import LAST, RecordedBatch
from megalite.parallel.sequence import SequenceLayout, zigzag
from megalite.training.data import global_batch_size, open_data

_NEAR = 4096
"""Samples before and after those of the step that are searched, and as many from the first one on."""
_SEEDS = (0, 1, 42, 1234)
"""Seeds that programs have by default."""
_MOST_SEEDS = 8
"""Maximum number of ranks of which it is tried whether they have seeds of their own: each may need an index."""
_FIELDS = ("labels", "loss_mask", "positions", "document_ids")
_FLAGS: Mapping[str, str] = {
    "eod_mask_loss": "loss_mask",
    "reset_position_ids": "positions",
    "reset_attention_mask": "document_ids",
}
"""Flags of the fields of a sample, each with the field that it decides."""


@dataclass(frozen=True)
class SampleFinding:
    """A sample of a recorded micro-batch that is not as the data flags give it.

    Attributes:
        row: its number in the micro-batch.
        field: tokens, or the field that differs though the tokens are right.
        expected: number of the sample that should be there.
        found: number of the sample that is there; None if it is none that was searched.
        said: what it looks like; empty if nothing fits.
    """

    rank: int
    micro_batch: int
    row: int
    field: str
    expected: int
    found: int | None = None
    said: str = ""


@dataclass(frozen=True)
class SamplesCheck:
    """Result of the comparison.

    Attributes:
        samples: number of recorded samples that were compared.
        explanation: what explains all samples with other tokens together; empty if nothing does.
        missing: lines on data-parallel ranks that have fewer micro-batches than a step has.
    """

    samples: int
    findings: tuple[SampleFinding, ...]
    explanation: str = ""
    missing: tuple[str, ...] = ()


_Place = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class _Row:
    """Recorded sample, with where it should have come from."""

    batch: RecordedBatch
    row: int
    rank: int
    """Its data-parallel rank."""
    layout: SequenceLayout
    expected: int

    def own(self, values: np.ndarray) -> np.ndarray:
        """Return the part of a whole sample that its context-parallel rank has."""
        return self.layout.own(torch.from_numpy(np.ascontiguousarray(values)), 0).numpy()

    @cached_property
    def tokens(self) -> np.ndarray:
        return _array(self.batch.tokens[self.row])

    def recorded(self, field: str) -> np.ndarray | None:
        values: Tensor | None = getattr(self.batch, field)
        return None if values is None else _array(values[self.row])

    def finding(self, field: str, found: int | None = None, said: str = "") -> SampleFinding:
        return SampleFinding(self.batch.rank, self.batch.micro_batch, self.row, field, self.expected, found, said)


def _array(values: Tensor) -> np.ndarray:
    array: np.ndarray = values.detach().cpu().to(torch.float64 if values.is_floating_point() else torch.int64).numpy()
    return array


def check_samples(
    command: Command, batches: Sequence[RecordedBatch], coordinates: Mapping[int, _Place], consumed: int
) -> SamplesCheck:
    """Compare recorded micro-batches of a step with the samples that the data flags give.

    Args:
        coordinates: for each rank its place on the axes, as (index, count); at least dp and cp.
        consumed: samples that the run has consumed before the step.

    Raises:
        DataError: the data are not here, or end before the step.
    """
    config, _ = one_process(command, "fp64")
    data = open_data(config)
    rows = [row for batch in batches for row in _rows(command, batch, coordinates, consumed)]
    if any(row.expected >= len(data.train) for row in rows):
        raise DataError(f"the data have {len(data.train)} samples, fewer than the step needs")
    search = _Search(command, config, data.train, consumed, rows)
    findings, others = list[SampleFinding](), list[_Row]()
    for row in rows:
        if search.is_sample(row, row.expected):
            findings += search.other_fields(row)
        else:
            others.append(row)
    found, explanation = search.explain(others)
    missing = tuple(_missing(command, batches, coordinates, consumed))
    return SamplesCheck(len(rows), (*found, *findings), explanation, missing)


def _missing(
    command: Command, batches: Sequence[RecordedBatch], coordinates: Mapping[int, _Place], consumed: int
) -> Iterator[str]:
    """Yield a line for each data-parallel rank that has fewer micro-batches than others have or the step needs."""
    numbers: dict[int, set[int]] = {}
    for batch in batches:
        rank, ranks = coordinates.get(batch.rank, {}).get("dp", (0, command.sizes["dp"]))
        numbers.setdefault(rank, set()).add(batch.micro_batch)
    if any(LAST in each for each in numbers.values()):
        return
    for rank, own in numbers.items():
        needed = len(_dealt(command, rank, ranks, consumed))
        if len(own) < needed:
            yield f"data-parallel rank {rank} has only {len(own)} of the {needed} micro-batches of the step"


def _dealt(command: Command, rank: int, ranks: int, consumed: int) -> Sequence[Sequence[int]]:
    """Return the numbers of the samples of each micro-batch of a data-parallel rank."""
    length = command.config.training.micro_batch_size
    size = global_batch_size(command.config).at(consumed) // length
    return equal_deal(rank, ranks, size).samples(consumed, length)


def _rows(command: Command, batch: RecordedBatch, coordinates: Mapping[int, _Place], consumed: int) -> Iterator[_Row]:
    """Yield the samples of a recorded micro-batch, each with its place in the step."""
    place = coordinates.get(batch.rank, {})
    rank, ranks = place.get("dp", (0, command.sizes["dp"]))
    part, parts = place.get("cp", (0, command.sizes["cp"]))
    length = command.config.data.seq_length
    whole = batch.tokens.shape[1] == length
    layout = SequenceLayout.whole(length) if whole else SequenceLayout.cut(length, zigzag(parts), part)
    dealt = _dealt(command, rank, ranks, consumed)
    number = len(dealt) - 1 if batch.micro_batch == LAST else batch.micro_batch
    if number >= len(dealt):
        raise DataError(f"rank {batch.rank} has a micro-batch {number}, but a step has {len(dealt)} on each rank")
    for row, expected in enumerate(dealt[number][: len(batch.tokens)]):
        yield _Row(batch, row, rank, layout, expected)


@dataclass(frozen=True)
class _Search:
    """The data of a run, and the samples that a step should have."""

    command: Command
    config: RunConfig
    train: Dataset[SampleFields]
    consumed: int
    rows: Sequence[_Row]

    # -------------------------------------------------------------------------------------------- right tokens

    def other_fields(self, row: _Row) -> Iterator[SampleFinding]:
        """Yield the fields of a sample with the right tokens that differ."""
        sample = self.train[row.expected]
        for field in _FIELDS:
            recorded = row.recorded(field)
            if recorded is None:
                continue
            if field == "document_ids":
                expected = sample["document_ids"]
                recorded = _numbered(recorded)
                right = np.zeros_like(recorded) if expected is None else _numbered(row.own(expected))
            else:
                right = row.own(sample[field])  # type: ignore[literal-required]  # one of _FIELDS
                right = right.astype(recorded.dtype)  # weights of tokens are rounded
            if not np.array_equal(recorded, right):
                yield row.finding(field, row.expected, self._said(field, row, recorded, sample))

    def _said(self, field: str, row: _Row, recorded: np.ndarray, sample: SampleFields) -> str:
        """Return what a field looks like."""
        length = len(sample["tokens"])
        others: dict[str, np.ndarray] = {}
        if field == "labels":
            after = np.concatenate([sample["labels"][1:], recorded[-1:]])
            before = np.concatenate([recorded[:1], sample["tokens"][:-1]])
            others = {
                "they are the inputs: not shifted": sample["tokens"],
                "they are shifted by two": after,
                "they are shifted the other way": before,
            }
            return next((said for said, each in others.items() if _near(recorded, row.own(each))), "")
        for flag, of_field in _FLAGS.items():
            if of_field == field and (other := self._with_flag(flag, row.expected)) is not None:
                given = getattr(self.command.config.data, flag)
                others[f"{flag_of(flag)} {'has no effect' if given else 'has an effect, and is not given'}"] = other
        if field == "loss_mask":
            mask, one = sample["loss_mask"], np.ones(1, np.float32)
            others["all tokens count"] = np.ones(length, np.float32)
            others["it is one token late"] = np.concatenate([one, mask[:-1]])
            others["it is one token early"] = np.concatenate([mask[1:], one])
        if field == "positions":
            others["they count in whole samples from 1"] = np.arange(1, length + 1)
            if not row.layout.is_whole and np.array_equal(recorded, np.arange(len(recorded))):
                return "they count in the rank's part of the sample"
        fits = (said for said, each in others.items() if np.array_equal(recorded, self._compared(field, row.own(each))))
        return next(fits, "")

    @staticmethod
    def _compared(field: str, values: np.ndarray) -> np.ndarray:
        return _numbered(values) if field == "document_ids" else values

    def _with_flag(self, flag: str, number: int) -> np.ndarray | None:
        """Return the field of a sample that a flag decides, with the flag turned over."""
        if not isinstance(self.train, FieldsDataset):
            return None
        changed: Any = {flag: not getattr(self.train, flag)}
        found = replace(self.train, **changed)[number]
        if flag == "reset_attention_mask" and found["document_ids"] is None:
            return np.zeros_like(found["tokens"])
        field: np.ndarray = found[_FLAGS[flag]]  # type: ignore[literal-required]  # a field of samples
        return field

    # -------------------------------------------------------------------------------------------- other tokens

    def explain(self, others: Sequence[_Row]) -> tuple[list[SampleFinding], str]:
        """Return what rows with other tokens are, and what explains all of them together."""
        if not others:
            return [], ""
        for said, deal in self._deals():
            dealt = list(map(deal, others))
            if all(map(self.is_sample, others, dealt)):
                return [row.finding("tokens", number) for row, number in zip(others, dealt, strict=True)], said
        numbers = self._located(others)
        found = [row.finding("tokens", numbers.get(at), self._moved(row)) for at, row in enumerate(others)]
        if len(numbers) == len(others):
            return found, self._shifts(others, [numbers[at] for at in range(len(others))])
        said_of_each = {each.said for each in found}
        if len(said_of_each) == 1 and (common := said_of_each.pop()):
            return found, common
        unknown = (
            "they are no samples of these data near the step" if not numbers else "some are other samples of these data"
        )
        return found, self._of_other_seed(others) or unknown

    def is_sample(self, row: _Row, number: int) -> bool:
        """Tell whether a row is the sample with this number."""
        return 0 <= number < len(self.train) and np.array_equal(row.tokens, row.own(self.train[number]["tokens"]))

    def _moved(self, row: _Row) -> str:
        """Tell whether a row is its sample, moved by a token."""
        sample = self.train[row.expected]
        whole, tokens = np.append(sample["tokens"], sample["labels"][-1:]), row.tokens
        if len(tokens) != len(whole) - 1:
            return ""
        if np.array_equal(tokens, whole[1:]):
            return "the sample begins one token late"
        if np.array_equal(tokens[1:], whole[:-2]):
            return f"the token {tokens[0]} was put before the sample"
        return ""

    def _located(self, others: Sequence[_Row]) -> dict[int, int]:
        """Return the number of the sample that each row is, if one near the step is."""
        wanted: dict[tuple[Any, bytes], list[int]] = {}
        for at, row in enumerate(others):
            wanted.setdefault((row.layout.rank, row.tokens.tobytes()), []).append(at)
        layouts = {row.layout.rank: row for row in others}
        found: dict[int, int] = {}
        for number in self._numbers():
            tokens = self.train[number]["tokens"].astype(np.int64)
            for rank, row in layouts.items():
                for at in wanted.pop((rank, row.own(tokens).tobytes()), ()):
                    found[at] = number
            if not wanted:
                break
        return found

    def _numbers(self) -> Iterator[int]:
        """Yield numbers of samples, those near the step first."""
        near = range(max(self.consumed - _NEAR, 0), min(self.consumed + _NEAR, len(self.train)))
        yield from sorted(near, key=lambda number: abs(number - self.consumed))
        yield from (number for number in range(min(_NEAR, len(self.train))) if number not in near)

    def _deals(self) -> Iterator[tuple[str, Callable[[_Row], int]]]:
        """Yield other ways to deal the samples of a step to ranks and micro-batches."""
        size, ranks = self.command.config.training.micro_batch_size, self.command.sizes["dp"]
        batch = global_batch_size(self.config).at(self.consumed)
        first, own = self.consumed, batch // ranks

        def place(row: _Row) -> int:
            """Return the number of the sample among those of its rank."""
            return (row.expected - first) // (size * ranks) * size + row.row

        yield "all data-parallel ranks have the samples of rank 0", lambda row: row.expected - row.rank * size
        yield (
            "each data-parallel rank has consecutive samples, instead of taking turns",
            lambda row: first + row.rank * own + place(row),
        )
        yield (
            "data-parallel ranks take turns with single samples, instead of micro-batches",
            lambda row: first + place(row) * ranks + row.rank,
        )
        yield (
            "each micro-batch has the samples of the first one",
            lambda row: first + (row.expected - first) % (size * ranks),
        )
        yield "samples are read without the shuffle", self._unshuffled

    def _unshuffled(self, row: _Row) -> int:
        """Return the number of the sample at a place of the order before the shuffle; -1 if that is not known."""
        tokens = getattr(self.train, "tokens", None)
        if not isinstance(tokens, GPTDataset):
            return -1
        found = np.flatnonzero(tokens.shuffle_index == row.expected)
        return int(found[0]) if len(found) else -1

    def _shifts(self, others: Sequence[_Row], located: Sequence[int]) -> str:
        """Return what samples are that are all as far from those that should be there."""
        batch = global_batch_size(self.config).at(self.consumed)
        shifts = {number - row.expected for row, number in zip(others, located, strict=True)}
        if len(shifts) > 1:
            step = range(self.consumed, self.consumed + batch)
            if len(others) == len(self.rows) and all(number in step for number in located):
                return "they are samples of this step, dealt in another way"
            return "they are samples of these data, in another order"
        (shift,) = shifts
        if shift == -self.consumed:
            return "they are the first samples of the run: it has begun again"
        if shift % batch == 0:
            steps = abs(shift) // batch
            return f"they are those of {steps} step{'s' * (steps > 1)} {'later' if shift > 0 else 'before'}"
        return f"they are {abs(shift)} sample{'s' * (abs(shift) > 1)} {'further on' if shift > 0 else 'back'}"

    def _of_other_seed(self, others: Sequence[_Row]) -> str:
        """Return the seed with which the samples are those of the step; empty if none is found."""
        own = self.config.training.seed
        ranks = sorted({row.rank for row in others})[:_MOST_SEEDS]
        seeds = dict.fromkeys((*(own + rank for rank in ranks), own + 1, own - 1, *_SEEDS))
        for seed in seeds:
            if seed == own or seed < 0:
                continue
            with TemporaryDirectory(prefix="megalite-") as cache, suppress(MegaliteError):
                data = replace(self.config.data, data_cache_path=cache)
                config = replace(self.config, data=data, training=replace(self.config.training, seed=seed))
                train = open_data(config).train
                if all(replace(self, train=train).is_sample(row, row.expected) for row in others):
                    return f"they are those of --seed {seed}, not {own}"
        return ""


def _numbered(documents: np.ndarray) -> np.ndarray:
    """Return numbers of documents that count from 0 in the order of their first tokens."""
    changes = np.flatnonzero(np.diff(documents, prepend=documents[:1]))
    numbered = np.zeros(len(documents), np.int64)
    numbered[changes] = 1
    return np.cumsum(numbered)


def _near(recorded: np.ndarray, other: np.ndarray) -> bool:
    """Tell whether labels are others, but for the ends of the rank's parts, where these may not be known."""
    return len(recorded) == len(other) and bool((recorded != other).sum() <= 2)
