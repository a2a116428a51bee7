"""Plan of one layout on a cluster: whether it fits, and how long a step takes."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache

import torch

from megalite.config import RunConfig
from megalite.config.validate import resolve
from megalite.errors import ConfigurationError, MegaliteError
from megalite.extras.planner.cluster import Cluster, Stack, find_stack
from megalite.extras.planner.cost import Prices
from megalite.extras.planner.dry_run import META, dry_run, planned_kernels
from megalite.extras.planner.layouts import Layout, has_uneven_stages, is_even, to_search
from megalite.extras.planner.memory import Flights, RankMemory, in_flight, memory_in_flight
from megalite.extras.planner.part_costs import priced
from megalite.extras.planner.parts import Parts, part_records
from megalite.extras.planner.records import PartRecord
from megalite.extras.planner.stage_layout import balanced
from megalite.extras.planner.step import Step, StepTime
from megalite.pipeline.schedules import SCHEDULES, orders_of
from megalite.pipeline.simulator import simulate
from megalite.pipeline.stages import Stages
from megalite.pipeline.timeline import TimeLine
from megalite.training.data import known_vocabulary
from megalite.training.kernels import require_equal_dropout, require_recipe

GIB = 2**30
_WITH_FP8 = ("Ada", "Hopper", "Blackwell")
"""Generations of GPUs that run products in FP8, as `scaled_products.refusal` tells them apart."""


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
    host_room: float | None = None
    """Bytes of its share of the host; None: they are not known."""
    rooms: tuple[float, ...] = ()
    """Bytes of the smallest GPU of each pipeline rank, if they are not alike; then `room` is that of the fullest."""

    @property
    def fullest(self) -> int:
        """The pipeline rank with the most memory on its GPU, or with GPUs that are not alike, the least to spare."""
        rooms = self.rooms or (self.room,) * len(self.memory)
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total - rooms[rank])

    @property
    def missing(self) -> float:
        """Bytes that the fullest GPU has not, or else its host; 0 if the layout fits."""
        return max(self.memory[self.fullest].total - self.room, 0.0) or missing_on_host(self.memory, self.host_room)

    @property
    def too_large(self) -> str:
        """The fullest rank with its memory, as text."""
        size = self.memory[self.fullest].total
        if size <= self.room and missing_on_host(self.memory, self.host_room):
            return misfit_of_host(self.memory, self.host_room)
        return misfit(self.fullest, size, self.room)


def misfit(stage: int, size: float, room: float) -> str:
    """Return the memory of a stage beside that of the GPU, as text."""
    return f"stage {stage}: {size / GIB:.1f} of {room / GIB:.1f} GiB"


def missing_on_host(memory: Sequence[RankMemory], room: float | None) -> float:
    """Return the bytes that some rank needs on its host beyond its share, which is `room`; 0 if that is not known."""
    return max(0.0, *(each.host - room for each in memory)) if room is not None else 0.0


def misfit_of_host(memory: Sequence[RankMemory], room: float | None) -> str:
    """Return what a rank of the fullest stage has on its host beside its share of the host's memory, as text."""
    size, stage = max((each.host, stage) for stage, each in enumerate(memory))
    return f"{misfit(stage, size, room or 0.0)} of the host"


class Planner:
    """Planner of the layouts of a run on a cluster."""

    def __init__(self, config: RunConfig, cluster: Cluster, gpus: int, stack: Stack | None = None) -> None:
        """Plan a run as its flags have it, with its vocabulary.

        Raises:
            ConfigurationError: the run trains indexers alone, or the GPUs do not have its products.
        """
        if config.model.trains_indexers_alone:
            raise ConfigurationError(
                f"--dsa-stage {config.model.dsa_stage} trains the indexers alone, but plans are of networks that are "
                "trained whole: plan --dsa-stage sparse, which needs no less"
            )
        self._given, self.config = config.model, with_vocabulary(config)
        self.cluster, self.gpus = cluster, gpus
        _require_products(self.config, cluster)
        self.prices = Prices(cluster, stack or find_stack(Stack.name))
        self._parts: dict[Hashable, Parts | None] = {}
        self._by_weights: dict[Hashable, Parts] = {}

    @property
    def device(self) -> torch.device:
        """The kind of device that is planned."""
        return torch.device("cpu" if self.cluster.gpu.is_cpu else "cuda")

    @property
    def host_room(self) -> float | None:
        """Bytes of a rank's share of its host; None: they are not known."""
        return self.cluster.host.memory if self.cluster.host is not None else None

    def with_gpus(self, gpus: int) -> Planner:
        """Return the planner of the same run on another number of GPUs."""
        other = copy(self)  # with the same records and prices
        other.gpus = gpus
        return other

    def for_other_run(self, gpus: int) -> Planner:
        """Return the planner of runs with other networks, optimizers or kernels."""
        other = self.with_gpus(gpus)
        other._parts, other._by_weights = {}, {}
        return other

    def to_search(self, keep: Collection[str]) -> Planner:
        """Return the planner of the run from which a search begins that keeps these axes."""
        other = copy(self)
        other.config = to_search(self.config, keep)
        return other

    def plan(self, config: RunConfig) -> Plan:
        """Return the plan of a run as its flags describe it. Raises ConfigurationError if its layout is not valid."""
        config = resolve(config, self.gpus)
        require_equal_dropout(config, self.device)
        parts = self.parts(config)
        if parts is None:
            raise MegaliteError(f"the network cannot be divided as {config.parallel.layout(self.gpus)}")
        step = Step(config, self.gpus, parts, self.prices)
        memory, room = self.memory(step), self.cluster.gpu.memory
        return Plan(config, self.gpus, Layout.of(config), step.simulated, memory, room, self.host_room)

    def on(self, layout: Layout, base: RunConfig | None = None) -> RunConfig:
        """Return a run, that of the planner or another one, with a layout.

        Its stages are balanced if the layers cannot be divided evenly, or are of different kinds, and the flags do not
        say how to divide them.
        """
        base = base or self.config
        config = layout.on(base)
        count = layout.pipeline * layout.chunks
        uneven = count > 1 and not is_even(config.model, count) and not has_uneven_stages(config)
        parts = self.parts(config) if uneven else None
        if parts is None:
            return config
        return layout.on(base, balanced(priced(parts, config, self.prices), count))

    def step(self, config: RunConfig) -> Step | None:
        """Return the step of a layout, not simulated yet; None if the network cannot be divided in this way."""
        parts = self.parts(config)
        return None if parts is None else Step(config, self.gpus, parts, self.prices)

    def memory(self, step: Step) -> tuple[RankMemory, ...]:
        """Return the memory of each pipeline rank."""
        flights = _flights(step.schedule, step.layout, step.filling, step.group)
        return tuple(memory_in_flight(step.config, self.gpus, step.parts, flights, self.cluster.gpu.reserved))

    def expected_memory(self, layout: Layout) -> tuple[RankMemory, ...] | None:
        """Return the memory of a layout by the records of micro-batches of one and of two samples; None without them.

        The layers are taken to be divided evenly. More context-parallel ranks need no less, with as many tokens each.
        """
        config, known = layout.on(self.config), layout.with_fewest_ranks()
        if not is_even(config.model, layout.pipeline * layout.chunks):
            return None
        parts = self._known(known)
        if parts is None:
            one, two = (self._known(replace(known, micro_batch=size)) for size in (1, 2))
            parts = None if one is None or two is None else extended(one, two, known.micro_batch)
        return None if parts is None else self.memory(Step(config, self.gpus, parts, self.prices))

    def _known(self, layout: Layout) -> Parts | None:
        return self.parts(layout.on(self.config)) if self.has_parts(layout) else None

    def time_line(self, plan: Plan) -> TimeLine:
        """Return the time line of the first micro-batches of a plan's step, of no more than show how it goes on."""
        step = self.step(plan.config)
        assert step is not None
        count = min(step.micro_batches, 2 * step.layout.ranks)
        spans = simulate(step.layout, step.orders(count), lambda s, kind: step.stages[s].seconds(kind), step.transfer)
        title = f"{step.schedule}: {count} of {step.micro_batches} micro-batches, predicted"
        return TimeLine(title, step.layout, spans, in_seconds=True)

    def confirm(self, plan: Plan) -> tuple[int, float]:
        """Run one step of a rank of the fullest stage on the meta device, with as many micro-batches as fill it.

        Returns the rank and the most bytes that it needs, with what the driver and the libraries take.
        """
        parallel, training, step = plan.config.parallel, plan.config.training, self.step(plan.config)
        assert step is not None
        samples = step.filling * training.micro_batch_size * parallel.data_parallel_size(plan.gpus)
        model = replace(plan.config.model, vocab_size=self._given.vocab_size)
        config = replace(plan.config, training=replace(training, global_batch_size=samples), model=model)
        rank = plan.fullest * (plan.gpus // parallel.pipeline_model_parallel_size)
        found = dry_run(config, plan.gpus, rank, of_gpu=not self.cluster.gpu.is_cpu)
        return rank, found.peak_blocks + self.cluster.gpu.reserved

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
            of_gpu, alike = not self.cluster.gpu.is_cpu, self._by_weights.get(weights)
            self._parts[key] = found = _recorded(config, alike, of_gpu=of_gpu)
            if found is not None:
                self._by_weights.setdefault(weights, found)
        return self._parts[key]


def _require_products(config: RunConfig, cluster: Cluster) -> None:
    """Raise ConfigurationError if the GPUs of a cluster do not multiply in the few bits that a run asks for."""
    low, gpu = config.low_precision, cluster.gpu
    if low.recipe is None or gpu.is_cpu or config.kernels.kernels == "reference":  # emulated
        return
    with planned_kernels(config.kernels):
        require_recipe(config, META)
    known = gpu.generation is None or gpu.generation in _WITH_FP8
    if not known or "float8" not in gpu.peak:
        raise ConfigurationError(
            f"{low.flag} with --cluster {cluster.name}: a run has these products on GPUs of the generations "
            f"{', '.join(_WITH_FP8)} alone, and a plan needs their peak (float8, see clusters.toml): "
            "give such a cluster, or plan without the flag"
        )


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


def _recorded(config: RunConfig, alike: Parts | None, *, of_gpu: bool) -> Parts | None:
    """Record the parts of a layout.

    Context-parallel ranks of CPUs draw their dropout on the host, which takes long: it is left out.
    """
    if config.parallel.context_parallel_size > 1:
        config = replace(config, model=replace(config.model, attention_dropout=0.0))
    try:
        with planned_kernels(config.kernels, of_gpu=of_gpu):
            return part_records(config, alike)
    except MegaliteError:
        return None


@cache
def _flights(schedule: str, stages: Stages, micro_batches: int, group: int) -> list[Flights]:
    return [in_flight(order) for order in orders_of(SCHEDULES[schedule], stages, micro_batches, group)]
