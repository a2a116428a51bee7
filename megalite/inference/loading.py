"""A trained model and its tokenizer from a checkpoint alone."""

from __future__ import annotations

from typing import Any

import torch

from megalite import checkpoint
from megalite.checkpoint import AnyPath
from megalite.config import ModelConfig, TrainingConfig
from megalite.data.tokenizers import Tokenizer, TokenizerOptions, build_tokenizer
from megalite.errors import ConfigurationError
from megalite.inference.network import Network, make_network
from megalite.parallel.mesh import ParallelMesh


def load_for_generation(
    path: AnyPath, mesh: ParallelMesh, tokenizer_model: str | None = None
) -> tuple[Network, Tokenizer]:
    """The network of the checkpoint in folder `path`, split over the mesh, and its tokenizer.

    Every rank calls it. `tokenizer_model` says where the tokenizer's file is now.
    Raises CheckpointError, ConfigurationError or DataError.
    """
    tokenizer = load_tokenizer(path, tokenizer_model)
    return load_network(path, mesh), tokenizer


def load_network(path: AnyPath, mesh: ParallelMesh) -> Network:
    """The network of the checkpoint in folder `path`, split over the mesh, in the precision it was trained in.

    Every rank calls it. Raises CheckpointError or ConfigurationError.
    """
    training = TrainingConfig(**checkpoint.read_config(path)["training"])
    network = make_network(checkpoint.read_model_config(path), mesh, getattr(torch, training.dtype))
    checkpoint.load(path, network.stage, None, mesh)
    return network


def load_tokenizer(path: AnyPath, tokenizer_model: str | None = None) -> Tokenizer:
    """The tokenizer that the checkpoint in folder `path` was trained with; `tokenizer_model`: where its file is now.

    Raises CheckpointError, ConfigurationError or DataError.
    """
    return _tokenizer(checkpoint.read_config(path)["data"], checkpoint.read_model_config(path), tokenizer_model)


def _tokenizer(data: dict[str, Any], config: ModelConfig, tokenizer_model: str | None) -> Tokenizer:
    kind = data["tokenizer_type"] or "NullTokenizer"
    size = config.vocab_size
    if kind == "NullTokenizer" and size is not None:
        size -= 1  # the model's vocabulary counts the end of document, which a NullTokenizer adds
    elif kind != "TikTokenizer":
        size = None  # compared below
    tokenizer = build_tokenizer(kind, tokenizer_model or data["tokenizer_model"], size, TokenizerOptions.of(data))
    if tokenizer.vocab_size != config.vocab_size:
        raise ConfigurationError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {config.vocab_size}: give the one it was "
            "trained with as --tokenizer-model"
        )
    return tokenizer
