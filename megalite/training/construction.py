"""Model, optimizer and loaders of a run, from its configuration and its place on the mesh."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch

from megalite.config import ModelConfig, RunConfig
from megalite.data.blend import Dataset
from megalite.data.datasets import build_datasets, target_samples
from megalite.data.loader import MicroBatchLoader
from megalite.data.tokenizers import Tokenizer, build_tokenizer
from megalite.model.gpt import GPT
from megalite.model.recompute import Recompute
from megalite.optim import optimizer
from megalite.optim.buckets import DataParallel
from megalite.optim.optimizer import Optimizer
from megalite.parallel.initialization import set_initial_values
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces


@dataclass(frozen=True)
class RunData:
    """What a run reads, opened and checked before any rank talks to another."""

    tokenizer: Tokenizer
    train: Dataset
    valid: Dataset | None


def global_batch_size(config: RunConfig) -> int:
    """Samples a step; `resolve` has filled it in."""
    if config.training.global_batch_size is None:
        raise ValueError("the configuration has not been resolved")
    return config.training.global_batch_size


def train_iterations(config: RunConfig) -> int:
    """Steps of the whole run; a remainder of --train-samples below one global batch is left out."""
    if config.training.train_iters is not None:
        return config.training.train_iters
    return (config.training.train_samples or 0) // global_batch_size(config)


def open_data(config: RunConfig) -> RunData:
    """Open the tokenizer and the datasets. Raises DataError or ConfigurationError, the same on every rank."""
    data, training = config.data, config.training
    tokenizer = build_tokenizer(data.tokenizer_type or "NullTokenizer", data.tokenizer_model, config.model.vocab_size)
    samples = target_samples(
        train_samples=training.train_samples,
        train_iters=train_iterations(config),
        global_batch_size=global_batch_size(config),
        eval_interval=training.eval_interval if training.eval_iters > 0 else None,
        eval_iters=training.eval_iters,
    )
    train, valid, _ = build_datasets(
        samples=replace(samples, test=0),
        sequence_length=data.seq_length,
        seed=training.seed,
        tokenizer=tokenizer,
        data_path=data.data_path or None,
        split=data.split,
        mock_data=data.mock_data,
        mmap_bin_files=data.mmap_bin_files,
    )
    if train is None:
        raise ValueError("a run of no steps has no data")
    return RunData(tokenizer, train, valid)


def make_loader(config: RunConfig, mesh: ParallelMesh, tokenizer: Tokenizer, dataset: Dataset) -> MicroBatchLoader:
    data = config.data
    return MicroBatchLoader(
        dataset,
        micro_batch_size=config.training.micro_batch_size,
        data_parallel_rank=mesh.coordinate("dp"),
        data_parallel_size=mesh.size("dp"),
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        num_workers=data.num_workers,
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
        network,
        mesh,
        config.optimizer,
        data_parallel(config, mesh),
        blocks=network.blocks(),
        set_values=functools.partial(set_initial_values, seed=config.training.seed),
    )


def data_parallel(config: RunConfig, mesh: ParallelMesh) -> DataParallel:
    """What the flags say of the data-parallel ranks."""
    parallel, dtype = config.parallel, model_dtype(config)
    low_precision = dtype == torch.bfloat16 and parallel.grad_reduce_in_bf16
    return DataParallel(
        gradient_dtype=dtype if low_precision else torch.promote_types(dtype, torch.float32),
        stage=parallel.zero_stage,
        instances=parallel.num_distributed_optimizer_instances,
        bucket_size=_bucket_size(config, mesh),
        overlap_reduce=parallel.overlap_grad_reduce,
        overlap_gather=parallel.overlap_param_gather,
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
