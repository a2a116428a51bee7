"""Records of the parts of a GPT: the embedding, each kind of layer and the head, one micro-batch each.

A stage does what its parts do, so that a few parts on the meta device tell what every stage of every pipeline does.
Messages of data parallelism are not among them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megalite.config import ModelConfig, RunConfig
from megalite.config.layer_specs import LayerSpec
from megalite.config.low_precision import LowPrecisionConfig
from megalite.config.model import with_layers
from megalite.config.parallel import ParallelConfig
from megalite.config.pipeline_layout import StageLayers
from megalite.extras.planner.dry_run import META, dry_micro_batch
from megalite.extras.planner.recording import Recorder
from megalite.extras.planner.records import PartRecord, Update, Work
from megalite.model.gpt import GPT, HIDDEN_STATES
from megalite.optim.layout import unique_parameters
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import Optimizer
from megalite.parallel.mesh import ParallelMesh, UnconnectedMesh
from megalite.torch_internals import run_backward
from megalite.training import builder


@dataclass(frozen=True)
class Parts:
    """Records of the parts of a network on one rank, in one layout."""

    stage: PartRecord
    """Record of what a stage with layers does and holds beside its layers, its input among it."""
    embedding: PartRecord
    layers: tuple[PartRecord, ...]
    """Record of each layer of the network; equal layers have the same one."""
    head: PartRecord
    """The final norm, the output layer and the loss."""


def part_records(config: RunConfig, alike: Parts | None = None) -> Parts:
    """Record the parts of the network with the layout of `config`, but for its pipeline and its data-parallel ranks.

    Their updates are those of state on the device, and products of few bits those of the weights' dtype.

    Args:
        config: has its vocabulary size.
        alike: parts with the same weights on each rank, whose updates are these.

    Raises:
        MegaliteError: the layout cannot divide the network.
    """
    parallel = replace(
        ParallelConfig(),
        tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
        context_parallel_size=config.parallel.context_parallel_size,
        cp_comm_type=config.parallel.cp_comm_type,
        hierarchical_context_parallel_sizes=config.parallel.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=config.parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=config.parallel.expert_tensor_parallel_size,
        sequence_parallel=config.parallel.sequence_parallel,
    )
    on_device = replace(config.offload, optimizer_cpu_offload=False, parameter_offload=False)
    specs, kinds = config.model.layers, _kinds(config.model)
    model = with_layers(config.model, [spec for spec in kinds for _ in range(2)])
    whole = LowPrecisionConfig()
    config = replace(config, model=model, parallel=parallel, offload=on_device, low_precision=whole)
    sizes = parallel.mesh_sizes
    dense = sizes["tensor_parallel_size"] * sizes["context_parallel_size"]
    experts = sizes["expert_tensor_parallel_size"] * sizes["expert_parallel_size"]
    mesh = UnconnectedMesh(rank=0, world_size=math.lcm(dense, experts), device=META, **sizes)
    of_kinds, stage = {}, PartRecord(Work(), Work(), 0, 0, 0, 0)

    def record(layers: StageLayers) -> PartRecord:
        found = _record(config, mesh, layers)
        return found if alike is not None else replace(found, update=_update(config, layers))

    for index in reversed(range(0, model.num_layers, 2)):  # the second layer of a stage is like those after it
        one = record(StageLayers(index, 1, embedding=False, loss=False))
        two = record(StageLayers(index, 2, embedding=False, loss=False))
        layer = replace(_difference(two, one), forward_peak=one.forward_peak, backward_peak=one.backward_peak)
        of_kinds[kinds[index // 2]], stage = layer, _difference(one, layer)
    embedding = record(StageLayers(0, 0, embedding=True, loss=False))
    head = record(StageLayers(model.num_layers, 0, embedding=False, loss=True))
    if alike is None:  # what an update does once for all of a stage is in the record of the stage
        embedding, head = (replace(each, update=each.update - stage.update) for each in (embedding, head))
    else:
        stage, embedding, head = (
            replace(each, update=known.update)
            for each, known in zip((stage, embedding, head), (alike.stage, alike.embedding, alike.head), strict=True)
        )
        of_kinds = {spec: replace(of_kinds[spec], update=alike.layers[specs.index(spec)].update) for spec in of_kinds}
    return Parts(stage, embedding, tuple(of_kinds[spec] for spec in specs), head)


def _kinds(model: ModelConfig) -> list[LayerSpec]:
    """Return one of each kind of layers. One that attends to the choice of another is recorded as one that chooses.

    With depths, which may have the layer that a network has last, it is the last one here, too.
    """
    return sorted(dict.fromkeys(model.layers), key=lambda spec: model.depths > 0 and spec == model.layers[-1])


def _difference(one: PartRecord, other: PartRecord) -> PartRecord:
    """Return what `one` has beyond `other`. A peak below the other's counts as none."""
    return PartRecord(
        one.forward - other.forward,
        one.backward - other.backward,
        one.kept - other.kept,
        max(one.forward_peak - other.forward_peak, 0),
        max(one.backward_peak - other.backward_peak, 0),
        one.parameters - other.parameters,
        one.expert_parameters - other.expert_parameters,
        one.synchronizations - other.synchronizations,
        one.update - other.update,
    )


def _record(config: RunConfig, mesh: ParallelMesh, layers: StageLayers) -> PartRecord:
    """Run one micro-batch through a stage with these layers, forward and backward."""
    recorder = Recorder()
    with recorder:
        chunk, optimizer = _built(config, mesh, layers)
        batch = dry_micro_batch(config, mesh, builder.make_cutting(config, mesh))
        recorder.listen(mesh.traffic)
        optimizer.begin_step(1)
        before = recorder.alive
        recorder.phase = "F"
        recorder.restart_peak()
        inputs = {} if layers.embedding else {HIDDEN_STATES: _hidden(config)}
        for each in inputs.values():
            each.requires_grad_(not config.model.trains_indexers_alone)
        found = chunk(inputs, batch)
        outputs = [each for each in (*found.tensors.values(), *found.terms.values()) if each.requires_grad]
        forward_peak = recorder.peak - before
        passed = sum(each.nbytes for each in found.tensors.values())
        kept = recorder.alive - before - passed
        recorder.phase, at_backward = "B", recorder.alive
        recorder.restart_peak()
        gradients = [torch.empty_like(each) for each in outputs]
        if outputs:
            run_backward([get_gradient_edge(each) for each in outputs], gradients)
        backward_peak = recorder.peak - at_backward
    mesh.traffic.listener = None
    parameters = unique_parameters(chunk)
    dense = sum(each.numel() for each in parameters if each.sharding.data_parallel_axes == ("dp", "cp"))
    work = recorder.work
    return PartRecord(
        work.get("F", Work()),
        work.get("B", Work()),
        kept,
        forward_peak,
        backward_peak,
        dense,
        sum(each.numel() for each in parameters) - dense,
        recorder.waits.total(),
    )


def _update(config: RunConfig, layers: StageLayers) -> Update:
    """Update the weights of a stage with these layers, which no other rank shares."""
    sizes = config.parallel.mesh_sizes
    experts = sizes["expert_tensor_parallel_size"] * sizes["expert_parallel_size"]
    ranks = math.lcm(sizes["tensor_parallel_size"], experts)
    plain = replace(config.parallel, context_parallel_size=1, hierarchical_context_parallel_sizes=())
    config = replace(config, parallel=replace(plain, cp_comm_type=ParallelConfig.cp_comm_type))
    mesh = UnconnectedMesh(rank=0, world_size=ranks, device=META, **config.parallel.mesh_sizes)
    recorder = Recorder()
    with recorder:
        _, optimizer = _built(config, mesh, layers)
        optimizer.begin_step(1)
        optimizer.reduce(0, 1)
        recorder.forget()
        recorder.listen(mesh.traffic)
        optimizer.step(Rates(1.0, 1.0, 0.0))
    mesh.traffic.listener = None
    return Update.of(recorder.total, recorder.waits.total())


def _built(config: RunConfig, mesh: ParallelMesh, layers: StageLayers) -> tuple[GPT, Optimizer]:
    """Return a stage with these layers, and its optimizer."""
    (chunk,) = builder.make_networks(config, config.model, mesh, [layers], (mesh.rank,))
    stages = builder.make_stages(config)
    return chunk, builder.make_optimizer(config, [chunk], mesh, stages, lambda parameter: None, allow_unused=True)


def _hidden(config: RunConfig) -> Tensor:
    parts, training = config.parallel.sequence_parts, config.training
    shape = config.data.seq_length // parts, training.micro_batch_size, config.model.hidden_size
    return torch.empty(shape, dtype=builder.model_dtype(config), device=META)
