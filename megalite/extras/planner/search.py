"""Search for the fastest layouts that fit: bounds decide which layouts are looked at more closely.

Each layout first has a bound from the network's sizes (`LowerBounds`), then one from the records of its parts
(`Step.bound`), and is simulated last. The layout with the smallest bound is always the next one, so the first K that
come out simulated are the K fastest ones of all.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from megalite.config import RunConfig
from megalite.config.parallel import STRATEGIES
from megalite.config.validate import resolve
from megalite.errors import ConfigurationError, MegaliteError
from megalite.extras.planner.cost import Prices
from megalite.extras.planner.layouts import Layout, is_even, layouts, require_batch
from megalite.extras.planner.lower_bounds import LowerBounds, Passes
from megalite.extras.planner.memory import RankMemory
from megalite.extras.planner.parts import Parts
from megalite.extras.planner.plan import GIB, Plan, Planner, misfit, misfit_of_host, missing_on_host
from megalite.extras.planner.split import PartCosts
from megalite.extras.planner.stage_layout import balanced
from megalite.extras.planner.step import Step
from megalite.training.kernels import drops_by_rank, require_equal_dropout

STATE = "weights, gradients and optimizer state alone"


@dataclass
class Misfits:
    """Layouts of one kind that do not fit, with the one among them that is nearest to fitting."""

    count: int
    missing: float
    """Bytes that this one has not."""
    layout: Layout
    words: str
    """Its fullest stage with its memory."""


@dataclass
class Found:
    """Result of a search.

    Attributes:
        plans: the fastest layouts that fit, in order.
        misfits: the layouts that do not fit, by what is too large.
        counts: numbers of layouts: "possible" ones, those "recorded" and those "simulated".
        config: the run that the layouts are set on.
    """

    plans: list[Plan] = field(default_factory=list)
    misfits: dict[str, Misfits] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    config: RunConfig | None = None

    def nearest(self, planner: Planner) -> Plan | None:
        """Return the plan in which the least memory is missing, of those of each kind that are nearest to fitting."""
        plans = []
        for each in self.misfits.values():
            with suppress(MegaliteError):  # only a bound is known of some
                plans.append(planner.plan(planner.on(each.layout, self.config)))
        return min(plans, key=lambda plan: plan.missing, default=None)


class _Entry(NamedTuple):
    """Layout in the queue, with the least seconds that it takes."""

    seconds: float
    layout: Layout
    stages: tuple[int, ...] = ()
    """Stages of ZeRO for which its weights have room, as long as its parts are not recorded."""
    config: RunConfig | None = None
    step: Step | None = None
    plan: Plan | None = None


class _Search:
    """Search with its queue. The arguments are those of `search`."""

    def __init__(self, planner: Planner, top: int, keep: Collection[str]) -> None:
        self.planner, self.top, self.keep = planner.to_search(keep), top, keep
        self.found = Found(config=self.planner.config)
        self.room = planner.cluster.gpu.memory
        self._least = LowerBounds(self.planner.config, planner.gpus, planner.prices)
        self._queue: list[_Entry] = []
        self._idle: set[tuple[str, bool]] = set()
        """Recomputations that change nothing without, or with, context-parallel ranks."""

    def run(self) -> Found:
        """Look at the layout with the smallest bound until enough of them have been simulated."""
        self._fill()
        self._require_a_valid_one()
        while self._queue and len(self.found.plans) < self.top:
            entry = heapq.heappop(self._queue)
            if entry.plan is not None:
                self.found.plans.append(entry.plan)
            elif entry.step is not None:
                self._simulate(entry)
            else:
                self._open(entry)
        if not self.found.plans and not self.found.misfits:
            raise ConfigurationError(_why_none(self.planner))
        return self.found

    def _fill(self) -> None:
        """Queue all layouts whose weights have room."""
        planner, counts, least = self.planner, self.found.counts, self._least
        stays = "zero" in self.keep
        all_stages = [planner.config.parallel.zero_stage] if stays else range(len(STRATEGIES))
        if planner.config.offload.parameter_offload or planner.config.low_precision.fp8_param_gather:
            all_stages = [3]  # whose slices are offloaded, and whose gathers are of codes
        dtype = getattr(torch, planner.config.training.dtype)
        whole = drops_by_rank(planner.config.model, planner.device, dtype)
        for layout in layouts(planner.config, planner.gpus, self.keep, whole_samples=whole):
            stages = all_stages if stays or planner.gpus > layout.tensor * layout.pipeline else [0]
            counts["possible"] += len(stages)
            sizes = dict(zip(stages, least.memory(layout, stages), strict=True))
            fitting = [stage for stage, size in sizes.items() if size <= self.room]
            for stage in sizes.keys() - fitting:
                words = f"at least {sizes[stage] / GIB:.1f} of {self.room / GIB:.1f} GiB"
                self._refuse(STATE, replace(layout, zero=stage), sizes[stage] - self.room, words)
            if fitting:
                self._queue.append(_Entry(least.seconds(layout, fitting[0]), layout, tuple(fitting)))
        if not counts["possible"]:
            require_equal_dropout(planner.config, planner.device)
            raise ConfigurationError(_why_none(planner))
        heapq.heapify(self._queue)

    def _require_a_valid_one(self) -> None:
        """Raise ConfigurationError, with the reason of the first one, if `resolve` refuses all layouts in the queue."""
        config = self.planner.config
        refusal: ConfigurationError | None = None
        for entry in sorted(self._queue):
            layout = replace(entry.layout, zero=entry.stages[0])
            layers, count = config.model.num_layers, layout.pipeline * layout.chunks
            even = is_even(config.model, count)
            stages = None if even else balanced(PartCosts(0.0, (1.0,) * layers, 0.0), count)
            try:
                resolve(layout.on(config, stages), self.planner.gpus)
                return
            except ConfigurationError as error:
                refusal = refusal or error
        if refusal is not None:
            raise refusal

    def _refuse(self, kind: str, layout: Layout, missing: float, words: str) -> None:
        """Count a layout that does not fit. `words`: its fullest stage with its memory, as far as they are known."""
        known = self.found.misfits.get(kind)
        if known is not None:
            known.count += 1
        if known is None or missing < known.missing:
            self.found.misfits[kind] = Misfits(1 if known is None else known.count, missing, layout, words)

    def _open(self, entry: _Entry) -> None:
        """Record the parts of a layout, and queue the stages of ZeRO with which it fits."""
        if (entry.layout.recompute, entry.layout.context > 1) in self._idle:
            return
        planner, seconds = self.planner, self._least.seconds(entry.layout, entry.stages[0])
        if seconds > entry.seconds:  # by what is known of its relatives now
            self._push(entry._replace(seconds=seconds))
        elif planner.has_parts(entry.layout):
            for stage in entry.stages:
                self._measure(replace(entry.layout, zero=stage), entry.seconds)
        elif fitting := tuple(stage for stage in entry.stages if self._may_fit(replace(entry.layout, zero=stage))):
            self._record(entry.layout)
            self._push(entry._replace(stages=fitting))

    def _measure(self, layout: Layout, seconds: float) -> None:
        """Queue a layout whose parts are recorded, if it fits."""
        config = self.planner.on(layout)
        step = self.planner.step(config)
        if step is None:
            return
        if "recompute" not in self.keep and self.planner.changes_nothing(layout):
            self._idle.add((layout.recompute, layout.context > 1))
            return
        self.found.counts["recorded"] += 1
        if self._fits(layout, self.planner.memory(step)):
            self._push(_Entry(max(step.bound, seconds), layout, (), config, step))

    def _may_fit(self, layout: Layout) -> bool:
        """Tell whether a layout may fit, as far as layouts with smaller micro-batches tell."""
        memory = self.planner.expected_memory(layout)
        return memory is None or self._fits(layout, memory)

    def _fits(self, layout: Layout, memory: Sequence[RankMemory]) -> bool:
        sizes = [each.total for each in memory]
        size, stage = max(zip(sizes, range(len(sizes)), strict=True))
        if size > self.room:
            words = misfit(stage, size, self.room)
            self._refuse(f"with recomputation {layout.recompute}", layout, size - self.room, words)
            return False
        if missing := missing_on_host(memory, self.planner.host_room):
            self._refuse("the host", layout, missing, misfit_of_host(memory, self.planner.host_room))
        return not missing

    def _record(self, layout: Layout) -> None:
        """Record the parts of a layout, or of another one that tells a bound of it."""
        first = self._to_record_before(layout)
        config = first.on(self.planner.config)
        if (parts := self.planner.parts(config)) is not None:
            self._least.learn(first, passes_of(parts, config, self.planner.prices))

    def _to_record_before(self, layout: Layout) -> Layout:
        """Return the layout to record before another, which takes less time to record and tells a bound of it.

        The more context-parallel ranks, the longer the record takes, and the less often is the layout a fast one.
        """
        smaller = [replace(layout, recompute="none"), layout.with_fewest_ranks()]
        if smaller[-1] == layout and layout.context % 2 == 0:
            smaller.append(replace(layout, context=layout.context // 2))
        elif smaller[-1] == layout and layout.micro_batch > 2:
            smaller += [replace(layout, micro_batch=size) for size in (1, 2)]
        for each in smaller:
            if each != layout and not self.planner.has_parts(each):
                return self._to_record_before(each)
        return layout

    def _simulate(self, entry: _Entry) -> None:
        assert entry.config is not None
        try:
            plan = self.planner.plan(entry.config)
        except ConfigurationError:  # a relation that `layouts` does not know
            return
        self.found.counts["simulated"] += 1
        self._push(_Entry(plan.step.seconds, entry.layout, plan=plan))

    def _push(self, entry: _Entry) -> None:
        heapq.heappush(self._queue, entry)


def search(planner: Planner, top: int = 10, keep: Collection[str] = ()) -> Found:
    """Find the fastest layouts that fit.

    Args:
        top: number of layouts.
        keep: axes (fields of `Layout`) that stay as the flags have them.

    Raises:
        ConfigurationError: no layout can split this run, or all are refused.
    """
    require_batch(planner.config)
    return _Search(planner, top, keep).run()


def passes_of(parts: Parts, config: RunConfig, prices: Prices) -> Passes:
    """Return the seconds of the passes of recorded parts."""
    layers = [prices.passes(layer, config, of_layer=True) for layer in parts.layers]
    forward, backward = (sum(each.total for each in passes) for passes in zip(*layers, strict=True))
    head = prices.passes(parts.head, config, of_layer=False)
    return Passes(forward, backward, sum(each.total for each in head))


def _why_none(planner: Planner) -> str:
    """Return why no layout splits a run."""
    model, batch = planner.config.model, planner.config.training.global_batch_size
    return (
        f"no layout of {planner.gpus} GPUs splits this run: they must be a product of a divisor of "
        f"--num-attention-heads {model.num_attention_heads}, at most --num-layers {model.num_layers} stages, and "
        f"divisors of --seq-length {planner.config.data.seq_length} and --global-batch-size {batch}"
    )
