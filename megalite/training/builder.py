"""Construction of a run's model, optimizer, schedules and loaders from its configuration and mesh."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import torch

from megalite.checkpoint import Contents, Plan
from megalite.config import ModelConfig, ParallelConfig, RunConfig
from megalite.config.offload import OffloadConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.pipeline_layout import (
    StageLayers,
    schedule_name,
    shape,
    stage_layers,
    virtual_stages,
    why_nothing_is_aligned,
)
from megalite.config.run import TaskConfig
from megalite.data.blend import Dataset
from megalite.data.fields import SampleFields
from megalite.data.loader import MicroBatchLoader
from megalite.data.routing_records import RoutingRecords
from megalite.data.sampler import Shares
from megalite.data.sources import Sources
from megalite.entry_points import entry_point
from megalite.model import gpt
from megalite.model.gpt import GPT
from megalite.model.head import LossConfig
from megalite.model.recompute import Recompute
from megalite.offload.transfers import make_transfers
from megalite.optim import optimizer as optim
from megalite.optim.buckets import DataParallel, ParameterBucket
from megalite.optim.fixed_point import FixedPoint
from megalite.optim.host_memory import expected_bytes_on_host
from megalite.optim.layout import default_bucket_size
from megalite.optim.loss_scale import LossScale
from megalite.optim.offloaded import HostState
from megalite.optim.optimizer import Optimizer
from megalite.optim.several import SeveralOptimizers, optimizer_of
from megalite.optim.synchronization import Synchronization
from megalite.parallel import collectives
from megalite.parallel.adapter import train_a_part
from megalite.parallel.context import AttentionWay
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter, named_pieces
from megalite.parallel.rounded_products import UNROUNDED, Rounding, Roundings
from megalite.parallel.sharding import LogicalTensor
from megalite.parallel.stage import LossTerm
from megalite.parallel.stage_module import Inside, StageModule
from megalite.pipeline.checker import Collective
from megalite.pipeline.lowering import Reductions
from megalite.pipeline.proved_schedules import ProvedSchedules
from megalite.pipeline.stages import Stages
from megalite.training.batches import Cutting
from megalite.training.data import RunData
from megalite.training.room_on_host import require_room_on_host
from megalite_kernels.recipes import recipe


def make_loader(
    config: RunConfig,
    mesh: ParallelMesh,
    data: RunData,
    dataset: Dataset[SampleFields],
    routing: RoutingRecords | None = None,
    sources: Sources | None = None,
    byte_lengths: np.ndarray | None = None,
    fills: bool = False,
) -> MicroBatchLoader:
    """Return the loader of this rank's micro-batches. See there for what is optional."""
    return MicroBatchLoader(
        dataset,
        micro_batch_size=config.training.micro_batch_size,
        vocab_size=data.tokenizer.vocab_size,
        num_workers=config.data.num_workers,
        verification=data.verification,
        routing=routing,
        sources=sources,
        byte_lengths=byte_lengths,
        fills=fills,
    )


def make_shares(config: TaskConfig, mesh: ParallelMesh) -> Shares:
    """Return the shares of the data-parallel ranks in the micro-batches of a step."""
    ranks = mesh.size("dp")
    if config.parallel.data_parallel_shares is not None:
        from megalite.training.unequal_shares import make_unequal_shares

        return make_unequal_shares(config, mesh)
    if config.recovery.elastic:
        from megalite.training.unequal_shares import make_even_shares

        return make_even_shares(config, mesh)
    return Shares(mesh.coordinate("dp"), ranks, config.synchronization.replicas(ranks))


def model_dtype(config: TaskConfig) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, config.training.dtype)
    return dtype


AnyConfig = TypeVar("AnyConfig", bound=TaskConfig)


def config_of_rank(config: AnyConfig, rank: int) -> AnyConfig:
    """Return the configuration of a rank: the run's, unless the class of the rank's device has flags of its own."""
    if config.parallel.device_classes is None:
        return config
    found: AnyConfig = entry_point("config_of_rank")(config, rank)
    return found


def make_recompute(config: RunConfig) -> Recompute:
    training = config.training
    parts = training.mlp_chunks_for_training
    if training.recompute_granularity == "full":
        method, layers = training.recompute_method or "uniform", training.recompute_num_layers or 1
        return Recompute(mlp_parts=parts, method=method, layers=layers)
    modules = training.recompute_modules if training.recompute_granularity == "selective" else ()
    return Recompute(attention="core_attn" in modules, moe="moe" in modules, mlp_parts=parts)


def make_stages(config: RunConfig) -> Stages:
    """Return the placement of the model's stages on pipeline ranks, with the tensors that stages send to each other."""
    parallel, chunks = config.parallel, virtual_stages(config.model, config.parallel)
    sequence = config.data.seq_length // parallel.sequence_parts
    ranks, batch = parallel.pipeline_model_parallel_size, config.training.micro_batch_size
    passed = gpt.messages(config.model, ranks * chunks, sequence=sequence, batch=batch, dtype=model_dtype(config))
    return Stages(ranks, chunks, shape(parallel).v_shaped, passed)


def make_chunks(config: RunConfig, model: ModelConfig, mesh: ParallelMesh, stages: Stages) -> list[GPT]:
    """Return this rank's stages, with uninitialized parameters. `model` must have its vocabulary size filled in."""
    parts, ranks = stage_layers(model, config.parallel), mesh.ranks("pp")
    own = [parts[stage] for stage in stages.of_rank(mesh.coordinate("pp"))]
    return make_networks(config, model, mesh, own, tuple(ranks[rank] for rank in stages.ends))


def make_networks(
    config: RunConfig, model: ModelConfig, mesh: ParallelMesh, parts: Sequence[StageLayers], ends: tuple[int, ...]
) -> list[GPT]:
    """Return stages with these layers. `ends`: the ranks of the first and the last stage."""
    training, fused_loss = config.training, config.kernels.fused_linear_cross_entropy
    chunks = gpt.make_chunks(
        model,
        mesh,
        parts,
        ends,
        sequence_parallel=config.parallel.sequence_parallel,
        recompute=make_recompute(config_of_rank(config, mesh.rank)),
        loss=LossConfig(training.label_smoothing, training.z_loss_coeff, fused_loss),
        dtype=model_dtype(config),
        attention_ways=attention_ways(config.parallel),
        roundings=roundings(config),
    )
    for chunk in chunks:
        train_a_part(chunk, config.adapters)
    return chunks


def roundings(config: RunConfig) -> Roundings:
    """Return how layers and depths round the operands of their products."""
    chosen, layers = config.low_precision, config.model.num_layers
    if chosen.recipe is None:
        return UNROUNDED
    each = Rounding(
        recipe(chosen.recipe, chosen.fp8_format or "e4m3"),
        chosen.fp8_wgrad,
        chosen.fp8_param_gather,
        chosen.activation_func_fp8_input_store,
    )
    of_layers = tuple(each if chosen.is_rounded(layer, layers) else None for layer in range(layers))
    return Roundings(of_layers, None if chosen.recipe == "nvfp4" else each)  # as Megatron-LM does with depths


def attention_ways(parallel: ParallelConfig) -> tuple[AttentionWay, ...]:
    """Return how layers compute attention under context parallelism, one way for all or one per layer."""
    gathers = ("all_gather", "allgather")
    chains = parallel.cp_state_exchange == "chain"
    return tuple(AttentionWay(parallel.head_ranks[way], way in gathers, chains) for way in parallel.cp_comm_type)


def make_cutting(config: RunConfig, mesh: ParallelMesh) -> Cutting:
    """Return the rule by which samples are cut for the context-parallel ranks."""
    length = config.data.seq_length
    ways = itertools.cycle(attention_ways(config.parallel))
    layers = Counter(
        (layer.keys_before, way.head_ranks)
        for layer, way in zip(config.model.passed_layers, ways, strict=False)
        if layer.attends
    )
    chunks, depths = config.parallel.chunks_per_rank(length), config.model.depths
    return Cutting(mesh.size("cp"), mesh.coordinate("cp"), chunks, layers, depths)


def make_proved_schedules(
    config: TaskConfig,
    mesh: ParallelMesh,
    stages: Stages,
    chunks: Sequence[StageModule],
    optimizer: Optimizer,
    terms: Sequence[LossTerm],
) -> ProvedSchedules:
    """Return the action lists of a step, with the collectives of layers and the optimizer inside and after them.

    Called by all ranks of a pipeline together.
    """
    forward = tuple(each for chunk in chunks for each in chunk.inside(backward=False))
    backward = tuple(each for chunk in chunks for each in chunk.inside(backward=True))
    parallel, each = config.parallel, optimizer.reduces_each_micro_batch
    whole = (*optimizer.buckets, *optimizer.frozen)
    gathers = _inside("gather of parameters", (bucket for bucket in whole if bucket.zero_stage == 3))
    reductions = _inside("reduction of gradients", optimizer.buckets)
    reduction, at_the_end = (reductions, ()) if each else ((), reductions)
    return ProvedSchedules(
        stages,
        mesh.coordinate("pp"),
        schedule=schedule_name(stages.chunks, parallel),
        group_size=parallel.microbatch_group_size_per_virtual_pipeline_stage,
        reductions=Reductions(each, parallel.overlap_grad_reduce, parallel.align_grad_reduce),
        overlap=parallel.overlap_p2p_communication,
        inside_actions={
            "F": (*gathers, *forward),
            "B": (*gathers, *backward, *reduction),
            "I": (*gathers, *backward),
            "W": reduction,
            "R": at_the_end,
        },
        after_list=_after_the_lists(mesh, optimizer),
        terms=terms,
        copied=_copied(mesh, optimizer),
    )


def _copied(mesh: ParallelMesh, optimizer: Optimizer) -> list[str]:
    """Describe what the data-parallel replicas of this rank must have in common, in order: the buckets, whose
    collectives run inside the lists, and the collectives after the lists."""
    has = [
        f"that a bucket of {bucket.length} elements is among {len(bucket.shard_group.ranks)} ranks of "
        f"{_data_axes(bucket)}"
        for bucket in (*optimizer.buckets, *optimizer.frozen)
    ]
    # Each replica orthogonalizes different matrices. Collectives within a matrix's tensor-parallel ranks may differ.
    split = [set(mesh.ranks("tp")), set(mesh.ranks("etp"))]
    does = [
        f"{name} among {len(ranks)} ranks after its list"
        for name, ranks in optimizer.collectives()
        if not any(set(ranks) <= ones for ones in split)
    ]
    return has + does


def _inside(name: str, buckets: Iterable[ParameterBucket]) -> tuple[Inside, ...]:
    """Return the collectives over these buckets that data-parallel ranks run inside actions, one per group."""
    sizes = {_data_axes(bucket): len(bucket.shard_group.ranks) for bucket in buckets}
    return tuple(Inside(name, f"{size} of {axes}") for axes, size in sizes.items())


def _data_axes(bucket: ParameterBucket) -> str:
    return " x ".join(bucket.slots[0].parameter.sharding.data_parallel_axes)


def _after_the_lists(mesh: ParallelMesh, optimizer: Optimizer) -> list[list[Collective]]:
    """Return, for each rank of this pipeline, the collectives that it runs after its action list."""
    numbers = {rank: number for number, rank in enumerate(mesh.ranks("pp"))}
    behind = []
    for run in collectives.all_gather_json(optimizer.collectives(), mesh, "pp"):
        among = [(name, tuple(numbers[rank] for rank in ranks if rank in numbers)) for name, ranks in run]
        behind.append([Collective(name, ranks) for name, ranks in among if len(ranks) > 1])
    return behind


def make_plan(
    config: TaskConfig,
    chunks_at: Callable[[ParallelMesh], Sequence[StageModule]],
    mesh: ParallelMesh,
    stages: Stages,
    synchronization: Synchronization | None = None,
    optimizer: Optimizer | None = None,
    optimizers: Mapping[str, OptimizerConfig] = MappingProxyType({}),
    *,
    saves_frozen: bool = True,
) -> Plan:
    """Return the plan of which parts of a checkpoint each rank owns and saves.

    Args:
        chunks_at: returns the stages of a rank, given the mesh of that rank.
        mesh: the mesh of all ranks.
        synchronization: that of the ranks; None: plain data parallelism.
        optimizer: that of this rank, if there is one, so that its network is not built again.
        optimizers: those of the task.
        saves_frozen: that of the task.
    """
    synchronization = synchronization or Synchronization(mesh)
    options = synchronization.options(data_parallel(config, mesh, stages))

    def contents_at(mesh: ParallelMesh) -> Contents:
        chunks = chunks_at(mesh)
        blocks = [chunk.blocks() for chunk in chunks]
        of_rank = synchronization.options(data_parallel(config, mesh, stages))
        return Contents.of(chunks, mesh, of_rank, blocks=blocks)

    return Plan(
        mesh,
        contents_at,
        synchronization.hyperparameters(config.optimizer),
        zero_stage=options.zero_stage,
        instances=options.instances,
        bucket_states=synchronization.bucket_states,
        rank_states=synchronization.rank_states,
        replicas=synchronization.replicas,
        fraction_on_host=lambda rank: config_of_rank(config, rank).offload.fraction_on_host,
        own=optimizer,
        saves_frozen=saves_frozen,
        optimizers=optimizers,
    )


def make_optimizer(
    config: TaskConfig,
    chunks: Sequence[StageModule],
    mesh: ParallelMesh,
    stages: Stages,
    set_values: Callable[[Parameter], None] | None,
    *,
    allow_unused: bool | None = None,
    synchronization: Synchronization | None = None,
    optimizers: Mapping[str, OptimizerConfig] = MappingProxyType({}),
) -> Optimizer:
    """Move parameters into flat buffers, set their initial values, and return the optimizer of this rank's shard.

    Args:
        set_values: sets the initial values of a parameter. None: the parameters already have them.
        allow_unused: that of the task.
        synchronization: that of the ranks; None: plain data parallelism.
        optimizers: those of the task.
    """
    synchronization = synchronization or Synchronization(mesh)
    options = replace(data_parallel(config, mesh, stages), allow_unused=allow_unused)
    host = host_state(config_of_rank(config, mesh.rank).offload, mesh.device)
    if host is not None:
        on_host = host.transfers if config.offload.parameter_offload else None
        options = replace(options, overlap_arrival=host.overlap, slices_on_host=on_host)
    blocks, options = [chunk.blocks() for chunk in chunks], synchronization.options(options)
    hyperparameters = synchronization.hyperparameters(config.optimizer)
    if host is not None:

        def config_of(parameter: Parameter) -> OptimizerConfig:
            return optimizers.get(optimizer_of(parameter), hyperparameters)

        needed = expected_bytes_on_host(chunks, mesh, options, host.fraction, config_of, blocks=blocks)
        require_room_on_host(needed, config.offload, mesh)
    return optim.make_optimizer(
        chunks,
        mesh,
        hyperparameters,
        options,
        blocks=blocks,
        set_values=set_values,
        synchronization=synchronization,
        host=host,
        make=partial(SeveralOptimizers, configs=optimizers) if optimizers else Optimizer,
    )


def host_state(offload: OffloadConfig, device: torch.device) -> HostState | None:
    """Return what the optimizer keeps on the host, from the flags."""
    if not offload.optimizer_cpu_offload:
        return None
    return HostState(
        make_transfers(device),
        offload.fraction_on_host,
        overlap=offload.overlap_cpu_optimizer_d2h_h2d,
        pin_gradients=offload.pin_cpu_grads,
        pin_parameters=offload.pin_cpu_params,
    )


def gradient_dtype(config: TaskConfig) -> torch.dtype:
    """Return the dtype in which gradients are summed and kept."""
    if config.parallel.grad_reduce_in_bf16 or config.optimizer.main_grads_dtype == "bf16":
        return torch.bfloat16
    if config.parallel.bitwise_elastic:
        return torch.float64
    return torch.promote_types(model_dtype(config), torch.float32)


def fixed_point(config: TaskConfig) -> FixedPoint | None:
    """Return how gradients and losses are rounded such that their sums are exact; None: they are not."""
    if not config.parallel.bitwise_elastic:
        return None
    training = config.training
    assert training.global_batch_size is not None  # the configuration is resolved
    sizes = [size for _, size in training.batch_size_schedule(1)]
    most = max([training.global_batch_size, *sizes]) // training.micro_batch_size
    return FixedPoint(most, torch.promote_types(model_dtype(config), torch.float32))


def gradient_notes(config: TaskConfig, micro_batches: int) -> tuple[str, ...]:
    """Return a note if a rank adds the gradients of more micro-batches in a step than their dtype has room for."""
    # bf16 has 8 bits: to 256 it adds 1 without a change.
    if gradient_dtype(config) != torch.bfloat16 or micro_batches <= 256:
        return ()
    flag = "--grad-reduce-in-bf16" if config.parallel.grad_reduce_in_bf16 else "--main-grads-dtype bf16"
    return (
        f"note: {flag}: a step adds the gradients of {micro_batches} micro-batches in bf16, where a sum of equal ones "
        f"stops at 256 of them. Up to {1 - 256 / micro_batches:.0%} of a gradient is lost, the more the more alike the "
        "micro-batches are: leave out the flag, which adds them in fp32, or let a rank have at most 256 micro-batches "
        "by a larger --micro-batch-size or more data-parallel ranks",
    )


def data_parallel(config: TaskConfig, mesh: ParallelMesh, stages: Stages) -> DataParallel:
    """Return the data-parallel settings from the flags."""
    parallel = config.parallel
    # If aligned, the action list decides when a chunk's reductions begin.
    aligned = parallel.align_grad_reduce and why_nothing_is_aligned(stages.chunks, parallel) is None
    bucket_size = parallel.ddp_bucket_size
    if bucket_size is None and parallel.overlap_grad_reduce:
        # Without overlap, several buckets have no advantage over one.
        bucket_size = default_bucket_size(mesh.size("dp", "cp"))
    return DataParallel(
        gradient_dtype=gradient_dtype(config),
        fixed_point=fixed_point(config),
        zero_stage=parallel.zero_stage,
        instances=config.synchronization.instances(parallel.num_distributed_optimizer_instances),
        bucket_size=bucket_size,
        overlap_reduce=parallel.overlap_grad_reduce and not aligned,
        overlap_gather=parallel.overlap_param_gather,
    )


def make_loss_scale(config: TaskConfig) -> LossScale:
    """Return the loss scale of the first step; 1 for every precision except fp16."""
    training = config.training
    if not training.fp16:
        return LossScale()
    if training.loss_scale is not None:
        return LossScale(training.loss_scale)
    return LossScale.dynamic(
        training.initial_loss_scale, training.min_loss_scale, training.loss_scale_window, training.hysteresis
    )


def count_parameters(chunks: Iterable[StageModule], mesh: ParallelMesh) -> int:
    """Count the unpadded parameters of the full model, each logical tensor once.

    Called by all ranks of a pipeline together.
    """
    return count_kinds(chunks, mesh, lambda parameter, tensor: "all").total()


def count_kinds(
    chunks: Iterable[StageModule], mesh: ParallelMesh, kind: Callable[[Parameter, LogicalTensor], str]
) -> Counter[str]:
    """Return the number of parameters per kind, approximately in the order of the model."""
    first = min(mesh.ranks("dp", "cp", "tp"))  # the first rank that has this stage
    tensors = {
        piece.tensor.name: (kind(parameter, piece.tensor), math.prod(piece.tensor.shape))
        for chunk in chunks
        for parameter, piece in named_pieces(chunk)
        if min(parameter.sharding.replica_ranks) >= first  # otherwise it is tied, and counted by an earlier stage
    }
    counts = Counter[str]()
    for name, size in tensors.values():
        counts[name] += size
    return sum(map(Counter[str], collectives.all_gather_json(counts, mesh, "pp")), Counter[str]())
