"""Seconds of a training step: the passes of each stage, put together by the schedule that the engine runs, and what
data-parallel ranks exchange."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megalite.config import RunConfig
from megalite.config.pipeline_layout import StageLayers, schedule_name, shape, stage_layers, virtual_stages
from megalite.extras.planner.cost import Cost, Prices
from megalite.extras.planner.data_parallel import DataParallel, Exchange
from megalite.extras.planner.intervals import Interval, interval
from megalite.extras.planner.memory import has_frozen_table, tied_elements
from megalite.extras.planner.parts import Parts
from megalite.extras.planner.records import PartRecord
from megalite.pipeline.schedules import SCHEDULES, Action, Kind, orders_of
from megalite.pipeline.simulator import simulate
from megalite.pipeline.stages import Stages
from megalite.tasks.adapters import adapter_products
from megalite.tasks.flops import flops_per_token
from megalite.training.builder import model_dtype

FILLING = 3
"""Groups of micro-batches after which a pipeline holds as many as ever."""
_PERIODS = (3, 4)
"""Groups of micro-batches that are simulated; further ones take as long as those between."""


@dataclass(frozen=True)
class StageTime:
    """Costs of a stage's passes with one micro-batch, and what its ranks exchange."""

    forward: Cost
    backward: Cost
    weights: float
    """Seconds of backward that the gradients of the weights take, for schedules that compute them later."""
    exchange: Exchange

    def seconds(self, kind: Kind) -> float:
        if kind == "F":
            return self.forward.total
        return {"B": self.backward.total, "I": self.backward.total - self.weights, "W": self.weights}[kind]


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    seconds: float
    cost: Cost
    """Breakdown of them, on the pipeline rank that has most to do."""
    stages: tuple[StageTime, ...]
    tokens_per_second: float
    """Per GPU."""
    flops: float
    """Model FLOP/s per GPU, with causal attention."""
    mfu: float
    """These over the peak of the weights' dtype."""
    interval: Interval

    @property
    def bubble(self) -> float:
        """Share of the step in which that rank waits for others."""
        return self.cost.bubble / self.seconds


class Step:
    """A step of a layout, to be bounded first and simulated if that is worth it.

    `config` has its vocabulary and its global batch size, and is valid for `world_size` ranks.
    """

    def __init__(self, config: RunConfig, world_size: int, parts: Parts, prices: Prices) -> None:
        self.config, self.world_size, self.prices = config, world_size, prices
        model, parallel, training = config.model, config.parallel, config.training
        data_ranks = parallel.data_parallel_size(world_size)
        self.batch = training.global_batch_size or training.micro_batch_size * data_ranks
        self.micro_batches = -(-self.batch // (training.micro_batch_size * data_ranks))
        chunks = virtual_stages(model, parallel)
        self.schedule = schedule_name(chunks, parallel)
        self.layout = Stages(parallel.pipeline_model_parallel_size, chunks, shape(parallel).v_shaped)
        self.parts = parts
        self._data = DataParallel(config, world_size, prices)
        self.transfer = self._transfer()
        self._head = self._without_tied(parts.head)
        stages: dict[tuple[tuple[int, ...], bool, bool], StageTime] = {}
        self.stages: list[StageTime] = []
        for stage in stage_layers(model, parallel):
            layers = parts.layers[stage.first_layer : stage.first_layer + stage.layers]
            key = (tuple(map(id, layers)), stage.embedding, stage.loss)
            if key not in stages:
                stages[key] = self._stage(parts, layers, stage)
            self.stages.append(stages[key])

    @property
    def group(self) -> int:
        """Number of micro-batches that a rank with several stages passes through one before the next."""
        return self.config.parallel.microbatch_group_size_per_virtual_pipeline_stage or self.layout.ranks

    @property
    def filling(self) -> int:
        """Number of micro-batches with which the pipeline holds as many at once as with all of them."""
        if self.schedule == "gpipe":  # it holds all of them
            return self.micro_batches
        return min(self.micro_batches, FILLING * self.group + self.micro_batches % self.group)

    @property
    def simulated(self) -> StepTime:
        """The time of the step."""
        ranks, ends = range(self.layout.ranks), self._ends()
        busy, after = [self._busy(rank) for rank in ranks], [self._afterwards(rank) for rank in ranks]
        seconds = max(end + each.total for end, each in zip(ends, after, strict=True))
        busiest = max(ranks, key=lambda rank: busy[rank].total + after[rank].total)
        cost = busy[busiest] + after[busiest]
        cost = replace(cost, bubble=seconds - cost.total) * self.prices.stack.factor
        config = self.config
        tokens = self.batch * config.data.seq_length / cost.total / self.world_size
        vocabulary = config.model.padded_vocab_size(config.parallel.tensor_model_parallel_size)
        adapters = adapter_products(config.model, config.adapters)
        flops = tokens * flops_per_token(config.model, vocabulary, config.data.seq_length, adapters=adapters)
        peak = self.prices.cluster.gpu.peak_of(config.training.dtype)  # whatever products are rounded to
        expected = interval(cost.total, config, self.prices.cluster, self.prices.stack)
        return StepTime(cost.total, cost, tuple(self.stages), tokens, flops, flops / peak, expected)

    @property
    def idle(self) -> float:
        """Share of the passes in which the busiest rank of the pipeline waits, for others or for messages."""
        busy = max((self._busy(rank) for rank in range(self.layout.ranks)), key=lambda each: each.total)
        return 1 - (busy.total - busy.pipeline) / max(self._ends())

    @property
    def bound(self) -> float:
        """Seconds that the step takes at least, without a simulation."""
        busy = [self._busy(rank).total for rank in range(self.layout.ranks)]
        after = [self._afterwards(rank).total for rank in range(self.layout.ranks)]
        # The last rank has nothing to do before the others' first chunks have run, and they still have to go back
        # after its last micro-batch. (Zero-bubble schedules compute gradients of weights meanwhile.)
        others = self.stages[: self.layout.ranks - 1]
        waits = sum(stage.forward.total for stage in others)
        if not self.schedule.startswith("zb"):
            waits += sum(stage.backward.total for stage in others)
        least = max([*map(sum, zip(busy, after, strict=True)), busy[-1] + waits])
        return least * self.prices.stack.factor

    # -------------------------------------------------------------------------------------------- stages

    def _stage(self, parts: Parts, layers: Sequence[PartRecord], stage: StageLayers) -> StageTime:
        """Return the seconds of a micro-batch in a stage, with the messages that its computation does not hide."""
        counts = Counter(map(id, layers))
        records = {id(each): each for each in layers}
        forward, backward, weights = Cost(), Cost(), 0.0
        ahead: list[tuple[PartRecord, int, Cost, Cost]] = []
        others = [parts.embedding] * stage.embedding + [parts.stage] * bool(layers) + [parts.head] * stage.loss
        for record, count, of_layer in [
            *((records[key], count, True) for key, count in counts.items()),
            *((record, 1, False) for record in others),
        ]:
            again = Cost(elementwise=self._data.rounding(record)[0])
            one_forward, one_backward = (
                each + again for each in self.prices.passes(record, self.config, of_layer=of_layer)
            )
            ahead.append((record, count, one_forward, one_backward))
            forward, backward = forward + one_forward * count, backward + one_backward * count
            weights += self.prices.weight_gradients(record, self.config, of_layer=of_layer) * count
        exchange = self._exchange([(record, count, f.total, b.total) for record, count, f, b in ahead], stage)
        sent = Cost()
        if self.layout.count > 1 and not self.config.parallel.overlap_p2p_communication:
            sent = Cost(pipeline=self.transfer)
        return StageTime(
            forward + sent + Cost(data=exchange.forward),
            backward + sent + Cost(data=exchange.backward),
            weights,
            exchange,
        )

    def _exchange(self, ahead: Sequence[tuple[PartRecord, int, float, float]], stage: StageLayers) -> Exchange:
        """Return what a stage exchanges, but for what another stage of the rank, or the embedding, exchanges for it."""
        whole = self._data.exchange(ahead)
        if not stage.loss or len(self.layout.ends) > 1:
            return whole
        *others, (_, count, forward, backward) = ahead  # the head is the last
        once = self._data.exchange([*others, (self._head, count, forward, backward)])
        if stage.embedding:
            return replace(once, forward=whole.forward)  # ZeRO 3 gathers a weight for each use
        # In two stages each use has a sum of gradients, and so a reduce-scatter. The rest is of both.
        reduce = whole.reduce if self.config.parallel.zero_stage else (whole.reduce + once.reduce) / 2
        return replace(whole, reduce=reduce, gather=once.gather, update=once.update)

    def _without_tied(self, head: PartRecord) -> PartRecord:
        """Return the head for a stage that has the embedding too: a weight of both is exchanged and updated once."""
        parameters = max(head.parameters - tied_elements(self.config), 0)
        if has_frozen_table(head, self.config):
            return replace(head, parameters=parameters, frozen=(head.frozen[0] - tied_elements(self.config), 0))
        update = replace(head.update, bytes=head.update.bytes * parameters // max(head.parameters, 1))
        return replace(head, parameters=parameters, update=update)

    def _transfer(self) -> float:
        """Return the seconds of a message between stages."""
        config = self.config
        if self.layout.ranks == 1:
            return 0.0
        tokens = config.training.micro_batch_size * config.data.seq_length // config.parallel.sequence_parts
        neighbours = (0, self.world_size // self.layout.ranks)
        size = tokens * config.model.hidden_size * model_dtype(config).itemsize
        tensor = config.parallel.tensor_model_parallel_size
        if not self.prices.stack.scattered or config.parallel.sequence_parallel or tensor == 1:
            return self.prices.collective("send", neighbours, size)
        gathered = self.prices.collective("all-gather", range(tensor), size)
        return self.prices.collective("send", neighbours, size / tensor) + gathered

    # -------------------------------------------------------------------------------------------- ranks

    def _of_rank(self, rank: int) -> list[StageTime]:
        return [self.stages[stage] for stage in self.layout.of_rank(rank)]

    def _busy(self, rank: int) -> Cost:
        passes = sum((stage.forward + stage.backward for stage in self._of_rank(rank)), Cost())
        return passes * self.micro_batches

    def _afterwards(self, rank: int) -> Cost:
        """Return what a rank does after its last backward."""
        apart = (
            len(self.layout.ends) == 2
            and rank in self.layout.ends
            and not has_frozen_table(self.parts.head, self.config)
        )
        return self._data.afterwards([stage.exchange for stage in self._of_rank(rank)], tied=apart)

    def _ends(self) -> list[float]:
        """Return when each rank has run its last action. Many micro-batches are not all simulated."""
        group = self.group
        if self.layout.ranks == 1:
            return [self._busy(0).total]
        some, more = (group * periods + self.micro_batches % group for periods in _PERIODS)
        if self.micro_batches <= more:
            return self._simulated_ends(self.micro_batches)
        before, after = self._simulated_ends(some), self._simulated_ends(more)
        further = (self.micro_batches - more) / (more - some)
        return [late + (late - early) * further for early, late in zip(before, after, strict=True)]

    def _simulated_ends(self, micro_batches: int) -> list[float]:
        orders = self.orders(micro_batches)
        table: dict[tuple[int, Kind], float] = {}

        def duration(stage: int, kind: Kind) -> float:
            if (stage, kind) not in table:
                table[stage, kind] = self.stages[stage].seconds(kind)
            return table[stage, kind]

        return [spans[-1].end for spans in simulate(self.layout, orders, duration, self.transfer)]

    def orders(self, micro_batches: int) -> list[list[Action]]:
        group = self.config.parallel.microbatch_group_size_per_virtual_pipeline_stage
        return _orders(self.schedule, self.layout, micro_batches, group)


@lru_cache(maxsize=64)
def _orders(schedule: str, layout: Stages, micro_batches: int, group: int | None) -> list[list[Action]]:
    """Return the order of each rank; many layouts have the same."""
    return orders_of(SCHEDULES[schedule], layout, micro_batches, group)
