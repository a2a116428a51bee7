"""Summary of a run and its memory, shown once before the first step."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megalite.config import RunConfig
from megalite.config.adapters import AdaptersConfig
from megalite.config.layer_specs import pattern_of
from megalite.config.model import ModelConfig
from megalite.config.pipeline_layout import layout_lines
from megalite.data.loader import MicroBatchArrays
from megalite.entry_points import entry_point
from megalite.optim.host_memory import bytes_on_host
from megalite.optim.layout import ParameterGroup
from megalite.parallel import device
from megalite.parallel.attention_plan import FirstKeys
from megalite.parallel.parameter import Parameter
from megalite.parallel.sharding import LogicalTensor
from megalite.pipeline.offloading import ahead, slots
from megalite.pipeline.schedules import Action
from megalite.pipeline.simulator import peak_in_flight
from megalite.pipeline.stages import Stages
from megalite.tasks import memory
from megalite.tasks.gpt_network import GPTNetworkTask
from megalite.training.batches import BUSIEST, to_micro_batches
from megalite.training.builder import count_kinds, count_parameters
from megalite.training.kernels import drops_by_rank
from megalite.training.room_on_host import require_room_on_host
from megalite.training.task import Summarized
from megalite.training.trainer import ENDLESS
from megalite_kernels.implementation import current, on_gpu

_MATRICES = "matrices of layers"


def layout_line(trainer: Summarized) -> str:
    """Return the layout as text: the parallel axes, what is sharded, and the micro-batches of a step."""
    parallel = trainer.config.parallel
    zero_stage = max(
        (bucket.zero_stage for bucket in trainer.optimizer.buckets), default=0
    )  # a pipeline stage may have no parameters
    zero = f"ZeRO {zero_stage}" + ("" if zero_stage == parallel.zero_stage else " (one rank has nothing to shard over)")
    if (instances := trainer.optimizer.options.instances) > 1:
        zero += f" in {instances} instances"
    shares = trainer.shares.description(trainer.task.batch_size.final // trainer.config.training.micro_batch_size)
    return f"{parallel.layout(trainer.mesh.world_size)}, {zero}, {shares}"


def training_line(trainer: Summarized) -> str:
    """Return the length of the run as text."""
    batch, tokens = trainer.task.batch_size, trainer.task.tokens_per_sample
    growing = f"{batch.at(0)} to {batch.final}" if len(batch.sizes) > 1 else f"{batch.final}"
    steps = "steps" if trainer.iterations == ENDLESS else f"{trainer.iterations} steps"
    return f"{steps} of {growing} samples" + ("" if tokens is None else f" x {tokens} tokens")


def common_lines(trainer: Summarized, measured: memory.Memory) -> dict[str, object]:
    """Return the last lines of the summary of any task. `measured`: the memory of this rank."""
    trainer.task.counted_memory = measured.total
    options, nothing = trainer.config.offload, {}
    if options.fine_grained_activation_offloading and measured.host == bytes_on_host(trainer.optimizer):
        least = options.min_offloaded_tensor_size
        nothing["  host"] = f"no saved tensor has the {least:,} elements of --min-offloaded-tensor-size"
    return {
        **measured.lines("a rank" if trainer.mesh.size("pp") == 1 else "on rank 0"),
        **nothing,
        "device": f"{trainer.mesh.world_size} x {device.device_name(trainer.mesh.device)}",
        "training": training_line(trainer),
        "saving": "nothing, without --save" if trainer.directory is None else f"to {trainer.directory}",
    }


def summary(trainer: Summarized, task: GPTNetworkTask) -> dict[str, object]:
    """Return names and values for the display. Called by all ranks together: a forward measures the activations."""
    config, mesh, model = task.config, trainer.mesh, task.model
    measured = measured_memory(trainer, task)
    return {
        "model": f"{count_parameters(trainer.chunks, mesh):,} parameters: {model.num_layers} layers{_pattern(model)}, "
        f"hidden {model.hidden_size}{_experts(model)}{_depths(model)}",
        **_sparse(trainer, model),
        **_part(trainer, config.adapters),
        "vocabulary": f"{model.vocab_size}, padded to {model.padded_vocab_size(mesh.size('tp'))}",
        "layout": layout_line(trainer),
        **_devices(trainer, task),
        **_synchronization(trainer),
        **_context(task),
        **_pipeline(trainer, task),
        **_optimizer(trainer),
        **masks_of_an_operator(model, mesh.device, task.dtype),
        "precision": precision_line(config),
        "kernels": current().description(mesh.device, task.dtype)
        + (", layers compiled" if config.kernels.compile else ""),
        **common_lines(trainer, measured),
    }


def precision_line(config: RunConfig) -> str:
    """Return the dtype of the network, and of which products operands are rounded, and how."""
    chosen, layers = config.low_precision, config.model.num_layers
    if chosen.recipe is None:
        return config.training.dtype
    count = sum(chosen.is_rounded(layer, layers) for layer in range(layers))
    return (
        f"{config.training.dtype}, products in {chosen.recipe} {chosen.fp8_format or chosen.fp4_format}"
        + (f" in {count} of {layers} layers" if count < layers else "")
        + (", those of weight gradients, too" if chosen.fp8_wgrad else "")
        + " (MFU: of bfloat16's peak)"
    )


def _devices(trainer: Summarized, task: GPTNetworkTask) -> dict[str, object]:
    """Return the classes of devices that are not alike, and what the slowest one costs, on the rank that shows it."""
    config, mesh = task.config, trainer.mesh
    if config.parallel.device_classes is None or mesh.rank != 0:
        return {}
    lines: dict[str, object] = entry_point("device_lines")(config, of_gpu=on_gpu(mesh.device))
    return lines


def _synchronization(trainer: Summarized) -> dict[str, object]:
    optimizer = trainer.optimizer
    flats = [flat for buckets in optimizer.bucket_states.values() for bucket in buckets for flat in bucket]
    kept = sum(values.nbytes for values in (*flats, *optimizer.rank_states.values()))
    line = optimizer.synchronization.description(kept)
    return {"exchange": line} if line else {}


def _context(task: GPTNetworkTask) -> dict[str, object]:
    """Return what a context-parallel rank holds and computes of a sample, if several share it."""
    cutting, parallel, length = task.cutting, task.config.parallel, task.config.data.seq_length
    if cutting.ranks == 1:
        return {}
    chunks = cutting.chunks_per_rank or 2
    first = FirstKeys()
    loads = cutting.loads(cutting.layout(length, first), first)
    busiest = "no layer computes scores"
    if any(loads):
        busiest = f"the busiest rank computes {max(loads) * len(loads) / sum(loads):.3f} x the mean scores"
    if any(loads) and task.config.data.reset_attention_mask:
        busiest += f" without documents; with them, see {BUSIEST} in metrics.jsonl"
    return {
        "context": f"{length // cutting.ranks:,} of {length:,} tokens per rank in {chunks} chunks, by "
        f"{', '.join(dict.fromkeys(parallel.cp_comm_type))}; {busiest}"
    }


def _pipeline(trainer: Summarized, task: GPTNetworkTask) -> dict[str, object]:
    """Return the parts of the model on each rank of the pipeline, if there is more than one stage."""
    if trainer.schedules.stages.count == 1:
        return {}
    layers, *ranks = layout_lines(task.model, task.config.parallel)
    held = (line.partition(": ") for line in ranks)
    return {"pipeline": layers, **{f"  {rank}": stages for rank, _, stages in held}}


def _pattern(model: ModelConfig) -> str:
    return "" if model.hybrid_layer_pattern is None else f" {pattern_of(model.layers)}"


def _depths(model: ModelConfig) -> str:
    if not model.depths:
        return ""
    letters = "" if model.mtp_hybrid_override_pattern is None else f" {model.mtp_hybrid_override_pattern}"
    shared = " with one set of weights" if model.own_depths < model.depths else ""
    count = "1 depth" if model.depths == 1 else f"{model.depths} depths"
    return f"; {count}{letters} predict{'s' if model.depths == 1 else ''} further tokens{shared}"


def _experts(model: ModelConfig) -> str:
    if model.num_experts is None:
        return ""
    layers = sum(layer.feed_forward == "moe" for layer in model.all_layers)
    return f"; {layers} layers have {model.num_experts} experts, of which a token uses {model.moe_router_topk}"


def _sparse(trainer: Summarized, model: ModelConfig) -> dict[str, object]:
    """Return how many keys are chosen for sparse attention, and which parameters are trained if some are not."""
    layers = [layer for layer in model.all_layers if layer.mixer == "sparse_attention"]
    if not layers:
        return {}
    keys = "all keys, in the warm-up" if model.dsa_stage == "warmup" else f"{model.dsa_indexer_topk} keys of a token"
    indexers = sum(layer.chooses for layer in layers)
    lines: dict[str, object] = {"sparse attention": f"{len(layers)} layers, {indexers} with an indexer, to {keys}"}
    counts = count_kinds(trainer.chunks, trainer.mesh, lambda parameter, _: str(parameter.requires_grad))
    if counts["False"]:
        which = "those of the indexers" if model.trains_indexers_alone else "all but those of the indexers"
        lines["trained"] = f"{counts['True']:,} parameters: {which}"
    return lines


def _part(trainer: Summarized, adapters: AdaptersConfig) -> dict[str, object]:
    """Return the parameters that are trained, if adapters or frozen weights leave a part."""
    if adapters.lora_rank is None and not adapters.freeze:
        return {}
    counts = count_kinds(trainer.chunks, trainer.mesh, lambda parameter, _: str(parameter.requires_grad))
    which = f"all but those of {' '.join(adapters.freeze)}"
    if adapters.lora_rank is not None:
        which = f"adapters of rank {adapters.lora_rank} ({' '.join(adapters.lora_target_modules)})"
    return {"trained": f"{counts['True']:,} parameters: {which}"}


def _optimizer(trainer: Summarized) -> dict[str, object]:
    """Return the parameters that Muon updates, and those that it leaves to adam."""
    if trainer.config.optimizer.optimizer != "muon":
        return {}
    counts = count_kinds(trainer.chunks, trainer.mesh, _seen_by_muon)
    matrices = counts.pop(_MATRICES)
    rest = ", ".join(f"{kind} {count:,}" for kind, count in counts.items())
    return {"optimizer": f"muon for {matrices:,} parameters in {_MATRICES}; adam for {counts.total():,}: {rest}"}


def masks_of_an_operator(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    """Return a note on the operator whose dropout differs between layouts, or on dropout that is drawn slowly."""
    if model.attention_dropout > 0.0 and "sparse_attention" in model.kinds and on_gpu(device):
        return {
            "dropout": "masks of sparse attention are drawn on the host, which may take longer than all else in a "
            "step: --attention-dropout 0 draws none"
        }
    if not drops_by_rank(model, device, dtype):
        return {}
    return {
        "dropout": "attention's fused operator (scaled_dot_product_attention) draws its own mask: with another layout, "
        "micro-batch size or GPU it drops other probabilities; --attention-dropout 0 drops none"
    }


def _seen_by_muon(parameter: Parameter, tensor: LogicalTensor) -> str:
    group = ParameterGroup.of(parameter)
    if group.matrices:
        return _MATRICES
    return tensor.name if group.is_embedding_or_output or group.weight_decay else "norms and biases"


def measured_memory(trainer: Summarized, task: GPTNetworkTask) -> memory.Memory:
    """Add up this rank's parameters, gradients, optimizer state and peak of saved activations.

    A forward of each chunk over meaningless tokens measures the activations. All ranks run it.
    """
    training, device = task.config.training, trainer.mesh.device
    shape = training.micro_batch_size, task.config.data.seq_length
    zeros = np.zeros(shape, dtype=np.int64)
    fields = MicroBatchArrays(
        # Equal tokens would all go to the same experts.
        tokens=np.arange(zeros.size).reshape(shape) % (task.model.vocab_size or 1),
        labels=zeros,
        loss_mask=np.ones(shape, dtype=np.float32),
        positions=np.tile(np.arange(shape[1]), (shape[0], 1)),
        document_ids=zeros if task.config.data.reset_attention_mask else None,
        padding=None,
        replayed=None,
        sample_ids=range(shape[0]),
    )
    (micro_batch,) = to_micro_batches([fields], training.seed, task.dtype, device, task.cutting)
    return measured_by(trainer, micro_batch)


def measured_by(trainer: Summarized, micro_batch: object) -> memory.Memory:
    """Add up this rank's memory, with the activations of a forward of each chunk over this micro-batch, which leaves no
    trace.
    """
    device, stages = trainer.mesh.device, trainer.schedules.stages
    own = stages.of_rank(trainer.mesh.coordinate("pp"))
    forwards = [
        functools.partial(chunk.train(), _inputs(stages, stage, device), micro_batch)
        for stage, chunk in zip(own, trainer.chunks, strict=True)
    ]
    with trainer.unchanged():
        found = memory.measured(
            trainer.optimizer,
            forwards,
            functools.partial(_peak, trainer),
            trainer.task.offloading,
            lambda sizes: _host_bytes(_step_actions(trainer), sizes),
        )
    if trainer.task.offloading is not None:  # only now it is known what the activations take
        require_room_on_host(found.host, trainer.config.offload, trainer.mesh)
    return found


def _host_bytes(actions: Sequence[Action], sizes: Sequence[int]) -> int:
    """Return the bytes of all host buffers, from what each chunk offloads of a micro-batch."""
    used = {chunk: slot for (chunk, _), slot in sorted(slots(actions).items(), key=lambda item: item[1])}
    return sum((used[chunk] + 1) * size for chunk, size in enumerate(sizes))


def _inputs(stages: Stages, stage: int, device: torch.device) -> dict[str, Tensor]:
    """Return zeros in place of the tensors that the previous stage sends."""
    return {
        spec.name: torch.zeros(spec.shape or (), dtype=spec.dtype, device=device, requires_grad=spec.gradient)
        for spec in (stages.passes(stage - 1) if stage else ())
    }


def _peak(trainer: Summarized, sizes: Sequence[int], last: Sequence[int]) -> int:
    """Return the most memory that this rank keeps in a step, from what each chunk keeps of a micro-batch, and what its
    last offloaded layer offloads: that is on the device from the computation before its backward on.
    """
    actions, offloading = _step_actions(trainer), trainer.task.offloading
    early = {} if offloading is None else ahead(actions, slots(actions), offloading.ends)
    return peak_in_flight(actions, sizes, {index: last[chunk] for index, (chunk, _) in early.items()})


def _step_actions(trainer: Summarized) -> Sequence[Action]:
    return trainer.schedules.training(trainer.num_micro_batches(trainer.task.batch_size.final))
