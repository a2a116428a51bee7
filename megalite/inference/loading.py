"""Load a trained model and its tokenizer. `--load` names a megalite checkpoint or a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megalite import checkpoint
from megalite.checkpoint.directory import resolve
from megalite.config import CheckpointConfig, DataConfig, ModelConfig, TrainingConfig
from megalite.config.adapters import AdaptersConfig
from megalite.config.prediction import without_depths
from megalite.config.tokenizer import TokenizerFlags
from megalite.conversion.huggingface import end_tokens, tokenizer_folder
from megalite.conversion.native import open_folder, open_megalite
from megalite.conversion.opened import OpenedModel, in_checkpoint, states_of_training, tensors_of_depths
from megalite.data.tokenizers import Tokenizer, build_tokenizer
from megalite.errors import CheckpointError, ConfigurationError
from megalite.inference.network import Network, make_network
from megalite.parallel.mesh import ParallelMesh
from megalite.storage import AnyPath, open_directory


@dataclass(frozen=True)
class TrainedModel:
    """Description of a trained model in a folder, which is read once."""

    path: AnyPath
    """Folder: a checkpoint, or a Hugging Face folder."""
    config: ModelConfig
    dtype: torch.dtype
    """Dtype of the saved weights."""
    tokenizer: TokenizerFlags | None
    """Tokenizer of the model; None for a Hugging Face folder without one."""
    sequence_length: int | None
    """Sequence length in training, if known."""
    ends: tuple[int, ...]
    """Tokens before which its texts end, as far as its files name them."""
    opened: OpenedModel | None = None
    """Source of the weights of a Hugging Face folder, or of a base in which adapters are merged."""
    mean: bool = False
    """True: take the mean of the weights of a checkpoint in place of the weights."""
    left_out: frozenset[str] = frozenset()
    """Names of tensors of the checkpoint that are not loaded: those that only predict further tokens."""


def open_model(load: str | AnyPath, *, mean: bool = False, base: str | None = None) -> TrainedModel:
    """Read the description of a checkpoint, of the latest checkpoint of a run directory, or of a Hugging Face folder.

    `mean`: take the mean of the weights that a run has kept (--ema) in place of the weights. `base`: where the base of
    a checkpoint's adapters is now (--base); None: where it was. Raises CheckpointError if there is no model.
    """
    directory = open_directory(str(load))
    if CheckpointConfig(load=str(directory)).loads_huggingface:
        if mean:
            raise CheckpointError(f"--ema: {load} is a Hugging Face folder, which has no mean of the weights: drop it")
        if base is not None:
            raise CheckpointError(f"--base {base}: {load} is a Hugging Face folder, which says itself what it is of")
        opened = open_folder(directory, depths=False).without_depths()
        flags = TokenizerFlags(**opened.data) if opened.data else None
        dtype = opened.source.tensors["embedding.word"].dtype
        return TrainedModel(directory, opened.config, dtype, flags, opened.sequence_length, opened.ends, opened)
    path = resolve(directory)
    config = checkpoint.read_config(path)
    adapters = checkpoint.saved_section(path, config, AdaptersConfig)
    data = checkpoint.saved_section(path, config, DataConfig)
    dtype = getattr(torch, checkpoint.saved_section(path, config, TrainingConfig).dtype)
    merged = None
    if adapters.lora_rank is not None or base is not None:
        merged = open_megalite(path, dtype if mean else None, mean=mean, base=base).without_depths()
    model = checkpoint.model_config(path, config)
    left_out = frozenset(in_checkpoint(tensors_of_depths(model)))
    length, ends = data.seq_length, data.eos_token_ids
    return TrainedModel(path, without_depths(model), dtype, data, length, ends, merged, mean, left_out)


def load_for_generation(
    load: str | AnyPath, mesh: ParallelMesh, tokenizer_model: str | None = None
) -> tuple[Network, Tokenizer, frozenset[int]]:
    """Return the network of a model that `open_model` finds, distributed over the mesh, its tokenizer, and the tokens
    before which its texts end.

    Every rank calls it. `tokenizer_model`: current path of the tokenizer's file, if it was moved. Raises
    CheckpointError, ConfigurationError or DataError.
    """
    model = open_model(load)
    tokenizer = load_tokenizer(model, tokenizer_model)  # first, because it fails faster than loading the network
    return load_network(model, mesh), tokenizer, ends_of_texts(model, tokenizer, tokenizer_model)


def load_network(model: TrainedModel, mesh: ParallelMesh) -> Network:
    """Load the network of a model, distributed over the mesh, in its saved dtype.

    Every rank calls it. Raises CheckpointError or ConfigurationError.
    """
    network = make_network(model.config, mesh, model.dtype)
    opened, fresh = model.opened, set[str]()
    if opened is None and model.mean:
        opened, fresh = open_megalite(model.path, model.dtype, mean=True), states_of_training(model.config)
    if opened is not None:
        checkpoint.load_weights(opened.source, opened.what, network.stage, None, mesh, fresh)
    else:
        checkpoint.load(model.path, network.stage, None, mesh, optional=model.left_out)
    return network


def load_tokenizer(model: TrainedModel, tokenizer_model: str | None = None) -> Tokenizer:
    """Load the tokenizer of a model. `tokenizer_model`: current path of its file, if it was moved or is not named.

    It may have fewer tokens than the model, because other programs pad the vocabulary. Raises ConfigurationError or
    DataError.
    """
    flags, size = model.tokenizer, model.config.vocab_size
    if flags is None and tokenizer_model is None:
        raise ConfigurationError(f"{model.path} has no tokenizer: name a folder that has one as --tokenizer-model")
    if flags is None or (flags.tokenizer_type is None and tokenizer_model is not None):
        flags = TokenizerFlags(tokenizer_type="HuggingFaceTokenizer")
    if flags.tokenizer_type in (None, "NullTokenizer") and size is not None:
        size -= 1  # the model's vocabulary includes the end-of-document token, which NullTokenizer adds by itself
    elif flags.tokenizer_type != "TikTokenizer":
        size = None  # the tokenizer's file has its own size, which is compared below
    flags = replace(flags, tokenizer_model=tokenizer_model or flags.tokenizer_model)
    tokenizer = build_tokenizer(flags, size, fast_encoding="off")  # which would take seconds to prepare, for few texts
    if model.config.vocab_size is not None and tokenizer.vocab_size > model.config.vocab_size:
        raise ConfigurationError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {model.config.vocab_size}: give the one it "
            "was trained with as --tokenizer-model, or remove the tokens that were added to it from its files"
        )
    return tokenizer


def ends_of_texts(model: TrainedModel, tokenizer: Tokenizer, tokenizer_model: str | None = None) -> frozenset[int]:
    """Return the tokens before which texts of a model end.

    For a Hugging Face folder, and for a checkpoint without a tokenizer, they are those that it names, if there are any.
    Otherwise it is the token that ends a document and, for a checkpoint, also those that it names, and those that such
    files beside its tokenizer name. `tokenizer_model` as in `load_tokenizer`. Raises CheckpointError as `end_tokens`
    does.
    """
    flags = model.tokenizer or TokenizerFlags()
    if (model.opened is not None and model.opened.is_huggingface) or (
        model.ends and not (flags.tokenizer_type or tokenizer_model)
    ):
        return frozenset(model.ends or {tokenizer.eod})
    folder = tokenizer_folder(tokenizer_model or flags.tokenizer_model)
    return frozenset({tokenizer.eod, *model.ends}) | (end_tokens(folder) if folder else frozenset())
