"""Load a trained model and its tokenizer. `--load` names a megalite checkpoint or a Hugging Face folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megalite import checkpoint
from megalite.checkpoint import AnyPath
from megalite.checkpoint.directory import resolve
from megalite.config import CheckpointConfig, DataConfig, ModelConfig, TrainingConfig
from megalite.config.tokenizer import TokenizerFlags
from megalite.conversion.huggingface import open_huggingface
from megalite.data.tokenizers import Tokenizer, build_tokenizer
from megalite.errors import ConfigurationError
from megalite.inference.network import Network, make_network
from megalite.parallel.mesh import ParallelMesh


def find_model(load: str) -> AnyPath:
    """Return the folder of the model: a checkpoint, the latest checkpoint of a run directory, or a Hugging Face folder.

    Raises CheckpointError if there is none.
    """
    directory = checkpoint.open_directory(load)
    return directory if _is_huggingface(directory) else resolve(directory)


def _is_huggingface(path: AnyPath) -> bool:
    return CheckpointConfig(load=str(path)).loads_huggingface


def read_model(path: AnyPath) -> ModelConfig:
    """Return the network configuration of the model in folder `path`. Raises CheckpointError."""
    return open_huggingface(Path(str(path))).config if _is_huggingface(path) else checkpoint.read_model_config(path)


def read_sequence_length(path: AnyPath) -> int | None:
    """Return the sequence length in training of the model in folder `path`; None if unknown. Raises CheckpointError."""
    if _is_huggingface(path):
        return open_huggingface(Path(str(path))).sequence_length
    return checkpoint.saved_section(path, checkpoint.read_config(path), DataConfig).seq_length


def load_for_generation(
    path: AnyPath, mesh: ParallelMesh, tokenizer_model: str | None = None
) -> tuple[Network, Tokenizer]:
    """Return the network of the model in folder `path`, distributed over the mesh, and its tokenizer.

    Every rank calls it. `tokenizer_model`: current path of the tokenizer's file, if it was moved. Raises
    CheckpointError, ConfigurationError or DataError.
    """
    tokenizer = load_tokenizer(path, tokenizer_model)  # first, because it fails faster than loading the network
    return load_network(path, mesh), tokenizer


def load_network(path: AnyPath, mesh: ParallelMesh) -> Network:
    """Load the network of the model in folder `path`, distributed over the mesh, in its saved dtype.

    Every rank calls it. Raises CheckpointError or ConfigurationError.
    """
    if _is_huggingface(path):
        with checkpoint.raise_on_all_ranks(mesh, f"opening {path}"):
            opened = open_huggingface(Path(str(path)))
        network = make_network(opened.config, mesh, opened.source.tensors["embedding.word"].dtype)
        checkpoint.load_weights(opened.source, opened.what, network.stage, None, mesh)
        return network
    training = checkpoint.saved_section(path, checkpoint.read_config(path), TrainingConfig)
    network = make_network(checkpoint.read_model_config(path), mesh, getattr(torch, training.dtype))
    checkpoint.load(path, network.stage, None, mesh)
    return network


def load_tokenizer(path: AnyPath, tokenizer_model: str | None = None) -> Tokenizer:
    """Load the tokenizer of the model in folder `path`. `tokenizer_model`: current path of its file, if it was moved.

    It may have fewer tokens than the model, because other programs pad the vocabulary. Raises CheckpointError,
    ConfigurationError or DataError.
    """
    if _is_huggingface(path):
        opened = open_huggingface(Path(str(path)))
        if not opened.data and tokenizer_model is None:
            raise ConfigurationError(f"{path} has no tokenizer: name a folder that has one as --tokenizer-model")
        flags = TokenizerFlags(**opened.data or {"tokenizer_type": "HuggingFaceTokenizer"})
        return _tokenizer(flags, opened.config, tokenizer_model)
    data = checkpoint.saved_section(path, checkpoint.read_config(path), DataConfig)
    return _tokenizer(data, checkpoint.read_model_config(path), tokenizer_model)


def _tokenizer(flags: TokenizerFlags, config: ModelConfig, tokenizer_model: str | None) -> Tokenizer:
    size = config.vocab_size
    if flags.tokenizer_type in (None, "NullTokenizer") and size is not None:
        size -= 1  # the model's vocabulary includes the end-of-document token, which NullTokenizer adds by itself
    elif flags.tokenizer_type != "TikTokenizer":
        size = None  # the tokenizer's file has its own size, which is compared below
    tokenizer = build_tokenizer(replace(flags, tokenizer_model=tokenizer_model or flags.tokenizer_model), size)
    if config.vocab_size is not None and tokenizer.vocab_size > config.vocab_size:
        raise ConfigurationError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {config.vocab_size}: give the one it was "
            "trained with as --tokenizer-model"
        )
    return tokenizer
