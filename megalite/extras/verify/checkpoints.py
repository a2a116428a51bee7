"""Weights of a checkpoint of any program, for the network that a command describes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megalite.checkpoint import check_same_function
from megalite.config import ModelConfig
from megalite.conversion.dcp import open_dcp, open_tensor_file
from megalite.conversion.dcp_files import METADATA
from megalite.conversion.opened import OpenedModel
from megalite.errors import CheckpointError
from megalite.extras.verify.saved import open_saved


def open_weights(path: str, model: ModelConfig | None = None) -> OpenedModel:
    """Open the weights of a checkpoint, whose format follows from what is there.

    It is a folder of megalite, Megatron-LM, Hugging Face or torch.distributed.checkpoint (DCP), or a file of tensors by
    name (.safetensors, or one of torch.save). `model`: the network, which DCP and files do not describe, and which the
    others must have; its size of the vocabulary may be missing, or without the padding of Megatron-LM or the token
    that a NullTokenizer adds.

    Raises CheckpointError if there is no checkpoint, or if it is of another network than `model`.
    """
    place = Path(path)
    if place.is_file() or _is_dcp(place):
        if model is None:
            raise CheckpointError(f"{path} does not say which network it is of: give the flags of the network")
        return open_dcp(place, model) if place.is_dir() else open_tensor_file(place, model)
    steps = sorted(each.parent.name for each in place.glob(f"*/{METADATA}") if _is_dcp(each.parent))
    if steps:
        raise CheckpointError(f"{path} is the folder of several checkpoints: give one of {', '.join(steps[:8])} in it")
    opened = open_saved(place).weights
    if model is None:
        return opened
    if not model.depths:
        opened = opened.without_depths()
    check_same_function(opened.what, opened.config, _with_padding(model, opened))
    return opened


def _is_dcp(folder: Path) -> bool:
    """Tell whether DCP has written a folder without another program's description beside it."""
    described = any((folder / name).exists() for name in ("metadata.json", "manifest.json", "common.pt"))
    return (folder / METADATA).is_file() and not described


def _with_padding(model: ModelConfig, opened: OpenedModel) -> ModelConfig:
    """Return the network with the vocabulary of a checkpoint, if it may be the network's own, or that with padding."""
    tokens, rows = model.vocab_size, opened.config.vocab_size
    if tokens is None or rows is None:
        return replace(model, vocab_size=rows)
    may_be = tokens <= rows if opened.what.startswith("Megatron-LM") else rows - tokens in (0, 1)
    return replace(model, vocab_size=rows) if may_be else model
