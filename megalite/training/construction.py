"""Model, optimizer and loaders of a run, from its configuration and its place on the mesh."""

from __future__ import annotations

import functools
import math

import torch

from megalite.config import ModelConfig, RunConfig
from megalite.data.blend import Dataset
from megalite.data.fields import SampleFields
from megalite.data.loader import MicroBatchLoader
from megalite.data.tokenizers import Tokenizer
from megalite.model.gpt import GPT
from megalite.model.recompute import Recompute
from megalite.optim import optimizer
from megalite.optim.buckets import DataParallel
from megalite.optim.loss_scale import LossScale
from megalite.optim.optimizer import Optimizer
from megalite.parallel.initialization import set_initial_values
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces


def make_loader(
    config: RunConfig, mesh: ParallelMesh, tokenizer: Tokenizer, dataset: Dataset[SampleFields]
) -> MicroBatchLoader:
    return MicroBatchLoader(
        dataset,
        micro_batch_size=config.training.micro_batch_size,
        data_parallel_rank=mesh.coordinate("dp"),
        data_parallel_size=mesh.size("dp"),
        vocab_size=tokenizer.vocab_size,
        num_workers=config.data.num_workers,
    )


def model_dtype(config: RunConfig) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, config.training.dtype)
    return dtype


def make_recompute(config: RunConfig) -> Recompute:
    training = config.training
    if training.recompute_granularity == "full":
        return Recompute(method=training.recompute_method or "uniform", layers=training.recompute_num_layers or 1)
    return Recompute(attention=training.recompute_granularity == "selective")


def make_model(config: RunConfig, model: ModelConfig, mesh: ParallelMesh) -> GPT:
    """The rank's share of the network, its values not yet set. `model` has the tokenizer's vocabulary filled in."""
    return GPT(
        model,
        mesh,
        sequence_parallel=config.parallel.sequence_parallel,
        recompute=make_recompute(config),
        dtype=model_dtype(config),
    )


def make_optimizer(config: RunConfig, network: GPT, mesh: ParallelMesh) -> Optimizer:
    """Give the network its initial weights, in flat buffers, and make the optimizer of this rank's part of them."""
    return optimizer.make_optimizer(
        [network],
        mesh,
        config.optimizer,
        data_parallel(config, mesh),
        blocks=[network.blocks()],
        set_values=functools.partial(set_initial_values, seed=config.training.seed),
    )


def data_parallel(config: RunConfig, mesh: ParallelMesh) -> DataParallel:
    """What the flags say of the data-parallel ranks."""
    parallel, dtype = config.parallel, model_dtype(config)
    low_precision = parallel.grad_reduce_in_bf16 or config.optimizer.main_grads_dtype == "bf16"
    return DataParallel(
        gradient_dtype=torch.bfloat16 if low_precision else torch.promote_types(dtype, torch.float32),
        stage=parallel.zero_stage,
        instances=parallel.num_distributed_optimizer_instances,
        bucket_size=_bucket_size(config, mesh),
        overlap_reduce=parallel.overlap_grad_reduce,
        overlap_gather=parallel.overlap_param_gather,
    )


def make_loss_scale(config: RunConfig) -> LossScale:
    """The first step's; 1 for every precision but fp16."""
    training = config.training
    if not training.fp16:
        return LossScale()
    if training.loss_scale is not None:
        return LossScale(training.loss_scale)
    return LossScale.dynamic(
        training.initial_loss_scale, training.min_loss_scale, training.loss_scale_window, training.hysteresis
    )


def _bucket_size(config: RunConfig, mesh: ParallelMesh) -> int | None:
    """Elements, by Megatron-LM's rule: 40 million, or one million for each data-parallel rank where that is more.

    Without overlap nothing is gained by more than one bucket.
    """
    if config.parallel.ddp_bucket_size is not None:
        return config.parallel.ddp_bucket_size
    return max(40_000_000, 1_000_000 * mesh.size("dp", "cp")) if config.parallel.overlap_grad_reduce else None


def count_parameters(network: GPT) -> int:
    """Parameters of the whole model, unpadded, each logical tensor once."""
    shapes = {piece.tensor.name: piece.tensor.shape for _, piece in named_pieces(network)}
    return sum(math.prod(shape) for shape in shapes.values())
