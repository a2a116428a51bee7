"""Explanations of a tensor that differs: each is another tensor, and the best is the nearest to what was recorded.

A hypothesis never says how sure it is: it says what would have been computed, and the recorded values tell how far they
are from that. One that explains them leaves no more than rounding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megalite.errors import MegaliteError
from megalite.extras.verify.alternatives import alternatives
from megalite.extras.verify.count_hypotheses import counts
from megalite.extras.verify.cuts import NoCounterpart
from megalite.extras.verify.judgement import LIMIT, Judgement
from megalite.extras.verify.points import HEAD, LOGITS, Point, Values
from megalite.extras.verify.rounding import Numerics
from megalite.extras.verify.sum_hypotheses import sums, terms
from megalite.extras.verify.suspect import Hypothesis, Suspect
from megalite.extras.verify.trace import OF_MODULES, Entry

_RANKS = {"factor": 0, "some factor": 2, "precision": 4, "own factors": 3}
"""Places of the kinds of hypotheses among those that explain: what says more comes first. The others are at 1."""
_OF_BF16 = 1.6
"""Ratio of what was computed in bf16 exactly as far from the truth as here: it explains 0.4 to 2.5 times as much."""
_MOST_CHANGES = 16
"""Maximum number of other ranks that one rank's tensor is compared with."""


class Search(Suspect):
    """Search for the explanation of one tensor."""

    def run(self) -> list[Hypothesis]:
        """Return the hypotheses, the best first: those that explain, by what they say, then by what is left."""
        found = [*self._factors(), *counts(self), *self._shards(), *self._others()]
        before = self.ratio(self.truth)
        kept = [each for each in found if each.explains or each.ratio < 0.5 * before]
        return sorted(kept, key=lambda each: (not each.explains, _RANKS.get(each.kind, 1), each.ratio))

    # -------------------------------------------------------------------------------------------- factors

    def _factors(self) -> Iterator[Hypothesis]:
        """Yield a factor that all ranks have, and factors that each rank has by itself."""
        found = [judgement.entry.read().factor(self.truth(judgement)) for judgement in self.group]
        if any(each is None or not math.isfinite(each) for each in found):
            return
        factors = [each for each in found if each is not None]
        mean = sum(factors) / len(factors)
        ratio = self.ratio(lambda judgement: self.truth(judgement) * mean)
        named = _named(mean, self.sizes)
        exact = named[0] if named else mean
        if abs(mean - 1.0) > 1e-3:
            text = f"{_what(self.group[0].entry)} is {_times(exact)}"
            text += f" ({', '.join(named[1])})" if named else ""
            yield Hypothesis("factor" if named else "some factor", text, ratio, exact)
        if len(factors) > 1 and max(factors) - min(factors) > 1e-3 * abs(mean):
            own = dict(zip((id(each) for each in self.group), factors, strict=True))
            ratio = self.ratio(lambda judgement: self.truth(judgement) * own[id(judgement)])
            shown = ", ".join(f"rank {each.entry.rank} x {own[id(each)]:.4g}" for each in self.group[:8])
            yield Hypothesis(
                "own factors", f"each rank has a factor of its own, as by a count taken locally: {shown}", ratio
            )

    # -------------------------------------------------------------------------------------------- shards

    def _shards(self) -> Iterator[Hypothesis]:
        """Yield that ranks have the parts of others, and that all have the same part."""
        for axis in ("tp", "cp", "ep"):
            count = max(self.place(each, axis)[1] for each in self.group)
            if not 1 < count <= _MOST_CHANGES:
                continue
            for shift in range(1, count):
                yield Hypothesis(
                    "shards",
                    f"ranks on axis {axis} have the parts of others, {shift} further",
                    self.ratio(partial(self._moved, axis=axis, shift=shift)),
                )
            for same in range(count):
                yield Hypothesis(
                    "shards",
                    f"all ranks on axis {axis} have the same part, that of rank {same}",
                    self.ratio(partial(self._moved, axis=axis, same=same)),
                )

    def _moved(self, judgement: Judgement, axis: str, shift: int = 0, same: int | None = None) -> Tensor | None:
        """Return the part of the rank that is `shift` places further on an axis, or at the place `same`."""
        at, count = self.place(judgement, axis)
        place = (at + shift) % count if same is None else same
        coordinates = {**self.recall.trace.coordinates.get(judgement.entry.rank, {}), axis: (place, count)}
        try:
            found = self.recall.expected(judgement, coordinates)
        except NoCounterpart:
            return None
        return found if tuple(found.shape) == judgement.entry.shape else None

    # -------------------------------------------------------------------------------------------- others

    def _others(self) -> Iterator[Hypothesis]:
        """Yield what only a module's tensor, or only a weight's gradient, may be."""
        first = self.group[0]
        if first.entry.role == "parameter":
            yield from self._other_weights()
            yield from self._other_copy()
            yield from self._cut_in_one()
            yield from self._other_orders()
            return
        if first.point is None:
            yield from sums(self)
            yield from terms(self)
            return
        yield from self._permuted()
        yield from self._padded()
        yield from sums(self)
        yield from terms(self)
        yield from self._computed()

    def _other_weights(self) -> Iterator[Hypothesis]:
        """Yield that a weight has the values of another one of the same shape, or only zeros or ones."""
        correspondence, first = self.recall.walk.correspondence, self.group[0]
        own = correspondence.of_weight(first.entry, self.recall.trace.coordinates.get(first.entry.rank, {})).tensor
        near = [each for each in correspondence.tensors if each.shape == own.shape and each.name != own.name]
        near.sort(key=lambda each: _layer_of(each.name) != _layer_of(own.name))
        for other in near[:_MOST_CHANGES]:
            yield Hypothesis(
                "shards", f"it has the values of {other.name}", self.ratio(partial(self._as_weight, name=other.name))
            )

    def _other_copy(self) -> Iterator[Hypothesis]:
        """Yield that a copy of a tied weight has values of its own, if another copy is right."""
        logical = self.recall.logical(self.first)
        parameters = (each for each in self.recall.walk.judgements if each.entry.role == "parameter")
        copies = [each for each in parameters if self.recall.logical(each) == logical]
        if any(each.entry.name != self.first.entry.name and not each.differs for each in copies):
            yield Hypothesis("shards", "this copy of the tied weight has other values than the embedding", LIMIT)

    def _cut_in_one(self) -> Iterator[Hypothesis]:
        """Yield that a matrix of several parts, such as gate and value, is cut into contiguous parts of all of it."""
        if (count := self.size("tp")) > 1:
            for dimension, what in enumerate(("rows", "columns")[: len(self.first.entry.shape)]):
                contiguous = partial(self.recall.contiguous, dimension=dimension, count=count)
                text = f"ranks on axis tp have contiguous {what} of the fused matrix, whose parts should each be cut"
                yield Hypothesis("layout", text, self.ratio(contiguous))

    def _as_weight(self, judgement: Judgement, name: str) -> Tensor:
        renamed = replace(judgement, entry=replace(judgement.entry, name=name))
        return self.recall.expected(renamed)

    def _other_orders(self) -> Iterator[Hypothesis]:
        """Yield other orders of a weight's rows and columns."""
        head = self.replay.model.head_dim
        shape = self.first.entry.shape
        for dimension, what in enumerate(("rows", "columns")[: len(shape)]):
            for text, order in _orders(shape[dimension], head):
                moved = partial(self._in_other_order, dimension=dimension, order=order)
                yield Hypothesis("layout", f"{what}: {text}", self.ratio(moved))
        if len(shape) == 2 and shape[0] == shape[1]:
            yield Hypothesis("layout", "it is transposed", self.ratio(lambda each: self.truth(each).t()))

    def _in_other_order(self, judgement: Judgement, dimension: int, order: Tensor) -> Tensor:
        return self.truth(judgement).index_select(dimension, order)

    def _permuted(self) -> Iterator[Hypothesis]:
        """Yield other orders of the features: halves, neighbours, heads."""
        first = self.group[0]
        assert first.point is not None
        width = self.recall.values(first)[first.point].shape[-1]
        for text, order in _orders(width, self.recall.replay.model.head_dim):
            yield Hypothesis(
                "layout",
                text,
                self.changed(partial(_in_order, order=order)),
            )
        for shift in (1, -1):
            yield Hypothesis(
                "position",
                f"tokens are shifted by one place {'forward' if shift > 0 else 'back'}",
                self.changed(partial(torch.roll, shifts=shift, dims=0)),
            )

    def _padded(self) -> Iterator[Hypothesis]:
        """Yield that rows which pad the vocabulary for so many ranks count in the softmax, with logits of zero."""
        first, model = self.first, self.replay.model
        vocabulary = model.vocab_size or 0
        rows = model.padded_vocab_size(self.size("tp")) - vocabulary
        if first.point == Point(HEAD, "output") and rows:
            logits = self.recall.values(first)[Point(LOGITS, "output")].double()[..., :vocabulary]
            total = logits.logsumexp(-1, keepdim=True)
            more = torch.logaddexp(total, torch.tensor(math.log(rows)).double()) - total
            text = f"{rows} padded rows of the vocabulary count in the softmax"
            yield Hypothesis("count", text, self.changed(lambda losses: losses + more))

    def _computed(self) -> Iterator[Hypothesis]:
        """Yield what other networks, batches and precisions give for the stage."""
        first = self.group[0]
        point, number = first.point, self.recall.number_of(first.entry)
        assert point is not None
        replay, place = self.recall.replay, self.recall.replay.place_of(first.point.module if first.point else "")
        factors = self.recall.factors_of(number) if point.role.endswith("gradient") else None
        for other in alternatives(replay.model, replay.micro_batch(number)):
            model = replace(replay.model, **other.fields) if other.fields else None
            batch = None if other.batch is None else other.batch(replay.micro_batch(number))
            try:
                values, _ = replay.again(place, number, model=model, batch=batch, change=other.change, factors=factors)
            except (ValueError, RuntimeError, IndexError, MegaliteError):  # a mistake that this network cannot make
                continue
            if point in values:
                yield Hypothesis(other.kind, other.text, self._with(values, point))
        if replay.numerics[1].dtype != torch.bfloat16:
            values, _ = replay.again(place, number, numerics=Numerics(torch.bfloat16), factors=factors)
            if point in values:
                yield self._rounded(values[point], point)

    def _with(self, values: Values, point: Point) -> float:
        return self.changed(lambda _: values[point].double())

    def _rounded(self, values: Tensor, point: Point) -> Hypothesis:
        """Return that the tensor is as far from the truth as bf16 would take it, which tells no direction."""
        distances = [each.distance for each in self.group]
        lower = [
            float(
                torch.linalg.vector_norm(
                    self.recall.expected(each, change=lambda _: values.double()) - self.truth(each)
                )
            )
            for each in self.group
        ]
        ratio = math.sqrt(sum(d * d for d in distances) / max(sum(e * e for e in lower), 1e-300))
        return Hypothesis(
            "precision",
            "it is as far off as if it were computed in bf16, where the run has more bits",
            _OF_BF16 * max(ratio, 1.0 / max(ratio, 1e-9)),
        )


def _layer_of(name: str) -> str:
    found = re.search(r"\d+", name)
    return found[0] if found is not None else ""


def _in_order(values: Tensor, order: Tensor) -> Tensor:
    return values[..., order]


def _what(entry: Entry) -> str:
    return f"the {entry.role.replace('_', ' ')} of {entry.name}" if entry.role in OF_MODULES else f"{entry.name}"


def _times(factor: float) -> str:
    return f"{factor:.6g} times what it should be"


def _named(factor: float, sizes: Mapping[str, float]) -> tuple[float, list[str]] | None:
    """Return the exact value of a factor, and what it may stand for; None if it is none that is known."""
    found: dict[float, list[str]] = {}
    numbers = {name: size for name, size in sizes.items() if size not in (0.0, 1.0) and name != "dp"}
    for of, change in (("", float), ("the root of ", math.sqrt)):  # a root only if nothing simpler fits
        for name, size in numbers.items():
            for value, text in (
                (change(size), f"{of}the number of {name}"),
                (1.0 / change(size), f"1 / {of}the number of {name}"),
            ):
                if not of or value not in found:
                    found.setdefault(value, []).append(text)
    for value in (2.0, 0.5, -1.0, 0.0):
        found.setdefault(value, [])
    near = [value for value in found if abs(factor - value) <= 0.01 * max(abs(value), 0.01)]
    if not near:
        return None
    best = min(near, key=lambda value: abs(factor - value))
    return best, found[best][:3]


def _orders(width: int, head: int) -> Iterator[tuple[str, Tensor]]:
    """Yield other orders of features."""
    numbers = torch.arange(width)
    if width % 2 == 0:
        yield "the two halves of the features are exchanged", numbers.view(2, -1).flip(0).flatten()
        yield "two halves of the features are interleaved", numbers.view(2, -1).t().flatten()
        yield "neighbouring features are taken apart into halves", numbers.view(-1, 2).t().flatten()
    if head and width % head == 0 and width // head > 1:
        heads = numbers.view(-1, head)
        yield "the order of heads is reversed", heads.flip(0).flatten()
        yield "heads are shifted by one", heads.roll(1, 0).flatten()
        yield "heads and channels of heads are exchanged", heads.t().flatten()
        if head % 2 == 0:
            yield (
                "in each head, halves are interleaved",
                heads.view(-1, 2, head // 2).transpose(1, 2).reshape(-1),
            )
            yield (
                "in each head, neighbours are taken apart",
                heads.view(-1, head // 2, 2).transpose(1, 2).reshape(-1),
            )
        count = width // head
        for groups in (2, 4):
            if count % groups == 0 and count > groups:
                yield (
                    f"heads are dealt to {groups} groups in turn",
                    heads.view(groups, -1, head).transpose(0, 1).reshape(-1),
                )
