"""Plan of one layout on a cluster: whether it fits, and how long a step takes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache

from megalite.config import RunConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.validate import resolve
from megalite.errors import MegaliteError
from megalite.pipeline.schedules import SCHEDULES, orders_of
from megalite.pipeline.simulator import simulate
from megalite.pipeline.stages import Stages
from megalite.pipeline.timeline import TimeLine
from megalite.planner.cluster import Cluster, Stack
from megalite.planner.cost import Cost, Prices
from megalite.planner.dry_run import dry_run, gpu_kernels
from megalite.planner.layouts import Layout
from megalite.planner.memory import Flights, RankMemory, in_flight, memory_in_flight
from megalite.planner.parts import Parts, part_records
from megalite.planner.records import MessageKind, PartRecord, Work
from megalite.planner.stage_layout import balanced, priced
from megalite.planner.step import Step, StepTime
from megalite.training.data import known_vocabulary

GIB = 2**30
_RECORDED_LAYERS = 3
"""Layers that the record of a middle one needs."""
_GROUPS = 3
"""Groups of micro-batches after which a pipeline holds as many as ever."""


@dataclass(frozen=True)
class Plan:
    """Prediction for a layout."""

    config: RunConfig
    gpus: int
    layout: Layout
    step: StepTime
    memory: tuple[RankMemory, ...]
    """Memory of each pipeline rank."""
    room: float
    """Bytes of a GPU."""

    @property
    def fullest(self) -> int:
        """The pipeline rank with the most memory."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total)

    @property
    def missing(self) -> float:
        """Bytes that the fullest rank has not; 0 if the layout fits."""
        return max(self.memory[self.fullest].total - self.room, 0.0)

    @property
    def too_large(self) -> str:
        """The fullest rank with its memory, as text."""
        return misfit(self.fullest, self.memory[self.fullest].total, self.room)


def misfit(stage: int, size: float, room: float) -> str:
    """Return the memory of a stage beside that of the GPU, as text."""
    return f"stage {stage}: {size / GIB:.1f} of {room / GIB:.1f} GiB"


class CachedPrices(Prices):
    """Prices that are looked up once for each message and each work."""

    def __init__(self, cluster: Cluster, stack: Stack | None = None) -> None:
        super().__init__(cluster, stack)
        self._collectives: dict[Hashable, float] = {}
        self._works: dict[Hashable, tuple[Work, Cost]] = {}

    def collective(self, kind: MessageKind, ranks: Sequence[int], size: float, experts: int = 1) -> float:
        key = (kind, ranks, size, experts)
        if key not in self._collectives:
            self._collectives[key] = super().collective(kind, ranks, size, experts)
        return self._collectives[key]

    def work(
        self, work: Work, parallel: ParallelConfig, *, of_layer: bool = True, waits: int = 0, experts: int = 1
    ) -> Cost:
        key = (id(work), of_layer, waits, experts)
        if key not in self._works:  # with the work, so that no other gets its id
            cost = super().work(work, parallel, of_layer=of_layer, waits=waits, experts=experts)
            self._works[key] = work, cost
        return self._works[key][1]


class Planner:
    """Planner of the layouts of a run on a cluster. `config` is the run as its flags describe it."""

    def __init__(self, config: RunConfig, cluster: Cluster, gpus: int, stack: Stack | None = None) -> None:
        self.given, self.config = config, with_vocabulary(config)
        self.cluster, self.gpus = cluster, gpus
        self.prices = CachedPrices(cluster, stack)
        self._parts: dict[Hashable, Parts | None] = {}
        self._by_weights: dict[Hashable, Parts] = {}

    def with_gpus(self, config: RunConfig, gpus: int) -> Planner:
        """Return the planner of a run with the same network and another batch on another number of GPUs."""
        other = copy(self)  # with the same records and prices
        other.config, other.gpus = config, gpus
        return other

    def plan(self, config: RunConfig) -> Plan:
        """Return the plan of a run as its flags describe it. Raises ConfigurationError if its layout is not valid."""
        config = resolve(config, self.gpus)
        parts = self.parts(config)
        if parts is None:
            raise MegaliteError(f"the network cannot be divided as {config.parallel.layout(self.gpus)}")
        step = Step(config, self.gpus, parts, self.prices)
        return Plan(
            config, self.gpus, Layout.of(config), step.simulated, self.memory(config, step), self.cluster.gpu.memory
        )

    def on(self, layout: Layout) -> RunConfig:
        """Return the run with a layout, whose stages are balanced if the layers cannot be divided evenly."""
        config = layout.on(self.config)
        count = layout.pipeline * layout.chunks
        parts = self.parts(config) if config.model.num_layers % count else None
        if parts is None:
            return config
        return layout.on(self.config, balanced(priced(parts, config, self.prices), count))

    def step(self, config: RunConfig) -> Step | None:
        """Return the step of a layout, not simulated yet; None if the network cannot be divided in this way."""
        parts = self.parts(config)
        return None if parts is None else Step(config, self.gpus, parts, self.prices)

    def memory(self, config: RunConfig, step: Step) -> tuple[RankMemory, ...]:
        """Return the memory of each pipeline rank."""
        parts = self.parts(config)
        assert parts is not None
        return self._memory(config, step, parts)

    def _memory(self, config: RunConfig, step: Step, parts: Parts) -> tuple[RankMemory, ...]:
        group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage or step.layout.ranks
        count = step.micro_batches
        if step.schedule != "gpipe":
            count = min(count, _GROUPS * group + count % group)
        flights = _flights(step.schedule, step.layout, count, group)
        return tuple(memory_in_flight(config, self.gpus, parts, flights, self.cluster.gpu.reserved))

    def expected_memory(self, layout: Layout) -> tuple[RankMemory, ...] | None:
        """Return the memory of a layout by the records of micro-batches of one and of two samples; None without them.

        The layers are taken to be divided evenly. More context-parallel ranks need no less, with as many tokens each.
        """
        config, known = layout.on(self.config), layout.with_fewest_ranks()
        if config.model.num_layers % (layout.pipeline * layout.chunks):
            return None
        parts = self._known(known)
        if parts is None:
            one, two = (self._known(replace(known, micro_batch=size)) for size in (1, 2))
            parts = None if one is None or two is None else extended(one, two, known.micro_batch)
        return None if parts is None else self._memory(config, Step(config, self.gpus, parts, self.prices), parts)

    def _known(self, layout: Layout) -> Parts | None:
        return self.parts(layout.on(self.config)) if self.has_parts(layout) else None

    def time_line(self, plan: Plan) -> TimeLine:
        """Return the time line of the first micro-batches of a plan's step, of no more than show how it goes on."""
        step = self.step(plan.config)
        assert step is not None
        count = min(step.micro_batches, 2 * step.layout.ranks)
        group = plan.config.parallel.microbatch_group_size_per_virtual_pipeline_stage
        spans = simulate(
            step.layout, step.orders(count, group), lambda s, kind: step.stages[s].seconds(kind), step.transfer
        )
        title = f"{step.schedule}: {count} of {step.micro_batches} micro-batches, predicted"
        return TimeLine(title, step.layout, spans, in_seconds=True)

    def confirm(self, plan: Plan) -> tuple[int, float]:
        """Run one step of a rank of the fullest stage on the meta device, with as many micro-batches as fill it.

        Returns the rank and the most bytes that it needs, with what the driver and the libraries take.
        """
        parallel, training = plan.config.parallel, plan.config.training
        ranks = parallel.pipeline_model_parallel_size
        of_step = training.micro_batch_size * parallel.data_parallel_size(plan.gpus)
        count = min((training.global_batch_size or of_step) // of_step, _GROUPS * ranks)
        smaller = replace(training, global_batch_size=count * of_step)
        config = replace(plan.config, training=smaller, model=self.given.model)
        rank = plan.fullest * (plan.gpus // ranks)
        return rank, dry_run(config, plan.gpus, rank).peak_blocks + self.cluster.gpu.reserved

    # -------------------------------------------------------------------------------------------- records

    def has_parts(self, layout: Layout) -> bool:
        """Tell whether the parts of a layout are recorded."""
        return parts_key(layout.on(self.config)) in self._parts

    def changes_nothing(self, layout: Layout) -> bool:
        """Tell whether recomputation leaves this layout as it is without."""
        if layout.recompute == "none":
            return False
        plain = replace(layout, recompute="none")
        return self.parts(plain.on(self.config)) == self.parts(layout.on(self.config))

    def parts(self, config: RunConfig) -> Parts | None:
        """Return the records of the parts of a layout; None if the network cannot be divided in this way."""
        key = parts_key(config)
        if key not in self._parts:
            weights = _weights_key(config)
            self._parts[key] = found = _recorded(config, self._by_weights.get(weights))
            if found is not None:
                self._by_weights.setdefault(weights, found)
        found, layers = self._parts[key], config.model.num_layers
        if found is not None and len(found.layers) != layers:
            found = self._parts[key] = replace(found, layers=found.layers[-1:] * layers)
        return found


def with_vocabulary(config: RunConfig) -> RunConfig:
    """Return a run with the size of its vocabulary, which its tokenizer knows."""
    return replace(config, model=replace(config.model, vocab_size=known_vocabulary(config)[0]))


def parts_key(config: RunConfig) -> Hashable:
    """Return what the records of a run's parts depend on, among what layouts differ in."""
    parallel, training = config.parallel, config.training
    return (
        *(size for axis, size in parallel.mesh_sizes.items() if axis != "pipeline_parallel_size"),
        *(parallel.sequence_parallel, parallel.cp_comm_type, parallel.hierarchical_context_parallel_sizes),
        *(training.recompute_granularity, training.recompute_modules, training.recompute_method),
        *(training.recompute_num_layers, training.micro_batch_size),
    )


def _weights_key(config: RunConfig) -> Hashable:
    """Return what the weights of a run's parts on a rank depend on, among what layouts differ in."""
    parallel = config.parallel
    experts = parallel.expert_model_parallel_size, parallel.mesh_sizes["expert_tensor_parallel_size"]
    return (parallel.tensor_model_parallel_size, parallel.sequence_parallel, *experts)


def extended(one: Parts, two: Parts, samples: int) -> Parts:
    """Return parts with the memory of larger micro-batches, from those for one sample and for two."""

    def record(of_one: PartRecord, of_two: PartRecord) -> PartRecord:
        sizes = {name: getattr(of_one, name) for name in ("kept", "forward_peak", "backward_peak")}
        more = {name: size + (samples - 1) * (getattr(of_two, name) - size) for name, size in sizes.items()}
        return replace(of_two, **more)

    layers = {id(of_two): record(of_one, of_two) for of_one, of_two in zip(one.layers, two.layers, strict=True)}
    return Parts(
        record(one.stage, two.stage),
        record(one.embedding, two.embedding),
        tuple(layers[id(each)] for each in two.layers),
        record(one.head, two.head),
    )


def _recorded(config: RunConfig, alike: Parts | None) -> Parts | None:
    """Record the parts of a layout. Layers that are all alike are recorded once.

    Context-parallel ranks draw their dropout on the host, which takes long: it is left out.
    """
    if config.parallel.context_parallel_size > 1:
        config = replace(config, model=replace(config.model, attention_dropout=0.0))
    if len(set(config.model.layers)) == 1:
        config = replace(config, model=replace(config.model, num_layers=_RECORDED_LAYERS))
    try:
        with gpu_kernels(config.kernels):
            return part_records(config, alike)
    except MegaliteError:
        return None


@cache
def _flights(schedule: str, stages: Stages, micro_batches: int, group: int) -> list[Flights]:
    return [in_flight(order) for order in orders_of(SCHEDULES[schedule], stages, micro_batches, group)]
