"""Model, optimizer and loaders of a run, from its configuration and its place on the mesh."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch

from megalite.config import ModelConfig, RunConfig
from megalite.data.blend import Dataset
from megalite.data.datasets import Datasets, Samples, build_mock_datasets, build_token_datasets, target_samples
from megalite.data.fields import FieldsDataset, SampleFields
from megalite.data.index_cache import IndexCache
from megalite.data.loader import MicroBatchLoader
from megalite.data.parts import read_parts
from megalite.data.sampler import GlobalBatchSize
from megalite.data.tokenizers import Tokenizer, TokenizerOptions, build_tokenizer
from megalite.model.gpt import GPT
from megalite.model.recompute import Recompute
from megalite.optim import optimizer
from megalite.optim.buckets import DataParallel
from megalite.optim.loss_scale import LossScale
from megalite.optim.optimizer import Optimizer
from megalite.parallel.initialization import set_initial_values
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces


@dataclass(frozen=True)
class RunData:
    """What a run reads, opened and checked before any rank talks to another; notes are for the person who starts it."""

    tokenizer: Tokenizer
    train: Dataset[SampleFields]
    valid: Dataset[SampleFields] | None
    test: Dataset[SampleFields] | None
    notes: tuple[str, ...] = ()


def global_batch_size(config: RunConfig) -> GlobalBatchSize:
    """Samples a step; `resolve` has filled it in."""
    if config.training.global_batch_size is None:
        raise ValueError("the configuration has not been resolved")
    return GlobalBatchSize(config.training.global_batch_size, config.training.rampup_batch_size)


def last_iteration(config: RunConfig, iteration: int = 0, consumed_samples: int = 0) -> int:
    """The number of the last step of a run that stands after `iteration` steps and `consumed_samples`; a remainder of
    --train-samples below one global batch is left out."""
    if config.training.train_iters is not None:
        return config.training.train_iters
    return iteration + global_batch_size(config).steps(consumed_samples, config.training.train_samples or 0)


def open_data(config: RunConfig) -> RunData:
    """Open the tokenizer and the datasets. Raises DataError or ConfigurationError, the same on every rank."""
    data, training = config.data, config.training
    kind, vocab_size = data.tokenizer_type or "NullTokenizer", config.model.vocab_size
    tokenizer = build_tokenizer(kind, data.tokenizer_model, vocab_size, TokenizerOptions.of(data))
    batch_size, iterations = global_batch_size(config).final, last_iteration(config)
    samples = target_samples(
        train_samples=iterations * batch_size if training.train_samples is None else training.train_samples,
        train_iters=iterations,
        global_batch_size=batch_size,
        eval_interval=training.eval_interval,
        eval_iters=training.eval_iters,
    )
    tokens = _open_tokens(config, tokenizer, samples)
    train, valid, test = (
        None if part is None else _with_fields(config, tokenizer, part)
        for part in (tokens.train, tokens.valid, tokens.test)
    )
    if train is None:
        raise ValueError("a run of no steps has no data")
    return RunData(tokenizer, train, valid, test, tokens.notes)


def _open_tokens(config: RunConfig, tokenizer: Tokenizer, samples: Samples) -> Datasets[np.ndarray]:
    data, seed = config.data, config.training.seed
    if data.mock_data:
        return build_mock_datasets(samples, sequence_length=data.seq_length, seed=seed, tokenizer=tokenizer)
    parts = read_parts(
        data_path=data.data_path,
        split=data.split,
        train_data_path=data.train_data_path,
        valid_data_path=data.valid_data_path,
        test_data_path=data.test_data_path,
        data_args_path=data.data_args_path,
        per_split_data_args_path=data.per_split_data_args_path,
    )
    return build_token_datasets(
        parts,
        samples,
        sequence_length=data.seq_length,
        seed=seed,
        tokenizer=tokenizer,
        cache=IndexCache(data.data_cache_path),
        surplus=data.mid_level_dataset_surplus,
        mmap_bin_files=data.mmap_bin_files,
    )


def _with_fields(config: RunConfig, tokenizer: Tokenizer, tokens: Dataset[np.ndarray]) -> FieldsDataset:
    data = config.data
    return FieldsDataset(tokens, tokenizer.eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)


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
