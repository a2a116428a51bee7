"""True values of a walk, computed again one stage at a time, whole or in parts: for hypotheses on one tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.extras.verify.compare import Walk, read_whole
from megalite.extras.verify.cuts import tokens_of
from megalite.extras.verify.judgement import Judgement
from megalite.extras.verify.own_terms import (
    Mask,
    change_output_gradient,
    keep_inner_features_of_experts,
    kept_features,
    kept_tokens,
    mask_inputs_of_rows,
)
from megalite.extras.verify.points import LOGITS, PRODUCT, Point, Values
from megalite.extras.verify.replay import Replay
from megalite.extras.verify.trace import Entry, Trace
from megalite.model.gpt import GPT
from megalite.parallel.embedding import VocabParallelEmbedding
from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear

_MOST_KEPT = 1 << 30
"""Bytes of gradients that are kept at most, and those of one micro-batch."""
SHARED = "shared keys and values"
"""In place of axis tp: only keys and values that several ranks have."""


def _as_it_is(values: Tensor) -> Tensor:
    return values


@dataclass
class Recall:
    """The true values of a finished walk, computed again when they are asked for."""

    walk: Walk
    _values: dict[tuple[int, int, bool], tuple[Values, Mapping[str, Tensor]]] = field(default_factory=dict)
    _gradients: dict[Hashable, Mapping[str, Tensor]] = field(default_factory=dict)

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

    def _stage(
        self,
        place: int,
        number: int,
        backward: bool,
        own: tuple[str, str, int, int] | None = None,
        factors: Mapping[str, float] | None = None,
        change: Callable[[GPT], None] | None = None,
    ) -> tuple[Values, Mapping[str, Tensor]]:
        """Return the points and gradients of a stage, with what is another than it should be (see `gradient`)."""
        plain = own is None and factors is None and change is None
        key = place, number, backward
        if plain and key in self._values:
            return self._values[key]
        multipliers = dict(self.factors_of(number)) if backward else None
        if multipliers is not None and factors is not None:
            multipliers = {name: each * factors.get(name, 1.0) for name, each in multipliers.items()}
        if own is not None:
            change = partial(self._keep_own, module=own[0], own=own[1:], number=number)
        found = self.replay.again(place, number, factors=multipliers, change=change or (lambda network: None))
        if plain:
            if len(self._values) > 8:
                self._values.clear()
            self._values[key] = found
        return found

    def _keep_own(self, network: GPT, module: str, own: tuple[str, int, int], number: int) -> None:
        """Change a stage such that backward gives a module only a rank's own terms in sums over an axis.

        What comes to the module's branch from behind it is complete.
        """
        axis, index, count = own
        if axis == SHARED:
            self._keep_own_keys_and_values(network, module, own, number)
            return
        branch = "head" if module.startswith("head") else "mlp" if ".mlp" in module else "attention"
        if axis == "cp":
            length = self.replay.batches[number]["tokens"].shape[1]
            mask = kept_tokens(tokens_of((index, count), length))
            mask_inputs_of_rows(network, lambda name: mask if ".attention." in name else None)
            return

        def of_layer(name: str) -> Mask | None:
            part = self.walk.correspondence.part_of_rank(name, index, count)
            if f".{branch}" not in name:
                return None
            return kept_features(part.columns[name]) if name in part.columns else None

        mask_inputs_of_rows(network, of_layer)
        if branch == "mlp":
            keep_inner_features_of_experts(network, index, count)
        if network.head is not None and branch == "head":
            values, _ = self._stage(len(self.replay.stages) - 1, number, backward=True)
            left = values[Point(LOGITS, "output_gradient")]
            part = self.walk.correspondence.part_of_rank(LOGITS, index, count)
            weight = torch.cat([each.detach() for each in network.head.output.weights])
            own_part = kept_features(part.rows[LOGITS])(left) @ weight * network.head.multiplier
            change_output_gradient(network.head.norm, lambda _: own_part)

    def _keep_own_keys_and_values(self, network: GPT, module: str, own: tuple[str, int, int], number: int) -> None:
        """Have queries get all of their gradient, and keys and values that of a rank's own heads."""
        layer = re.match(r"layers\.\d+", module)
        name = f"{layer[0] if layer else ''}.attention.query_key_value"
        placed = self.walk.correspondence.rows_of(f"{layer[0] if layer else ''}.attention.key_value")
        projection = _module(network, name)
        if projection is None or placed is None:
            return
        stage, point = self.replay.place_of(name), Point(name, "output_gradient")
        whole = self._stage(stage, number, backward=True)[0][point]
        part = self._stage(stage, number, backward=True, own=(module, "tp", *own[1:]))[0][point]
        keep = kept_features(placed)
        change_output_gradient(projection, lambda _: whole - keep(whole) + keep(part))

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
            return F.linear(kept_features(part.columns[name])(entered), module.weight.detach())
        if role == "output" and isinstance(module, VocabParallelEmbedding) and name in part.rows:
            tokens = self.replay.micro_batch(self.number_of(judgement.entry)).tokens.t()
            return values[judgement.point] * torch.isin(tokens, part.rows[name]).unsqueeze(-1)
        if role == "input_gradient" and isinstance(module, ColumnParallelLinear) and name in part.rows:
            left = values[Point(name, "output_gradient")]
            weight = torch.cat([each.detach() for each in module.weights])
            return kept_features(part.rows[name])(left) @ weight
        return None

    def own_points(self, judgement: Judgement, axis: str, place: tuple[int, int]) -> Values:
        """Return the points of a judgement's stage if its ranks do not sum gradients over an axis.

        `axis`: tp for the terms of a rank's heads, inner features and tokens of the vocabulary; `SHARED`; cp for the
        terms of its queries.
        """
        assert judgement.point is not None
        stage = self.replay.place_of(judgement.point.module)
        return self._stage(
            stage, self.number_of(judgement.entry), backward=True, own=(judgement.point.module, axis, *place)
        )[0]

    def contiguous(self, judgement: Judgement, dimension: int, count: int) -> Tensor | None:
        """Return a rank's part of a weight if the whole one is cut into contiguous parts; None if shapes differ."""
        coordinates = self.trace.coordinates.get(judgement.entry.rank, {})
        weight = self.walk.correspondence.of_weight(judgement.entry, coordinates)
        whole = weight.whole({name: read_whole(self.replay.source, name) for name in weight.logical})
        parts = whole.chunk(count, dimension)
        found = parts[min(coordinates.get("tp", (0, 1))[0], len(parts) - 1)]
        return found if tuple(found.shape) == judgement.entry.shape else None

    def changed_points(
        self, judgement: Judgement, factors: Mapping[str, float], change: Callable[[GPT], None] | None
    ) -> Values:
        """Return the points of a judgement's stage after backward with other factors of terms, and a change of it."""
        assert judgement.point is not None
        stage = self.replay.place_of(judgement.point.module)
        return self._stage(stage, self.number_of(judgement.entry), True, None, factors, change)[0]

    def logical(self, judgement: Judgement) -> str:
        """Return the logical name of the first part of a recorded weight."""
        coordinates = self.trace.coordinates.get(judgement.entry.rank, {})
        return self.walk.correspondence.of_weight(judgement.entry, coordinates).logical[0]

    def gradient(
        self,
        judgement: Judgement,
        weight_of: Callable[[int], float],
        *,
        tokens: tuple[str, int, int] | None = None,
        own: tuple[str, int, int] | None = None,
        uses: Sequence[int] | None = None,
        factors: Mapping[str, float] | None = None,
        change: Callable[[GPT], None] | None = None,
        coordinates: Mapping[str, tuple[int, int]] | None = None,
    ) -> Tensor:
        """Return a rank's part of a weight's gradient, as a weighted sum over micro-batches, or of a part of the terms.

        Args:
            weight_of: weight of a micro-batch, by its number.
            tokens: only the terms of the tokens that a place on an axis (tp: contiguous; cp) has: (axis, index, count).
            own: only the terms of a rank's own features or queries, as `own_points` has them: (axis, index, count).
            uses: only the terms of some of the uses of a weight, by their numbers: a tied embedding has two.
            factors: factors of the terms of the loss, relative to what they should be.
            change: changes the stage before it runs.
        """
        at = self.trace.coordinates.get(judgement.entry.rank, {}) if coordinates is None else coordinates
        weight = self.walk.correspondence.of_weight(judgement.entry, at)
        module = self.walk.correspondence.module_of(weight.logical[0])
        places = self.places_of(weight.logical[0])
        masked = None if tokens is None else partial(_with_tokens, name=module, tokens=tokens)
        total: dict[str, Tensor] = {}
        for place in places if uses is None else [places[use] for use in uses]:
            for number in range(len(self.replay.batches)):
                if not (multiplier := weight_of(number)):
                    continue
                key = weight.logical, place, number, tokens, own, tuple(sorted((factors or {}).items())), change
                if key not in self._gradients:
                    terms = None if own is None else (module, *own)
                    found = self._stage(place, number, True, terms, factors, masked or change)[1]
                    self._keep(key, {name: found[name].double() for name in weight.logical if name in found})
                for name, gradient in self._gradients[key].items():
                    total[name] = total.get(name, torch.zeros(())) + gradient * multiplier
        shapes = {name: self.replay.source.tensors[name].shape for name in weight.logical}
        whole = {name: total[name] if name in total else torch.zeros(shapes[name]).double() for name in weight.logical}
        return weight.cut(weight.whole(whole))

    def _keep(self, key: Hashable, gradients: Mapping[str, Tensor]) -> None:
        """Keep the gradients of a weight of one micro-batch, of which many hypotheses are sums."""
        kept = (each.nbytes for found in self._gradients.values() for each in found.values())
        if sum(kept) > _MOST_KEPT:
            self._gradients.clear()
        self._gradients[key] = gradients

    def places_of(self, logical: str) -> list[int]:
        """Return the stages of the replay that use a weight: two for a tied embedding."""
        place = self.replay.place_of(self.walk.correspondence.module_of(logical))
        last = len(self.replay.stages) - 1
        return [place, last] if logical == "embedding.word" and last and self.is_tied else [place]

    @property
    def is_tied(self) -> bool:
        return not self.replay.model.untie_embeddings_and_output_weights


def _module(network: GPT, name: str) -> nn.Module | None:
    """Return a module of a stage by its name in the whole network."""
    first = network.stage_layers.first_layer
    path = re.sub(r"^layers\.(\d+)", lambda found: f"layers.{int(found[1]) - first}", name)
    return dict(network.named_modules()).get(path)


def _with_tokens(network: GPT, name: str, tokens: tuple[str, int, int]) -> None:
    """Have a module's weights get the gradient of some tokens alone."""
    axis, index, count = tokens

    def keep(gradient: Tensor) -> Tensor:
        length = len(gradient)
        places = tokens_of((index, count), length) if axis == "cp" else torch.arange(length).chunk(count)[index]
        return kept_tokens(places)(gradient)

    if (module := _module(network, name)) is not None:
        change_output_gradient(module, keep)
