"""Model, optimizer and loaders of a run, from its configuration and its place on the mesh."""

from __future__ import annotations

import math

import torch

from megalite.config import ModelConfig, RunConfig
from megalite.data.blend import Dataset
from megalite.data.fields import SampleFields
from megalite.data.loader import MicroBatchLoader
from megalite.data.tokenizers import Tokenizer
from megalite.model.gpt import GPT
from megalite.model.recompute import Recompute
from megalite.optim.buckets import gather_before_use, make_buckets
from megalite.optim.optimizer import Optimizer
from megalite.parallel.initialization import initialize
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
    """The rank's share of the network with its initial weights. `model` has the tokenizer's vocabulary filled in."""
    network = GPT(
        model,
        mesh,
        sequence_parallel=config.parallel.sequence_parallel,
        recompute=make_recompute(config),
        dtype=model_dtype(config),
    )
    if mesh.device.type != "meta":
        initialize(network, config.training.seed)
    return network


def make_optimizer(config: RunConfig, network: GPT, mesh: ParallelMesh) -> Optimizer:
    """Move the network's parameters into flat buffers and make the optimizer of this rank's part of them."""
    parallel = config.parallel
    dtype = model_dtype(config)
    low_precision = dtype == torch.bfloat16 and parallel.grad_reduce_in_bf16
    buckets = make_buckets(
        network,
        mesh,
        gradient_dtype=dtype if low_precision else torch.promote_types(dtype, torch.float32),
        bucket_size=_bucket_size(config, mesh),
        overlap=parallel.overlap_grad_reduce,
    )
    optimizer = Optimizer(
        buckets,
        mesh,
        config.optimizer,
        sharded=parallel.use_distributed_optimizer,
        overlap=parallel.overlap_param_gather,
    )
    if parallel.overlap_param_gather:
        gather_before_use(network, buckets)
    return optimizer


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
