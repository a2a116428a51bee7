"""Memory of each pipeline rank of a layout, from the records of the network's parts and the engine's own schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import torch

from megalite.config import RunConfig
from megalite.config.pipeline_layout import StageLayers, shape, stage_layers, virtual_stages
from megalite.extras.planner.parts import Parts
from megalite.extras.planner.records import PartRecord, Work
from megalite.optim.layout import ParameterGroup
from megalite.optim.shard import bytes_per_element, state_dtype
from megalite.pipeline.schedules import Action
from megalite.pipeline.stages import Stages
from megalite.training.builder import gradient_dtype, model_dtype

Flights = Sequence[tuple[int, ...]]
"""Numbers of micro-batches in flight by chunk, at those moments than which no other has more of all chunks."""
_WEIGHTS = ParameterGroup(weight_decay=True, is_embedding_or_output=False, matrices=True)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at the peak of a step."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    """Tensors that the micro-batches in flight keep from forward to backward."""
    transient: float
    """Tensors of a pass that nothing keeps, whole weights and gradients under ZeRO 2 and 3, and gradients of an
    embedding, or their sum, that wait for those of the head with the same weight."""
    reserved: float
    """Memory that the GPU's driver and the communication library take."""
    host: float = 0.0
    """Bytes that offloading keeps in the host's memory, and that no other figure has."""

    @property
    def of_device(self) -> tuple[float, ...]:
        """The bytes on the device by kind, in order."""
        return astuple(self)[:-1]

    @property
    def total(self) -> float:
        """Bytes on the device."""
        return sum(self.of_device)


@dataclass(frozen=True)
class Element:
    """Bytes of one element of the network."""

    parameter: float
    gradient: float
    state: float
    """Optimizer state and master weight."""
    offloaded: float = 0.0
    """Share of the elements that have their state on the host."""
    slices_on_host: bool = False
    """True if the parameters are there between their uses, which those of ZeRO 3 can be."""

    @property
    def of_device(self) -> tuple[float, float, float]:
        """Bytes of parameter, gradient and state on the device."""
        return 0.0 if self.slices_on_host else self.parameter, self.gradient, self.state * (1 - self.offloaded)

    @property
    def of_host(self) -> tuple[float, float]:
        """Bytes on the host of any parameter, if these are there, and of one that is trained: the state with copies of
        gradient and parameter."""
        updated = self.offloaded * (self.gradient + self.state)
        return (self.parameter, updated) if self.slices_on_host else (0.0, updated + self.offloaded * self.parameter)

    @staticmethod
    def of(config: RunConfig) -> Element:
        """Return the bytes under the precision and the optimizer of a run, as its buffers take them."""
        dtype, optimizer = model_dtype(config), config.optimizer
        wide = torch.promote_types(dtype, torch.float32)
        master = 0
        if dtype.itemsize < wide.itemsize:
            master = 2 if optimizer.store_param_remainders else state_dtype(optimizer, "master", dtype).itemsize
        return Element(
            dtype.itemsize,
            gradient_dtype(config).itemsize,
            bytes_per_element(optimizer, _WEIGHTS, dtype) + master,
            config.offload.fraction_on_host,
            config.offload.parameter_offload,
        )


def tied_elements(config: RunConfig) -> int:
    """Return the elements that a tensor-parallel rank has of an embedding that the last stage shares."""
    tensor, model = config.parallel.tensor_model_parallel_size, config.model
    return model.padded_vocab_size(tensor) // tensor * model.hidden_size if model.shares_embedding else 0


def has_frozen_table(head: PartRecord, config: RunConfig) -> bool:
    """Tell whether the output layer is not trained, by the record of the head. One that is shared has no adapters."""
    return 0 < tied_elements(config) <= head.frozen[0]


def in_flight(order: Sequence[Action]) -> Flights:
    """Return the moments of a rank's order with the most micro-batches in flight."""
    counts = [0] * (1 + max(action.chunk for action in order))
    moments: dict[tuple[int, ...], None] = {}
    for action in order:
        if action.kind == "F":
            counts[action.chunk] += 1
        elif action.kind in ("B", "W"):
            moments[tuple(counts)] = None
            counts[action.chunk] -= 1
    return [
        each for each in moments if not any(other != each and all(map(int.__ge__, other, each)) for other in moments)
    ]


def memory_in_flight(
    config: RunConfig, world_size: int, parts: Parts, flights: Sequence[Flights], reserved: float = 0.0
) -> list[RankMemory]:
    """Return the memory of the first rank of each pipeline stage, by the micro-batches in flight on each."""
    parallel, element = config.parallel, Element.of(config)
    stages = Stages(
        parallel.pipeline_model_parallel_size, virtual_stages(config.model, parallel), shape(parallel).v_shaped
    )
    all_layers = stage_layers(config.model, parallel)
    found = []
    for rank, moments in enumerate(flights):
        chunks = [_parts_of(all_layers[stage], parts) for stage in stages.of_rank(rank)]
        kept = [sum(part.kept for part in chunk) for chunk in chunks]
        held = sum((_State.of(part, config, world_size, element) for chunk in chunks for part in chunk), _State())
        shared = _shared_elements(config, [all_layers[stage] for stage in stages.of_rank(rank)])
        one_sum = any(chunk.embedding and chunk.loss for chunk in (all_layers[stage] for stage in stages.of_rank(rank)))
        is_frozen = has_frozen_table(parts.head, config)
        held += _counted_twice(config, world_size, element, shared, one_sum=one_sum, is_frozen=is_frozen)
        shared *= not is_frozen
        of_embedding, at_end = _of_embedding(config, world_size) if one_sum and shared else (0.0, 0.0)
        found.append(
            RankMemory(
                held.parameters,
                held.gradients,
                held.optimizer,
                max(sum(map(int.__mul__, moment, kept)) for moment in moments),
                max(_transient(chunk, config, element, shared, at_end, one_sum=one_sum) for chunk in chunks)
                + of_embedding
                + _codes_of_step([part for chunk in chunks for part in chunk], config, world_size, element),
                reserved,
                held.host,
            )
        )
    return found


def _parts_of(stage: StageLayers, parts: Parts) -> list[PartRecord]:
    """Return the parts of a stage in the order of forward."""
    layers = parts.layers[stage.first_layer : stage.first_layer + stage.layers]
    extra = [parts.stage] if layers else []
    return [*[parts.embedding] * stage.embedding, *extra, *layers, *[parts.head] * stage.loss]


def _shared_elements(config: RunConfig, chunks: Sequence[StageLayers]) -> int:
    """Return the elements of a weight that is both embedding and output layer of a rank with these stages."""
    both = any(chunk.embedding for chunk in chunks) and any(chunk.loss for chunk in chunks)
    return tied_elements(config) if both else 0


def _codes_of_step(parts: Sequence[PartRecord], config: RunConfig, world_size: int, element: Element) -> float:
    """Return the bytes of codes that stay for a step: of whole weights or, if ZeRO 3 gathers codes, of slices.

    Those of slices on the host are made for each gather.
    """
    if config.parallel.zero_stage < 3:
        return float(sum(part.codes for part in parts))
    if not config.low_precision.fp8_param_gather or element.slices_on_host:
        return 0.0
    shards = _shards(config, world_size)
    return sum(count / of_kind for part in parts for count, of_kind in zip(part.rounded, shards, strict=True))


def _counted_twice(
    config: RunConfig, world_size: int, element: Element, shared: int, *, one_sum: bool, is_frozen: bool
) -> _State:
    """Return, as negative bytes, what the records of both embedding and head have if they share one weight.

    Each use has a sum of gradients of its own, unless these are sharded, or both uses are in one chunk (`one_sum`).
    """
    both = PartRecord(Work(), Work(), 0, 0, 0, -shared, frozen=(-shared * is_frozen, 0))
    found = _State.of(both, config, world_size, element)
    return found if one_sum or config.parallel.zero_stage >= 2 else replace(found, gradients=0.0)


def _of_embedding(config: RunConfig, world_size: int) -> tuple[float, float]:
    """Return the bytes that gradients of the embedding take over a step, and more at its end, in the head's chunk.

    They are kept until the end, where their sum is made, or are added to it as they arrive if they would take more
    bytes. Under ZeRO 2 and 3 they are those of one micro-batch (`_transient`).
    """
    training, parallel = config.training, config.parallel
    if parallel.zero_stage >= 2:
        return 0.0, 0.0
    tensor = parallel.tensor_model_parallel_size
    replicas = world_size // (tensor * parallel.pipeline_model_parallel_size)  # with those that share a sample
    tokens = (training.global_batch_size or 1) * config.data.seq_length / replicas
    item = model_dtype(config).itemsize / (tensor if parallel.sequence_parallel else 1)
    kept = tokens * (config.model.hidden_size * item + 8 + 1)  # with the numbers of rows
    summed = float(tied_elements(config) * gradient_dtype(config).itemsize)
    return (kept, summed) if kept <= summed else (summed, 0.0)


def _transient(
    chunk: Sequence[PartRecord], config: RunConfig, element: Element, shared: int, at_end: float, *, one_sum: bool
) -> float:
    """Return the most bytes of a chunk's passes beyond what its micro-batches in flight keep.

    Backward begins with the last part, when all that the chunk keeps is alive, and each part frees what it kept. Under
    ZeRO 2 and 3, gradients and weights of a part, or codes of these, are whole while it runs. With overlap, the
    gradients of the part before are still being reduced, and the weights of the next one already gathered. A weight
    that embedding and head share, of `shared` elements, has the head's sum of gradients until the embedding's has
    arrived. The embedding's exists from the beginning, too, or if both are in one chunk (`one_sum`), only then.
    `at_end`: bytes of a sum that is made when the last micro-batch has freed all.
    """
    stage, parallel = config.parallel.zero_stage, config.parallel
    gradient, as_codes = element.gradient if stage >= 2 else 0.0, config.low_precision.fp8_param_gather
    sizes = [sum(part.trained) for part in chunk]
    gathered = [sum(part.gathered(element.parameter, as_codes=as_codes)) if stage == 3 else 0.0 for part in chunk]
    most, freed = 0.0, 0
    for index in reversed(range(len(chunk))):
        part, whole = chunk[index], sizes[index] * gradient + gathered[index]
        if stage == 3 and part.codes:
            whole += part.codes - (sum(part.rounded) if as_codes else 0)
        if index + 1 < len(chunk):
            sums = shared if one_sum else 2 * shared
            whole += max(sizes[index + 1] if parallel.overlap_grad_reduce else 0, sums) * gradient
        elif not one_sum:
            whole += shared * gradient
        if parallel.overlap_param_gather and index:
            whole += gathered[index - 1]
        most = max(most, whole + max(part.backward_peak, part.forward_peak - part.kept) - freed)
        freed += part.kept
    return max(most, at_end - freed)


@dataclass(frozen=True)
class _State:
    """Bytes of parameters, gradients and optimizer state on the device, and of what is on the host."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    host: float = 0.0

    def __add__(self, other: _State) -> _State:
        return _State(*map(float.__add__, map(float, astuple(self)), map(float, astuple(other))))

    @staticmethod
    def of(part: PartRecord, config: RunConfig, world_size: int, element: Element) -> _State:
        """Return the bytes of a part on one rank, split over the data-parallel ranks as the ZeRO stage says."""
        total = _State()
        for elements, trained, shards in zip(part.elements, part.trained, _shards(config, world_size), strict=True):
            of_stage = [shards if config.parallel.zero_stage >= first else 1 for first in (3, 2, 1)]
            counts = elements, trained, trained
            parameters, gradients, state = (
                count * size / parts for count, size, parts in zip(counts, element.of_device, of_stage, strict=True)
            )
            of_any, of_trained = element.of_host
            host = (elements * of_any + trained * of_trained) / of_stage[2]
            total += _State(parameters, gradients, state, host)
        return total


def _shards(config: RunConfig, world_size: int) -> tuple[int, int]:
    """Return the ranks among which what all data-parallel ranks have is split, and what the ranks of experts have."""
    sizes, ranks = config.parallel.mesh_sizes, world_size // config.parallel.pipeline_model_parallel_size
    of_experts = sizes["expert_tensor_parallel_size"] * sizes["expert_parallel_size"]
    instances = config.synchronization.instances(config.parallel.num_distributed_optimizer_instances)
    tensor = config.parallel.tensor_model_parallel_size
    return max(ranks // tensor // instances, 1), max(ranks // of_experts // instances, 1)
