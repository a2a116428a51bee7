"""A trained model and its tokenizer from a checkpoint alone."""

from __future__ import annotations

from typing import Any

import torch

from megalite import checkpoint
from megalite.checkpoint import AnyPath
from megalite.config import ModelConfig, TrainingConfig
from megalite.data.tokenizers import Tokenizer, TokenizerOptions, build_tokenizer
from megalite.errors import ConfigurationError
from megalite.model.gpt import GPT
from megalite.parallel.mesh import ParallelMesh


def load_for_generation(path: AnyPath, mesh: ParallelMesh, tokenizer_model: str | None = None) -> tuple[GPT, Tokenizer]:
    """The network of the checkpoint in folder `path`, split over the mesh, in the precision it was trained in.

    `tokenizer_model` says where the tokenizer's file is now.
    Raises CheckpointError, ConfigurationError or DataError.
    """
    saved = checkpoint.read_config(path)
    config = checkpoint.read_model_config(path)
    tokenizer = _tokenizer(saved["data"], config, tokenizer_model)
    for what, count in (("attention heads", config.num_attention_heads), ("feed-forward width", config.ffn_size)):
        if count % mesh.size("tp"):
            raise ConfigurationError(f"{count} {what} do not divide over {mesh.size('tp')} ranks: start fewer")
    network = GPT(config, mesh, dtype=getattr(torch, TrainingConfig(**saved["training"]).dtype))
    checkpoint.load(path, network, None, mesh)
    return network, tokenizer


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
