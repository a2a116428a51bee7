"""True values of a walk, computed again one stage at a time, whole or in parts: for hypotheses on one tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.extras.verify.compare import Walk, read_whole
from megalite.extras.verify.cuts import tokens_of
from megalite.extras.verify.judgement import Judgement
from megalite.extras.verify.points import PRODUCT, Point, Values
from megalite.extras.verify.replay import Replay
from megalite.extras.verify.trace import Entry, Trace
from megalite.model.gpt import GPT
from megalite.parallel.embedding import VocabParallelEmbedding
from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear


def _as_it_is(values: Tensor) -> Tensor:
    return values


@dataclass
class Recall:
    """The true values of a finished walk, computed again when they are asked for."""

    walk: Walk
    _values: dict[tuple[int, int, bool], tuple[Values, Mapping[str, Tensor]]] = field(default_factory=dict)

    @property
    def replay(self) -> Replay:
        return self.walk.replay

    @property
    def trace(self) -> Trace:
        return self.walk.trace

    def number_of(self, entry: Entry) -> int:
        """Return the number in the replay of an entry's micro-batch."""
        number = self.walk.number_of(entry)
        assert number is not None  # it has been compared
        return number

    def factors_of(self, number: int) -> Mapping[str, float]:
        """Return the factor of each term of the loss for a micro-batch."""
        return self.walk.multipliers[number]

    def values(self, judgement: Judgement) -> Values:
        """Return the points of the stage of a judgement's point, for its micro-batch."""
        assert judgement.point is not None
        place = self.replay.place_of(judgement.point.module)
        return self._stage(place, self.number_of(judgement.entry), judgement.point.role.endswith("gradient"))[0]

    def _stage(self, place: int, number: int, backward: bool) -> tuple[Values, Mapping[str, Tensor]]:
        key = place, number, backward
        if key not in self._values:
            if len(self._values) > 8:
                self._values.clear()
            factors = self.factors_of(number) if backward else None
            self._values[key] = self.replay.again(place, number, factors=factors)
        return self._values[key]

    def expected(
        self,
        judgement: Judgement,
        coordinates: Mapping[str, tuple[int, int]] | None = None,
        change: Callable[[Tensor], Tensor] = _as_it_is,
    ) -> Tensor:
        """Return the true tensor that a rank should have recorded, in fp64.

        Args:
            coordinates: the place of another rank, whose part is returned; None for its own.
            change: changes the point before the rank's part is cut out of it.

        Raises:
            NoCounterpart: the other place has no such part.
        """
        entry = judgement.entry
        own = self.trace.coordinates.get(entry.rank, {}) if coordinates is None else coordinates
        if judgement.point is None:
            weight = self.walk.correspondence.of_weight(entry, own)
            if entry.role == "parameter":
                values = {name: read_whole(self.replay.source, name) for name in weight.logical}
                return weight.cut(weight.whole(values))
            return self.gradient(judgement, lambda number: 1.0, coordinates=own)
        batch, sequence = self.replay.batches[0]["tokens"].shape
        counterpart = self.walk.correspondence.of_module(entry, own, batch, sequence)
        scale = self.walk.scale if judgement.point.role.endswith("gradient") else 1.0
        return counterpart.cut(change(self.values(judgement)[judgement.point])) * scale

    # -------------------------------------------------------------------------------------------- parts of sums

    def partial(self, judgement: Judgement, tp: tuple[int, int]) -> Tensor | None:
        """Return the term of a tensor-parallel rank in the sum that gives a point; None if no such sum does."""
        assert judgement.point is not None
        name, role = judgement.point
        name = name.removesuffix(PRODUCT)
        place = self.replay.place_of(name)
        network = self.replay.network(self.replay.stages[place], torch.float64)
        module = _module(network, name)
        part = self.walk.correspondence.part_of_rank(name, *tp)
        values = self.values(judgement)
        if role == "output" and isinstance(module, RowParallelLinear) and name in part.columns:
            entered = values[Point(name, "input")]
            return F.linear(entered * _mask(part.columns[name], entered), module.weight.detach())
        if role == "output" and isinstance(module, VocabParallelEmbedding) and name in part.rows:
            tokens = self.replay.micro_batch(self.number_of(judgement.entry)).tokens.t()
            return values[judgement.point] * torch.isin(tokens, part.rows[name]).unsqueeze(-1)
        if role == "input_gradient" and isinstance(module, ColumnParallelLinear) and name in part.rows:
            left = values[Point(name, "output_gradient")]
            weight = torch.cat([each.detach() for each in module.weights])
            return (left * _mask(part.rows[name], left)) @ weight
        return None

    def gradient(
        self,
        judgement: Judgement,
        weight_of: Callable[[int], float],
        *,
        tokens: tuple[str, int, int] | None = None,
        heads: tuple[int, int] | None = None,
        coordinates: Mapping[str, tuple[int, int]] | None = None,
    ) -> Tensor:
        """Return a rank's part of a weight's gradient, as a weighted sum over micro-batches, or of a part of the terms.

        Args:
            weight_of: weight of a micro-batch, by its number.
            tokens: only the terms of the tokens that a place on an axis (tp: contiguous; cp) has: (axis, index, count).
            heads: only the terms of the heads of a tensor-parallel rank, for a weight that heads share.
        """
        own = self.trace.coordinates.get(judgement.entry.rank, {}) if coordinates is None else coordinates
        weight = self.walk.correspondence.of_weight(judgement.entry, own)
        module = self.walk.correspondence.module_of(weight.logical[0])
        places = [self.replay.place_of(module)]
        if weight.logical[0] == "embedding.word" and len(self.replay.stages) > 1:
            places.append(len(self.replay.stages) - 1)  # a tied output layer
        total: dict[str, Tensor] = {}
        for place in places:
            for number in range(len(self.replay.batches)):
                if not (factor := weight_of(number)):
                    continue
                if tokens is None and heads is None:
                    _, found = self._stage(place, number, backward=True)
                else:
                    change = partial(_with_part, name=module, tokens=tokens, heads=heads)
                    _, found = self.replay.again(place, number, change=change, factors=self.factors_of(number))
                for name in weight.logical:
                    if name in found:
                        total[name] = total.get(name, torch.zeros(())) + found[name].double() * factor
        return weight.cut(weight.whole(total))


def _module(network: GPT, name: str) -> nn.Module | None:
    """Return a module of a stage by its name in the whole network."""
    first = network.stage_layers.first_layer
    path = re.sub(r"^layers\.(\d+)", lambda found: f"layers.{int(found[1]) - first}", name)
    return dict(network.named_modules()).get(path)


def _mask(kept: Tensor, like: Tensor) -> Tensor:
    mask = torch.zeros(like.shape[-1], dtype=like.dtype)
    mask[kept] = 1.0
    return mask


def _with_part(network: GPT, name: str, tokens: tuple[str, int, int] | None, heads: tuple[int, int] | None) -> None:
    """Have a module's weights get the gradient of some tokens or heads alone."""
    module = _module(network, name)

    def keep(gradient: Tensor) -> Tensor:
        mask = torch.zeros_like(gradient)
        if tokens is not None:
            axis, index, count = tokens
            places = torch.arange(len(gradient))
            kept = tokens_of((index, count), len(gradient)) if axis == "cp" else places.chunk(count)[index]
            mask[kept] = 1.0
        elif heads is not None and gradient.dim() == 4:
            mask[:, :, torch.arange(gradient.shape[2]).chunk(heads[1])[heads[0]]] = 1.0
        else:
            return gradient
        return gradient * mask

    def look(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            first.register_hook(keep)

    if module is not None:
        module.register_forward_hook(look)
