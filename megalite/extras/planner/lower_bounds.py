"""Lower bounds of the time and the memory of a layout, from the sizes of the network and from layouts recorded before.

From the sizes follow the matrix products and attention of each layer, the messages between tensor-parallel ranks, and
the way of the first and the last micro-batch through the pipeline; and the memory of the weights with their gradients
and state, and of the inputs of the products. A recorded layout bounds its relatives, since work that is split further,
or comes in smaller micro-batches, is not done at a higher speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from megalite.config import RunConfig
from megalite.config.kinds.table import kinds_of
from megalite.config.layer_specs import LayerSpec
from megalite.extras.planner.cost import Prices
from megalite.extras.planner.intervals import rounded_dtype
from megalite.extras.planner.layouts import Layout
from megalite.extras.planner.memory import Element
from megalite.extras.planner.records import Operation

_LARGEST_FACTOR = 64
_ALIGNED = 64
"""Multiple of columns in which no product is faster than in fewer of them."""


@dataclass(frozen=True)
class Passes:
    """Seconds of all layers with one micro-batch, forward and backward, and of the head both ways."""

    forward: float
    backward: float
    head: float

    def most(self, other: Passes, factor: float) -> Passes:
        """Return the larger of each of these and `factor` times the other."""
        return Passes(*(max(one, factor * two) for one, two in zip(_values(self), _values(other), strict=True)))

    def extended(self, two: Passes, samples: int) -> Passes:
        """Return the least seconds with more samples, of these for one and the others for two.

        Kernels and messages take time in proportion to samples beyond a fixed part, or more.
        """
        return Passes(
            *(
                first + (samples - 1) * (second - first)
                for first, second in zip(*map(_values, (self, two)), strict=True)
            )
        )


def _values(passes: Passes) -> tuple[float, ...]:
    return tuple(vars(passes).values())


_Key = tuple[int, bool, int, int, int, str, int]


class LowerBounds:
    """Lower bounds for the layouts of a run. `config` has its vocabulary."""

    def __init__(self, config: RunConfig, gpus: int, prices: Prices) -> None:
        self.config, self.gpus, self.prices = config, gpus, prices
        element = Element.of(config)
        trains_all = config.adapters.lora_rank is None and not config.adapters.freeze
        self._itemsize, self._trains_all = element.parameter, trains_all
        gathered = 1.0 if config.low_precision.fp8_param_gather else element.parameter
        self._sizes = gathered, element.gradient * trains_all
        self._on_device = (element.of_device[0], *(size * trains_all for size in element.of_device[1:]))
        self._rounded = rounded_dtype(config)
        """Dtype of products that may be rounded; all are taken to be, the fastest case."""
        self._layers, self._length = config.model.layers, config.data.seq_length
        self._matrices = config.model.activation.matrices * config.model.hidden_size
        self._batch, self._reserved = config.training.global_batch_size or 1, prices.cluster.gpu.reserved
        self._of_sizes: dict[_Key, Passes] = {}
        self._recorded: dict[_Key, Passes] = {}
        self._exchanges: dict[tuple[int, int], tuple[float, float]] = {}
        self._dense, self._experts = self._weights()
        self._hidden, self._split = self._widths()

    def learn(self, layout: Layout, passes: Passes) -> None:
        """Note what the passes of a layout take by its records."""
        self._recorded[_key(layout)] = passes

    def seconds(self, layout: Layout, stage: int = 1) -> float:
        """Return the least seconds of a step under this stage of ZeRO, or a later one."""
        passes = self._passes(layout)
        if stage >= 2:
            passes = self._with_exchange(passes, layout, stage)
        copies = self.gpus // (layout.tensor * layout.context * layout.pipeline)
        ranks, steps = layout.pipeline, self._batch // (layout.micro_batch * copies)
        waits = passes.forward if layout.schedule.startswith("zb") else passes.forward + passes.backward
        busy = steps * (passes.forward + passes.backward + passes.head) / ranks
        return (busy + (ranks - 1) * waits / (ranks * layout.chunks)) * self.prices.stack.factor

    def memory(self, layout: Layout, stages: Iterable[int]) -> list[float]:
        """Return the least bytes of the fullest pipeline rank under each of these stages of ZeRO, with what the driver
        and the libraries take."""
        ranks = layout.pipeline
        of_stage, of_experts = self.gpus // ranks, max(layout.expert * layout.expert_tensor, 1)
        shards = of_stage // layout.tensor, max(of_stage // of_experts, 1)
        dense, experts = self._dense / layout.tensor, self._experts / of_experts
        parts = [(dense * size, experts * size) for size in self._on_device]
        steps = self._batch * layout.tensor * layout.context // (layout.micro_batch * of_stage)
        fixed = min(steps, ranks) * self._kept(layout)
        found = []
        for stage in stages:
            total = fixed
            for first, (own, of_expert) in zip((3, 2, 1), parts, strict=True):
                total += own / shards[0] + of_expert / shards[1] if stage >= first else own + of_expert
            found.append(total / ranks + self._reserved)
        return found

    def _with_exchange(self, passes: Passes, layout: Layout, stage: int) -> Passes:
        """Return passes that last as long as the messages with gradients (ZeRO 2) and weights (ZeRO 3) in them."""
        key = (layout.tensor, layout.pipeline)
        if key not in self._exchanges:
            ranks = range(0, self.gpus // layout.pipeline, layout.tensor)
            count, elements = len(self._layers), self._dense / layout.tensor / len(self._layers)
            weights, gradients = (elements * size for size in self._sizes)
            self._exchanges[key] = (
                count * self.prices.collective("reduce-scatter", ranks, gradients),
                count * self.prices.collective("all-gather", ranks, weights),
            )
        reduced, gathered = self._exchanges[key]
        gathered *= stage == 3
        return Passes(max(passes.forward, gathered), max(passes.backward, reduced + gathered), passes.head)

    # -------------------------------------------------------------------------------------------- memory

    def _weights(self) -> tuple[float, float]:
        """Return the elements of all layers that every rank has a part of, and those of experts."""
        model = self.config.model
        dense = experts = 0.0
        for spec in self._layers:
            if spec.mixer is not None:
                dense += kinds_of(spec)[0].weights(model)
            if spec.feed_forward == "moe":
                matrices = model.activation.matrices * model.expert_hidden_size
                experts += matrices * model.expert_ffn_size * (model.num_experts or 0)
                dense += self._matrices * (model.moe_shared_expert_intermediate_size or 0)
            elif spec.feed_forward is not None:
                dense += self._matrices * model.ffn_size
        return dense, experts

    def _kept(self, layout: Layout) -> float:
        """Return the bytes that all layers keep of a micro-batch."""
        tokens = layout.micro_batch * self._length / layout.context
        hidden = tokens * self._hidden / (layout.tensor if layout.sequence else 1)
        if layout.recompute == "full":
            return hidden * len(self._layers)
        return hidden * sum(len(spec.kinds) for spec in self._layers) + tokens * self._split / layout.tensor

    def _widths(self) -> tuple[float, float]:
        """Return the bytes per token of hidden states, and of the inputs and outputs of products that all layers keep
        at least beside them."""
        model, split = self.config.model, 0
        for spec in self._layers:
            if spec.mixer is not None:
                split += kinds_of(spec)[0].weights(model) // model.hidden_size
            kept = spec.feed_forward == "dense" and self.config.training.mlp_chunks_for_training == 1
            split += model.ffn_size * (model.activation.matrices - 1) * kept
        item = 1 if self._rounded else self._itemsize  # of codes
        return model.hidden_size * self._itemsize, split * item

    # -------------------------------------------------------------------------------------------- time

    def _passes(self, layout: Layout) -> Passes:
        """Return seconds that no plan of this layout can be below: the most that sizes and recorded layouts give."""
        key = _key(layout)
        if key in self._recorded:
            return self._recorded[key]
        simple = _key(replace(layout, recompute="none")) if layout.recompute == "selective" else key
        if simple not in self._of_sizes:
            self._of_sizes[simple] = self._from_sizes(layout)
        found = self._of_sizes[simple]
        if self._recorded:
            for relative, factor in _relatives(layout):
                known = self._recorded.get(_key(relative))
                if known is not None:
                    if layout.recompute == "full" and relative.recompute == "none":
                        known = replace(known, backward=known.backward + known.forward)
                    found = found.most(known, factor)
            one, two = (self._recorded.get(_key(replace(layout, micro_batch=size))) for size in (1, 2))
            if one is not None and two is not None and layout.micro_batch > 2:
                found = found.most(one.extended(two, layout.micro_batch), 1.0)
        return found

    def _from_sizes(self, layout: Layout) -> Passes:
        """Return the seconds of products and of messages that nothing hides, computed from sizes alone."""
        model, dtype = self.config.model, self.config.training.dtype
        tensor = layout.tensor
        tokens = layout.micro_batch * self._length // layout.context
        forward = backward = 0.0
        message = self._message(layout, tokens)
        for spec in set(self._layers):
            count = self._layers.count(spec)
            once, again = self._layer(spec, layout, tokens)
            of_halves = [self._dispatch(layout, tokens) if kind == "moe" else message for kind in spec.kinds]
            messages = sum(of_halves)
            forward, backward = forward + count * (once + messages), backward + count * (again + messages)
        rows = model.padded_vocab_size(tensor) // tensor
        head = (3 if self._trains_all else 2) * self.prices.product((1, tokens, rows, model.hidden_size), dtype)
        return Passes(forward, backward + forward * (layout.recompute == "full"), head)

    def _layer(self, spec: LayerSpec, layout: Layout, tokens: int) -> tuple[float, float]:
        """Return the seconds of a layer's kernels, forward and backward."""
        model, tensor, matrices = self.config.model, layout.tensor, self.config.model.activation.matrices
        plain = self.prices.stack.low_precision or self.config.training.dtype
        dtype, item = (self._rounded, 1.0) if self._rounded else (plain, self._itemsize)
        of_weight = dtype if self.config.low_precision.fp8_wgrad else plain
        hidden, activated = model.hidden_size, 0
        shapes: list[tuple[int, int, int, int]] = []
        if spec.mixer == "attention":
            heads = model.num_attention_heads * model.head_dim // tensor
            groups = max(2 * model.kv_groups * model.head_dim // tensor, 2)
            shapes += [(1, tokens, heads + groups, hidden), (1, tokens, hidden, heads)]
        elif spec.mixer is not None:  # all products of other mixers are taken for one, without the recurrence
            columns = kinds_of(spec)[0].weights(model) // (hidden * tensor)
            shapes.append((1, tokens, max(columns // _ALIGNED * _ALIGNED, 1), hidden))
        if spec.feed_forward is not None:
            rows, width, local, inner_hidden = tokens, model.ffn_size // tensor, 1, hidden
            if spec.feed_forward == "moe":
                local = (model.num_experts or 1) // layout.expert
                rows = tokens * model.moe_router_topk // tensor * layout.expert_tensor
                width, inner_hidden = model.expert_ffn_size // layout.expert_tensor, model.expert_hidden_size
            shapes += [(local, rows, (matrices - 1) * width, inner_hidden), (local, rows, inner_hidden, width)]
            activated = matrices * rows * width
        forward = backward = 0.0
        for batch, count, columns, inner in shapes:
            weights = batch * columns * inner
            reading, adding = (self.prices.moved(weights * size) for size in (item, 2 * self._sizes[1]))
            forward += max(self.prices.product((1, count, columns, inner), dtype), reading)
            backward += max(self.prices.product((1, count, inner, columns), dtype), reading)
            if self._trains_all:
                backward += max(self.prices.product((1, columns, inner, count), of_weight), adding)
        if spec.attends and spec.keys_before is None:
            shape = layout.micro_batch * model.num_attention_heads // tensor, self._length // layout.context
            width = model.score_width
            scores = shape[0] * shape[1] * self._length * width
            for name, halves in (("attention", 2), ("attention_backward", 5)):
                kernel = Operation(name, "attention", (*shape, self._length, width), halves * scores, 0, plain)
                seconds = self.prices.operation(kernel).attention
                forward, backward = (forward + seconds, backward) if halves == 2 else (forward, backward + seconds)
        norms = 2 * len(spec.kinds) * tokens * hidden // (tensor if layout.sequence else 1)
        elements = self.prices.moved(self._itemsize * norms + item * activated)
        return forward + elements, backward + elements

    def _message(self, layout: Layout, tokens: int) -> float:
        """Return the seconds in which tensor-parallel ranks sum up the hidden states once."""
        elements, ranks = tokens * self.config.model.hidden_size, range(layout.tensor)
        size = elements * self._itemsize
        gathered = self.prices.collective("all-gather", ranks, elements if self._rounded else size)  # of codes
        gathered += self.prices.collective("reduce-scatter", ranks, size)
        return min(self.prices.collective("all-reduce", ranks, size), gathered) * (1 - self.prices.stack.hidden_tensor)

    def _dispatch(self, layout: Layout, tokens: int) -> float:
        """Return the seconds in which tokens go to the ranks of their experts, and back."""
        model, tensor = self.config.model, layout.tensor
        size = tokens // tensor * model.moe_router_topk * model.expert_hidden_size * self._itemsize
        step = max(tensor, layout.expert_tensor)
        ranks = range(0, layout.expert * step, step) if step == layout.expert_tensor else range(layout.expert)
        seconds = self.prices.collective("all-to-all", ranks, size, model.moe_router_topk)
        return 2 * seconds * (1 - self.prices.stack.hidden_expert)


def _key(layout: Layout) -> _Key:
    return (
        *(layout.tensor, layout.sequence, layout.context, layout.expert, layout.expert_tensor),
        *(layout.recompute, layout.micro_batch),
    )


def _relatives(layout: Layout) -> Iterator[tuple[Layout, float]]:
    """Yield layouts that do the same work at a speed that is as high or higher, and the share of their seconds."""
    plain = replace(layout, recompute="none")
    if layout.recompute != "none":
        yield plain, 1.0
    for each in {layout, plain}:
        factor = 2
        while factor <= _LARGEST_FACTOR:
            yield replace(each, micro_batch=layout.micro_batch * factor), 1 / factor
            if layout.context % factor == 0:
                yield replace(each, context=layout.context // factor), 1 / factor
                if layout.micro_batch % factor == 0:  # with as many tokens on each rank
                    yield replace(each, context=layout.context // factor, micro_batch=layout.micro_batch // factor), 1.0
            if layout.tensor % factor == 0 and layout.expert == 0:
                tensor = layout.tensor // factor
                sequence = layout.sequence and tensor > 1
                yield replace(each, tensor=tensor, sequence=sequence, expert_tensor=tensor), 1 / factor
            factor *= 2
