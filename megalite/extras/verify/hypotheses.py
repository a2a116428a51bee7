"""Explanations of a tensor that differs: each is another tensor, and the best is the nearest to what was recorded.

A hypothesis never says how sure it is: it says what would have been computed, and the recorded values tell how far they
are from that. One that explains them leaves no more than rounding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megalite.errors import MegaliteError
from megalite.extras.verify.alternatives import alternatives
from megalite.extras.verify.cuts import NoCounterpart
from megalite.extras.verify.judgement import LIMIT, Judgement
from megalite.extras.verify.points import Point, Values
from megalite.extras.verify.recall import Recall
from megalite.extras.verify.rounding import Numerics
from megalite.extras.verify.trace import OF_MODULES, Entry

_RANKS = {"factor": 0, "some factor": 2, "precision": 3, "count": 2}
"""Places of the kinds of hypotheses among those that explain: what says more comes first. The others are at 1."""
_MOST_CHANGES = 16
"""Maximum number of other ranks that one rank's tensor is compared with."""


@dataclass(frozen=True)
class Hypothesis:
    """Explanation of what was recorded.

    Attributes:
        kind: its class: factor, sum, shards, layout, mask, position, epsilon, scale, missing, precision, stale, count.
        text: what the program seems to have computed.
        ratio: what is left of the distance, as a multiple of what rounding explains.
        factor: the factor, of a hypothesis of this kind.
    """

    kind: str
    text: str
    ratio: float
    factor: float | None = None

    @property
    def explains(self) -> bool:
        """True if no more than rounding is left."""
        return self.ratio <= LIMIT


Expected = Callable[[Judgement], Tensor | None]
"""Tensor that a rank would have recorded; None if the hypothesis says nothing of it."""


@dataclass
class Search:
    """Search for the explanation of one tensor.

    Attributes:
        recall: computes what the walk has compared again.
        group: the judgements of the tensor, one of each rank that has recorded it.
        sizes: sizes of axes, and other numbers that a factor may be, by name.
    """

    recall: Recall
    group: Sequence[Judgement]
    sizes: Mapping[str, float]

    def run(self) -> list[Hypothesis]:
        """Return the hypotheses, the best first: those that explain, by what they say, then by what is left."""
        found = [*self._factors(), *self._shards(), *self._others()]
        before = self._ratio(self._truth)
        kept = [each for each in found if each.explains or each.ratio < 0.5 * before]
        return sorted(kept, key=lambda each: (not each.explains, _RANKS.get(each.kind, 1), each.ratio))

    # -------------------------------------------------------------------------------------------- measures

    def _ratio(self, expected: Expected) -> float:
        """Return what is left of the distance on all ranks together, as a multiple of what rounding explains."""
        left, rounding = 0.0, 0.0
        for judgement in self.group:
            tensor = expected(judgement)
            if tensor is None:
                return math.inf
            scale = float(torch.linalg.vector_norm(tensor)) / judgement.norm if judgement.norm else 1.0
            left += judgement.entry.read().distance(tensor.double()) ** 2
            rounding += (judgement.rounding * max(scale, 0.1)) ** 2
        return math.sqrt(left / rounding) if rounding else math.inf if left else 0.0

    def _changed(self, change: Callable[[Tensor], Tensor]) -> float:
        """Return what is left if the point was changed in this way."""
        return self._ratio(partial(self.recall.expected, change=change))

    def _truth(self, judgement: Judgement) -> Tensor:
        return self.recall.expected(judgement)

    # -------------------------------------------------------------------------------------------- factors

    def _factors(self) -> Iterator[Hypothesis]:
        """Yield a factor that all ranks have, and factors that each rank has by itself."""
        found = [judgement.entry.read().factor(self._truth(judgement)) for judgement in self.group]
        if any(each is None or not math.isfinite(each) for each in found):
            return
        factors = [each for each in found if each is not None]
        mean = sum(factors) / len(factors)
        ratio = self._ratio(lambda judgement: self._truth(judgement) * mean)
        named = _named(mean, self.sizes)
        exact = named[0] if named else mean
        if abs(mean - 1.0) > 1e-3:
            text = f"{_what(self.group[0].entry)} is {_times(exact)}"
            text += f" ({', '.join(named[1])})" if named else ""
            yield Hypothesis("factor" if named else "some factor", text, ratio, exact)
        if len(factors) > 1 and max(factors) - min(factors) > 1e-3 * abs(mean):
            own = dict(zip((id(each) for each in self.group), factors, strict=True))
            ratio = self._ratio(lambda judgement: self._truth(judgement) * own[id(judgement)])
            shown = ", ".join(f"rank {each.entry.rank} x {own[id(each)]:.4g}" for each in self.group[:8])
            yield Hypothesis("count", f"each rank has a factor of its own, as by a count taken locally: {shown}", ratio)

    # -------------------------------------------------------------------------------------------- shards

    def _shards(self) -> Iterator[Hypothesis]:
        """Yield that ranks have the parts of others, and that all have the same part."""
        for axis in ("tp", "cp", "ep"):
            count = max(self._place(each, axis)[1] for each in self.group)
            if not 1 < count <= _MOST_CHANGES:
                continue
            for shift in range(1, count):
                yield Hypothesis(
                    "shards",
                    f"ranks on axis {axis} have the parts of others, {shift} further",
                    self._ratio(partial(self._moved, axis=axis, shift=shift)),
                )
            for same in range(count):
                yield Hypothesis(
                    "shards",
                    f"all ranks on axis {axis} have the same part, that of rank {same}",
                    self._ratio(partial(self._moved, axis=axis, same=same)),
                )

    def _place(self, judgement: Judgement, axis: str) -> tuple[int, int]:
        return self.recall.trace.coordinates.get(judgement.entry.rank, {}).get(axis, (0, 1))

    def _moved(self, judgement: Judgement, axis: str, shift: int = 0, same: int | None = None) -> Tensor | None:
        """Return the part of the rank that is `shift` places further on an axis, or at the place `same`."""
        at, count = self._place(judgement, axis)
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
            return
        if first.point is None:
            yield from self._sums_of_gradients()
            return
        yield from self._permuted()
        yield from self._partial()
        yield from self._computed()

    def _other_weights(self) -> Iterator[Hypothesis]:
        """Yield that a weight has the values of another one of the same shape, or only zeros or ones."""
        correspondence, first = self.recall.walk.correspondence, self.group[0]
        own = correspondence.of_weight(first.entry, self.recall.trace.coordinates.get(first.entry.rank, {})).tensor
        near = [each for each in correspondence.tensors if each.shape == own.shape and each.name != own.name]
        near.sort(key=lambda each: _layer_of(each.name) != _layer_of(own.name))
        for other in near[:_MOST_CHANGES]:
            yield Hypothesis(
                "shards", f"it has the values of {other.name}", self._ratio(partial(self._as_weight, name=other.name))
            )

    def _as_weight(self, judgement: Judgement, name: str) -> Tensor:
        renamed = replace(judgement, entry=replace(judgement.entry, name=name))
        return self.recall.expected(renamed)

    def _permuted(self) -> Iterator[Hypothesis]:
        """Yield other orders of the features: halves, neighbours, heads."""
        first = self.group[0]
        assert first.point is not None
        width = self.recall.values(first)[first.point].shape[-1]
        for text, order in _orders(width, self.recall.replay.model.head_dim):
            yield Hypothesis(
                "layout",
                text,
                self._changed(partial(_in_order, order=order)),
            )
        for shift in (1, -1):
            yield Hypothesis(
                "position",
                f"tokens are shifted by one place {'forward' if shift > 0 else 'back'}",
                self._changed(partial(torch.roll, shifts=shift, dims=0)),
            )

    def _partial(self) -> Iterator[Hypothesis]:
        """Yield that a sum over tensor-parallel ranks is missing: each has only its own term."""
        first = self.group[0]
        ranks = self._place(first, "tp")[1]
        if first.point is None or ranks == 1:
            return
        terms = [self.recall.partial(first, (rank, ranks)) for rank in range(ranks)]
        if any(term is None for term in terms):
            return

        def own(each: Judgement) -> Tensor:
            term = terms[self._place(each, "tp")[0]]
            return self.recall.expected(each, change=lambda _: term)  # type: ignore[return-value,arg-type]

        yield Hypothesis("sum", "the sum over axis tp is missing: each rank has its own term", self._ratio(own))

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
        return self._changed(lambda _: values[point].double())

    def _rounded(self, values: Tensor, point: Point) -> Hypothesis:
        """Return that the tensor was computed in bf16: it is as far from the truth as that takes it."""
        distances = [each.distance for each in self.group]
        lower = [
            float(
                torch.linalg.vector_norm(
                    self.recall.expected(each, change=lambda _: values.double()) - self._truth(each)
                )
            )
            for each in self.group
        ]
        ratio = math.sqrt(sum(d * d for d in distances) / max(sum(e * e for e in lower), 1e-300))
        return Hypothesis(
            "precision", "it was computed in bf16, where the run has more bits", max(ratio, 0.1 / max(ratio, 1e-9))
        )

    def _sums_of_gradients(self) -> Iterator[Hypothesis]:
        """Yield that the gradient of a weight lacks the terms of other ranks, micro-batches or tokens."""
        first = self.group[0]
        replicas, per_rank = int(self.sizes.get("dp", 1)), int(self.sizes.get("micro-batches", 1))
        subsets: list[tuple[str, Callable[[int, int], bool]]] = []
        if replicas > 1:
            subsets.append(("the sum over axis dp is missing", lambda own, number: number // per_rank == own))
        if per_rank > 1:
            subsets.append(("only the last micro-batch counts", lambda own, number: number % per_rank == per_rank - 1))
            subsets.append(("only the first micro-batch counts", lambda own, number: number % per_rank == 0))
            subsets.append(("the last micro-batch is missing", lambda own, number: number % per_rank != per_rank - 1))
        for text, keeps in subsets:
            undivided = [(float(replicas), f", and nothing is divided by {replicas}")] if replicas > 1 else []
            for scale, how in ((1.0, ""), *undivided):

                def expected(
                    each: Judgement, keeps: Callable[[int, int], bool] = keeps, scale: float = scale
                ) -> Tensor:
                    own = self._place(each, "dp")[0]
                    return self.recall.gradient(each, lambda number: scale if keeps(own, number) else 0.0)

                yield Hypothesis("sum", text + how, self._ratio(expected))
        for axis in ("tp", "cp"):
            ranks = self._place(first, axis)[1]
            if ranks > 1:

                def of_tokens(each: Judgement, axis: str = axis) -> Tensor:
                    return self.recall.gradient(each, lambda number: 1.0, tokens=(axis, *self._place(each, axis)))

                words = {"tp": "sequence-parallel ranks (axis tp)", "cp": "axis cp"}[axis]
                yield Hypothesis(
                    "sum", f"the sum over {words} is missing: each has that of its tokens", self._ratio(of_tokens)
                )
        ranks = self._place(first, "tp")[1]
        if ranks > 1:

            def of_heads(each: Judgement) -> Tensor:
                return self.recall.gradient(each, lambda number: 1.0, heads=self._place(each, "tp"))

            yield Hypothesis(
                "sum", "the sum over axis tp is missing: each rank has that of its heads", self._ratio(of_heads)
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
    for name, size in sizes.items():
        if size in (0.0, 1.0):
            continue
        for value, text in (
            (size, f"the number of {name}"),
            (1.0 / size, f"1 / the number of {name}"),
            (math.sqrt(size), f"the root of the number of {name}"),
            (1.0 / math.sqrt(size), f"1 / the root of the number of {name}"),
        ):
            found.setdefault(value, []).append(text)
    for value in (2.0, 0.5, -1.0, 0.0):
        found.setdefault(value, [])
    near = [value for value in found if abs(factor - value) <= 0.01 * max(abs(value), 0.01)]
    if not near:
        return None
    best = min(near, key=lambda value: abs(factor - value))
    return best, found[best]


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
