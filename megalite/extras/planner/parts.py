"""Records of the parts of a GPT: the embedding, each kind of layer and the head, one micro-batch each.

A stage does what its parts do, so that a few parts on the meta device tell what every stage of every pipeline does.
Messages of data parallelism are not among them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megalite.config import RunConfig
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
from megalite.parallel.parameter import Parameter
from megalite.parallel.rounded_products import kept_codes
from megalite.torch_internals import run_backward
from megalite.training import builder
from megalite.training.kernels import require_whole_units

_ROUNDING = "rounding"
"""Name of the phase in which codes of weights are made."""


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

    Their updates are those of state on the device. Codes of weights are made before a pass, of whole values.

    Args:
        config: has its vocabulary size.
        alike: parts with the same weights on each rank, whose updates are these.

    Raises:
        MegaliteError: the layout cannot divide the network, or a GPU has no such products.
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
    low = config.low_precision
    of_layers = [
        (spec, low.is_rounded(layer, config.model.num_layers)) for layer, spec in enumerate(config.model.layers)
    ]
    kinds = _kinds(of_layers, config.model.depths)
    model = with_layers(config.model, [spec for spec, _ in kinds for _ in range(2)])
    config = replace(config, model=model, parallel=parallel, offload=on_device, low_precision=_of_kinds(low, kinds))
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
        of_kinds = {
            kind: replace(of_kinds[kind], update=alike.layers[of_layers.index(kind)].update) for kind in of_kinds
        }
    return Parts(stage, embedding, tuple(of_kinds[kind] for kind in of_layers), head)


_LayerKind = tuple[LayerSpec, bool]
"""A layer, and whether its products are rounded."""


def _kinds(of_layers: Sequence[_LayerKind], depths: int) -> list[_LayerKind]:
    """Return one of each kind of layers. One that attends to the choice of another is recorded as one that chooses.

    Those that are not rounded come first. With depths, which may have the layer that a network has last, it is the last
    one here, too, rounded if any of its kind is.
    """
    last = of_layers[-1][0], any(rounded for spec, rounded in of_layers if spec == of_layers[-1][0])
    return sorted(dict.fromkeys(of_layers), key=lambda kind: (depths > 0 and kind == last, kind[1]))


def _of_kinds(low: LowPrecisionConfig, kinds: Sequence[_LayerKind]) -> LowPrecisionConfig:
    """Return the options by which two layers of each kind are rounded as the kind is, with whole weights."""
    rounded = [each for _, each in kinds]
    if low.recipe is None:
        return low
    return replace(
        low,
        fp8_param_gather=False,
        first_last_layers_bf16=True,
        num_layers_at_start_in_bf16=2 * rounded.index(True),
        num_layers_at_end_in_bf16=2 * rounded[::-1].index(True),
    )


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
        _less(one.frozen, other.frozen),
        _less(one.rounded, other.rounded),
        one.codes - other.codes,
        one.rounding - other.rounding,
    )


def _less(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] - other[0], one[1] - other[1]


def _record(config: RunConfig, mesh: ParallelMesh, layers: StageLayers) -> PartRecord:
    """Run one micro-batch through a stage with these layers, forward and backward.

    Codes of weights are made in a forward before, which does nothing else that the second one does not.
    """
    recorder = Recorder()
    with recorder, ExitStack() as keeping:
        chunk, optimizer = _built(config, mesh, layers)
        require_whole_units(config, [chunk], META)
        batch = dry_micro_batch(config, mesh, builder.make_cutting(config, mesh))
        recorder.listen(mesh.traffic)
        optimizer.begin_step(1)
        codes = recorder.alive
        if config.low_precision.recipe is not None:
            keeping.enter_context(kept_codes([chunk]))
            recorder.phase = _ROUNDING
            chunk(_inputs(config, layers), batch)
        before = recorder.alive
        codes = before - codes
        recorder.phase = "F"
        recorder.restart_peak()
        found = chunk(_inputs(config, layers), batch)
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
        parameters = unique_parameters(chunk)
        rounded = _elements(each for each in parameters if each.codes is not None)
    mesh.traffic.listener = None
    work = recorder.work
    forward = work.get("F", Work())
    return PartRecord(
        forward,
        work.get("B", Work()),
        kept,
        forward_peak,
        backward_peak,
        *_elements(parameters),
        recorder.waits.total(),
        frozen=_elements(each for each in parameters if not each.requires_grad),
        rounded=rounded,
        codes=codes,
        rounding=work.get(_ROUNDING, Work()) - forward,
    )


def _elements(parameters: Iterable[Parameter]) -> tuple[int, int]:
    """Return the elements that all data-parallel ranks have, and those that only the ranks of the same experts have."""
    counts = Counter[bool]()
    for each in parameters:
        counts[each.sharding.data_parallel_axes == ("dp", "cp")] += each.numel()
    return counts[True], counts[False]


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


def _inputs(config: RunConfig, layers: StageLayers) -> dict[str, Tensor]:
    """Return what a stage with these layers receives."""
    if layers.embedding:
        return {}
    parts, training = config.parallel.sequence_parts, config.training
    shape = config.data.seq_length // parts, training.micro_batch_size, config.model.hidden_size
    hidden = torch.empty(shape, dtype=builder.model_dtype(config), device=META)
    return {HIDDEN_STATES: hidden.requires_grad_(not config.model.trains_indexers_alone)}
